"""Oracles: Monte Carlo of noisy inputs, two-expert closed forms, numbers of docs/theory.md E4, ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_less
from scipy.integrate import quad
from scipy.special import expit, logit
from scipy.stats import norm

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry import noise
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import flip_chance, noise_between, upstream_noise
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.geometry.selection import top_k


def affine(k):
    return Rule(k, "softmax", Weights("scores"))


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
    distances = noise.noisy_distances(weight, NOISES[name])
    found = noise.flip_bounds(z, top_k(z, k), distances, np.ones(300))
    scale = np.atleast_2d(NOISES[name])
    p = noise.simulate_flip(y, weight, affine(k), scale, 60, np.random.default_rng(k)) / 60
    error = 4.0 * np.sqrt((p * (1.0 - p)).sum() / 59) / len(p) + 1e-4
    assert found.lower.mean() - error <= p.mean() <= found.upper.mean() + error
    # and token by token: binomial counts
    spread = 5.0 * np.sqrt(np.maximum(p * (1.0 - p), 1.0 / 60) / 60)
    assert_array_less(found.lower - spread, p)
    assert_array_less(p - spread, found.upper)
    # rows of 20 dimensions are nearly orthogonal: the estimate is near as well
    assert_allclose(found.estimate.mean(), p.mean(), rtol=0.06, atol=error)


def test_estimates_are_exact_for_two_experts_and_for_orthogonal_rows_and_meet_the_notes():
    random = np.random.default_rng(4)
    weight, y = random.standard_normal((2, 7)), random.standard_normal((50, 7))
    z = y @ weight.T
    scale = random.uniform(0.05, 3.0, 50)
    found = noise.flip_bounds(z, top_k(z, 1), row_distances(weight), scale)
    expected = norm.sf(np.abs(z[:, 0] - z[:, 1]) / (scale * np.linalg.norm(weight[0] - weight[1])))
    for p in (found.lower, found.upper, found.estimate):
        assert_allclose(p, expected, rtol=1e-9)
    near = expected > 1e-5
    raw = noise.independent_flip(z, top_k(z, 1), row_distances(weight), scale)
    assert_allclose(raw[near], expected[near], rtol=5e-3)
    # The notes measured .415 where the law says .4247.
    random = np.random.default_rng(9)
    y = random.standard_normal((500, 64)).astype(np.float32)
    rounded = y.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_allclose(noise_between(y, rounded).kappa, 1.0, rtol=0.04)
    # docs/theory.md E4: D = 4096, E = 64, k = 8: sum over boundaries .01220, simulated .01145.
    # Gaussian rows make logits independent, so they are drawn as such.
    random = np.random.default_rng(5)
    z = random.standard_normal((6000, 64))
    scale = np.full(6000, ROUNDING_RMS * UNIT_BFLOAT16)
    found = noise.flip_bounds(z, top_k(z, 8), row_distances(np.eye(64)), scale)
    error = found.upper.std() / np.sqrt(6000)
    assert_allclose(found.upper.mean(), 0.01220, atol=3.0 * error)
    assert_allclose(found.estimate.mean(), 0.01145, atol=4.0 * error)
    assert found.lower.mean() < found.estimate.mean() < found.upper.mean()
    random = np.random.default_rng(3)
    lengths = random.uniform(0.3, 2.0, 9)
    weight = np.hstack([np.diag(lengths), np.full((9, 1), 5.0)])
    distances = row_distances(weight)
    assert_allclose(noise.logit_deviations(distances), lengths, rtol=1e-12)
    y = random.standard_normal((40, 10))
    z = y @ weight.T
    found = noise.independent_flip(z, top_k(z, 3), distances, np.full(40, 0.3))
    p = noise.simulate_flip(y, weight, affine(3), np.full((1, 1), 0.3), 3000, random) / 3000
    assert_array_less(np.abs(found - p), 5.0 * np.sqrt(p * (1 - p) / 3000) + 2e-3)
    assert_allclose(found.mean(), p.mean(), rtol=2e-3 + 4e-2)


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
    flipped = noise.simulate_flip(
        np.repeat(y, 50, axis=0), weight, rule, np.full((1, 1), s), 400, generator, None, bias
    )
    error = np.sqrt(expected * (1.0 - expected) / (50 * 400))
    assert_allclose(flipped.mean() / 400, expected, atol=4.0 * error)


def test_a_logit_bias_and_groups_take_part_in_the_simulation():
    random = np.random.default_rng(7)
    weight, y = random.standard_normal((8, 5)), random.standard_normal((60, 5))
    bias = np.array([50.0, 40.0] + [0.0] * 6)
    still = noise.simulate_flip(y, weight, affine(2), np.full((1, 1), 0.5), 20, random, bias)
    assert still.sum() == 0
    groups = GroupMask(4, 1, "max", -np.inf)
    rule = Rule(2, "identity", Weights("scores"), groups=groups)
    grouped = noise.simulate_flip(y, weight, rule, np.full((1, 1), 0.1), 20, random)
    # both experts of the group are chosen, so only a change of group shows
    free = noise.simulate_flip(y, weight, affine(2), np.full((1, 1), 0.1), 20, random)
    assert 0 < grouped.sum() < free.sum()


def test_noise_between_two_recordings_predicts_flips(case):
    weight, y, _ = case
    random = np.random.default_rng(10)
    first, second = (np.tile(y, (20, 1)) + 0.05 * random.standard_normal((6000, 20)) for _ in "ab")
    differs = np.sort(top_k(first @ weight.T, 3)) != np.sort(top_k(second @ weight.T, 3))
    share = differs.any(axis=1).mean()
    scale = np.full(6000, np.sqrt(2.0) * noise_between(first, second).scale)
    z = second @ weight.T
    found = noise.flip_bounds(z, top_k(z, 3), row_distances(weight), scale)
    assert_allclose(found.estimate.mean(), share, rtol=0.06)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_planted_noise_is_found_again(size):
    random = np.random.default_rng(8)
    truth = size * random.standard_normal((4000, 16))
    scales = np.geomspace(1e-3, 1e-1, 16)
    first, second = (truth + scales * random.standard_normal(truth.shape) for _ in range(2))
    found = noise_between(first, second)
    assert_allclose(found.scale, np.sqrt((scales**2).mean()), rtol=0.03)
    assert found.systematic_share < 2.0 / 4000


# ----------------------------------------------------------------------- noise from what it flipped
TOKENS, HIDDEN, EXPERTS, K = 6000, 48, 24, 4


def simulated(scale: float, seed: int = 0, spread: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Distances to the four nearest boundaries, and which tokens noise of that size flipped."""
    generator = np.random.default_rng([seed, 17])
    weight = generator.standard_normal((EXPERTS, HIDDEN)) / np.sqrt(HIDDEN)
    inputs = generator.standard_normal((TOKENS, HIDDEN))

    def chosen(x: np.ndarray) -> np.ndarray:
        return np.argsort(-(x @ weight.T), axis=1, kind="stable")[:, :K]

    before = chosen(inputs)
    own = scale * np.exp(spread * generator.standard_normal((TOKENS, 1)))
    after = chosen(inputs + own * generator.standard_normal(inputs.shape))
    flipped = (np.sort(before, axis=1) != np.sort(after, axis=1)).any(axis=1)
    sigmas = noise.boundary_sigmas(
        inputs @ weight.T, before.astype(np.int32), row_distances(weight)
    )
    return np.sort(sigmas, axis=1)[:, :4], flipped


