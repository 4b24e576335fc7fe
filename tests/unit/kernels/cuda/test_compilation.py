"""The CUDA sources compile for the GPUs that are used, without a GPU being there."""

import functools
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from moegeom.core.router import GroupMask
from moegeom.kernels.cuda import cupy_device
from moegeom.kernels.cuda.cupy_device import architecture_for, compile_program, nvrtc
from moegeom.kernels.cuda.device import DeviceError
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
        *(counts_program(entry) for entry in ("count_bins", "count_experts", "count_pairs")),
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
