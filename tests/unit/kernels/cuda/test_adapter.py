"""The adapter to CuPy gives what the emulated device gives; CuPy is stood in for."""

import gc
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.core.tokens import TILE
from moegeom.engine.devices.resident import DeviceFold
from moegeom.kernels.cuda import cupy_device
from moegeom.kernels.cuda.device import OutOfDeviceMemory
from tests.emulator.cupy_stand_in import NULL_STREAM, CupyStandIn, Tensor
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
from tests.unit.scan.made import Recorded

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
    assert {program.entry for program in cupy.programs} == {"route", "input_norm"}
    assert len(cupy.programs) == 2  # compiled once, whatever the number of batches
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
    for part in (values[:300], values[300:]):
        fold.take(Tensor(laid(part)))
    expected = DeviceFold(task, emulated(product=exact_product)[0])
    held = values.view(np.uint16) if dtype is ml_dtypes.bfloat16 else values
    expected.take(held)
    assert_equal(fold.progress(), expected.progress())
    assert cupy.waited_for == [NULL_STREAM] * 2  # what was put into a tensor before it was given


def test_tensors_of_elsewhere_are_refused(cupy):
    fold = DeviceFold(task_of(router_of(), without_labels(inputs(3, 8)), COUNTED), device())
    with pytest.raises(UsageError, match="on cuda:1; expected one on cuda:0"):
        fold.take(Tensor(inputs(3, 8), number=1))