@pytest.mark.parametrize(("scale", "seed"), [(0.003, 0), (0.01, 1), (0.05, 2), (0.01, 0)])
def test_the_size_of_the_noise_is_found(scale, seed):
    distances, flipped = simulated(scale, seed)
    found = upstream_noise(distances, flipped)
    assert found.excess == 0.0
    # the share of flips is known to its standard error, the scale to as much; boundaries are not
    # independent, which costs a tenth
    tolerance = 0.1 + 3.0 / np.sqrt(flipped.sum())
    assert found.scale == pytest.approx(scale, rel=tolerance)
    assert abs(found.expected - found.observed) < 4.0 * found.expected_error


@pytest.mark.parametrize("spread", [1.0, 1.5])
def test_tokens_with_several_times_the_noise_are_no_excess(spread):
    distances, flipped = simulated(0.01, 4, spread)
    found = upstream_noise(distances, flipped)
    assert found.excess == 0.0
    assert found.spread > 0.0
    assert abs(found.expected - found.observed) < 4.0 * found.expected_error
    assert found.chance(distances[:, :1]).shape == (TOKENS,)


def test_flips_at_random_do_not_pass_for_noise_and_nothing_flipped_is_none():
    distances, flipped = simulated(0.01)
    hit = np.random.default_rng(5).random(TOKENS) < 0.02
    found = upstream_noise(distances, flipped | hit)
    assert found.scale == pytest.approx(0.01, rel=0.3)
    assert found.excess == pytest.approx(0.02, rel=0.5)
    planted = upstream_noise(distances, hit)
    assert planted.excess > 0.01
    distances, _ = simulated(0.01)
    still = upstream_noise(distances, np.zeros(TOKENS, dtype=bool))
    assert (still.scale, still.excess, still.observed) == (0.0, 0.0, 0.0)
    nothing = upstream_noise(np.empty((0, 4)), np.empty(0, dtype=bool))
    assert np.isnan(nothing.scale)
    boundaries = np.array([[0.0], [1.0], [np.inf]])
    chance = flip_chance(boundaries, 1.0)
    assert chance == pytest.approx([0.5, 0.15865525393145707, 0.0])
    assert (flip_chance(boundaries, 0.0) == 0.0).all()
