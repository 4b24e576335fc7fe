"""The emulated device finds what it is there to find."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.emulator.emulated_device import EmulatedDevice
from tests.emulator.host_program import host_call

ROOT = Path(__file__).resolve().parents[4]


@dataclass(frozen=True)
class Source:
    """A program that is no file."""

    entry: str
    text: str
    parts: tuple[str, ...] = ()


def reversal(barrier: str) -> Source:
    """Each thread reads what another one wrote into shared memory."""
    return Source(
        "reversal",
        'extern "C" __global__ void reversal(long long start, long long* out) {\n'
        "    __shared__ long long shared[128];\n"
        "    const long long value = start + 1000 * blockIdx.x + threadIdx.x;\n"
        "    shared[threadIdx.x] = value;\n"
        f"    {barrier}\n"
        "    out[blockIdx.x * 128 + threadIdx.x] = shared[127 - threadIdx.x];\n"
        "}\n",
    )


def reversed_blocks(barrier: str, start: int) -> np.ndarray:
    out = np.full((4, 128), -1, dtype=np.int64)
    host_call(reversal(barrier), 4, 128, (np.int64(start), out))
    return out


def test_a_barrier_makes_shared_memory_readable():
    expected = 7 + 1000 * np.arange(4)[:, None] + np.arange(128)[::-1]
    np.testing.assert_array_equal(reversed_blocks("__syncthreads();", 7), expected)


@pytest.mark.parametrize("barrier", ["", "__syncwarp();"])
def test_a_missing_barrier_gives_a_wrong_answer(barrier):
    """In every order of the threads that is tried: what is read was not written by this block."""
    found = reversed_blocks(barrier, 7) - 7 - 1000 * np.arange(4)[:, None]
    assert (found != np.arange(128)[::-1]).any(axis=1).all()


def test_threads_that_wait_for_each_other_for_ever_end_the_test():
    code = (
        "from tests.unit.kernels.cuda.test_emulator import reversal, host_call; import numpy as np;"
        "half = reversal('if (threadIdx.x < 32) __syncthreads(); else __syncwarp(1);');"
        "host_call(half, 1, 128, (np.int64(0), np.zeros((1, 128), np.int64)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "emulated block: " in ran.stderr


@pytest.mark.parametrize(("index", "code"), [("4095", 0), ("4096", -signal.SIGSEGV)])
@pytest.mark.parametrize("statement", ["out[0] = at[{}];", "at[{}] = out[0];"])
def test_what_reads_or_writes_past_an_end_dies(index, code, statement):
    text = (
        'extern "C" __global__ void touch(long long* out, long long* at) {'
        f"if (threadIdx.x == 0) {{ {statement.format(index)} }} }}"
    )
    script = (
        "from tests.unit.kernels.cuda.test_emulator import *; device = EmulatedDevice();"
        "arrays = [device.put(np.zeros(n, np.int64)) for n in (1, 4096)]; queue = device.queue();"
        f"queue.launch(Source('touch', {text!r}), 1, 32, tuple(arrays)); queue.finish()"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr


def test_work_that_is_not_waited_for_is_not_done():
    device = EmulatedDevice()
    queue, held = device.queue(), device.put(np.zeros(4, np.int64))
    queue.upload(held, np.arange(4))
    np.testing.assert_array_equal(device.get(held), 0)
    queue.finish()
    np.testing.assert_array_equal(device.get(held), np.arange(4))
