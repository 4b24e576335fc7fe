"""Load figures at the corners: balance, one expert, nothing chosen."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry import load

BALANCED = np.full(8, 5)
ONE_TAKES_ALL = np.array([0, 0, 12, 0])
NOTHING = np.zeros(4, dtype=np.int64)

EVERY_FIGURE = (
    load.load_cv,
    load.max_vio,
    load.min_vio,
    load.gini,
    load.load_entropy_nats,
    load.dead_share,
    load.underused_share,
)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (load.load_cv, 0.0),
        (load.max_vio, 0.0),
        (load.min_vio, 0.0),
        (load.gini, 0.0),
        (load.load_entropy_nats, np.log(8)),
        (load.dead_share, 0.0),
        (load.underused_share, 0.0),
    ],
)
def test_balance_is_the_zero_of_every_imbalance(figure, expected):
    np.testing.assert_allclose(figure(BALANCED), expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (load.load_cv, np.sqrt(3.0)),
        (load.max_vio, 3.0),
        (load.min_vio, -1.0),
        (load.gini, 0.75),
        (load.load_entropy_nats, 0.0),
        (load.dead_share, 0.75),
        (load.underused_share, 0.75),
    ],
)
def test_one_expert_taking_everything_is_the_other_end(figure, expected):
    np.testing.assert_allclose(figure(ONE_TAKES_ALL), expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("figure", EVERY_FIGURE)
def test_nothing_chosen_is_nan_and_not_zero(figure):
    np.testing.assert_equal(float(figure(NOTHING)), np.nan)
    np.testing.assert_array_equal(figure(np.stack([NOTHING, ONE_TAKES_ALL]))[0], np.nan)


def test_nothing_chosen_has_no_share():
    np.testing.assert_array_equal(load.load_share(NOTHING), np.full(4, np.nan))


@pytest.mark.parametrize("figure", EVERY_FIGURE)
def test_leading_axes_are_separate_measurements(figure):
    counts = np.random.default_rng(0).poisson(4.0, (2, 3, 6))
    each = [[figure(counts[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(figure(counts), each)


def test_underused_is_below_a_tenth_of_the_fair_share_and_not_at_it():
    counts = np.array([1, 0, 19, 20])  # fair is 10: 1 is exactly a tenth
    np.testing.assert_array_equal(load.underused_share(counts), 0.25)


def test_share_of_slots_is_in_units_of_the_fair_share():
    np.testing.assert_array_equal(load.load_share(np.array([8, 4, 2, 2])), [2.0, 1.0, 0.5, 0.5])


def test_the_floor_without_tokens_is_nan():
    np.testing.assert_equal(load.load_cv_floor(0, 8, 2), np.nan)


def test_the_floor_is_zero_when_every_expert_is_chosen():
    np.testing.assert_equal(load.load_cv_floor(100, 8, 8), 0.0)
