"""Oracles: SciPy, NumPy, mpmath, scikit-learn, all permutations, torch and drawn rows, for rows,
their Gram matrix, and the matching of rows and experts.
"""

import itertools
import math
from itertools import product

import numpy as np
import pytest
import scipy.linalg
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cdist
from scipy.special import hyp2f1
from scipy.stats import entropy, ortho_group
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.geometry import gram as grams
from moegeom.geometry import rows as row_sets
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.number_formats import CASTS, cast_of, grid_of
from tests.by_day import by_day


def inverse(weight) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return 1.0 / cdist(weight.astype(np.float64), weight.astype(np.float64))


def off_diagonal(matrix) -> np.ndarray:
    return matrix[~np.eye(len(matrix), dtype=bool)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("experts", "hidden"), [(2, 1), (5, 3), (64, 40), (128, 16)])
def test_inverse_distances_are_scipys(experts, hidden, dtype):
    random = np.random.default_rng([experts, hidden])
    weight = random.standard_normal((experts, hidden)).astype(dtype)
    found = row_distances(weight).inverse
    assert_allclose(off_diagonal(found), off_diagonal(inverse(weight)), rtol=1e-11)


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4, 1.1e-4, 1e-5, 1e-7, 1e-12])
def test_nearly_equal_rows_do_not_lose_their_distance_to_cancellation(relative):
    """The Gram matrix knows |w|^2 to 1e-16, so a squared distance of 1e-8 |w|^2 to 1e-8."""
    random = np.random.default_rng(3)
    weight = random.standard_normal((8, 200))
    weight[5] = weight[2] * (1.0 + relative)
    weight[6] = weight[3] + relative * random.standard_normal(200)
    found = row_distances(weight).inverse
    assert_allclose(off_diagonal(found), off_diagonal(inverse(weight)), rtol=3e-8)


SHAPES = [(2, 5), (8, 64), (64, 16), (17, 17), (128, 300), (300, 128)]


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden"), SHAPES)
def test_the_spectrum_is_that_of_the_rows(experts, hidden, is_centred):
    random = np.random.default_rng([experts, hidden])
    # singular values over three decades
    rows = random.standard_normal((experts, hidden)) * np.logspace(0, 3, hidden)
    rows -= is_centred * rows.mean(axis=0)
    values = np.linalg.svd(rows, compute_uv=False)[: min(experts - is_centred, hidden)]
    found = grams.row_spectrum(rows @ rows.T, hidden, is_centred)
    assert found.rank == found.largest_possible_rank == np.linalg.matrix_rank(rows)
    assert_allclose(found.condition, values[0] / values[-1], rtol=1e-7)
    assert_allclose(found.effective_rank, np.exp(entropy(values)), rtol=1e-9)


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_a_low_rank_is_found(rank):
    random = np.random.default_rng(rank)
    rows = random.standard_normal((24, rank)) @ random.standard_normal((rank, 50))
    values = np.linalg.svd(rows, compute_uv=False)[:rank]
    found = grams.row_spectrum(rows @ rows.T, 50, False)
    assert found.rank == rank == np.linalg.matrix_rank(rows)
    assert_array_equal(found.condition, np.inf)
    assert_allclose(found.effective_rank, np.exp(entropy(values)), rtol=1e-9)


@pytest.mark.parametrize("rank", [3, 8])
def test_the_symmetric_root_is_scipys(rank):
    rows = np.random.default_rng(rank).standard_normal((8, rank))
    gram = rows @ rows.T
    # of a singular matrix scipy's root is complex by rounding, and no better than its root
    assert_allclose(
        grams.symmetric_root(gram), scipy.linalg.sqrtm(gram).real, atol=1e-12 if rank == 8 else 1e-6
    )


def drawn(experts, hidden, is_centred, count, figure=grams.gram_score):
    random = np.random.default_rng([experts, hidden, is_centred])
    found = []
    for _ in range(count):
        rows = random.standard_normal((experts, hidden))
        rows -= is_centred * rows.mean(axis=0)
        found.append(figure(grams.cosines(rows @ rows.T)))
    return np.array(found)


def test_cosines_and_the_nearest_row_are_scipys_and_three_rows_score_as_theory_says():
    rows = np.random.default_rng(0).standard_normal((9, 5))
    assert_allclose(grams.cosines(rows @ rows.T), 1.0 - cdist(rows, rows, "cosine"), atol=1e-14)
    # to first order in 1 / D it would be .339
    assert_allclose(grams.random_gram_score(3, 2, is_centred=True), 0.246, atol=5e-4)
    weight = np.random.default_rng(4).standard_normal((9, 4))
    found = row_distances(weight)
    expected = [np.delete(inverse(weight)[i], i).min() for i in range(9)]
    assert_allclose(found.smallest, expected, rtol=1e-12)


