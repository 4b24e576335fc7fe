"""Expert set statistics at the corners."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.load import chao1, expert_set_entropy_nats, good_turing_coverage

NONE = np.array([], dtype=np.int64)


def test_without_tokens_nothing_is_known():
    np.testing.assert_equal(good_turing_coverage(NONE), np.nan)
    np.testing.assert_equal(expert_set_entropy_nats(NONE), np.nan)
    np.testing.assert_equal(chao1(NONE), 0.0)


def test_only_singletons_cover_nothing():
    np.testing.assert_equal(good_turing_coverage(np.array([1, 1, 1])), 0.0)


def test_without_singletons_everything_is_covered_and_counted():
    np.testing.assert_equal(good_turing_coverage(np.array([2, 9])), 1.0)
    np.testing.assert_equal(chao1(np.array([2, 9])), 2.0)


def test_chao1_is_finite_without_any_doubleton():
    np.testing.assert_equal(chao1(np.array([1, 1, 1, 5])), 4 + 3 * 2 / 2)


def test_one_expert_set_has_no_entropy():
    np.testing.assert_equal(expert_set_entropy_nats(np.array([17])), 0.0)
