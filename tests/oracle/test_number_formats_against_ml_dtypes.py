"""Oracles: ml_dtypes, integers for tf32, exact sums, and rows quantised the way people do it."""

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.router import mantissa_bits
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.number_formats import WINDOW, expected_window_levels, window_levels
from moegeom.geometry.rounding import bf16_noise_scale, flip_probability, logit_error_bound
from moegeom.geometry.selection import top_k
from moegeom.kernels.table import load_kernels

FLOATS = ["F16", "BF16", "F8_E4M3", "F8_E5M2", "F32", "F64"]


@pytest.fixture
def rows():
    return np.random.default_rng(8).standard_normal((2000, 512))


def test_mantissa_bits_are_those_of_ml_dtypes_and_of_nothing_that_is_no_float_of_a_router():
    for dtype in FLOATS:
        bits = ml_dtypes.finfo(DTYPES[dtype].numpy).nmant
        assert mantissa_bits(dtype) == mantissa_bits(dtype.lower()) == bits, dtype
    others = ["I8", "U32", "F8_E8M0", "", "bfloat16"]
    assert [mantissa_bits(dtype) for dtype in others] == [None] * 5


@pytest.mark.parametrize("scale", [1.0, 1.37, 3.9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gaussian_rows_hold_the_expected_values(dtype, scale, rows):
    stored = (scale * rows).astype(DTYPES[dtype].numpy).astype(np.float64)
    expected = expected_window_levels(scale, mantissa_bits(dtype))
    # 32 000 windows: the error of their mean is below .01; subnormals take .05 from 8-bit floats
    assert_allclose(window_levels(stored).mean(), expected, atol=0.1)


def quantised(rows, bits, group, is_symmetric):
    """Round to nearest in groups along a row: absmax, or least to largest with a zero point."""
    grouped = rows.reshape(len(rows), -1, group)
    least, largest = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    if is_symmetric:
        step = np.maximum(-least, largest) / (2 ** (bits - 1) - 1)
        return (np.rint(grouped / step) * step).reshape(rows.shape)
    step = (largest - least) / (2**bits - 1)
    return (np.rint((grouped - least) / step) * step + least).reshape(rows.shape)


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_integers_hold_no_more_than_their_levels_and_eight_bits_28_to_30(is_symmetric, rows):
    expected = expected_window_levels(1.0, 7)
    for group in (32, 128, 512):
        for bits, most in ((4, 16), (2, 4)):
            levels = window_levels(quantised(rows, bits, group, is_symmetric))
            assert_array_less(levels, most + 1e-12)
            # so that bfloat16 storage of such rows shows half the values that it should
            assert_array_less(levels.mean() / expected, 0.51)
        levels = window_levels(quantised(rows, 8, group, is_symmetric)).mean()
        assert_array_less([28.0, levels], [levels, 30.0])


def test_a_finer_dtype_does_not_hide_few_levels(rows):
    coarse = quantised(rows, 4, 128, True).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_array_less(window_levels(coarse), 16.5)
    assert_array_equal(expected_window_levels(1.0, 23), WINDOW)


# -------------------------------------------------------------------------------- inputs of engines
KERNELS = load_kernels("cpu")

#: Sums of so many float32 squares, each of them rounded.
RTOL = 1e-5


def as_tf32(values: np.ndarray) -> np.ndarray:
    """The nearest whole number of steps, ties to even; a step is 2^-10 of the power below."""
    wide = values.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1], -125)
    steps = np.rint(np.ldexp(wide, 11 - exponent))
    return np.ldexp(steps, exponent - 11).astype(np.float32)


FORMATS = {16: lambda values: values.astype(ml_dtypes.bfloat16).astype(np.float32), 13: as_tf32}


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
    assert_array_equal(found, expected)
    assert_array_equal(np.signbit(found), np.signbit(values))


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-42, 1e30, 0.0])
@pytest.mark.parametrize("lost", FORMATS)
def test_lengths_are_those_of_float64_sums(lost: int, size: float) -> None:
    random = np.random.default_rng(1)
    values = (random.standard_normal((9, 2049)) * size).astype(np.float32)
    values[3] = FORMATS[lost](values[3])  # nothing to round
    found, norm, moved = entering(values, lost)
    rounded = FORMATS[lost](values).astype(np.float64)
    assert_array_equal(found, rounded)
    assert_allclose(norm, np.linalg.norm(rounded, axis=1), RTOL)
    assert_allclose(moved, np.linalg.norm(rounded - values, axis=1), RTOL)
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
    assert_array_equal(found[~is_wanted], others[~is_wanted])


