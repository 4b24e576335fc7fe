"""The CUDA sources compile for the GPUs that are used, without a GPU being there."""

from __future__ import annotations

import re

import numpy as np
import pytest

from moegeom.core.router import GroupMask
from moegeom.kernels.cuda.counts_program import counts_program
from moegeom.kernels.cuda.input_norm import INPUT_KINDS, norm_program
from moegeom.kernels.cuda.layout import MAX_EXPERTS, MAX_TOP_K
from moegeom.kernels.cuda.program import OPTIONS, Program
from moegeom.kernels.cuda.route import RouteRule

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


def compiled(program: Program, architecture: str) -> tuple[bytes, str]:
    """Machine code and what the compiler says about it."""
    from cupy.cuda import nvrtc

    handle = nvrtc.createProgram(program.text, f"{program.entry}.cu", (), ())
    try:
        options = (*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
        nvrtc.compileProgram(handle, options)
        return nvrtc.getCUBIN(handle), nvrtc.getProgramLog(handle)
    finally:
        nvrtc.destroyProgram(handle)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rule", [*MEASURED.values(), *LIMITS.values()], ids=[*MEASURED, *LIMITS])
def test_the_fused_kernel_compiles_without_a_warning(rule, architecture):
    code, said = compiled(rule.program, architecture)
    assert code.startswith(b"\x7fELF") and len(code) > 4096
    assert "warning" not in said
    assert rule.refusal == ""


@pytest.mark.parametrize("rule", MEASURED.values(), ids=MEASURED)
def test_keys_of_a_measured_shape_stay_in_registers(rule):
    """An array that is looked up by a number takes 32 bytes at least; two spilt words are let be."""
    _, said = compiled(rule.program, "sm_90")
    assert int(re.search(r"(\d+) bytes stack frame", said)[1]) <= 16, said


@pytest.mark.parametrize(
    "rule",
    [
        RouteRule(n, k, "softmax", a, False, None)
        for n in (8, 64, 256, 1024)
        for k in (1, 8)
        for a in (True, False)
    ],
    ids=str,
)
def test_the_shared_memory_of_a_block_is_as_large_as_the_layout_thinks(rule):
    """More warps than fit would not compile; that the next larger number does not is the point."""
    _, said = compiled(rule.program, "sm_90")
    used = int(re.search(r"(\d+) bytes smem", said)[1])
    assert used <= 48 * 1024
    assert rule.warps == 8 or 2 * used > 48 * 1024 - 25_000


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_parts_compile(architecture):
    programs = [
        *(norm_program(kind) for kind in INPUT_KINDS),
        *(counts_program(entry) for entry in ("count_bins", "count_experts", "count_pairs")),
    ]
    for program in programs:
        code, said = compiled(program, architecture)
        assert code.startswith(b"\x7fELF") and len(code) > 1024
        assert "warning" not in said


def test_an_error_in_a_source_is_found():
    """The compiler is really asked."""
    from cupy.cuda import nvrtc

    broken = Program("route", ("lanes.cuh",), ())
    with pytest.raises(nvrtc.NVRTCError):
        compiled(broken, "sm_90")
