"""Without a GPU: the CUDA sources compile for those that are used, and the reason why none serves
is given.
"""

import ast
import functools
import importlib
import itertools
import operator
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.core.router import GroupMask
from moegeom.kernels.cuda import cupy_device
from moegeom.kernels.cuda.cupy_device import architecture_for, compile_program, nvrtc
from moegeom.kernels.cuda.device import DeviceError, OutOfDeviceMemory
from moegeom.kernels.cuda.parts import INPUT_KINDS, counts_program, norm_program
from moegeom.kernels.cuda.program import MAX_EXPERTS, MAX_TOP_K, Program
from moegeom.kernels.cuda.route import RouteRule
from tests.by_day import by_day

#: A100, and H100, H200.
ARCHITECTURES = ("sm_80", "sm_90")

#: Shapes whose speed is measured (benchmarks/), and rules of production.
MEASURED = {
    "64_8": RouteRule(64, 8, "softmax", True, False, None),
    "128_4": RouteRule(128, 4, "softmax", True, True, None),
    "256_8": RouteRule(256, 8, "softmax", True, False, None),
    "256_8_three_terms": RouteRule(256, 8, "softmax", True, False, None, terms=3),
    "deepseek_v3": RouteRule(256, 8, "sigmoid", False, False, GroupMask(8, 4, "top2_sum", -np.inf)),
    "deepseek_v2": RouteRule(160, 6, "identity", False, False, GroupMask(8, 3, "max", 0.0)),
    "without_groups": RouteRule(384, 8, "sigmoid", False, False, None),
}
LIMITS = {
    "least": RouteRule(1, 1, "identity", True, False, None),
    "all_chosen": RouteRule(5, 5, "sqrt_softplus", True, True, None),
    "most_experts": RouteRule(MAX_EXPERTS, 8, "softmax", False, False, None),
    "most_slots": RouteRule(128, MAX_TOP_K, "softmax", True, False, None),
}


RULES = MEASURED | LIMITS


def compiled(program: Program, architecture: str) -> tuple[bytes, str]:
    """As a device compiles it, and what the assembler says about it.

    Where there is a driver NVRTC keeps what it compiled, and of that the assembler says nothing.
    """
    return compile_program(program, architecture, ("--ptxas-options=-v", "--no-cache"))


@functools.cache
def assembled(rule: RouteRule, architecture: str = "sm_90") -> tuple[bytes, str]:
    return compiled(rule.program, architecture)


#: Shapes whose parts others have, too.
AT_NIGHT = ("128_4", "256_8", "deepseek_v2", "without_groups", "all_chosen")


@pytest.mark.parametrize(
    ("name", "architecture"),
    by_day(
        itertools.product(RULES, ARCHITECTURES),
        [("deepseek_v2", "sm_80"), *((n, "sm_90") for n in RULES if n not in AT_NIGHT)],
    ),
)
def test_the_fused_kernel_compiles_without_a_warning(name, architecture):
    rule = RULES[name]
    code, log = assembled(rule, architecture)
    assert code.startswith(b"\x7fELF") and len(code) > 4096
    assert "warning" not in log
    assert rule.refusal == ""
    if name in MEASURED and architecture == "sm_90":
        # keys stay in registers: an array that is looked up by a number takes 32 bytes at least;
        # two spilt words are let be
        assert int(re.search(r"(\d+) bytes stack frame", log)[1]) <= 16, log


@pytest.mark.parametrize(
    ("experts", "top_k", "is_affine"),
    by_day(
        itertools.product((8, 64, 256, 1024), (1, 8), (True, False)),
        {"one lane": (8, 1, True), "some lanes": (64, 8, True), "fewer warps": (1024, 8, False)},
    ),
)
def test_the_shared_memory_of_a_block_is_as_large_as_the_layout_thinks(experts, top_k, is_affine):
    """More warps than fit would not compile; that the next larger number does not is the point."""
    rule = RouteRule(experts, top_k, "softmax", is_affine, False, None)
    used = int(re.search(r"(\d+) bytes smem", assembled(rule)[1])[1])
    assert used <= 48 * 1024
    assert rule.warps == 8 or 2 * used > 48 * 1024 - 25_000


@pytest.mark.parametrize("architecture", by_day(ARCHITECTURES, ["sm_90"]))
def test_the_parts_compile(architecture):
    programs = [
        *(norm_program(kind) for kind in INPUT_KINDS),
        *map(counts_program, ("count_bins", "count_experts", "count_pairs")),
        *map(counts_program, ("count_labels", "add_scores")),
    ]
    for program in programs:
        code, log = compiled(program, architecture)
        assert code.startswith(b"\x7fELF") and len(code) > 1024
        assert "warning" not in log


class WithoutMachineCode:
    """The compiler, which hands out what it gives to the assembler."""

    def __getattr__(self, name: str):
        return getattr(nvrtc(), "getPTX" if name == "getCUBIN" else name)


def test_subnormal_numbers_are_kept(monkeypatch):
    """CuPy's own way of compiling flushes them, and so would tie what is not tied."""
    monkeypatch.setattr(cupy_device, "nvrtc", WithoutMachineCode)
    for program in (MEASURED["deepseek_v3"].program, *map(norm_program, INPUT_KINDS)):
        text = compiled(program, "sm_90")[0].decode()
        assert ".f64" in text
        assert ".ftz" not in text


def knows(*numbers: int) -> SimpleNamespace:
    return SimpleNamespace(getSupportedArchs=lambda: numbers, getVersion=lambda: (12, 8))


def test_code_is_for_the_gpu_that_is_there_or_for_its_generation_or_refused(monkeypatch):
    for number in (80, 86, 89, 90, 100):
        assert architecture_for("a GPU", *divmod(number, 10)) == f"sm_{number}"
    monkeypatch.setattr(cupy_device, "nvrtc", lambda: knows(75, 80, 86, 90, 100))
    assert architecture_for("a GPU", 10, 3) == "sm_100"
    assert architecture_for("a GPU", 8, 7) == "sm_86"
    monkeypatch.setattr(cupy_device, "nvrtc", lambda: knows(75, 80, 90))
    for major in (7, 11):
        with pytest.raises(DeviceError) as refused:
            architecture_for("NVIDIA X", major, 0)
        assert refused.value.message == (
            f"NVRTC 12.8 writes no code for NVIDIA X, compute capability {major}.0;"
            " it knows 75 to 90."
        )


def test_a_source_that_does_not_compile_is_refused_with_what_the_compiler_says():
    broken = Program("route", ("lanes.cuh",), ())
    with pytest.raises(DeviceError, match="does not compile route for sm_90 .* LANES") as refused:
        compiled(broken, "sm_90")
    assert refused.value.message.isprintable()


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
