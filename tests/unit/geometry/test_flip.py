"""Oracles: Python's sets, and every way of breaking ties."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moegeom.geometry.noise import certainly_differs, shares_expert, swapped_pairs, weight_moved

E, K = 6, 3


@given(
    st.lists(st.integers(0, 3), min_size=E, max_size=E),
    st.permutations(range(E)).map(lambda order: order[:K]),
)
def test_a_set_differs_for_certain_when_no_way_of_breaking_ties_gives_it(
    scores: list[int], chosen: list[int]
) -> None:
    possible = [
        set(some)
        for some in itertools.combinations(range(E), K)
        if min(scores[i] for i in some) >= max(scores[j] for j in set(range(E)) - set(some))
    ]
    found = certainly_differs(np.array([scores], np.float64), np.array([chosen], np.int32))
    assert found[0] == (set(chosen) not in possible)


@given(
    st.permutations(range(E)).map(lambda order: order[:K]),
    st.permutations(range(E)).map(lambda order: order[:K]),
    st.lists(st.floats(0.01, 1.0), min_size=K, max_size=K),
)
def test_moved_weight_and_swaps_are_those_of_the_sets(
    one: list[int], other: list[int], weights: list[float]
) -> None:
    a, b = np.array([one], np.int32), np.array([other], np.int32)
    moved = weight_moved(np.array([weights]), a, b)[0]
    left = sum(w for w, e in zip(weights, one, strict=True) if e not in other)
    np.testing.assert_allclose(moved, left / sum(weights), rtol=1e-12)
    assert (moved == 0.0) == (set(one) == set(other))
    assert shares_expert(a, b)[0].tolist() == [e in other for e in one]
    swaps = swapped_pairs(a, b)
    assert swaps[:, 1].tolist() == [e for e in one if e not in other]
    assert swaps[:, 2].tolist() == [e for e in other if e not in one]


def test_swaps_name_the_row_they_are_in() -> None:
    one = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    other = np.array([[1, 0], [3, 0], [0, 1]], np.int32)
    assert swapped_pairs(one, other).tolist() == [[1, 2, 0], [2, 4, 0], [2, 5, 1]]


def test_weights_that_are_all_zero_move_an_unknown_share() -> None:
    one, other = np.array([[0, 1]], np.int32), np.array([[0, 2]], np.int32)
    assert np.isnan(weight_moved(np.zeros((1, 2)), one, other)[0])
    assert weight_moved(np.zeros((1, 2)), one, one)[0] == 0.0
