"""The boundary of one pair of experts at its corners, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit

from moegeom.core.router import LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.kernels.cpu.curved_distance import curved_distance

UNIT = np.eye(2)


def boundary(score, logits, rows, delta, cap=math.inf):
    """Lower and upper bound of the distance at which expert 1 takes the place of expert 0."""
    rule = Rule(1, score, Weights("scores"), True, logit_map=LogitMap(1.0, cap))
    made = curved_rows(np.array(rows), rule, None, np.array([delta, 0.0]))
    lower, upper, _ = curved_distance(np.array([logits]), np.zeros((1, 1), np.int32), made)
    return lower[0], upper[0]


def test_the_worked_pair():
    """docs/theory.md E1: logits 1 and 0, orthonormal rows, biases apart by 0.1."""
    np.testing.assert_allclose(expit(1.0) + 0.1 - expit(0.0), 0.331059, atol=5e-7)
    np.testing.assert_allclose(boundary("sigmoid", (1.0, 0.0), UNIT, 0.1), 1.007672, atol=2e-6)


def test_without_a_bias_the_boundary_is_straight():
    found = boundary("sigmoid", (1.0, 0.0), UNIT, 0.0)
    np.testing.assert_allclose(found, math.sqrt(0.5), rtol=1e-6)


@pytest.mark.parametrize("delta", [1.0, 1.5])
def test_a_bias_beyond_the_range_of_the_score_leaves_no_boundary(delta):
    np.testing.assert_array_equal(boundary("sigmoid", (0.0, 0.0), UNIT, delta), np.inf)


def test_an_unbounded_score_makes_up_for_any_bias():
    """sqrt softplus(u) + 3 = sqrt softplus(v): the nearest point by its u, on a fine grid."""
    lower, upper = boundary("sqrt_softplus", (0.0, 0.0), UNIT, 3.0)
    u = np.linspace(-12.0, 3.0, 200001)
    v = np.log(np.expm1((np.sqrt(np.logaddexp(0.0, u)) + 3.0) ** 2))
    np.testing.assert_allclose([lower, upper], np.hypot(u, v).min(), rtol=1.1e-6)


def test_on_the_boundary_and_behind_it_the_distance_is_zero():
    tied = math.log(0.6 / 0.4)
    for delta in (0.5 - expit(tied), 0.5 - expit(tied) - 0.1):
        np.testing.assert_array_equal(boundary("sigmoid", (tied, 0.0), UNIT, delta), 0.0)


def test_opposite_rows_are_a_root_in_one_variable():
    """Rows w and -w: sigmoid(1 - t) + 0.1 = sigmoid(t)."""
    _, t = boundary("sigmoid", (1.0, 0.0), [[1.0, 0.0], [-1.0, 0.0]], 0.1)
    assert expit(1 - t) + 0.1 <= expit(t)
    assert expit(1 - 0.999999 * t) + 0.1 >= expit(0.999999 * t)


def test_of_two_roots_on_a_line_the_nearer_one_counts():
    """Rows w and 2 w: sigmoid(t) + 0.1 = sigmoid(2 t) has two roots above 0."""
    _, upper = boundary("sigmoid", (0.0, 0.0), [[1.0, 0.0], [2.0, 0.0]], 0.1)
    roots = np.linspace(0, 5, 500001)
    gap = expit(roots) + 0.1 - expit(2 * roots)
    crossings = roots[1:][np.sign(gap[1:]) != np.sign(gap[:-1])]
    assert len(crossings) == 2
    np.testing.assert_allclose(upper, crossings[0], rtol=1e-4)


def test_equal_rows_with_different_biases_never_tie():
    assert boundary("sigmoid", (0.7, 0.7), [[1.0, 0.0], [1.0, 0.0]], 0.01)[1] == math.inf


def test_a_zero_row_waits_for_the_other_one():
    """The other expert has to come to sigmoid^-1(0.5 + 0.1) by itself, along a row of length 2."""
    _, upper = boundary("sigmoid", (0.0, -1.0), [[0.0, 0.0], [2.0, 0.0]], 0.1)
    np.testing.assert_allclose(upper, (math.log(0.6 / 0.4) + 1.0) / 2.0, rtol=1e-6)
    _, upper = boundary("sigmoid", (1.0, 0.0), [[2.0, 0.0], [0.0, 0.0]], 0.1)
    np.testing.assert_allclose(upper, (1.0 - math.log(0.4 / 0.6)) / 2.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("score", "cap"), [("sigmoid", math.inf), ("sigmoid", 5.0), ("sqrt_softplus", math.inf)]
)
def test_saturated_scores_still_have_a_distance(score, cap):
    lower, upper = boundary(score, (30.0, -30.0), UNIT, 0.05, cap)
    assert 0.0 < lower <= upper < 100.0


def test_a_soft_cap_bounds_what_a_bias_may_be():
    """Logits capped at 2: the scores lie between 0.1192 and 0.8808, 0.7616 apart."""
    assert boundary("sigmoid", (0.0, 0.0), UNIT, 0.762, 2.0)[1] == math.inf
    assert boundary("sigmoid", (0.0, 0.0), UNIT, 0.761, 2.0)[1] < math.inf
