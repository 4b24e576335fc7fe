"""Oracles: SciPy, NumPy, mpmath, scikit-learn, permutations and drawn rows, for rows and their Gram matrix."""

import math
from itertools import product

import mpmath
import numpy as np
import pytest
import scipy.linalg
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less, assert_equal
from scipy.spatial.distance import cdist
from scipy.special import hyp2f1
from scipy.stats import entropy
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.geometry import gram as grams
from moegeom.geometry.boundary.linear import row_distances
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


DIMENSIONS = [2, 3, 5, 64, 1000, 4096, 7168]
NEAR_ONE = [1.0 - 1e-4, 1.0 - 1e-6, 1.0 - 1e-9, 1.0 - 1e-13, 1.0 - 2.0**-53]
SINES = [1e-300, 1e-160, 1e-8, 1e-3, 0.1, 0.5, 0.7, 0.9, 0.99, 0.999, *NEAR_ONE]


def area(sine: float, dimension: int):
    with mpmath.workdps(50):
        half = mpmath.mpf(dimension - 1) / 2
        square = mpmath.mpf(sine) ** 2
        return mpmath.betainc(half, 0.5, 0, square, regularized=True) / 2


def test_areas_are_mpmaths_and_worked_areas_and_angles_are_met():
    every, turns = product(SINES, DIMENSIONS), len(DIMENSIONS)
    day = [(s, DIMENSIONS[(n + m) % turns]) for n, s in enumerate(SINES) for m in (0, 3)]
    cases = by_day(every, day)
    expected = [float(mpmath.log10(area(*case))) for case in cases]
    assert_allclose([grams.cap_area_log10(*case) for case in cases], expected, rtol=1e-11)
    angles = np.linspace(0.01, 1.5, 50)
    on_circle, on_sphere = angles / math.pi, (1.0 - np.cos(angles)) / 2.0
    for dimension, expected, rtol in ((2, on_circle, 1e-7), (3, on_sphere, 1e-9)):
        areas = [grams.cap_area_log10(math.sin(a), dimension) for a in angles]
        assert_allclose(np.power(10.0, areas), expected, rtol=rtol)
    assert_equal(grams.cap_half_angle(0.0, 2.0), 0.0)
    assert_allclose(grams.cap_half_angle(1.0, 2.0), math.pi / 6, rtol=1e-15)
    for radius, length in [(2.0, 2.0), (3.0, 2.0), (0.0, 0.0), (math.nan, 1.0), (-1.0, 2.0)]:
        assert math.isnan(grams.cap_half_angle(radius, length))
    assert_allclose(grams.mean_pairwise_cosine(5.0, 5), 1.0)
    assert_allclose(grams.mean_pairwise_cosine(0.0, 5), -0.25)
    assert math.isnan(grams.mean_pairwise_cosine(1.0, 1))
    assert math.isnan(grams.mean_pairwise_cosine(0.0, 0))


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_area_grows_to_half_the_sphere_and_is_that_of_small_caps(dimension):
    found = [grams.cap_area_log10(sine, dimension) for sine in [0.0, *SINES, 1.0]]
    assert found[0] == -math.inf
    assert_array_less(found[:-1], found[1:])
    assert_allclose(found[-1], math.log10(0.5), rtol=1e-15)
    assert_equal(grams.cap_area_log10(1.0 + 1e-9, dimension), found[-1])
    assert math.isnan(grams.cap_area_log10(-0.1, dimension))


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_the_mean_cosine_is_that_of_all_pairs(shift):
    rows = np.random.default_rng(1).standard_normal((70, 9)) + shift
    cosine = cosine_similarity(rows)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = grams.mean_pairwise_cosine(float(np.linalg.norm(unit.sum(axis=0))), 70)
    expected = cosine[~np.eye(70, dtype=bool)].mean()
    assert_allclose(found, expected, rtol=1e-11, atol=1e-15)
