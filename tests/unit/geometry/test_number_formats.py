"""Numbers in few bits: casts of a bias, levels of rows, rounding, orders of summation.

Oracles: torch's casts, TF32 and sums in exact fractions, each order written out in plain Python.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.testing import assert_allclose, assert_array_equal, assert_equal

from moegeom.geometry.number_formats import (
    NUMBER_FORMATS,
    PREFIX,
    WINDOW,
    bias_precision,
    distinct_values,
    expected_window_levels,
    format_gap,
    rounded_to,
    sum_error,
    to_bfloat16,
    ulp_bfloat16,
    window_levels,
)
from moegeom.geometry.rounding import SUMMATION_ORDERS, UNIT_FLOAT32, gamma, ordered_sums

SINGLES = st.floats(width=32, allow_nan=False, allow_infinity=False)
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# ------------------------------------------------------------------------------ a bias in bfloat16
def test_four_updates_around_seven_are_one_number_whose_step_is_a_32nd():
    bias = bias_precision(np.float32([7.0, 7.001, 7.002, 7.003]))
    assert (bias.num_distinct, bias.num_distinct_bf16) == (4, 1)
    assert bias.num_distinct_bf16_recentred == 4
    assert_array_equal([bias.ulp_bf16, bias.lost_update_share], [2.0**-5, 1.0])
    assert_allclose([bias.spread, bias.largest_shift], [0.001 * np.sqrt(1.25), 0.003], rtol=1e-3)
    assert_allclose(bias.middle, 7.0015, rtol=1e-6)


def test_a_constant_bias_is_one_number_and_zeros_have_no_step():
    flat = bias_precision(np.full(5, 0.25))
    assert (flat.num_distinct, flat.num_distinct_bf16, flat.num_distinct_bf16_recentred) == (1,) * 3
    assert_array_equal([flat.spread, flat.middle, flat.largest_shift], [0.0, 0.25, 0.0])
    zeros = bias_precision(np.zeros(4, np.float32))
    assert_array_equal([zeros.ulp_bf16, zeros.lost_update_share], [0.0, 0.0])
    assert bias_precision(np.float32([0.3])).num_distinct == 1


def test_an_update_is_lost_beyond_one_half():
    """Half a step is .00195 above one half and .00098 below it (sglang, its source)."""
    lost, safe = (0.504, 0.7, 1.0, 40.0), (0.0, 1e-3, 0.1, 0.26, 0.49, 0.5)
    for sign in (-1.0, 1.0):
        for values, share in ((lost, 1.0), (safe, 0.0)):  # down from one half the step is smaller
            shares = [bias_precision(np.array([sign * v])).lost_update_share for v in values]
            assert_array_equal(shares, share)
    assert_equal(bias_precision(np.array([0.1, 0.2, 0.6, 0.7])).lost_update_share, 0.5)


def test_names_of_experts_change_nothing_and_signs_only_the_middle():
    bias = np.random.default_rng(1).normal(0.4, 0.2, 64)
    one = dataclasses.asdict(bias_precision(bias))
    assert_allclose(
        [*dataclasses.asdict(bias_precision(bias[::-1].copy())).values()],
        [*one.values()],
        rtol=1e-13,
    )
    one["middle"] *= -1.0
    assert_allclose([*dataclasses.asdict(bias_precision(-bias)).values()], [*one.values()])


def test_rounding_ties_to_even_keeps_infinities_and_overflows_to_them():
    step = 2.0**-7
    values = np.array([1 + step / 2, 1 + 3 * step / 2, np.inf, -np.inf, np.nan, 1e300, 3.4e38])
    expected = [1.0, 1 + 2 * step, np.inf, -np.inf, np.nan, np.inf, np.inf]
    assert_array_equal(to_bfloat16(values), expected)


def test_the_step_at_a_value():
    steps = {
        1.0: 2.0**-7,
        -1.5: 2.0**-7,
        np.nextafter(8.0, 0.0): 2.0**-5,  # a logarithm rounds to 3
        8.0: 2.0**-4,
        2.0**-126: 2.0**-133,
        2.0**-130: 2.0**-133,  # subnormal: steps do not shrink any more
    } | dict.fromkeys((0.0, np.inf, np.nan), 0.0)
    assert_array_equal([ulp_bfloat16(float(value)) for value in steps], [*steps.values()])


# ---------------------------------------------------------------------------------------- rounding
@pytest.mark.parametrize("name", TORCH)
def test_rounding_is_that_of_torch(name: str) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(20_000) * 2.0 ** random.integers(-40, 40, 20_000)).astype("f4")
    values = np.concatenate([values, np.float32([0.0, -0.0, np.inf, -np.inf, 65520.0, 1e38])])
    expected = torch.from_numpy(values).to(TORCH[name]).to(torch.float32).numpy()
    assert_array_equal(rounded_to(values, name), expected)


@given(SINGLES)
def test_tf32_keeps_the_nearest_eleven_bits_and_ties_go_to_the_even_ones(value: float) -> None:
    _, exponent = np.frexp(np.float32(value))
    step = Fraction(2) ** (max(int(exponent), -125) - 11)
    expected = round(Fraction(value) / step) * step
    rounded = rounded_to(np.array([np.float32(value)]), "tf32")[0]
    if abs(expected) <= Fraction(float(np.finfo(np.float32).max)):
        assert Fraction(float(rounded)) == expected
    else:
        assert np.isinf(rounded)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
@given(one=SINGLES, other=SINGLES)
def test_the_error_is_within_the_unit_and_order_survives_the_gap(
    name: str, one: float, other: float
) -> None:
    form = NUMBER_FORMATS[name]
    pair = np.array([one, other], np.float64)
    rounded = rounded_to(pair, name)
    finite = np.isfinite(rounded)
    error = np.abs(rounded[finite] - pair[finite])
    assert (error <= form.unit * np.abs(pair[finite]) + form.least).all()
    if finite.all() and one - other > format_gap(pair[:1], pair[1:], name)[0]:
        assert rounded[0] > rounded[1]
    odd = np.float32([np.nan, np.inf, -np.inf])
    assert_array_equal(rounded_to(odd, name), odd)


# ------------------------------------------------------------------------------------------ levels
SMALL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.0])


@given(
    arrays(np.float32, array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9), elements=SMALL)
)
def test_distinct_values_are_what_a_set_holds(values):
    assert_array_equal(distinct_values(values), [len(set(row)) for row in values.tolist()])


def test_whole_windows_of_the_prefix_are_counted_one_by_one_and_zeros_left_out():
    ones, zeros, all_apart = np.ones(WINDOW), np.zeros(WINDOW), np.arange(WINDOW)
    for parts, levels in (
        ([ones, all_apart], (1 + WINDOW) / 2),
        ([all_apart, zeros[1:]], WINDOW),  # the rest is shorter than a window
        ([zeros, all_apart], WINDOW),
    ):
        assert_array_equal(window_levels(np.concatenate(parts)[None]), [levels])
    long = np.tile(np.arange(2.0 * PREFIX), (3, 1))
    long[:, PREFIX:] = 0.0
    assert_array_equal(window_levels(long), [WINDOW] * 3)


def test_zeros_short_rows_and_no_rows_have_no_levels():
    for rows in (*(np.ones((2, columns)) for columns in (0, 1, WINDOW - 1)), np.zeros((2, WINDOW))):
        assert_array_equal(window_levels(rows), [np.nan, np.nan])
    assert window_levels(np.empty((0, 64))).shape == (0,)


def test_more_mantissa_bits_hold_more_values_at_any_power_of_two_and_at_most_a_window():
    bits = (0, 2, 3, 7, 10, 12)
    levels = [expected_window_levels(0.02, b) for b in bits]
    assert_array_equal(np.diff(levels) > 0.0, True)
    assert max(levels) < WINDOW
    assert_array_equal([expected_window_levels(0.02, b) for b in (13, 23, 52)], WINDOW)
    for power in (-14, -1, 5):
        scaled = [expected_window_levels(0.02 * 2.0**power, b) for b in bits]
        assert_allclose(scaled, levels, rtol=1e-12)
    for scale in (0.0, -1.0, np.nan, np.inf):
        assert_array_equal([expected_window_levels(scale, b) for b in (3, 23)], np.nan)


# -------------------------------------------------------------------------------------------- sums
WITH_SUMS = [name for name, order in SUMMATION_ORDERS.items() if order.sums is not None]
WIDTHS = (1, 2, 7, 64, 1000, 2048)


def drawn(width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two tokens and three rows with large terms that cancel."""
    random = np.random.default_rng(seed)
    scale = 2.0 ** random.integers(-8, 8, width)
    values, rows = (random.standard_normal((n, width)) * scale for n in (2, 3))
    return values.astype(np.float32), rows.astype(np.float32)


