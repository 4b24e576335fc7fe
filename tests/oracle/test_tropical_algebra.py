"""The max-plus semiring: its laws, and top-k routing as its k-th symmetric polynomial."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moegeom.geometry.capacity.tropical import (
    TROPICAL_ONE,
    TROPICAL_ZERO,
    elementary_symmetric,
    on_tropical_hypersurface,
    power_distances,
    power_weights,
    tropical_product,
    tropical_sum,
    tropical_value,
)
from moegeom.geometry.selection import margin, top_k

#: Numbers whose sums are exact.
LOGITS = np.random.default_rng(4).integers(-8, 8, (400, 6)).astype(np.float64)


def test_sums_and_products_are_a_semiring():
    a, b, c = LOGITS.T[:3]
    zero, one = np.full(len(a), TROPICAL_ZERO), np.full(len(a), TROPICAL_ONE)
    np.testing.assert_array_equal(tropical_sum(a, zero), a)
    np.testing.assert_array_equal(tropical_product(a, one), a)
    np.testing.assert_array_equal(tropical_product(a, zero), zero)
    np.testing.assert_array_equal(tropical_sum(a, a), a)
    np.testing.assert_array_equal(
        tropical_product(a, tropical_sum(b, c)),
        tropical_sum(tropical_product(a, b), tropical_product(a, c)),
    )


@pytest.mark.parametrize("k", range(8))
def test_the_symmetric_polynomial_is_the_sum_of_the_k_largest(k):
    found = elementary_symmetric(LOGITS, k)
    if k > 6:
        np.testing.assert_array_equal(found, TROPICAL_ZERO)
        return
    np.testing.assert_array_equal(found, np.sort(LOGITS, axis=1)[:, 6 - k :].sum(axis=1))


def test_a_negative_degree_is_refused_and_the_worked_value_is_met():
    with pytest.raises(ValueError, match="top_k -1"):
        elementary_symmetric(LOGITS, -1)
    assert elementary_symmetric(np.array([[1.0, -2.0, 4.0, 0.5]]), 3) == [5.5]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_its_hypersurface_is_where_the_margin_is_zero(k):
    sets = np.array([[i in s for i in range(6)] for s in itertools.combinations(range(6), k)])
    exponents, zeros = sets.astype(np.int64), np.zeros(len(sets))
    np.testing.assert_array_equal(
        tropical_value(zeros, exponents, LOGITS), elementary_symmetric(LOGITS, k)
    )
    on = on_tropical_hypersurface(zeros, exponents, LOGITS)
    np.testing.assert_array_equal(on, margin(LOGITS, k) == 0.0)
    near = on_tropical_hypersurface(zeros, exponents, LOGITS, tolerance=1.0)
    np.testing.assert_array_equal(near, margin(LOGITS, k) <= 1.0)
    assert 0.1 < on.mean() < 0.9


def test_polynomials_of_one_term_and_of_none_have_no_hypersurface():
    one = np.zeros((1, 6), np.int64)
    assert not on_tropical_hypersurface(np.ones(1), one, LOGITS).any()
    assert (tropical_value(np.ones(1), one, LOGITS) == 1.0).all()
    assert (tropical_value(np.ones(0), one[:0], LOGITS) == TROPICAL_ZERO).all()


def test_the_largest_logits_are_the_least_power_distances():
    random = np.random.default_rng(0)
    weight, bias = random.standard_normal((7, 3)), random.standard_normal(7)
    points = random.standard_normal((200, 3))
    logits = points @ weight.T + bias
    distances = power_distances(weight, bias, points)
    np.testing.assert_allclose(distances, (points**2).sum(1)[:, None] - 2.0 * logits, atol=1e-12)
    np.testing.assert_array_equal(np.sort(top_k(logits, 3)), np.sort(top_k(-distances, 3)))
    voronoi = -0.5 * (weight**2).sum(axis=1)
    np.testing.assert_allclose(power_weights(weight, voronoi), 0.0, atol=1e-15)
