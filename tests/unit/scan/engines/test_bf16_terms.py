"""Rows as sums of bfloat16 numbers lose nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moegeom.engine.devices.device_router import bf16_terms


def sum_of(terms: list[np.ndarray]) -> np.ndarray:
    return sum(term.view(ml_dtypes.bfloat16).astype(np.float64) for term in terms)


def weights(least: float) -> st.SearchStrategy[np.ndarray]:
    """Rows of finite float32 numbers that are 0 or at least so large."""
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return arrays(np.float32, (2, 3), elements=numbers.filter(lambda x: x == 0 or abs(x) >= least))


@given(weights(2.0**-110))
def test_terms_add_up_to_the_weight(weight):
    terms = bf16_terms(weight)
    np.testing.assert_array_equal(sum_of(terms), weight.astype(np.float64))


@given(weights(0.0))
def test_terms_of_the_smallest_weights_are_off_by_less_than_the_least_bfloat16(weight):
    error = sum_of(bf16_terms(weight)) - weight.astype(np.float64)
    assert (np.abs(error) < 2.0**-133).all()


@given(weights(0.0))
def test_there_is_one_term_where_bfloat16_is_exact_and_three_else(weight):
    is_exact = (weight == weight.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    terms = bf16_terms(weight)
    assert len(terms) == (1 if is_exact else 3)
    assert all(term.dtype == np.uint16 and term.shape == weight.shape for term in terms)


@given(weights(2.0**-110))
def test_terms_are_finite_fall_in_size_and_have_the_sign_of_the_weight(weight):
    """Cut off and not rounded: no term is larger than what is left, so none overflows."""
    terms = [term.view(ml_dtypes.bfloat16).astype(np.float64) for term in bf16_terms(weight)]
    rest = weight.astype(np.float64)
    for term in terms:
        assert (np.abs(term) <= np.abs(rest)).all()
        assert ((term == 0) | (np.sign(term) == np.sign(rest))).all()
        rest = rest - term
        assert (np.abs(rest) <= 2.0**-7 * np.abs(term)).all()


def test_extreme_weights_are_kept():
    largest = np.finfo(np.float32).max
    weight = np.array([[largest, -largest, 2.0**-126, -(2.0**-110), 0.0, -0.0]], np.float32)
    np.testing.assert_array_equal(sum_of(bf16_terms(weight)), weight.astype(np.float64))


def test_weights_that_two_terms_hold_are_padded_to_three():
    weight = np.array([[1.0 + 2.0**-8, 3.0]], np.float32)
    terms = bf16_terms(weight)
    assert len(terms) == 3 and not terms[2].any()
    np.testing.assert_array_equal(sum_of(terms), weight.astype(np.float64))


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_weight_stays_as_it_is_whatever_its_order(order):
    weight = np.asarray(np.random.default_rng(0).standard_normal((5, 7)), np.float32, order=order)
    before = weight.copy()
    np.testing.assert_array_equal(sum_of(bf16_terms(weight)), before.astype(np.float64))
    np.testing.assert_array_equal(weight, before)
