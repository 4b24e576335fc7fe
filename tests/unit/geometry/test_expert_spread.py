"""Noise around a common start is told from growth; shares and figures against their definitions."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from moegeom.geometry.expert_spread import expert_spread
from moegeom.geometry.number_formats import NUMBER_FORMATS

BF16 = NUMBER_FORMATS["bfloat16"].unit


def copies(seed: int, shape: tuple[int, int, int], noise: float, size: float = 0.02) -> np.ndarray:
    random = np.random.default_rng(seed)
    return size * random.standard_normal(shape[1:]) + noise * random.standard_normal(shape)


def test_shares_are_their_definitions():
    experts = copies(1, (5, 6, 7), 0.02)
    mean = experts.mean(axis=0)
    flat = experts.reshape(5, -1)
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    apart = ((experts - mean) ** 2).sum() / (experts**2).sum()
    found = expert_spread(experts)
    np.testing.assert_allclose(found.upcycled_share, 1.0 - apart, rtol=1e-12)
    pairs = (unit @ unit.T)[np.triu_indices(5, 1)]
    np.testing.assert_allclose(found.correlation, pairs.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.deviation, np.sqrt(experts.var(axis=0, ddof=1).mean()))
    assert (found.num_experts, found.num_values) == (5, 42)


def test_the_edge_is_the_largest_singular_value_of_contrasts_over_that_of_noise():
    experts = copies(2, (2, 8, 40), 0.01)
    apart = (experts[0] - experts[1]) / math.sqrt(2.0)
    top = np.linalg.svd(apart / apart.std(), compute_uv=False)[0]
    expected = top / (math.sqrt(40 - 1) + math.sqrt(8))
    found = expert_spread(experts)
    np.testing.assert_allclose(found.edge_ratio, expected, rtol=1e-2)
    np.testing.assert_allclose(
        found.kurtosis, stats.kurtosis((experts - experts.mean(axis=0)).ravel()), atol=2e-2
    )


def test_experts_drawn_apart_share_one_part_in_their_number():
    experts = np.random.default_rng(3).standard_normal((8, 32, 64))
    found = expert_spread(experts)
    np.testing.assert_allclose(found.upcycled_share, 1.0 / 8.0, atol=0.01)
    assert abs(found.correlation) < 0.02


def test_copies_have_no_deviation_and_are_not_resolved():
    found = expert_spread(np.repeat(copies(4, (1, 8, 8), 0.0), 3, axis=0), BF16)
    np.testing.assert_allclose((found.upcycled_share, found.correlation), 1.0)
    assert (found.is_resolved, found.deviation, found.errors, found.farthest) == (False, 0.0, {}, 0)
    assert math.isnan(found.kurtosis)


def test_zeros_have_no_share_and_one_expert_no_spread():
    found = expert_spread(np.zeros((3, 4, 5)))
    assert math.isnan(found.upcycled_share)
    assert math.isnan(found.correlation)
    with pytest.raises(ValueError, match="1 experts"):
        expert_spread(np.zeros((1, 4, 5)))


@pytest.mark.parametrize(
    ("shape", "noise"),
    [((2, 64, 64), 0.01), ((8, 8, 512), 1e-4), ((3, 256, 16), 0.1), ((24, 4, 256), 1e-3)],
)
def test_figures_of_noise_are_standard_normal_also_after_rounding(shape, noise):
    """Mean 0 and variance 1 of each over 150 sets of experts, stored in bfloat16."""
    found = []
    for seed in range(150):
        experts = copies(seed, shape, noise).astype(ml_dtypes.bfloat16).astype(np.float32)
        found.append(expert_spread(experts, BF16))
    assert all(one.is_resolved for one in found)
    errors = np.array([[*one.errors.values()] for one in found])
    np.testing.assert_allclose(errors.mean(axis=0), 0.0, atol=0.4)
    np.testing.assert_allclose(errors.std(axis=0), 1.0, atol=0.35)
    assert np.mean([one.farthest <= 4.0 for one in found]) > 0.97


def test_noise_below_the_spacing_of_storage_is_not_resolved():
    for noise in (1e-5, 2e-6):
        experts = copies(6, (8, 8, 512), noise).astype(ml_dtypes.bfloat16).astype(np.float64)
        found = expert_spread(experts, BF16)
        assert not found.is_resolved
        assert found.deviation < found.step


def with_rows(noise, random):
    return noise * np.where(np.arange(noise.shape[1]) % 2, 0.9, 1.1)[:, None]


def with_columns(noise, random):
    return noise * np.where(np.arange(noise.shape[2]) % 2, 0.8, 1.2)


def with_experts(noise, random):
    return noise * np.where(np.arange(len(noise)) % 2, 0.95, 1.05)[:, None, None]


def with_tails(noise, random):
    return random.laplace(size=noise.shape)


def with_rank_one(noise, random):
    rows, columns = random.standard_normal((2, *noise.shape))
    return noise + 0.4 * rows[:, :, :1] * columns[:, :1, :]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", with_rows),
        ("columns", with_columns),
        ("experts", with_experts),
        ("kurtosis", with_tails),
        ("spectrum", with_rank_one),
    ],
)
def test_each_departure_from_noise_is_seen_by_its_figure(name, change):
    random = np.random.default_rng(7)
    noise = random.standard_normal((8, 16, 128))
    start = 2.0 * random.standard_normal((16, 128))
    assert abs(expert_spread(start + noise).errors[name]) < 4.0
    found = expert_spread(start + change(noise, random))
    assert abs(found.errors[name]) > 4.0, found.errors
    assert found.farthest > 4.0


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
    found = expert_spread(2.0 * random.standard_normal((16, 128)) + noise)
    assert found.errors["rows"] < -2.0
    assert found.farthest < 4.0
