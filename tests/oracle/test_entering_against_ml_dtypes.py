"""Oracle: ml_dtypes for bfloat16, integers for tf32, numpy in float64 for lengths and logits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moegeom.kernels.table import load_kernels

KERNELS = load_kernels("cpu")

#: Sums of so many float32 squares, each of them rounded.
RTOL = 1e-5


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def as_tf32(values: np.ndarray) -> np.ndarray:
    """The nearest whole number of steps, ties to even; a step is 2^-10 of the power below."""
    wide = values.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1], -125)
    steps = np.rint(np.ldexp(wide, 11 - exponent))
    return np.ldexp(steps, exponent - 11).astype(np.float32)


FORMATS = {16: as_bfloat16, 13: as_tf32}


def entering(values: np.ndarray, lost: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    out = np.full_like(values, np.nan)
    norm, moved = KERNELS["rounded_inputs"](values, lost, out)
    return out, norm, moved


@pytest.mark.parametrize("lost", FORMATS)
def test_every_kind_of_number_is_rounded_to_nearest_even(lost: int) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (64, 1000), dtype=np.uint32)
    # half of what is cut off: ties, and their neighbours
    bits[1::2] = (bits[1::2] >> np.uint32(lost) << np.uint32(lost)) + np.uint32(2 ** (lost - 1))
    bits[1::4] += random.integers(0, 3, bits[1::4].shape, dtype=np.uint32) - np.uint32(1)
    values = bits.view(np.float32)
    values[0, :6] = np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(np.float32).max
    with np.errstate(over="ignore", invalid="ignore"):
        expected = FORMATS[lost](values)
    found, _, _ = entering(values, lost)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(values))


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-42, 1e30, 0.0])
@pytest.mark.parametrize("lost", FORMATS)
def test_lengths_are_those_of_float64_sums(lost: int, size: float) -> None:
    random = np.random.default_rng(1)
    values = (random.standard_normal((9, 2049)) * size).astype(np.float32)
    values[3] = FORMATS[lost](values[3])  # nothing to round
    found, norm, moved = entering(values, lost)
    rounded = FORMATS[lost](values).astype(np.float64)
    np.testing.assert_array_equal(found, rounded)
    np.testing.assert_allclose(norm, np.linalg.norm(rounded, axis=1), RTOL)
    np.testing.assert_allclose(moved, np.linalg.norm(rounded - values, axis=1), RTOL)
    assert moved[3] == 0.0


@pytest.mark.parametrize("lost", [0, *FORMATS])
def test_wanted_logits_are_float64_sums_of_rounded_inputs(lost: int) -> None:
    random = np.random.default_rng(2)
    values = random.standard_normal((30, 777)).astype(np.float32)
    weight = random.standard_normal((5, 777)).astype(np.float32)
    token = np.array([7, 0, 29, 7])
    is_wanted = random.random((4, 5)) < 0.5
    others = random.standard_normal((4, 5)).astype(np.float32)
    found = KERNELS["wide_logits"](values, token, lost, weight, is_wanted, others)
    rounded = FORMATS[lost](values[token]) if lost else values[token]
    exact = rounded.astype(np.float64) @ weight.T.astype(np.float64)
    sizes = np.abs(rounded).astype(np.float64) @ np.abs(weight).T.astype(np.float64)
    assert is_wanted.any()
    assert not is_wanted.all()
    assert (np.abs(found - exact) <= 777 * 2.0**-53 * sizes)[is_wanted].all()
    np.testing.assert_array_equal(found[~is_wanted], others[~is_wanted])
