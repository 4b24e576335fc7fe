"""The emulated device finds what it is there to find."""

import faulthandler
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator.emulated_device import EmulatedDevice
from tests.emulator.host_program import host_call


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


def reversed_blocks(barrier: str) -> np.ndarray:
    """What four blocks write, which begin at 0, 1000, 2000 and 3000."""
    out = np.full((4, 128), -1, dtype=np.int64)
    host_call(reversal(barrier), 4, 128, (np.int64(7), out))
    return out - 7 - 1000 * np.arange(4)[:, None]


def test_a_barrier_makes_shared_memory_readable():
    expected = np.tile(np.arange(128)[::-1], (4, 1))
    np.testing.assert_array_equal(reversed_blocks("__syncthreads();"), expected)


@pytest.mark.parametrize("barrier", ["", "__syncwarp();"])
def test_a_missing_barrier_gives_a_wrong_answer(barrier):
    """In every order of the threads that is tried: what is read was not written by this block."""
    assert (reversed_blocks(barrier) != np.arange(128)[::-1]).any(axis=1).all()


def end_of(work: Callable[[], object]) -> int:
    """How a copy of this process ends that does some work: 0, or less the signal that ends it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_threads_that_wait_for_each_other_for_ever_end_the_test(capfd):
    half = reversal("if (threadIdx.x < 32) __syncthreads(); else __syncwarp(1);")
    out = np.zeros((1, 128), np.int64)
    assert end_of(lambda: host_call(half, 1, 128, (np.int64(0), out))) == -signal.SIGABRT
    assert "emulated block: " in capfd.readouterr().err


@pytest.mark.parametrize(("index", "end"), [("4095", 0), ("4096", -signal.SIGSEGV)])
@pytest.mark.parametrize("statement", ["out[0] = at[{}];", "at[{}] = out[0];"])
def test_what_reads_or_writes_past_an_end_dies(index, end, statement):
    text = (
        'extern "C" __global__ void touch(long long* out, long long* at) {'
        f"if (threadIdx.x == 0) {{ {statement.format(index)} }} }}"
    )
    device = EmulatedDevice()
    arrays = tuple(device.put(np.zeros(n, np.int64)) for n in (1, 4096))
    queue = device.queue()
    queue.launch(Source("touch", text), 1, 32, arrays)
    assert end_of(queue.finish) == end


def test_work_that_is_not_waited_for_is_not_done():
    device = EmulatedDevice()
    queue, on_device = device.queue(), device.put(np.zeros(4, np.int64))
    queue.upload(on_device, np.arange(4))
    np.testing.assert_array_equal(device.get(on_device), 0)
    queue.finish()
    np.testing.assert_array_equal(device.get(on_device), np.arange(4))