# ----------------------------------------------------------------------------------------- rounding
def sequential(terms):
    total = np.float32(0.0)
    for term in terms:
        total += term
    return total


def halves(terms):
    terms = terms.copy()
    while len(terms) > 1:
        if len(terms) % 2:
            terms = np.append(terms, np.float32(0.0))
        terms = terms[::2] + terms[1::2]
    return terms[0]


def float32_sums(weight, y, bias, random) -> list[float]:
    """The same logit in float32 in many orders: forwards, backwards, sorted, shuffled, in halves."""
    terms = weight * y
    orders = [terms, terms[::-1], np.sort(terms), np.sort(terms)[::-1]]
    orders += [random.permutation(terms) for _ in range(6)]
    sums = [sequential(order) for order in orders] + [halves(order) for order in orders]
    sums += [sum((sequential(terms[i::8]) for i in range(8)), np.float32(0.0))]
    # a bias may come last or first
    first = [sequential(np.append(bias, order)) for order in orders]
    return [float(np.float32(s + bias)) for s in sums] + [float(s) for s in first]


@pytest.mark.parametrize(
    "kind", ["gaussian", "cancelling", "all_positive", "wide_range", "large_bias"]
)
def test_no_two_float32_sums_are_farther_apart_than_the_bound(kind):
    random = np.random.default_rng(8)
    for _ in range(12):
        hidden = int(random.integers(2, 300))
        weight = random.standard_normal(hidden).astype(np.float32)
        y = random.standard_normal(hidden).astype(np.float32)
        bias = np.float32(random.standard_normal() * 3)
        if kind == "cancelling":
            weight[1::2] = -weight[::2][: len(weight[1::2])]
            y[1::2] = y[::2][: len(y[1::2])]
        elif kind == "all_positive":
            weight, y = np.abs(weight), np.abs(y)
        elif kind == "large_bias":
            bias *= np.float32(1e4)
        elif kind == "wide_range":
            y *= np.float32(2.0) ** random.integers(-12, 12, hidden).astype(np.float32)
        found = float32_sums(weight, y, bias, random)
        norm = np.array([math.sqrt(math.fsum(float(v) ** 2 for v in y))])
        length = float(np.linalg.norm(weight.astype(np.float64)))
        bound = logit_error_bound(norm, hidden, length, abs(float(bias)))
        products = [float(w) * float(v) for w, v in zip(weight, y, strict=True)]
        exact = math.fsum([*products, float(bias)])
        # the bound is for two engines, so each is within half of it of the exact logit
        farthest = np.abs(np.subtract(found, exact)).max()
        assert_array_less(farthest, bound[0] / 2)
        assert_array_less(max(found) - min(found), bound[0])


@pytest.mark.parametrize("scale", [1.0, 0.013, 700.0])
def test_the_noise_scale_is_the_measured_error_of_rounding_to_bfloat16(scale):
    """Relative errors are measured as .415 to .4247 ulps (docs/theory.md E4): within 5 %."""
    y = (scale * np.random.default_rng(9).standard_normal((40, 4096))).astype(np.float32)
    error = y.astype(ml_dtypes.bfloat16).astype(np.float64) - y
    measured = np.sqrt((error**2).mean(axis=1))
    norm = np.linalg.norm(y.astype(np.float64), axis=1)
    found = bf16_noise_scale(norm, 4096)
    assert_allclose(found.mean(), measured.mean(), rtol=0.05)


def test_the_flip_probability_is_the_simulated_one_of_one_boundary():
    random = np.random.default_rng(10)
    weight = random.standard_normal((2, 6))
    y = random.standard_normal((8, 6)) * 0.3
    logits = y @ weight.T
    chosen = top_k(logits, 1)
    distance = boundary_distance(logits, chosen, row_distances(weight)).distance
    noise = np.full(8, 0.5)
    steps = random.standard_normal((20000, 1, 6)) * 0.5
    flipped = ((y + steps) @ weight.T).argmax(axis=2) != chosen[:, 0]
    expected = flipped.mean(axis=0)
    assert_allclose(flip_probability(distance, noise), expected, atol=4 * 0.5 / np.sqrt(20000))
    found = flip_probability(np.array([0.0, 0.0, np.inf, 1.0]), np.array([1.0, 0.0, 1.0, 0.0]))
    assert_array_equal(found, [0.5, 0.5, 0.0, 0.0])
    assert_array_equal(logit_error_bound(np.zeros(2), 3, 1.0), [0.0, 0.0])
