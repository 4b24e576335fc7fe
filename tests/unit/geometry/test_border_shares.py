"""Shares of a ball near ties and boundaries, by directions, draws, closed forms and mpmath."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from numpy.testing import assert_allclose

from moegeom.geometry import border_shares as border
from moegeom.geometry.boundary.orders import free_logit_distance, tie_spread
from tests.oracle import measures


def points(dimension: int, number: int, seed: int = 0) -> np.ndarray:
    """Uniform in the unit ball."""
    random = np.random.default_rng(seed)
    inside = random.standard_normal((number, dimension))
    inside /= np.linalg.norm(inside, axis=1, keepdims=True)
    return inside * random.random((number, 1)) ** (1.0 / dimension)


# ----------------------------------------------------------------------------------- borders of ties
def test_borders_of_orthonormal_rows_and_without_any_no_share_and_no_ratio():
    shapes = ((8, 3, 1), (8, 3, 2), (64, 8, 1), (4, 2, 3))
    shares = [measures.orthonormal_border_share(*shape) for shape in shapes]
    assert_allclose(shares, [0.1739947, 0.4093402, 0.0113547, 1.0], atol=1e-7)
    none, some = border.TieSums(2, 0, 0.0, 0.0, 0.0, 0.0), border.TieSums(1, 3, 1.0, 0.1, 1.0, 0.1)
    assert border.log_leading_share(none, 8, 0.1) == -math.inf
    for name in border.CONVENTIONS:
        assert border.log_order_ratio(none, some, 8, 0.1, name) == -math.inf
        assert math.isnan(border.log_order_ratio(some, none, 8, 0.1, name))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orthonormal_rows_are_a_case_of_any_rows(order):
    sums = border.tie_sums(np.eye(8), 3, order, 4000, 1000, np.random.default_rng(0))
    flats = math.comb(8, order + 1)
    assert sums.flats == flats
    expected = flats * measures.orthonormal_border_share(8, 3, order)
    assert abs(sums.borders - expected) < 4 * sums.borders_error
    assert sums.borders_error < 0.01 * expected
    # factors of orthonormal rows are all one number
    assert sums.weighted == pytest.approx(sums.borders / math.sqrt(order + 1), rel=1e-12)


@pytest.mark.parametrize("tied", [(0, 1), (2, 5), (0, 3, 4), (1, 2, 4, 5)])
def test_borders_are_those_of_directions_on_the_flat(tied):
    random = np.random.default_rng(3)
    rows, k = random.standard_normal((7, 10)), 3
    gram = rows @ rows.T
    share = border.border_shares(
        gram, border.direction_logits(gram, 40_000, random), k, np.array([tied])
    ).mean()
    away = rows[list(tied[1:])] - rows[tied[0]]
    flat = np.linalg.svd(away)[2][len(away) :]
    logits = random.standard_normal((40_000, len(flat))) @ flat @ rows.T
    above = (np.delete(logits, tied, axis=1) > logits[:, [tied[0]]]).sum(axis=1)
    direct = ((above >= k - (len(tied) - 1)) & (above <= k - 1)).mean()
    assert share == pytest.approx(direct, abs=0.012)


def test_a_sample_of_ties_is_scaled_and_knows_its_error():
    random = np.random.default_rng(4)
    rows = random.standard_normal((12, 20)) * np.linspace(0.5, 2.0, 12)[:, None]
    gram = rows @ rows.T
    whole = border.tie_sums(gram, 4, 2, 4000, 1000, random)
    parts = [
        border.tie_sums(gram, 4, 2, 800, 60, np.random.default_rng(seed)) for seed in range(40)
    ]
    away = [(part.borders - whole.borders) / part.borders_error for part in parts]
    assert 0.6 < np.std(away) < 1.5
    assert abs(np.mean(away)) < 0.6
    assert all(part.flats == whole.flats == 220 for part in parts)


def test_factors_are_those_of_singular_values_and_dependent_rows_leave_no_flat():
    rows = np.random.default_rng(5).standard_normal((6, 9))
    for tied in itertools.permutations((1, 3, 4)):
        values = np.linalg.svd(rows[list(tied[1:])] - rows[tied[0]], compute_uv=False)
        assert_allclose(
            border.tie_factor(rows @ rows.T, np.array(tied)), 1.0 / values.prod(), rtol=1e-12
        )
    assert border.tie_factor(np.eye(4), np.arange(3)) == pytest.approx(3**-0.5)
    draw = np.random.default_rng(0)
    for rows in (np.ones((3, 2)), np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])):
        gram = rows @ rows.T
        logits = border.direction_logits(gram, 80, draw)
        assert np.isnan(border.border_shares(gram, logits, 1, np.array([[0, 1, 2]]))).all()
        assert border.tie_factor(gram, np.array([0, 1, 2])) == math.inf
        assert border.tie_sums(gram, 1, 2, 80, 10, draw).borders == 0.0
    assert border.tie_sums(np.eye(3), 1, 3, 80, 10, draw).flats == 0


# ------------------------------------------------------------------------------------ leading terms
def test_leading_shares_are_what_lies_near_ties_that_all_meet_in_the_middle():
    rows, width = np.random.default_rng(6).standard_normal((4, 6)), 0.004
    logits = points(6, 400_000, 6) @ rows.T
    least = np.full(len(logits), np.inf)
    order = np.sort(logits, axis=1)
    for i, j in itertools.combinations(range(4), 2):
        # two tie at the border of two where one of the others is above both and one below
        middle = (logits[:, [i]] + logits[:, [j]]) / 2
        num_above = (order > middle).sum(axis=1) - (logits[:, [i, j]] > middle).sum(axis=1)
        away = np.abs(logits[:, i] - logits[:, j]) / np.linalg.norm(rows[i] - rows[j])
        least = np.minimum(least, np.where(num_above == 1, away, np.inf))
    sums = border.tie_sums(rows @ rows.T, 2, 1, 40_000, 100, np.random.default_rng(6))
    expected = math.exp(border.log_leading_share(sums, 6, width))
    assert (least < width).mean() == pytest.approx(expected, rel=0.05)


def test_conventions_of_a_width_are_told_apart_by_draws_in_three_dimensions():
    eps, inside, near = 0.02, points(3, 2_000_000, 7), {}
    for order in (1, 2):
        spread = tie_spread(inside, 1, order)
        half = free_logit_distance(inside, 1, order)
        near[order] = {n: (a < eps).mean() for n, a in (("half_spread", half), ("spread", spread))}
    assert near[2]["half_spread"] / near[1]["half_spread"] == pytest.approx(0.0205, abs=0.001)
    random = np.random.default_rng(7)
    sums = [border.tie_sums(np.eye(3), 1, order, 40_000, 9, random) for order in (1, 2)]
    for name in ("half_spread", "spread"):
        expected = math.exp(border.log_order_ratio(sums[1], sums[0], 3, eps, name))
        assert near[2][name] / near[1][name] == pytest.approx(expected, rel=0.06), name
    base = math.exp(border.log_order_ratio(sums[1], sums[0], 3, eps, "base"))
    assert base == pytest.approx(0.01386, abs=1e-4)
    assert border.log_order_ratio(sums[0], sums[0], 3, eps, "spread") == 0.0


# ------------------------------------------------------------------------------------------- bounds


# --------------------------------------------------------------------------------- slabs and tubes
@pytest.mark.parametrize(("dimension", "order"), [(3, 1), (6, 4), (7168, 1), (7168, 3)])
def test_half_binomials_are_quotients_of_gammas(dimension, order):
    with mpmath.workdps(40):
        half = mpmath.mpf(dimension) / 2
        expected = mpmath.log(mpmath.binomial(half, mpmath.mpf(order) / 2))
    assert border.log_half_binomial(dimension, order) == pytest.approx(float(expected), rel=1e-12)


def test_a_bound_of_orders_is_never_below_what_is_near():
    bounds = [border.log_order_bound(64, n, 4096, 0.01 / 64) / math.log(10.0) for n in (1, 2, 3, 4)]
    assert_allclose(bounds, [1.2065, 0.3187, -0.7722, -2.0211], atol=1e-4)
    assert border.log_order_bound(3, 3, 8, 0.1) == -math.inf
    rows, inside = np.random.default_rng(1).standard_normal((5, 6)), points(6, 20_000)
    least = np.full(len(inside), np.inf)
    for i, j in itertools.combinations(range(5), 2):
        away = rows[i] - rows[j]
        least = np.minimum(least, np.abs(inside @ away) / np.linalg.norm(away))
    for width in (0.01, 0.05, 0.1):
        assert (least < width).mean() <= math.exp(border.log_order_bound(5, 1, 6, width))


@pytest.mark.parametrize(("experts", "hidden"), [(12, 96), (12, 7)])
def test_logits_of_a_ball_are_those_of_its_points(experts, hidden):
    random = np.random.default_rng(2)
    rows, bias = random.standard_normal((experts, hidden)), random.standard_normal(experts)
    drawn = border.ball_logits(rows, bias, 1.7, 100_000, random)
    direct = 1.7 * points(hidden, 100_000, 5) @ rows.T + bias
    size = direct.std(axis=0)
    assert_allclose((drawn.mean(axis=0) - direct.mean(axis=0)) / size, 0.0, atol=0.02)
    scale = np.outer(size, size)
    assert_allclose(np.cov(drawn.T) / scale, np.cov(direct.T) / scale, atol=0.03)
    # and what is near a boundary of the first two
    away = np.linalg.norm(rows[0] - rows[1])
    for width in (0.05, 0.3):
        near = [(np.abs(z[:, 0] - z[:, 1]) < width * away).mean() for z in (drawn, direct)]
        assert_allclose(*near, rtol=0.0, atol=0.006)