def exact(y: np.ndarray, w: np.ndarray) -> Fraction:
    return sum(
        (Fraction(float(a)) * Fraction(float(b)) for a, b in zip(y, w, strict=True)), Fraction()
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_every_order_are_within_gamma_of_the_exact_ones(width: int) -> None:
    values, rows = drawn(width)
    sums = {name: ordered_sums(values, rows, name) for name in WITH_SUMS}
    for t, y in enumerate(values):
        for e, w in enumerate(rows):
            size, total = np.abs(y.astype(np.float64) * w).sum(), exact(y, w)
            for name, table in sums.items():
                bound = gamma(SUMMATION_ORDERS[name].depth(width), UNIT_FLOAT32)
                assert abs(Fraction(float(table[t, e])) - total) <= Fraction(bound * size), name


@pytest.mark.parametrize("width", WIDTHS)
def test_any_order_of_a_matrix_product_is_within_the_error_of_a_sum(width: int) -> None:
    values, rows = drawn(width, seed=1)
    norm, longest = np.linalg.norm(values, axis=1), float(np.linalg.norm(rows, axis=1).max())
    bound = sum_error(norm, width, SUMMATION_ORDERS["any"].depth(width), longest, 0.5)
    totals = [[exact(y, w) + Fraction(1, 2) for w in rows] for y in values]
    random = np.random.default_rng(2)
    for _ in range(5):
        order = random.permutation(width)
        logits = values[:, order] @ rows[:, order].T + np.float32(0.5)
        for t, row in enumerate(logits.tolist()):
            error = [abs(float(Fraction(z) - s)) for z, s in zip(row, totals[t], strict=True)]
            assert max(error) <= bound[t]


def test_a_sequence_is_added_from_the_left_and_pairs_first() -> None:
    values, rows = drawn(50)
    total = np.float32(0.0)
    for y, w in zip(values[1], rows[2], strict=True):
        total = np.float32(total + np.float32(y * w))
    assert ordered_sums(values, rows, "sequential")[1, 2] == total
    values, rows = drawn(4)
    p = values[0] * rows[0]
    expected = np.float32(p[0] + p[1]) + np.float32(p[2] + p[3])
    assert ordered_sums(values, rows, "pairwise")[0, 0] == expected


def test_the_order_of_the_router_kernel_is_threads_then_lanes_then_warps() -> None:
    width = 2048
    values, rows = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in drawn(width))
    threads = np.zeros(128, np.float32)
    for i in range(0, width, 1024):
        for thread in range(128):
            for r in range(8):
                k = i + 8 * thread + r
                threads[thread] = np.float32(threads[thread] + values[0, k] * rows[0, k])
    total = np.float32(0.0)
    for warp in threads.reshape(4, 32):
        lanes = warp.copy()
        for step in (16, 8, 4, 2, 1):
            lanes = np.float32([lanes[n] + lanes[n ^ step] for n in range(32)])
        total = np.float32(total + lanes[0])
    assert ordered_sums(values, rows, "strided_128")[0, 0] == total


def test_an_order_that_has_a_bound_alone_has_no_sums() -> None:
    with pytest.raises(ValueError, match="has a bound and no sums"):
        ordered_sums(*drawn(4), "any")
    assert gamma(2**24, UNIT_FLOAT32) == np.inf
