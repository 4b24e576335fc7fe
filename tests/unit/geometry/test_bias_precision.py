"""What a cast to bfloat16 leaves of a selection bias."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.geometry.number_formats import bias_precision, to_bfloat16, ulp_bfloat16


def test_the_worked_bias():
    """Four updates of 0.001 around 7: one number in bfloat16, whose step there is 1/32."""
    found = bias_precision(np.float32([7.0, 7.001, 7.002, 7.003]))
    assert (found.num_distinct, found.num_distinct_bf16) == (4, 1)
    assert found.num_distinct_bf16_recentred == 4
    np.testing.assert_array_equal([found.ulp_bf16, found.lost_update_share], [2.0**-5, 1.0])
    np.testing.assert_allclose(found.spread, 0.001 * np.sqrt(1.25), rtol=1e-3)
    np.testing.assert_allclose(found.middle, 7.0015, rtol=1e-6)
    np.testing.assert_allclose(found.largest_shift, 0.003, rtol=1e-3)


def test_a_constant_bias_is_one_number_with_no_spread():
    found = bias_precision(np.full(5, 0.25))
    assert (found.num_distinct, found.num_distinct_bf16) == (1, 1)
    assert found.num_distinct_bf16_recentred == 1
    np.testing.assert_array_equal([found.spread, found.middle, found.largest_shift], [0.0, 0.25, 0])


def test_a_bias_of_zeros_has_no_step_and_loses_no_update():
    found = bias_precision(np.zeros(4, np.float32))
    np.testing.assert_array_equal([found.ulp_bf16, found.lost_update_share], [0.0, 0.0])


def test_one_expert_is_enough():
    assert bias_precision(np.float32([0.3])).num_distinct == 1


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_an_update_is_lost_beyond_one_half(sign):
    """Half a step is .00195 above one half and .00098 below it (sglang, its source)."""
    for value in (0.504, 0.7, 1.0, 40.0):
        np.testing.assert_equal(bias_precision(np.array([sign * value])).lost_update_share, 1.0)
    for value in (0.0, 1e-3, 0.1, 0.26, 0.49, 0.5):  # down from one half the step is the smaller
        np.testing.assert_equal(bias_precision(np.array([sign * value])).lost_update_share, 0.0)


def test_the_share_is_over_experts():
    found = bias_precision(np.array([0.1, 0.2, 0.6, 0.7]))
    np.testing.assert_equal(found.lost_update_share, 0.5)


def test_renaming_experts_changes_nothing():
    bias = np.random.default_rng(1).normal(0.4, 0.2, 64)
    first, second = bias_precision(bias), bias_precision(bias[::-1].copy())
    for name, value in dataclasses.asdict(first).items():
        np.testing.assert_allclose(getattr(second, name), value, rtol=1e-13, err_msg=name)


def test_the_sign_of_every_bias_changes_only_the_middle():
    bias = np.random.default_rng(2).normal(0.4, 0.2, 64)
    first, second = bias_precision(bias), bias_precision(-bias)
    np.testing.assert_allclose(second.middle, -first.middle)
    for field in dataclasses.fields(first):
        if field.name != "middle":
            value = getattr(first, field.name)
            np.testing.assert_allclose(getattr(second, field.name), value, err_msg=field.name)


def test_rounding_ties_to_even_keeps_infinities_and_overflows_to_them():
    step = 2.0**-7
    given = np.array([1 + step / 2, 1 + 3 * step / 2, np.inf, -np.inf, np.nan, 1e300, 3.4e38])
    expected = [1.0, 1 + 2 * step, np.inf, -np.inf, np.nan, np.inf, np.inf]
    np.testing.assert_array_equal(to_bfloat16(given), expected)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (0.0, 0.0),
        (np.inf, 0.0),
        (np.nan, 0.0),
        (1.0, 2.0**-7),
        (-1.5, 2.0**-7),
        (np.nextafter(8.0, 0.0), 2.0**-5),  # a logarithm rounds to 3
        (8.0, 2.0**-4),
        (2.0**-126, 2.0**-133),
        (2.0**-130, 2.0**-133),  # subnormal: steps do not shrink any more
    ],
)
def test_the_step_at_a_value(value, step):
    np.testing.assert_equal(ulp_bfloat16(float(value)), step)
