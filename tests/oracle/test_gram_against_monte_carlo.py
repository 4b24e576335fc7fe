"""Oracle: drawn rows for what chance shows, scipy.spatial for cosines."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.special import hyp2f1

from moegeom.geometry.gram import (
    SquaredCosines,
    cosines,
    gram_score,
    mean_absolute_cosine,
    random_gram_score,
    random_gram_score_sd,
    random_squared_cosines,
)


def drawn(experts, hidden, is_centred, count, figure=gram_score):
    random = np.random.default_rng([experts, hidden, is_centred])
    found = []
    for _ in range(count):
        rows = random.standard_normal((experts, hidden))
        rows -= is_centred * rows.mean(axis=0)
        found.append(figure(cosines(rows @ rows.T)))
    return np.array(found)


def test_cosines_are_scipys():
    rows = np.random.default_rng(0).standard_normal((9, 5))
    np.testing.assert_allclose(
        cosines(rows @ rows.T), 1.0 - cdist(rows, rows, "cosine"), atol=1e-14
    )


def test_eight_rows_in_128_dimensions_score_as_theory_says():
    """docs/theory.md D1: mean .9127, standard deviation .0113; mean |cosine| 1 - .9295."""
    scores = drawn(8, 128, False, 3000)
    np.testing.assert_allclose(scores.mean(), 0.9127, atol=0.001)
    np.testing.assert_allclose(scores.std(), 0.0113, atol=0.0006)
    mean = drawn(8, 128, False, 3000, mean_absolute_cosine).mean()
    np.testing.assert_allclose(mean, 1 - 0.9295, atol=0.0008)


#: experts, hidden, draws
SHAPES = [
    (3, 2, 6000),
    (3, 8, 6000),
    (4, 2, 6000),
    (4, 5, 6000),
    (8, 512, 3000),
    (4, 64, 3000),
    (6, 64, 3000),
    (8, 128, 2000),
    (8, 2048, 400),
    (64, 256, 200),
    (64, 32, 300),
]


def squares(cosine):
    """Mean squared cosine over pairs: what the score is made of."""
    return (1.0 - gram_score(cosine)) ** 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "count"), SHAPES)
def test_both_moments_are_those_of_drawn_rows(experts, hidden, count, is_centred):
    """Within four standard errors of the draws, which for most shapes are below 2 %."""
    found = drawn(experts, hidden, is_centred, count, squares)
    moments = random_squared_cosines(experts, hidden, is_centred)
    error = 4.0 * found.std() / np.sqrt(count)
    np.testing.assert_allclose(moments.mean, found.mean(), atol=error)
    kurtosis = ((found - found.mean()) ** 4).mean() / found.var() ** 2
    error = 4.0 * np.sqrt((kurtosis - 1.0) / count)
    np.testing.assert_allclose(moments.variance, found.var(), rtol=error)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "count"), SHAPES)
def test_score_and_spread_are_those_of_drawn_rows(experts, hidden, count, is_centred):
    scores = drawn(experts, hidden, is_centred, count)
    spread = random_gram_score_sd(experts, hidden, is_centred)
    # one minus a root: the curvature adds a share of the spread, the more the fewer rows
    found = random_gram_score(experts, hidden, is_centred)
    moments = random_squared_cosines(experts, hidden, is_centred)
    bend = moments.variance / (8.0 * moments.mean**1.5)
    error = 4.0 * scores.std() / np.sqrt(count)
    np.testing.assert_allclose(found + bend, scores.mean(), atol=error + 0.15 * bend)
    near = 0.1 if experts < 5 else 0.03
    np.testing.assert_allclose(spread, scores.std(), rtol=near + 3.0 / np.sqrt(2.0 * count))


@pytest.mark.parametrize("dimension", [2, 3, 8, 64, 512, 7168])
@pytest.mark.parametrize("experts", [3, 4, 8, 64, 512])
def test_the_mean_is_the_second_moment_of_a_correlation_coefficient(experts, dimension):
    """Exact for D observations of two Gaussian variables with a known mean (hypergeometric)."""
    square = 1.0 / (experts - 1.0) ** 2
    series = hyp2f1(1.0, 1.0, dimension / 2.0 + 1.0, square)
    expected = 1.0 - (1.0 - square) * (dimension - 1.0) / dimension * series
    found = random_squared_cosines(experts, dimension, True).mean
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("dimension", [2, 3, 64, 7168])
@pytest.mark.parametrize("experts", [2, 3, 4, 300])
def test_raw_rows_have_pairs_that_are_not_correlated(experts, dimension):
    """Two cosines with one row are independent: the variance is that of one pair over the pairs."""
    found = random_squared_cosines(experts, dimension, False)
    one = 2.0 * (dimension - 1.0) / (dimension**2 * (dimension + 2.0))
    np.testing.assert_allclose(found.mean, 1.0 / dimension, rtol=1e-12)
    np.testing.assert_allclose(found.variance, 2.0 * one / experts / (experts - 1), rtol=1e-6)


def test_three_centred_rows_in_the_plane_score_what_drawn_rows_do():
    """To first order in 1 / D it would be .339."""
    np.testing.assert_allclose(random_gram_score(3, 2, is_centred=True), 0.246, atol=5e-4)
    rms = np.sqrt(drawn(3, 2, True, 20_000, squares).mean())
    np.testing.assert_allclose(1.0 - rms, 0.246, atol=0.004)


@pytest.mark.parametrize(("experts", "hidden"), [(2, 64), (5, 1), (2, 1)])
def test_rows_on_one_line_have_no_spread(experts, hidden):
    assert random_squared_cosines(experts, hidden, True) == SquaredCosines(1.0, 0.0)
    assert random_gram_score_sd(experts, hidden, is_centred=True) == 0.0
    np.testing.assert_allclose(drawn(experts, hidden, True, 50).std(), 0.0, atol=1e-12)
