"""Oracle: the nearest input in front of an RMS norm with another choice, by minimisation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from moegeom.core.router import Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import angle_bound, boundary_angle, cones_of
from moegeom.geometry.selection import top_k
from moegeom.kernels.cpu.curved_distance import curved_distance


def logits_of(rows, bias, x):
    """Logits behind a norm without epsilon; rows times the gain."""
    return np.sqrt(len(x)) * rows @ x / np.linalg.norm(x) + bias


def nearest_by_minimisation(rows, bias, x, k):
    """min |x' - x| over every pair of a chosen and another expert that ties at x'."""
    chosen = top_k(logits_of(rows, bias, x)[None], k)[0]
    best = np.inf
    for i in chosen:
        for j in set(range(len(rows))) - set(chosen.tolist()):

            def gap(z, i=i, j=j):
                found = logits_of(rows, bias, z)
                return found[i] - found[j]

            for seed in range(4):
                start = x + 0.3 * seed * np.random.default_rng(seed).standard_normal(len(x))
                found = minimize(
                    lambda z: ((z - x) ** 2).sum(),
                    start,
                    constraints={"type": "eq", "fun": gap},
                    method="SLSQP",
                    options={"ftol": 1e-14, "maxiter": 300},
                )
                if found.success and abs(gap(found.x)) < 1e-8:
                    best = min(best, np.sqrt(found.fun))
    return best


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("biased", [False, True])
def test_the_sine_of_the_angle_is_the_distance_over_the_length(seed, biased):
    random = np.random.default_rng(seed)
    experts, dimension, k = 5, 4, 2
    rows = random.standard_normal((experts, dimension))
    bias = random.standard_normal(experts) * (0.5 if biased else 0.0)
    x = random.standard_normal(dimension)
    logits = logits_of(rows, bias, x)[None]
    chosen = top_k(logits, k)
    length = np.array([np.sqrt(dimension)])
    (angle,) = boundary_angle(logits, chosen, cones_of(rows, bias), length)
    expected = nearest_by_minimisation(rows, bias, x, k)
    if np.isfinite(angle) and angle < np.pi / 2:
        np.testing.assert_allclose(np.sin(angle) * np.linalg.norm(x), expected, rtol=1e-5)


def test_the_worked_cone():
    """Rows differ by (1, -1), biases by 1, x = (3, 1): the tie is at 15 degrees, x at 18.43."""
    rows, bias = np.array([[1.0, -1.0], [0.0, 0.0]]), np.array([0.0, 1.0])
    x = np.array([3.0, 1.0])
    logits = logits_of(rows, bias, x)[None]
    (angle,) = boundary_angle(
        logits, top_k(logits, 1), cones_of(rows, bias), np.array([np.sqrt(2.0)])
    )
    np.testing.assert_allclose(angle, np.arctan2(1, 3) - np.deg2rad(15), rtol=1e-12)
    distance = np.linalg.norm(x) * np.sin(angle)
    np.testing.assert_allclose(distance, nearest_by_minimisation(rows, bias, x, 1), rtol=1e-6)


def test_degenerate_points():
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    none = np.zeros(3)
    length = np.array([np.sqrt(2.0)])
    tie = np.array([[1.0, 1.0, 0.0]])
    assert boundary_angle(tie, np.array([[0]], np.int32), cones_of(rows, none), length)[0] == 0.0
    every = np.array([[0, 1, 2]], np.int32)
    assert boundary_angle(tie, every, cones_of(rows, none), length)[0] == np.inf
    apart = np.array([[1.0, 9.0, 0.0]])
    steep = np.array([0.0, 8.0, -20.0])
    assert (
        boundary_angle(apart, np.array([[1]], np.int32), cones_of(rows, steep), length)[0] == np.inf
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_direction_nearer_than_the_bound_has_another_choice_behind_curved_boundaries(seed):
    random = np.random.default_rng(seed)
    experts, dimension, k = 5, 12, 2
    rows = random.standard_normal((experts, dimension)) / np.sqrt(dimension)
    bias = 0.1 * random.standard_normal(experts)
    rule = Rule(k, "sigmoid", Weights("scores"), has_selection_bias=True)
    x = random.standard_normal(dimension)

    def selection(z):
        return expit(logits_of(rows, 0.0, z)) + bias

    logits = logits_of(rows, 0.0, x)[None]
    chosen = top_k(selection(x)[None], k)
    distance, _, _ = curved_distance(logits, chosen, curved_rows(rows, rule, None, bias))
    (bound,) = angle_bound(distance, np.array([np.sqrt(dimension)]))
    best = np.inf
    for i in chosen[0]:
        for j in set(range(experts)) - set(chosen[0].tolist()):
            for start in range(4):
                found = minimize(
                    lambda z: -(z @ x) / np.linalg.norm(z) / np.linalg.norm(x),
                    x + 0.3 * start * np.random.default_rng(start).standard_normal(dimension),
                    constraints={
                        "type": "eq",
                        "fun": lambda z, i=i, j=j: selection(z)[i] - selection(z)[j],
                    },
                    method="SLSQP",
                    options={"ftol": 1e-14, "maxiter": 300},
                )
                if found.success and abs(selection(found.x)[i] - selection(found.x)[j]) < 1e-8:
                    best = min(best, np.arccos(min(-found.fun, 1.0)))
    assert bound <= best * (1.0 + 1e-6)
    assert bound > 0.7 * best  # it is no trivial bound
    for _ in range(500):
        across = random.standard_normal(dimension)
        across -= across @ x / (x @ x) * x
        across /= np.linalg.norm(across)
        turned = np.cos(0.999 * bound) * x / np.linalg.norm(x) + np.sin(0.999 * bound) * across
        assert set(top_k(selection(turned)[None], k)[0]) == set(chosen[0])


def test_the_bound_is_infinite_beyond_the_sphere_and_0_on_a_boundary():
    found = angle_bound(np.array([0.0, 1.0, 2.0, 2.1, np.inf]), np.ones(5))
    np.testing.assert_allclose(found, [0.0, np.pi / 3, np.pi, np.inf, np.inf])
