"""Noise around a common start is told from growth; shares and figures against their definitions."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from moegeom.geometry.expert_spread import expert_spread
from moegeom.geometry.number_formats import NUMBER_FORMATS

BF16 = NUMBER_FORMATS["bfloat16"].unit


def copies(seed: int, shape: tuple[int, int, int], noise: float, size: float = 0.02) -> np.ndarray:
    random = np.random.default_rng(seed)
    return size * random.standard_normal(shape[1:]) + noise * random.standard_normal(shape)


def test_shares_are_their_definitions():
    experts = copies(1, (5, 6, 7), 0.02)
    flat = experts.reshape(5, -1)
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    apart = ((experts - experts.mean(axis=0)) ** 2).sum() / (experts**2).sum()
    pairs = (unit @ unit.T)[np.triu_indices(5, 1)]
    spread = expert_spread(experts)
    shares = [spread.upcycled_share, spread.correlation]
    assert_allclose(shares, [1.0 - apart, pairs.mean()], rtol=1e-12)
    assert_allclose(spread.deviation, np.sqrt(experts.var(axis=0, ddof=1).mean()))
    assert (spread.num_experts, spread.num_values) == (5, 42)


def test_the_edge_is_the_largest_singular_value_of_contrasts_over_that_of_noise():
    experts = copies(2, (2, 8, 40), 0.01)
    apart = (experts[0] - experts[1]) / math.sqrt(2.0)
    top = np.linalg.svd(apart / apart.std(), compute_uv=False)[0]
    spread = expert_spread(experts)
    assert_allclose(spread.edge_ratio, top / (math.sqrt(40 - 1) + math.sqrt(8)), rtol=1e-2)
    kurtosis = stats.kurtosis((experts - experts.mean(axis=0)).ravel())
    assert_allclose(spread.kurtosis, kurtosis, atol=2e-2)


def test_experts_drawn_apart_share_one_part_in_their_number():
    spread = expert_spread(np.random.default_rng(3).standard_normal((8, 32, 64)))
    assert_allclose(spread.upcycled_share, 1.0 / 8.0, atol=0.01)
    assert abs(spread.correlation) < 0.02


def test_copies_have_no_deviation_zeros_no_share_and_one_expert_no_spread():
    same = expert_spread(np.repeat(copies(4, (1, 8, 8), 0.0), 3, axis=0), BF16)
    assert_allclose((same.upcycled_share, same.correlation), 1.0)
    assert (same.is_resolved, same.deviation, same.errors, same.farthest) == (False, 0.0, {}, 0)
    zeros = expert_spread(np.zeros((3, 4, 5)))
    assert np.isnan([same.kurtosis, zeros.upcycled_share, zeros.correlation]).all()
    with pytest.raises(ValueError, match="1 experts"):
        expert_spread(np.zeros((1, 4, 5)))


@pytest.mark.parametrize(
    ("shape", "noise"),
    [((2, 64, 64), 0.01), ((8, 8, 512), 1e-4), ((3, 256, 16), 0.1), ((24, 4, 256), 1e-3)],
)
def test_figures_of_noise_are_standard_normal_also_after_rounding(shape, noise):
    """Mean 0 and variance 1 of each over 150 sets of experts, stored in bfloat16."""
    spreads = []
    for seed in range(150):
        experts = copies(seed, shape, noise).astype(ml_dtypes.bfloat16).astype(np.float32)
        spreads.append(expert_spread(experts, BF16))
    assert all(spread.is_resolved for spread in spreads)
    errors = np.array([[*spread.errors.values()] for spread in spreads])
    assert_allclose(errors.mean(axis=0), 0.0, atol=0.4)
    assert_allclose(errors.std(axis=0), 1.0, atol=0.35)
    assert np.mean([spread.farthest <= 4.0 for spread in spreads]) > 0.97


def test_noise_below_the_spacing_of_storage_is_not_resolved():
    for noise in (1e-5, 2e-6):
        experts = copies(6, (8, 8, 512), noise).astype(ml_dtypes.bfloat16).astype(np.float64)
        spread = expert_spread(experts, BF16)
        assert not spread.is_resolved
        assert spread.deviation < spread.step


def every_other(number: int, one: float, other: float) -> np.ndarray:
    return np.where(np.arange(number) % 2, one, other)


def with_rank_one(noise, random):
    rows, columns = random.standard_normal((2, *noise.shape))
    return noise + 0.4 * rows[:, :, :1] * columns[:, :1, :]


#: Figure -> a departure from noise that it sees.
DEPARTURES = {
    "rows": lambda noise, _: noise * every_other(16, 0.9, 1.1)[:, None],
    "columns": lambda noise, _: noise * every_other(128, 0.8, 1.2),
    "experts": lambda noise, _: noise * every_other(8, 0.95, 1.05)[:, None, None],
    "kurtosis": lambda noise, random: random.laplace(size=noise.shape),
    "spectrum": with_rank_one,
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_each_departure_from_noise_is_seen_by_its_figure(name):
    random = np.random.default_rng(7)
    noise = random.standard_normal((8, 16, 128))
    start = 2.0 * random.standard_normal((16, 128))
    assert abs(expert_spread(start + noise).errors[name]) < 4.0
    spread = expert_spread(start + DEPARTURES[name](noise, random))
    assert abs(spread.errors[name]) > 4.0, spread.errors
    assert spread.farthest > 4.0


def test_growth_along_what_is_common_is_seen_by_its_part_along_the_mean():
    random = np.random.default_rng(8)
    start, noise = random.standard_normal((16, 128)), random.standard_normal((8, 16, 128))
    scaled = start * (1.0 + 0.1 * random.standard_normal((8, 1, 1))) + noise
    assert expert_spread(scaled).errors["mean"] > 4.0
    assert expert_spread(start + noise).errors["mean"] < 4.0


def test_less_variation_than_noise_has_is_no_growth():
    """Energies that are too even come from rounding and masks, not from training."""
    random = np.random.default_rng(9)
    noise = random.standard_normal((8, 16, 128))
    noise /= np.sqrt((noise**2).mean(axis=(0, 2), keepdims=True))
    spread = expert_spread(2.0 * random.standard_normal((16, 128)) + noise)
    assert spread.errors["rows"] < -2.0
    assert spread.farthest < 4.0
