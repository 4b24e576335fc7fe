"""Rows as sums of bfloat16 numbers lose nothing."""

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moegeom.engine.devices.device_router import bf16_terms


def terms_of(weight: np.ndarray) -> list[np.ndarray]:
    """The terms in float64, as many as are needed to be exact and 16 bits wide."""
    terms = bf16_terms(weight)
    is_exact = (weight == weight.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert len(terms) == (1 if is_exact else 3)
    assert all(term.dtype == np.uint16 and term.shape == weight.shape for term in terms)
    return [term.view(ml_dtypes.bfloat16).astype(np.float64) for term in terms]


def weights(least: float) -> st.SearchStrategy[np.ndarray]:
    """Rows of finite float32 numbers that are 0 or at least so large."""
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return arrays(np.float32, (2, 3), elements=numbers.filter(lambda x: x == 0 or abs(x) >= least))


@given(weights(2.0**-110))
def test_terms_add_up_to_the_weight_fall_in_size_and_have_its_sign(weight):
    """Cut off and not rounded: no term is larger than what is left, so none overflows."""
    rest = weight.astype(np.float64)
    for term in terms_of(weight):
        assert (np.abs(term) <= np.abs(rest)).all()
        assert ((term == 0) | (np.sign(term) == np.sign(rest))).all()
        rest = rest - term
        assert (np.abs(rest) <= 2.0**-7 * np.abs(term)).all()
    np.testing.assert_array_equal(rest, 0.0)


@given(weights(0.0))
def test_terms_of_the_smallest_weights_are_off_by_less_than_the_least_bfloat16(weight):
    error = sum(terms_of(weight)) - weight.astype(np.float64)
    assert (np.abs(error) < 2.0**-133).all()


def test_extreme_weights_are_exact_and_what_two_terms_hold_is_padded_to_three():
    largest = np.finfo(np.float32).max
    extreme = np.array([[largest, -largest, 2.0**-126, -(2.0**-110), 0.0, -0.0]], np.float32)
    padded = np.array([[1.0 + 2.0**-8, 3.0]], np.float32)
    for weight in (extreme, padded, np.asfortranarray(np.repeat(extreme, 3, axis=0))):
        before = weight.copy()
        np.testing.assert_array_equal(sum(terms_of(weight)), before.astype(np.float64))
        np.testing.assert_array_equal(weight, before)
    assert not terms_of(padded)[2].any()
