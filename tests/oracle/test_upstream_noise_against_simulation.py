"""The size of noise from what it flipped, against noise of known size on known inputs."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import boundary_sigmas
from moegeom.geometry.noise_size import flip_chance, upstream_noise

TOKENS, HIDDEN, EXPERTS, K = 6000, 96, 24, 4


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
    sigmas = boundary_sigmas(inputs @ weight.T, before.astype(np.int32), row_distances(weight))
    return np.sort(sigmas, axis=1)[:, :4], flipped


@pytest.mark.parametrize("scale", [0.003, 0.01, 0.05])
@pytest.mark.parametrize("seed", range(3))
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


def test_flips_at_random_do_not_pass_for_noise():
    distances, flipped = simulated(0.01)
    hit = np.random.default_rng(5).random(TOKENS) < 0.02
    found = upstream_noise(distances, flipped | hit)
    assert found.scale == pytest.approx(0.01, rel=0.3)
    assert found.excess == pytest.approx(0.02, rel=0.5)
    planted = upstream_noise(distances, hit)
    assert planted.excess > 0.01


def test_nothing_flipped_is_no_noise_and_no_tokens_are_not_known():
    distances, _ = simulated(0.01)
    still = upstream_noise(distances, np.zeros(TOKENS, dtype=bool))
    assert (still.scale, still.excess, still.observed) == (0.0, 0.0, 0.0)
    nothing = upstream_noise(np.empty((0, 4)), np.empty(0, dtype=bool))
    assert np.isnan(nothing.scale)


def test_a_single_boundary_is_crossed_half_of_the_time_where_it_is():
    boundaries = np.array([[0.0], [1.0], [np.inf]])
    chance = flip_chance(boundaries, 1.0)
    assert chance == pytest.approx([0.5, 0.15865525393145707, 0.0])
    assert (flip_chance(boundaries, 0.0) == 0.0).all()
