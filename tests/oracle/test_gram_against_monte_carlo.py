"""Oracle: drawn rows for what chance shows, scipy.spatial for cosines."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from moegeom.geometry.gram import (
    cosines,
    gram_score,
    mean_absolute_cosine,
    random_gram_score,
    random_gram_score_sd,
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
    """THEORY D1: mean .9127, standard deviation .0113; mean |cosine| 1 - .9295."""
    scores = drawn(8, 128, False, 3000)
    np.testing.assert_allclose(scores.mean(), 0.9127, atol=0.001)
    np.testing.assert_allclose(scores.std(), 0.0113, atol=0.0006)
    mean = drawn(8, 128, False, 3000, mean_absolute_cosine).mean()
    np.testing.assert_allclose(mean, 1 - 0.9295, atol=0.0008)


#: experts, hidden, draws
SHAPES = [
    (4, 64, 3000),
    (6, 64, 3000),
    (8, 128, 2000),
    (8, 2048, 400),
    (64, 256, 200),
    (64, 32, 300),
]


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "count"), SHAPES)
def test_the_random_score_is_the_mean_over_drawn_rows(experts, hidden, count, is_centred):
    scores = drawn(experts, hidden, is_centred, count)
    expected = random_gram_score(experts, hidden, is_centred)
    # to first order in 1 / D: what is left out is far below the spread of a single draw
    np.testing.assert_allclose(expected, scores.mean(), atol=0.3 * scores.std())


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "count"), SHAPES)
def test_the_spread_is_that_of_drawn_rows(experts, hidden, count, is_centred):
    scores = drawn(experts, hidden, is_centred, count)
    expected = random_gram_score_sd(experts, hidden, is_centred)
    np.testing.assert_allclose(expected, scores.std(), rtol=0.15)


@pytest.mark.parametrize("experts", [2, 3])
def test_few_centred_rows_score_what_their_common_cosine_says(experts):
    scores = drawn(experts, 64, True, 2000)
    found = random_gram_score(experts, 64, is_centred=True)
    np.testing.assert_allclose(found, scores.mean(), atol=0.001)
    np.testing.assert_array_less(scores.std(), random_gram_score_sd(experts, 64, is_centred=True))
