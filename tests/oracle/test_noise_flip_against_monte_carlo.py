"""Oracle: Monte Carlo of noisy inputs, two-expert closed forms, numbers of docs/theory.md E4, ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, logit
from scipy.stats import norm

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import (
    flip_bounds,
    independent_flip,
    logit_deviations,
    noisy_distances,
    simulate_flip,
)
from moegeom.geometry.noise_size import noise_between
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.geometry.selection import top_k


def affine(k):
    return Rule(k, "softmax", Weights("scores"))


def isotropic(s):
    return np.full((1, 1), s)


@pytest.fixture(scope="module")
def case():
    """Rows of unequal length with a common row, which moves all logits alike."""
    random = np.random.default_rng(2)
    weight = random.uniform(0.5, 1.5, (12, 1)) * random.standard_normal((12, 20))
    weight += 3.0 * random.standard_normal(20)
    y = random.standard_normal((300, 20))
    return weight, y, y @ weight.T


NOISES = {
    "isotropic": 0.15,
    "weak": 0.005,
    "strong": 1.5,
    "by coordinate": np.geomspace(0.01, 0.4, 20),
}


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("k", [1, 3, 11])
def test_bounds_and_estimate_hold_the_simulated_share(case, name, k):
    weight, y, z = case
    distances = noisy_distances(weight, NOISES[name])
    found = flip_bounds(z, top_k(z, k), distances, np.ones(300))
    scale = np.atleast_2d(NOISES[name])
    simulated = simulate_flip(y, weight, affine(k), scale, 60, np.random.default_rng(k))
    error = 4.0 * simulated.standard_error + 1e-4
    assert found.lower.mean() - error <= simulated.share <= found.upper.mean() + error
    # and token by token: binomial counts
    p = simulated.flipped / 60
    spread = 5.0 * np.sqrt(np.maximum(p * (1.0 - p), 1.0 / 60) / 60)
    np.testing.assert_array_less(found.lower - spread, p)
    np.testing.assert_array_less(p - spread, found.upper)
    # rows of 20 dimensions are nearly orthogonal: the estimate is near as well
    np.testing.assert_allclose(found.estimate.mean(), simulated.share, rtol=0.06, atol=error)


def test_the_estimate_is_exact_for_rows_that_are_orthogonal_but_for_a_common_one():
    random = np.random.default_rng(3)
    lengths = random.uniform(0.3, 2.0, 9)
    weight = np.hstack([np.diag(lengths), np.full((9, 1), 5.0)])
    distances = row_distances(weight)
    np.testing.assert_allclose(logit_deviations(distances), lengths, rtol=1e-12)
    y = random.standard_normal((40, 10))
    z = y @ weight.T
    found = independent_flip(z, top_k(z, 3), distances, np.full(40, 0.3))
    simulated = simulate_flip(y, weight, affine(3), isotropic(0.3), 3000, random)
    p = simulated.flipped / 3000
    np.testing.assert_array_less(np.abs(found - p), 5.0 * np.sqrt(p * (1 - p) / 3000) + 2e-3)
    np.testing.assert_allclose(found.mean(), simulated.share, rtol=2e-3 + 4e-2)


def test_two_experts_have_one_boundary_and_a_closed_form():
    random = np.random.default_rng(4)
    weight, y = random.standard_normal((2, 7)), random.standard_normal((50, 7))
    z = y @ weight.T
    scale = random.uniform(0.05, 3.0, 50)
    found = flip_bounds(z, top_k(z, 1), row_distances(weight), scale)
    expected = norm.sf(np.abs(z[:, 0] - z[:, 1]) / (scale * np.linalg.norm(weight[0] - weight[1])))
    for p in (found.lower, found.upper, found.estimate):
        np.testing.assert_allclose(p, expected, rtol=1e-9)
    near = expected > 1e-5
    raw = independent_flip(z, top_k(z, 1), row_distances(weight), scale)
    np.testing.assert_allclose(raw[near], expected[near], rtol=5e-3)


def test_the_numbers_of_the_notes_are_reproduced():
    """E4: D = 4096, E = 64, k = 8: sum over boundaries .01220, simulated .01145, of a sample of tokens.

    Gaussian rows make logits independent, so they are drawn as such.
    """
    random = np.random.default_rng(5)
    z = random.standard_normal((30_000, 64))
    scale = np.full(30_000, ROUNDING_RMS * UNIT_BFLOAT16)
    found = flip_bounds(z, top_k(z, 8), row_distances(np.eye(64)), scale)
    error = found.upper.std() / np.sqrt(30_000)
    np.testing.assert_allclose(found.upper.mean(), 0.01220, atol=3.0 * error)
    np.testing.assert_allclose(found.estimate.mean(), 0.01145, atol=4.0 * error)
    assert found.lower.mean() < found.estimate.mean() < found.upper.mean()


def test_a_curved_rule_is_simulated_as_it_routes():
    """Sigmoid scores with a selection bias, two experts: a double integral of the normal law."""
    weight, bias = np.diag([1.3, 0.7]), np.array([0.0, 0.15])
    y, s = np.array([[0.6, 0.1]]), 0.5
    rule = Rule(1, "sigmoid", Weights("scores"), has_selection_bias=True)
    z = (y @ weight.T)[0]
    assert expit(z[0]) > expit(z[1]) + bias[1]

    def overtaken(u):
        """The second score, bias included, is above the first one's, whose logit is u."""
        rest = expit(u) - bias[1]
        reach = 1.0 if rest <= 0.0 else norm.sf((logit(rest) - z[1]) / (0.7 * s))
        return norm.pdf(u, z[0], 1.3 * s) * reach

    expected, _ = quad(overtaken, z[0] - 5.0, z[0] + 5.0, points=[logit(bias[1])], limit=200)
    generator = np.random.default_rng(6)
    simulated = simulate_flip(
        np.repeat(y, 50, axis=0), weight, rule, isotropic(s), 400, generator, None, bias
    )
    np.testing.assert_allclose(simulated.share, expected, atol=4.0 * simulated.standard_error)
    assert simulated.standard_error < 0.01


