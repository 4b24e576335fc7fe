"""The emulated device finds what it is there to find, and the adapter to CuPy gives what it gives;
CuPy is stood in for.
"""

import faulthandler
import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.core.router import Rule
from moegeom.core.tokens import TILE
from moegeom.engine.devices.resident import DeviceFold
from moegeom.geometry.histogram import NUM_BINS
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.cuda import cupy_device
from moegeom.kernels.cuda.device import OutOfDeviceMemory
from moegeom.kernels.cuda.program import Program
from moegeom.kernels.cuda.tally import TallyRule
from tests.emulator.cupy_stand_in import NULL_STREAM, CupyStandIn, Tensor
from tests.emulator.emulated_device import FUNCTIONS, EmulatedDevice
from tests.emulator.host_program import host_call
from tests.unit.scan.engines.scanned import (
    COUNTED,
    DISTANCES,
    assert_equal,
    bf16,
    emulated,
    exact_product,
    inputs,
    on_devices,
    router_of,
    task_of,
    without_labels,
)
from tests.unit.scan.made import SOFTMAX, Recorded

TOKENS = 3 * TILE + 70


@pytest.fixture
def cupy(monkeypatch) -> CupyStandIn:
    bindings = cupy_device.nvrtc()  # the compiler itself is there without a GPU
    bindings.getVersion()  # which loads it
    monkeypatch.setattr(cupy_device, "nvrtc", lambda: bindings)
    made = CupyStandIn()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty))
    monkeypatch.setattr(cupy_device, "need_libraries", lambda: None)
    monkeypatch.setattr(cupy_device, "compile_program", made.compile)
    return made


def device() -> cupy_device._CupyDevice:
    return cupy_device._CupyDevice(0)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [("float32", COUNTED), ("bfloat16", (*COUNTED, *DISTANCES, "neighbours"))],
    ids=["counted on the device", "with answers for the host"],
)
def test_a_scan_through_the_adapter_is_that_of_the_emulated_device(cupy, dtype, names):
    values = inputs(TOKENS, 8)
    task = task_of(router_of(), Recorded(bf16(values) if dtype == "bfloat16" else values), names)
    progress = on_devices(task, names, devices=[device()])
    assert_equal(progress, on_devices(task, names, devices=emulated(product=exact_product)))
    assert {program.entry for program in cupy.programs} >= {"route", "input_norm"}
    assert len(cupy.programs) == len(
        set(cupy.programs)
    )  # compiled once, whatever the number of batches
    gc.collect()
    assert cupy.handles == 0


def test_a_batch_that_does_not_fit_is_halved_through_the_adapter(cupy):
    task, lines = task_of(router_of(), Recorded(inputs(8 * TILE, 8)), COUNTED), []
    options = {"devices": [device()], "batch_tokens": 8 * TILE, "on_message": lines.append}
    whole = on_devices(task, COUNTED, **options)
    assert (lines, cupy.memory.used) == ([], 0)
    cupy.memory.room = cupy.memory.peak - 1
    cupy.cuda.runtime.memGetInfo = lambda: (2**33, 2**33)  # another program takes it meanwhile
    assert_equal(on_devices(task, COUNTED, **options), whole)
    assert lines == ["the device has no room for 8192 tokens at once; taking 4096"]
    assert cupy.memory.used == 0
    with pytest.raises(OutOfDeviceMemory):
        device().empty((cupy.memory.room + 1,), np.dtype(np.uint8))


def test_rows_in_any_order_are_multiplied_alike(cupy):
    plain, turned = router_of(), router_of(weight=np.asfortranarray(router_of().weight))
    assert not turned.weight.flags.c_contiguous
    progress, expected = (
        on_devices(task_of(r, Recorded(inputs(TOKENS, 8)), COUNTED), COUNTED, devices=[device()])
        for r in (turned, plain)
    )
    assert_equal(progress, expected)