#: Experts, hidden size and draws, and whether rows are centred.
DRAWN_SHAPES = [
    *((experts, hidden, 6000) for experts in (3, 4) for hidden in (2, 5, 8)),
    *((8, hidden, 2000) for hidden in (128, 512)),
    *((experts, 64, 3000) for experts in (4, 6)),
    *((8, 2048, 400), (64, 256, 200), (64, 32, 300)),
]
DRAWS = list(product(DRAWN_SHAPES, [False, True]))
DRAWS_BY_DAY = {
    "three centred rows in the plane": ((3, 2, 6000), True),
    "three raw rows": ((3, 8, 6000), False),
    "four centred rows": ((4, 5, 6000), True),
    "four raw rows in the plane": ((4, 2, 6000), False),
    "many dimensions": ((8, 512, 2000), True),
    "more rows than dimensions": ((64, 32, 300), True),
    "many raw rows": ((64, 256, 200), False),
}


@pytest.mark.parametrize(("shape", "is_centred"), by_day(DRAWS, DRAWS_BY_DAY))
def test_score_spread_and_both_moments_are_those_of_drawn_rows(shape, is_centred):
    """Within four standard errors of the draws, which for most shapes are below 2 %."""
    experts, hidden, count = shape
    scores = drawn(experts, hidden, is_centred, count)
    squares = (1.0 - scores) ** 2  # the mean squared cosine over pairs
    moments = grams.random_squared_cosines(experts, hidden, is_centred)
    assert_allclose(moments.mean, squares.mean(), atol=4.0 * squares.std() / np.sqrt(count))
    kurtosis = ((squares - squares.mean()) ** 4).mean() / squares.var() ** 2
    error = 4.0 * np.sqrt((kurtosis - 1.0) / count)
    assert_allclose(moments.variance, squares.var(), rtol=error)
    # one minus a root: the curvature adds a share of the spread, the more the fewer rows
    bend = moments.variance / (8.0 * moments.mean**1.5)
    error = 4.0 * scores.std() / np.sqrt(count) + 0.15 * bend
    score = grams.random_gram_score(experts, hidden, is_centred)
    assert_allclose(score + bend, scores.mean(), atol=error)
    near = (0.1 if experts < 5 else 0.03) + 3.0 / np.sqrt(2.0 * count)
    assert_allclose(
        grams.random_gram_score_sd(experts, hidden, is_centred), scores.std(), rtol=near
    )


def test_the_mean_is_the_second_moment_of_a_correlation_coefficient():
    """Exact for D observations of two Gaussian variables with a known mean (hypergeometric)."""
    for experts, dimension in product((3, 4, 8, 64, 512), (2, 3, 8, 64, 512, 7168)):
        square = 1.0 / (experts - 1.0) ** 2
        series = hyp2f1(1.0, 1.0, dimension / 2.0 + 1.0, square)
        expected = 1.0 - (1.0 - square) * (dimension - 1.0) / dimension * series
        moments = grams.random_squared_cosines(experts, dimension, True)
        assert_allclose(moments.mean, expected, rtol=1e-12)


def test_raw_rows_have_pairs_that_are_not_correlated():
    """Two cosines with one row are independent: the variance is that of one pair over the pairs."""
    for experts, dimension in product((2, 3, 4, 300), (2, 3, 64, 7168)):
        moments = grams.random_squared_cosines(experts, dimension, False)
        one = 2.0 * (dimension - 1.0) / (dimension**2 * (dimension + 2.0))
        assert_allclose(moments.mean, 1.0 / dimension, rtol=1e-12)
        assert_allclose(moments.variance, 2.0 * one / experts / (experts - 1), rtol=1e-6)


@pytest.mark.parametrize(("experts", "hidden"), [(2, 64), (5, 1), (2, 1)])
def test_rows_on_one_line_have_no_spread(experts, hidden):
    assert grams.random_squared_cosines(experts, hidden, True) == grams.SquaredCosines(1.0, 0.0)
    assert grams.random_gram_score_sd(experts, hidden, is_centred=True) == 0.0
    assert_allclose(drawn(experts, hidden, True, 50).std(), 0.0, atol=1e-12)


def test_mean_cosines_follow_from_the_length_of_the_sum():
    assert_allclose(grams.mean_pairwise_cosine(5.0, 5), 1.0)
    assert_allclose(grams.mean_pairwise_cosine(0.0, 5), -0.25)
    assert math.isnan(grams.mean_pairwise_cosine(1.0, 1))
    assert math.isnan(grams.mean_pairwise_cosine(0.0, 0))


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_the_mean_cosine_is_that_of_all_pairs(shift):
    rows = np.random.default_rng(1).standard_normal((70, 9)) + shift
    cosine = cosine_similarity(rows)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = grams.mean_pairwise_cosine(float(np.linalg.norm(unit.sum(axis=0))), 70)
    expected = cosine[~np.eye(70, dtype=bool)].mean()
    assert_allclose(found, expected, rtol=1e-11, atol=1e-15)


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
