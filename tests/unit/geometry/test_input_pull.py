"""The pull of the mean input, and what random rows make of it."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_equal

from moegeom.checks.catalogue.tokens import MOST_PULL
from moegeom.checks.measured import MeanPull
from moegeom.geometry.space import BlockedScores, blocked_moments, input_pull, pull_of_random_rows


def participation(inputs: np.ndarray) -> float:
    moments = blocked_moments(inputs, np.zeros(len(inputs), np.int32), 1)
    return moments.of_blocks(np.ones(1, bool)).participation_ratio


def rows_of(random, lengths: np.ndarray, hidden: int) -> np.ndarray:
    """In random directions."""
    rows = random.standard_normal((len(lengths), hidden))
    return rows * (lengths / np.linalg.norm(rows, axis=1))[:, None]


def test_the_pull_is_mean_over_rest_also_at_its_corners():
    # experts 0 and 1 favoured by +1 and -1, tokens apart by +2 and -2 the same way round
    assert input_pull(np.array([[3.0, -3.0], [-1.0, 1.0]])) == pytest.approx(0.5)
    random = np.random.default_rng(1)
    scores = random.standard_normal((500, 12))
    scores -= scores.mean(axis=0)
    lean = random.standard_normal(12)
    assert input_pull(scores) < 1e-14
    assert_allclose(input_pull(scores + 7.0 * lean), 7.0 * input_pull(scores + lean), rtol=1e-12)
    random = np.random.default_rng(2)
    scores = random.standard_normal((200, 9)) + random.standard_normal(9)
    common, order = random.standard_normal((200, 1)), random.permutation(9)
    for other in (scores + common, 3.0 * scores, scores[:, order], scores[::-1]):
        assert_allclose(input_pull(other), input_pull(scores), rtol=1e-12)
    alike = np.tile([1.0, 0.0], (5, 1))
    scores = (np.zeros((0, 4)), np.ones((5, 1)), np.ones((5, 4)), alike)
    assert_equal([input_pull(s) for s in scores], [math.nan] * 3 + [math.inf])
    only = BlockedScores.of(np.eye(4), np.zeros(4, np.int64), 2).without(0)
    one_less = BlockedScores.of(alike, np.arange(5), 5).without(3)
    assert_equal([only.pull(), one_less.pull()], [math.nan, math.inf])
    ones, both = np.ones(4), np.concatenate([np.eye(3), -np.eye(3)])
    for inputs, ratio, lengths in (
        (np.ones((1, 3)), 1.0, ones),
        (np.ones((5, 3)), math.nan, ones),
        (np.eye(3), 2.0, np.zeros(4)),
    ):
        assert math.isnan(pull_of_random_rows(inputs, ratio, lengths)[0])
    assert pull_of_random_rows(both, 3.0, ones) == (0.0, 0.0)


@pytest.mark.parametrize("lean", [0.0, 1.0, 1e4])
def test_without_a_block_it_is_that_of_the_tokens_that_are_left(lean):
    random = np.random.default_rng(4)
    scores = random.standard_normal((300, 9)) + lean * random.standard_normal(9)
    bias, block = random.standard_normal(9).astype(np.float32), random.integers(0, 5, 300)
    scores[block == 2] += random.standard_normal(9)
    blocked = BlockedScores.of(scores, block, 6)
    for left_out in (None, 0, 2, 5):
        left = scores[block != left_out] if left_out is not None else scores
        rest = blocked.without(left_out)
        assert_allclose(rest.pull(), input_pull(left), rtol=1e-11)
        assert_allclose(rest.pull(bias), input_pull(left + bias), rtol=1e-11)


@pytest.mark.parametrize(("experts", "lean"), [(16, 0.3), (64, 1.0)])
def test_the_range_of_random_rows_is_that_of_draws(experts, lean):
    random = np.random.default_rng(3)
    hidden = 48
    spread = np.geomspace(2.0, 0.2, hidden)
    inputs = random.standard_normal((300, hidden)) * spread + lean * random.standard_normal(hidden)
    lengths = random.uniform(0.5, 2.0, experts)
    drawn = [input_pull(inputs @ rows_of(random, lengths, hidden).T) for _ in range(2000)]
    mean, deviation = pull_of_random_rows(inputs, participation(inputs), lengths)
    assert mean == pytest.approx(np.mean(drawn), rel=0.03)
    assert deviation == pytest.approx(np.std(drawn), rel=0.15)


def test_of_200_random_routers_at_most_one_is_called_pulled():
    """As MGG302 does: inputs of any spectrum and any lean, rows in random directions."""
    alarms = strong = 0
    for number in range(200):
        random = np.random.default_rng([302, number])
        experts, hidden = (int(2.0 ** random.uniform(*ends)) for ends in ((2, 8), (5, 9)))
        spread = np.geomspace(1.0, 10.0 ** -random.uniform(0, 2), hidden)
        lean = random.uniform(0, 3) * random.standard_normal(hidden) * spread
        inputs = random.standard_normal((400, hidden)) * spread + lean
        inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True))
        lengths = random.uniform(0.5, 2.0, experts)
        here = input_pull(inputs @ rows_of(random, lengths, hidden).T)
        pull = MeanPull(here, *pull_of_random_rows(inputs, participation(inputs), lengths))
        alarms += pull.is_above(MOST_PULL)
        strong += here > MOST_PULL
    assert alarms <= 1  # three deviations are passed by one in some hundreds
    assert strong > 100
