"""Smoothed gates have a largest slope; weight that lies elsewhere is a distance of mixtures."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cityblock

from moegeom.core.router import Weights
from moegeom.geometry import whatif
from moegeom.geometry.boundary.orders import extra_experts
from moegeom.geometry.noise import weight_moved
from moegeom.geometry.whatif import dense_weights, same_sets, weight_distance

#: Few distinct values, so that exact ties are common; all are exact in binary.
BATCH = st.tuples(st.integers(1, 5), st.integers(1, 7)).flatmap(
    lambda shape: st.tuples(
        arrays(np.int64, shape, elements=st.integers(-8, 8)).map(lambda logits: logits / 4),
        st.integers(1, shape[1]),
    )
)
EPS = st.integers(0, 20).map(lambda n: n / 8)
SELECTED = Weights("softmax_of_selected_logits")


@given(BATCH, EPS)
def test_as_many_run_as_are_chosen_and_extra(drawn, eps):
    logits, k = drawn
    gate = whatif.smooth_gate(logits, logits, logits, k, SELECTED, eps)
    assert_array_equal((gate > 0).sum(axis=1), k + extra_experts(logits, k, eps))
    assert_allclose(gate.sum(axis=1), 1.0, rtol=1e-12)
    assert (gate[whatif.hard_set(logits, k)] > 0).all()


@given(BATCH, EPS, st.integers(0, 2**32 - 1))
def test_no_activation_changes_faster_than_the_largest_slope(drawn, eps, seed):
    """Of the difference to the k-th score, which a change of scores moves by twice itself."""
    logits, k = drawn
    eps = eps + 0.125
    step = np.random.default_rng(seed).uniform(-1e-3, 1e-3, logits.shape)
    # at a tie of the border the hard set is one of two, and both have activation 1
    before, after = (whatif.smooth_activations(z, k, eps) for z in (logits, logits + step))
    largest = 17.756 / eps * 2.0 * np.abs(step).max(axis=1, keepdims=True)
    assert (np.abs(after - before) <= largest + 1e-12).all()


def test_the_largest_slope_is_reached():
    eps, at = 0.4, 0.0545
    logits = np.array([[1.0, 1.0 - eps * (1 - at)]])
    moved = logits + np.array([[0.0, 1e-6]])
    before, after = (whatif.smooth_activations(z, 1, eps)[0, 1] for z in (logits, moved))
    assert_allclose((after - before) / 1e-6, 17.756 / eps, rtol=1e-4)


@given(BATCH, st.floats(0.0, 1.0))
def test_a_budget_is_never_exceeded_and_the_next_gap_would(drawn, share):
    logits, k = drawn
    extra = share * (logits.shape[1] - k)
    most = round(len(logits) * extra) / len(logits)
    budget = whatif.smoothing_budget(whatif.gaps(logits, k), extra)
    assert_allclose(budget.extra, extra_experts(logits, k, budget.eps).mean(), rtol=1e-12)
    assert budget.extra <= most + 1e-12
    wider = extra_experts(logits, k, np.nextafter(budget.eps, np.inf)).mean()
    assert wider >= most - 1e-12 or budget.eps == 0.0


# ----------------------------------------------------------------------- weight that lies elsewhere
EXPERTS = 5

#: Routing weights of one token by expert, many of them 0; all are exact in binary.
WEIGHTS = arrays(np.int64, EXPERTS, elements=st.integers(0, 8)).map(lambda eighths: eighths / 8)
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
