"""Oracle: SciPy's functions and numerical derivatives, for the score curves and their bends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit
from scipy.differentiate import derivative
from scipy.special import expit, logit

from moegeom.geometry.boundary.curved import BENDS, ScoreCurve
from moegeom.kernels.cpu.score_curve import curve_at, curve_inverse, curve_of, curve_slopes

FUNCTIONS = {
    "identity": lambda z: z,
    "sigmoid": expit,
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(0.0, z)),
}
CURVES = [ScoreCurve(score, cap) for score in FUNCTIONS for cap in (math.inf, 1.5, 6.0)]
GRID = np.linspace(-12.0, 12.0, 4801)
every_curve = pytest.mark.parametrize("curve", CURVES, ids=lambda c: f"{c.score}-{c.soft_cap}")


def function_of(curve):
    inner, cap = FUNCTIONS[curve.score], curve.soft_cap
    return inner if math.isinf(cap) else lambda z: inner(cap * np.tanh(z / cap))


@njit
def points_of(curve, logits, out):
    """Score, rest and slope at each logit."""
    for n in range(logits.shape[0]):
        out[n, 0], out[n, 1], out[n, 2] = curve_at(curve, logits[n])


@njit
def inverses_of(curve, points, out):
    """Logit and slope from each score and rest."""
    for n in range(points.shape[0]):
        out[n, 0], out[n, 1] = curve_inverse(curve, points[n, 0], points[n, 1])


@njit
def slopes_of(curve, ends, out):
    """Least and largest slope between each two logits."""
    for n in range(ends.shape[0]):
        out[n, 0], out[n, 1] = curve_slopes(curve, ends[n, 0], ends[n, 1])


def tabulated(loop, curve, given, columns):
    out = np.empty((len(given), columns))
    loop(curve_of(curve), given, out)
    return out


def slopes_at(curve, logits):
    return tabulated(points_of, curve, logits, 3)[:, 2]


@every_curve
def test_values_slopes_and_inverses(curve):
    points = tabulated(points_of, curve, GRID, 3)
    function = function_of(curve)
    np.testing.assert_allclose(points[:, 0], function(GRID), rtol=1e-12, atol=1e-300)
    slopes = derivative(function, GRID, initial_step=0.1).df
    np.testing.assert_allclose(points[:, 2], slopes, rtol=1e-5, atol=1e-9)
    near = np.abs(GRID) < 3.0 if math.isfinite(curve.soft_cap) else np.abs(GRID) < 12.0
    back = tabulated(inverses_of, curve, points[near], 2)
    np.testing.assert_allclose(back[:, 0], GRID[near], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(back[:, 1], points[near, 2], rtol=1e-6)


@every_curve
def test_the_range_is_that_of_the_score_between_the_ends_of_the_cap(curve):
    found = curve_of(curve)
    with np.errstate(over="ignore"):
        ends = FUNCTIONS[curve.score](np.array([-curve.soft_cap, curve.soft_cap]))
    np.testing.assert_allclose([found.low, found.high], ends, rtol=1e-14)


@every_curve
def test_no_derivative_leaves_its_bound(curve):
    bends, step = curve.bends, GRID[1] - GRID[0]
    slopes = slopes_at(curve, GRID)
    second = (slopes[2:] - slopes[:-2]) / (2.0 * step)
    assert slopes.max() <= bends.steepest * (1.0 + 1e-9)
    assert np.abs(second).max() <= bends.bend * (1.0 + 1e-9) + 1e-12
    steep = slopes[1:-1] > 1e-12
    share = np.abs(np.log(slopes[2:] / slopes[:-2])[steep]) / (2.0 * step)
    assert share.max() <= bends.log_slope * (1.0 + 1e-6) + 1e-9


@every_curve
def test_one_over_the_slope_is_convex_as_far_as_stated(curve):
    inside = GRID[(curve.bends.convex_until > GRID) & (np.abs(GRID) < 6.0)]
    inverse = 1.0 / slopes_at(curve, inside)
    np.testing.assert_array_less(-1e-9 * inverse[1:-1], np.diff(inverse, 2))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_the_bounds_are_reached(score):
    """So that a constant cannot be far too large: largest slope, where it is, largest bend."""
    curve, own = ScoreCurve(score), BENDS[score]
    slopes = slopes_at(curve, GRID)
    np.testing.assert_allclose(slopes.max(), own.steepest, rtol=1e-5)
    np.testing.assert_allclose(GRID[slopes.argmax()], own.peak, atol=0.006)
    second = np.gradient(slopes, GRID)
    np.testing.assert_allclose(np.abs(second).max(), own.bend, rtol=1e-4)
    convex = np.diff(1.0 / slopes, 2)
    if math.isfinite(own.convex_until):
        first_concave = GRID[1:-1][convex < 0.0].min()
        np.testing.assert_allclose(first_concave, own.convex_until, atol=0.01)


@every_curve
def test_slopes_between_two_logits_stay_between_the_bounds(curve):
    random = np.random.default_rng(5)
    ends = np.sort(random.uniform(-8.0, 8.0, (200, 2)))
    least, most = tabulated(slopes_of, curve, ends, 2).T
    inside = slopes_at(curve, np.linspace(*ends.T, 50).ravel()).reshape(50, 200)
    assert (least <= inside.min(axis=0) * (1.0 + 1e-12)).all()
    assert (inside.max(axis=0) <= most * (1.0 + 1e-9)).all()


def test_far_out_a_sigmoid_keeps_the_distance_to_one():
    curve = ScoreCurve("sigmoid")
    points = tabulated(points_of, curve, np.array([60.0]), 3)
    np.testing.assert_allclose(points[0, 1], expit(-60.0), rtol=1e-14)
    back = tabulated(inverses_of, curve, np.array([points[0, :2], [0.25, 0.75]]), 2)
    np.testing.assert_allclose(back[:, 0], [60.0, logit(0.25)])
