"""What can be said of a GPU without one: which reason is given."""

import ast
import importlib
import operator
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.kernels.cuda import cupy_device
from moegeom.kernels.cuda.device import DeviceError, OutOfDeviceMemory


@pytest.mark.parametrize("kind", [ImportError, RuntimeError], ids=["cuBLAS", "NVRTC"])
def test_a_missing_library_of_cuda_is_named_with_what_brings_it(monkeypatch, kind):
    def load():
        raise kind("libcublas.so.13 is nowhere\nsecond line")

    monkeypatch.setattr(cupy_device, "_cublas", load)
    with pytest.raises(DeviceError) as refused:
        cupy_device.need_libraries()
    assert refused.value.message == (
        "No GPU can be used: cuBLAS or NVRTC, libraries of CUDA, cannot be loaded "
        "(libcublas.so.13 is nowhere)."
    )
    assert "cupy-cuda13x[ctk]" in refused.value.hint


def failure(name: str, status: int) -> RuntimeError:
    """An error as CuPy raises it, which has its number in ``status``."""
    error = type(name, (RuntimeError,), {})(f"{name} {status}")
    error.status = status
    return error


def test_failures_of_a_device_are_errors_of_moegeom_and_short_memory_is_what_cupy_calls_so():
    import cupy
    from cupy_backends.cuda.api import runtime

    for failed, kind in (
        (failure("CUDARuntimeError", 2), OutOfDeviceMemory),
        (failure("CUBLASError", 3), OutOfDeviceMemory),
        (failure("CUDARuntimeError", 700), DeviceError),
        (failure("CUDADriverError", 2), DeviceError),
        (failure("CUBLASError", 2), DeviceError),
        (RuntimeError("Failed to find CUDA headers."), DeviceError),
    ):
        with pytest.raises(DeviceError) as raised, cupy_device._translated():
            raise failed
        assert type(raised.value) is kind
        assert str(failed) in raised.value.message
    with pytest.raises(OutOfDeviceMemory), cupy_device._translated():
        raise cupy.cuda.memory.OutOfMemoryError(10, 20)
    error = runtime.CUDARuntimeError(2)
    assert (type(error).__name__, error.status) in cupy_device._NO_ROOM
    assert "cudaErrorMemoryAllocation" in str(error)


def test_what_a_library_says_of_a_tensor_that_it_does_not_hand_out_is_a_usage_error():
    # CuPy says NotImplementedError of dtypes that it does not know
    for kind in (BufferError, RuntimeError, ValueError, TypeError, NotImplementedError):
        refused = pytest.raises(UsageError, match="cannot be taken by DLPack: requires grad.")
        with refused, cupy_device._translated(), cupy_device._exporting():
            raise kind("requires grad")
    # a failure of the device is none of the tensor
    failed = pytest.raises(DeviceError, match="The device failed")
    with failed, cupy_device._translated(), cupy_device._exporting():
        raise failure("CUDARuntimeError", 700)


class On:
    def __init__(self, number: int) -> None:
        self.number = number

    def __dlpack_device__(self):
        return 2, self.number


def test_tensors_that_are_not_on_the_device_are_refused_with_where_they_are():
    for tensor, reason in (
        (np.zeros((2, 2), np.float32), "on no GPU; expected one on cuda:0"),
        ([1.0], "A list was given"),
        (On(1), "on cuda:1; expected one on cuda:0"),
    ):
        with pytest.raises(UsageError, match=reason):
            cupy_device._refuse_foreign(tensor, 0)
    cupy_device._refuse_foreign(On(1), 1)


def test_a_cupy_that_is_absent_or_cannot_be_loaded_is_no_gpu(monkeypatch, tmp_path):
    """CuPy answers a missing library with a framed page whose first line is empty."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy/__init__.py").write_text(
        "try:\n    raise ImportError('libcuda.so.1: cannot open shared object file')\n"
        "except ImportError as error:\n    raise ImportError('\\n====\\nFailed.') from error\n"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError) as quoted:
        cupy_device.count_devices()
    assert quoted.value.message == (
        "No GPU can be used: CuPy cannot be imported: libcuda.so.1: cannot open shared object file."
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="CuPy is not installed") as absent:
        cupy_device.count_devices()
    assert all("[cuda13]" in refused.value.hint for refused in (quoted, absent))


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    for count, present in ((0, "none"), (1, "cuda:0"), (3, "cuda:0 to cuda:2")):
        monkeypatch.setattr(cupy_device, "count_devices", lambda count=count: count)
        for index in (-1, 3, 99):
            with pytest.raises(DeviceError, match=f"no device cuda:{index}; found {present}."):
                cupy_device.open_device(index)


@pytest.mark.parametrize("library", ["cupy", "cupyx"])
def test_cupy_has_every_name_that_the_adapter_reads(library):
    """A GPU is not needed to see that; cuBLAS itself is not there without one."""
    tree = ast.parse(Path(cupy_device.__file__).read_text("utf-8"))
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read = {chain for chain in chains if re.fullmatch(rf"{library}(\.\w+)+", chain)}
    assert len(read) > (library == "cupy") * 15
    for chain in sorted(read - {"cupy.cuda.cublas"}):
        operator.attrgetter(chain.partition(".")[2])(importlib.import_module(library))


def test_cupy_has_the_methods_that_are_called_on_its_objects():
    import cupy

    for kind, names in {
        cupy.cuda.Stream: ("wait_event", "record", "synchronize"),
        cupy.cuda.Module: ("load", "get_function"),
        cupy.ndarray: ("set", "get", "view", "copy", "data", "nbytes"),
    }.items():
        assert [name for name in names if not hasattr(kind, name)] == []