def misaligned(values: np.ndarray) -> np.ndarray:
    room = np.empty(values.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 16 + values.itemsize
    room[first : first + values.nbytes] = values.reshape(-1).view(np.uint8)
    return room[first : first + values.nbytes].view(values.dtype).reshape(values.shape)


@pytest.mark.parametrize(
    ("laid", "dtype"),
    [
        (np.ascontiguousarray, ml_dtypes.bfloat16),
        (np.asfortranarray, np.float32),
        (np.asfortranarray, ml_dtypes.bfloat16),
        (misaligned, np.float32),
        (misaligned, ml_dtypes.bfloat16),
    ],
)
def test_tensors_of_any_layout_are_counted_as_a_scan_counts_them(cupy, laid, dtype):
    names = (*COUNTED, *DISTANCES)
    values = inputs(700, 8).astype(dtype)
    task = task_of(router_of(), without_labels(values), names)
    fold = DeviceFold(task, device())
    ours = type("ndarray", (Tensor,), {"__module__": "cupy"})
    for part, kind in ((values[:300], Tensor), (values[300:], ours)):
        fold.take(kind(laid(part)))
    expected = DeviceFold(task, emulated(product=exact_product)[0])
    held = values.view(np.uint16) if dtype is ml_dtypes.bfloat16 else values
    expected.take(held)
    assert_equal(fold.progress(), expected.progress())
    # what was put into a tensor before it was given: other libraries see to that themselves
    assert cupy.waited_for == [NULL_STREAM]


def test_tensors_of_elsewhere_are_refused(cupy):
    fold = DeviceFold(task_of(router_of(), without_labels(inputs(3, 8)), COUNTED), device())
    with pytest.raises(UsageError, match="on cuda:1; expected one on cuda:0"):
        fold.take(Tensor(inputs(3, 8), number=1))


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


def test_functions_that_arrays_of_a_device_are_given_to_are_those_of_cupy():
    """The emulated device answers to them alone."""
    import cupy

    assert [name for name in FUNCTIONS if not hasattr(cupy, name)] == []


TALLY = TallyRule(12, Rule(3, "softmax", SOFTMAX), subtracts=False)


def tallied(program: Program | Source) -> list[np.ndarray]:
    """What the kernel adds up of 600 tokens of two labels, and of a batch that ends within a warp."""
    random = np.random.default_rng(0)
    tokens = 600
    logits = random.standard_normal((tokens, 12)).astype(np.float32)
    chosen = np.argsort(-logits, axis=1)[:, :3].astype(np.int32)
    label = (np.arange(tokens) // 250).astype(np.int32)
    numbers = np.arange(tokens, dtype=np.int64)
    sizes = (4, 12, 5, 3, 14, 2, 2, NUM_BINS)
    sums = [np.zeros((3 * NUM_BLOCKS, size), np.uint64) for size in sizes]
    reals = [random.random(tokens) + 0.1 for _ in range(3)]
    labels = (numbers, numbers // 50, (numbers % 50).astype(np.int32), label, label)
    arguments = (np.int64(tokens), np.float64(1e-3), np.float64(2.0), logits, None, chosen)
    host_call(program, 3, 32 * TALLY.warps, (*arguments, *reals, *labels, *sums))
    return sums


def test_barriers_of_the_kernel_that_adds_up_are_needed_but_for_one_of_the_memory_model():
    """Values are exchanged between a read of the row before and the next write to it."""
    text, usual = TALLY.program.text, tallied(TALLY.program)
    kernel = text.index("tally(i64 tokens")
    barriers = [at.start() for at in re.finditer(r"__sync\w+\(\);", text) if at.start() > kernel]
    needed = []
    for at in barriers:
        sums = tallied(Source("tally", text[:at] + text[text.index(";", at) :]))
        needed.append(any((a != b).any() for a, b in zip(sums, usual, strict=True)))
    assert needed == [True, False, True, True]


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
