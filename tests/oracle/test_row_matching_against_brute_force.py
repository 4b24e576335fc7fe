"""Matching of rows and experts, and casts, against all permutations, torch and Monte Carlo."""

import itertools

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cdist
from scipy.stats import ortho_group

from moegeom.geometry import rows as row_sets
from moegeom.geometry.number_formats import CASTS, cast_of, grid_of

TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


def rows(seed: int, count: int = 12, dimension: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dimension))


@pytest.mark.parametrize("seed", range(10))
def test_the_order_is_the_best_of_all_permutations(seed):
    count = 2 + seed % 5
    a, b = rows(seed, count, 3), rows(seed + 100, count, 3)
    cost = cdist(b, a) ** 2
    best = min(
        itertools.permutations(range(count)),
        key=lambda order: sum(cost[i, j] for i, j in enumerate(order)),
    )
    assert row_sets.nearest_order(a, b).tolist() == list(best)


def test_distances_cosines_factors_and_cycles_are_those_of_their_definitions():
    assert_allclose(
        row_sets.squared_distances(rows(0), rows(1, 7)), cdist(rows(1, 7), rows(0)) ** 2, rtol=1e-12
    )
    assert_allclose(
        row_sets.own_cosines(rows(0), rows(1)), 1.0 - np.diag(cdist(rows(0), rows(1), "cosine"))
    )
    a, b = rows(0), rows(1)
    wanted = np.linalg.lstsq(a.reshape(-1, 1), b.ravel(), rcond=None)[0][0]
    assert_allclose(row_sets.common_factor(a, b), wanted)
    by_column = [np.linalg.lstsq(a[:, [j]], b[:, j], rcond=None)[0][0] for j in range(40)]
    assert_allclose(row_sets.column_factors(a, b), by_column)
    assert row_sets.common_factor(np.zeros((2, 3)), rows(0, 2, 3)) == 1.0
    rotation = ortho_group.rvs(40, random_state=0)
    assert_allclose(row_sets.gram_noise(rows(0), rows(0) @ rotation), 0.0, atol=1e-12)
    z = [row_sets.likeness_z(rows(seed), rows(seed + 1000)) for seed in range(300)]
    assert_allclose([np.mean(z), np.std(z)], [0.0, 1.0], atol=0.15)
    assert row_sets.likeness_z(rows(0), rows(0) + rows(1)) > 10.0
    a = rows(0)
    a[5] = a[1]
    assert row_sets.matched_places(a, a.copy()).tolist() == list(range(12))
    swapped = a[[0, 2, 1, *range(3, 12)]]
    assert row_sets.matched_places(a, swapped).tolist() == [0, 2, 1, *range(3, 12)]
    for seed in range(30):
        leads = np.random.default_rng(seed).random((9, 9)) < 0.13
        np.fill_diagonal(leads, False)
        ways = leads.astype(np.int64)
        comes_home = any(np.trace(np.linalg.matrix_power(ways, length)) for length in range(1, 10))
        assert row_sets._has_cycle(leads) == comes_home
    assert row_sets.cycles(np.array([0, 2, 1, 4, 5, 3])) == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_a_permutation_is_found_again_under_noise_and_a_factor(noise):
    for seed in range(10):
        a, order = rows(seed), np.random.default_rng(seed).permutation(12)
        b = 3.0 * (a[order] + noise * rows(seed + 50))
        assert row_sets.matched_places(a, b).tolist() == order.tolist()


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0, 3.0, np.inf])
def test_rows_that_merely_moved_and_unrelated_rows_stay_where_they_are(noise):
    for seed in range(30):
        a, b = rows(seed), rows(seed + 500)
        moved = a + noise * b if np.isfinite(noise) else b
        assert row_sets.matched_places(a, moved).tolist() == list(range(12))