def test_a_logit_bias_and_groups_take_part_in_the_simulation():
    random = np.random.default_rng(7)
    weight, y = random.standard_normal((8, 5)), random.standard_normal((60, 5))
    bias = np.array([50.0, 40.0] + [0.0] * 6)
    still = simulate_flip(y, weight, affine(2), isotropic(0.5), 20, random, bias)
    assert still.flipped.sum() == 0
    groups = GroupMask(4, 1, "max", -np.inf)
    rule = Rule(2, "identity", Weights("scores"), groups=groups)
    grouped = simulate_flip(y, weight, rule, isotropic(0.1), 20, random)
    # both experts of the group are chosen, so only a change of group shows
    free = simulate_flip(y, weight, affine(2), isotropic(0.1), 20, random)
    assert 0 < grouped.flipped.sum() < free.flipped.sum()


def test_the_standard_error_is_the_spread_of_repeated_simulations(case):
    weight, y, _ = case
    runs = [
        simulate_flip(y[:50], weight, affine(3), isotropic(0.1), 5, np.random.default_rng(seed))
        for seed in range(120)
    ]
    spread = np.std([run.share for run in runs], ddof=1)
    np.testing.assert_allclose(np.mean([run.standard_error for run in runs]), spread, rtol=0.25)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_planted_noise_is_found_again(size):
    random = np.random.default_rng(8)
    truth = size * random.standard_normal((4000, 16))
    scales = np.geomspace(1e-3, 1e-1, 16)
    first, second = (truth + scales * random.standard_normal(truth.shape) for _ in range(2))
    found = noise_between(first, second)
    np.testing.assert_allclose(found.scales, scales, rtol=0.06)
    np.testing.assert_allclose(found.scale, np.sqrt((scales**2).mean()), rtol=0.03)
    assert found.systematic_share < 2.0 / 4000


def test_rounding_one_run_to_bfloat16_is_kappa_1():
    """The notes measured .415 where the law says .4247."""
    random = np.random.default_rng(9)
    y = random.standard_normal((500, 64)).astype(np.float32)
    rounded = y.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(noise_between(y, rounded).kappa, 1.0, rtol=0.04)


def test_calibrated_noise_predicts_how_often_two_runs_differ(case):
    """From two recordings to the share of tokens whose sets differ between them."""
    weight, y, _ = case
    random = np.random.default_rng(10)
    first, second = (np.tile(y, (20, 1)) + 0.05 * random.standard_normal((6000, 20)) for _ in "ab")
    differs = np.sort(top_k(first @ weight.T, 3)) != np.sort(top_k(second @ weight.T, 3))
    share = differs.any(axis=1).mean()
    scale = np.full(6000, np.sqrt(2.0) * noise_between(first, second).scale)
    z = second @ weight.T
    found = flip_bounds(z, top_k(z, 3), row_distances(weight), scale)
    np.testing.assert_allclose(found.estimate.mean(), share, rtol=0.06)
