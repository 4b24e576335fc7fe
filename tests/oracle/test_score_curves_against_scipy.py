"""Oracle: SciPy's minimisation and numerical derivatives, for the bends of the score curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.differentiate import derivative
from scipy.special import expit, logit

from moegeom.geometry.boundary.score_curve import BENDS, ScoreCurve

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


@every_curve
def test_values_slopes_and_inverses(curve):
    points = [curve.at(z) for z in GRID.tolist()]
    function = function_of(curve)
    np.testing.assert_allclose([p.score for p in points], function(GRID), rtol=1e-12, atol=1e-300)
    slopes = derivative(function, GRID, initial_step=0.1).df
    np.testing.assert_allclose([p.slope for p in points], slopes, rtol=1e-5, atol=1e-9)
    near = np.abs(GRID) < 3.0 if math.isfinite(curve.soft_cap) else np.abs(GRID) < 12.0
    for z, point in zip(GRID[near].tolist(), np.array(points)[near], strict=True):
        back, slope = curve.inverse(point.score, point.rest)
        np.testing.assert_allclose(back, z, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(slope, point.slope, rtol=1e-6)


@every_curve
def test_no_derivative_leaves_its_bound(curve):
    bends, step = curve.bends, GRID[1] - GRID[0]
    slopes = np.array([curve.at(z).slope for z in GRID.tolist()])
    second = (slopes[2:] - slopes[:-2]) / (2.0 * step)
    assert slopes.max() <= bends.steepest * (1.0 + 1e-9)
    assert np.abs(second).max() <= bends.bend * (1.0 + 1e-9) + 1e-12
    steep = slopes[1:-1] > 1e-12
    share = np.abs(np.log(slopes[2:] / slopes[:-2])[steep]) / (2.0 * step)
    assert share.max() <= bends.log_slope * (1.0 + 1e-6) + 1e-9


@every_curve
def test_one_over_the_slope_is_convex_as_far_as_stated(curve):
    inside = GRID[(curve.bends.convex_until > GRID) & (np.abs(GRID) < 6.0)]
    inverse = np.array([1.0 / curve.at(z).slope for z in inside.tolist()])
    np.testing.assert_array_less(-1e-9 * inverse[1:-1], np.diff(inverse, 2))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_the_bounds_are_reached(score):
    """So that a constant cannot be far too large: largest slope, where it is, largest bend."""
    curve, own = ScoreCurve(score), BENDS[score]
    slopes = np.array([curve.at(z).slope for z in GRID.tolist()])
    np.testing.assert_allclose(slopes.max(), own.steepest, rtol=1e-5)
    np.testing.assert_allclose(GRID[slopes.argmax()], own.peak, atol=0.006)
    second = np.gradient(slopes, GRID)
    np.testing.assert_allclose(np.abs(second).max(), own.bend, rtol=1e-4)
    convex = np.diff([1.0 / curve.at(z).slope for z in GRID.tolist()], 2)
    if math.isfinite(own.convex_until):
        first_concave = GRID[1:-1][convex < 0.0].min()
        np.testing.assert_allclose(first_concave, own.convex_until, atol=0.01)


@every_curve
def test_slopes_between_two_logits_stay_between_the_bounds(curve):
    random = np.random.default_rng(5)
    for low, high in np.sort(random.uniform(-8.0, 8.0, (200, 2))).tolist():
        least, most = curve.slopes(low, high)
        inside = [curve.at(z).slope for z in np.linspace(low, high, 50).tolist()]
        assert least <= min(inside) * (1.0 + 1e-12)
        assert max(inside) <= most * (1.0 + 1e-9)


def test_far_out_a_sigmoid_keeps_the_distance_to_one():
    point = ScoreCurve("sigmoid").at(60.0)
    np.testing.assert_allclose(point.rest, expit(-60.0), rtol=1e-14)
    np.testing.assert_allclose(ScoreCurve("sigmoid").inverse(point.score, point.rest)[0], 60.0)
    np.testing.assert_allclose(logit(0.25), ScoreCurve("sigmoid").inverse(0.25, 0.75)[0])
