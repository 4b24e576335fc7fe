"""One curved wall at its corners, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moegeom.geometry.boundary.curved_wall import wall_distance
from moegeom.geometry.boundary.score_curve import ScoreCurve

SIGMOID, ROOT = ScoreCurve("sigmoid"), ScoreCurve("sqrt_softplus")
UNIT = (1.0, 0.0, 1.0)  # two orthogonal rows of length 1


def test_the_worked_pair():
    """docs/theory.md E1: logits 1 and 0, orthonormal rows, biases apart by 0.1."""
    wall = wall_distance(SIGMOID, (1.0, 0.0), UNIT, 0.1)
    margin = SIGMOID.at(1.0).score + 0.1 - SIGMOID.at(0.0).score
    np.testing.assert_allclose(margin, 0.331059, atol=5e-7)
    np.testing.assert_allclose([wall.lower, wall.upper], 1.007672, atol=2e-6)
    np.testing.assert_allclose(wall.logits, (0.25398, 0.67739), atol=2e-5)


def test_without_a_bias_the_wall_is_straight():
    wall = wall_distance(SIGMOID, (1.0, 0.0), UNIT, 0.0)
    np.testing.assert_allclose([wall.lower, wall.upper], math.sqrt(0.5), rtol=1e-6)
    np.testing.assert_allclose(wall.logits, (0.5, 0.5), rtol=1e-6)


@pytest.mark.parametrize("delta", [1.0, 1.5])
def test_a_bias_beyond_the_range_of_the_score_leaves_no_wall(delta):
    wall = wall_distance(SIGMOID, (0.0, 0.0), UNIT, delta)
    assert (wall.lower, wall.upper) == (math.inf, math.inf)


def test_an_unbounded_score_makes_up_for_any_bias():
    wall = wall_distance(ROOT, (0.0, 0.0), UNIT, 3.0)
    u, v = wall.logits
    np.testing.assert_allclose(ROOT.at(u).score + 3.0, ROOT.at(v).score, rtol=1e-9)
    np.testing.assert_allclose(wall.upper, math.hypot(u, v), rtol=1e-9)
    assert wall.lower >= (1 - 1e-6) * wall.upper


def test_on_the_wall_and_behind_it_the_distance_is_zero():
    tied = math.log(0.6 / 0.4)
    score = SIGMOID.at(tied).score
    for delta in (0.5 - score, 0.5 - score - 0.1):
        assert wall_distance(SIGMOID, (tied, 0.0), UNIT, delta).upper == 0.0


def test_opposite_rows_are_a_root_in_one_variable():
    """Rows w and -w: sigmoid(1 - t) + 0.1 = sigmoid(t)."""
    wall = wall_distance(SIGMOID, (1.0, 0.0), (1.0, -1.0, 0.0), 0.1)
    t = wall.upper
    assert SIGMOID.at(1 - t).score + 0.1 <= SIGMOID.at(t).score
    assert SIGMOID.at(1 - 0.999999 * t).score + 0.1 >= SIGMOID.at(0.999999 * t).score
    np.testing.assert_allclose(wall.logits, (1 - t, t), rtol=1e-6)


def test_of_two_roots_on_a_line_the_nearer_one_counts():
    """Rows w and 2 w: sigmoid(t) + 0.1 = sigmoid(2 t) has two roots above 0."""
    wall = wall_distance(SIGMOID, (0.0, 0.0), (1.0, 2.0, 0.0), 0.1)
    roots = np.linspace(0, 5, 500001)
    gap = 1 / (1 + np.exp(-roots)) + 0.1 - 1 / (1 + np.exp(-2 * roots))
    crossings = roots[1:][np.sign(gap[1:]) != np.sign(gap[:-1])]
    assert len(crossings) == 2
    np.testing.assert_allclose(wall.upper, crossings[0], rtol=1e-4)


def test_equal_rows_with_different_biases_never_tie():
    wall = wall_distance(SIGMOID, (0.7, 0.7), (1.0, 1.0, 0.0), 0.01)
    assert wall.upper == math.inf


def test_a_zero_row_waits_for_the_other_one():
    """The other expert has to come to sigmoid^-1(0.5 + 0.1) by itself, along a row of length 2."""
    wall = wall_distance(SIGMOID, (0.0, -1.0), (0.0, 2.0, 0.0), 0.1)
    np.testing.assert_allclose(wall.upper, (math.log(0.6 / 0.4) + 1.0) / 2.0, rtol=1e-6)
    wall = wall_distance(SIGMOID, (1.0, 0.0), (2.0, 0.0, 0.0), 0.1)
    np.testing.assert_allclose(wall.upper, (1.0 - math.log(0.4 / 0.6)) / 2.0, rtol=1e-6)


def test_nothing_is_looked_for_beyond_the_limit():
    free = wall_distance(SIGMOID, (1.0, 0.0), UNIT, 0.1)
    near = wall_distance(SIGMOID, (1.0, 0.0), UNIT, 0.1, limit=1.0)
    assert near.upper == math.inf
    assert 1.0 - 1e-6 <= near.lower <= free.upper


@pytest.mark.parametrize("curve", [SIGMOID, ScoreCurve("sigmoid", 5.0), ROOT], ids=repr)
def test_saturated_scores_still_have_a_distance(curve):
    wall = wall_distance(curve, (30.0, -30.0), UNIT, 0.05)
    assert 0.0 < wall.lower <= wall.upper < 100.0


def test_a_soft_cap_bounds_what_a_bias_may_be():
    """Logits capped at 2: the scores lie between 0.1192 and 0.8808, 0.7616 apart."""
    curve = ScoreCurve("sigmoid", 2.0)
    assert wall_distance(curve, (0.0, 0.0), UNIT, 0.762).upper == math.inf
    assert wall_distance(curve, (0.0, 0.0), UNIT, 0.761).upper < math.inf