def test_rows_that_only_lead_away_need_no_matching(monkeypatch):
    def unexpected(*rows):
        raise AssertionError("the Hungarian method was asked")

    monkeypatch.setattr("moegeom.geometry.rows.nearest_order", unexpected)
    a = rows(0)
    assert row_sets.matched_places(a, a[[0, 0, 1, 1, 2, *range(5, 12)]]).tolist() == list(range(12))


@pytest.mark.parametrize("values", [0.0, np.nan, np.inf])
def test_rows_that_cannot_be_compared_keep_their_places(values):
    with np.errstate(invalid="ignore"):
        assert row_sets.matched_places(rows(0), np.full((12, 40), values)).tolist() == list(
            range(12)
        )


@pytest.mark.parametrize("name", sorted(TORCH))
def test_a_cast_of_torch_is_recognised_by_name(name):
    values = (rows(3) * 0.5).astype(np.float32)
    cast = torch.from_numpy(values).to(TORCH[name]).to(torch.float32).numpy()
    assert_array_equal(CASTS[name](values), cast)
    assert cast_of(values, cast) == name
    assert cast_of(cast, values) is None
    assert cast_of(values, values) is None


def test_casts_are_named_and_renamed_choices_come_back():
    values = rows(3).astype(np.float32)
    cast = CASTS["bf16"](values)
    cast[7, 11] *= 1.01
    assert cast_of(values, cast) is None
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert cast_of(values, cut) == "bf16 by cutting off bits"
    assert cast_of(rows(0), rows(0).astype(np.float32)) == "fp32"
    one, other = np.array([[0, 1], [1, 2], [0, 2]]), np.array([[2, 1], [0, 1], [0, 2]])
    counts = row_sets.common_choices(one, other, 3)
    for a, b in itertools.product(range(3), repeat=2):
        expected = sum(a in mine and b in theirs for mine, theirs in zip(one, other, strict=True))
        assert counts[a, b] == expected
    generator = np.random.default_rng(3)
    mine = np.argsort(generator.random((500, 16)), axis=1)[:, :4]
    numbers = generator.permutation(16)
    assert (
        row_sets.expert_matching(row_sets.common_choices(mine, numbers[mine], 16)) == numbers
    ).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_quantisation_by_torch_is_recognised(stored):
    values = torch.from_numpy(rows(5, 8, 256).astype(np.float32)).to(stored).to(torch.float32)
    scale = values.abs().amax(dim=1) / 127
    quantised = torch.fake_quantize_per_channel_affine(
        values, scale, torch.zeros(8, dtype=torch.int32), 0, -128, 127
    )
    precision = 2.0**-8 if stored is torch.bfloat16 else 1e-6
    found = grid_of(values.numpy(), quantised.to(stored).to(torch.float32).numpy(), precision)
    assert found == "int8, a scale for each row"


@pytest.mark.parametrize("noise", [0.003, 0.03, 0.1])
def test_noise_is_no_grid(noise):
    for seed in range(10):
        values = rows(seed, 8, 256)
        assert grid_of(values, values + noise * rows(seed + 9, 8, 256), 2.0**-8) is None


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.1])
def test_the_gram_matrix_tells_how_large_noise_is(noise):
    found = []
    for seed in range(40):
        a = rows(seed, 16, 256)
        a /= np.linalg.norm(a, axis=1, keepdims=True)
        found.append(row_sets.gram_noise(a, a + noise * rows(seed + 77, 16, 256) / 16.0))
    assert_allclose(np.mean(found), noise, rtol=0.35)


@pytest.mark.parametrize("seed", range(10))
def test_no_numbering_fits_better(seed):
    counts = np.random.default_rng(seed).integers(0, 5, (6, 6))
    own = np.arange(6)

    def fit(order: tuple[int, ...]) -> tuple[int, int]:
        return int(counts[own, list(order)].sum()), int((own == order).sum())

    best = max(map(fit, itertools.permutations(range(6))))
    assert fit(tuple(row_sets.expert_matching(counts))) == best
