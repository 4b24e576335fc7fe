"""How much routing weight lies elsewhere: a distance of mixtures, whatever their scales."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cityblock

from moegeom.geometry.noise import weight_moved
from moegeom.geometry.whatif.moved import dense_weights, same_sets, weight_distance

EXPERTS = 5

#: Routing weights of one token by expert, many of them 0; all are exact in binary.
WEIGHTS = st.lists(
    st.integers(0, 8).map(lambda n: n / 8), min_size=EXPERTS, max_size=EXPERTS
).map(np.array)  # fmt: skip
SOME = WEIGHTS.filter(np.any)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(weight_distance(first[None], second[None])[0])


@given(SOME, SOME, st.sampled_from([0.125, 3.0, 1e6]))
def test_it_is_half_the_city_block_distance_of_shares_and_at_least_what_leaves(a, b, scale):
    expected = cityblock(a / a.sum(), b / b.sum()) / 2.0
    assert_allclose([distance(a, b), distance(scale * a, b)], expected, atol=1e-15)
    chosen, other = (np.flatnonzero(w).astype(np.int32)[None] for w in (a, b))
    assert distance(a, b) >= weight_moved(a[chosen], chosen, other)[0] - 1e-12


@given(WEIGHTS, WEIGHTS, WEIGHTS)
def test_it_is_a_metric_of_mixtures_from_0_to_1(a, b, c):
    assert distance(a, a) == 0.0
    assert 0.0 <= distance(a, b) == distance(b, a) <= 1.0
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-15
    are_equal = np.array_equal(a * b.sum(), b * a.sum()) and a.any() == b.any()
    assert (distance(a, b) < 1e-9) == are_equal
    assert (distance(a, b) > 1.0 - 1e-9) == (not (a * b).any() and (a.any() or b.any()))


@given(SOME, st.data())
def test_it_is_that_weight_where_the_others_keep_theirs_and_what_comes_takes_it(first, data):
    """An expert that leaves hands its weight to one that had none."""
    chosen, free = np.flatnonzero(first).tolist(), np.flatnonzero(first == 0.0).tolist()
    if free:
        out, new = data.draw(st.sampled_from(chosen)), data.draw(st.sampled_from(free))
        second = first.copy()
        second[new], second[out] = second[out], 0.0
        assert_allclose(distance(first, second), first[out] / first.sum(), atol=1e-15)


@given(st.permutations(range(EXPERTS)), st.integers(0, EXPERTS), st.data())
def test_dense_weights_and_sets_know_no_order_and_no_empty_slots(order, size, data):
    weights = np.array(data.draw(st.lists(st.floats(0.1, 1.0), min_size=size, max_size=size)))
    chosen = np.array(order[:size], np.int32)
    place = np.array(data.draw(st.permutations(range(size))), int)
    padded = np.concatenate([chosen[place], [-1, -1]]).astype(np.int32)
    assert same_sets(chosen[None], padded[None])[0]
    moved = np.concatenate([weights[place], [0.0, 0.0]])
    slots = ((chosen, weights), (padded, moved))
    dense = [dense_weights(c[None], w[None], EXPERTS) for c, w in slots]
    assert_array_equal(*dense)
    assert_array_equal(np.flatnonzero(dense[0]), np.sort(chosen))
