"""Reductions: disagreements with recorded choices, sums of unit vectors, expert sets beyond the
capacity, samples of documents and tokens, the same however a stream is cut.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.metric import RouterFacts
from moegeom.core.router import Rule
from moegeom.engine.plan import rounds_won
from moegeom.geometry.histogram import NUM_BINS, bin_index
from moegeom.geometry.rows import unit_rows
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions import samples as sketch
from moegeom.kernels.reductions.choices import BEYOND, EQUAL, NEAR_TIE, NUM_LISTED
from moegeom.kernels.reductions.histograms import FIXED_POINT
from moegeom.kernels.reductions.samples import NUM_INPUTS
from moegeom.kernels.table import load_kernels
from moegeom.measure.finish import finish_router
from moegeom.metrics import METRICS
from moegeom.recorder.folding import _dropped
from tests.unit.metrics.theorems import RULES, router
from tests.unit.scan.made import SOFTMAX, router_with


def batch_of(tokens: int, **quantities: Any) -> TokenBatch:
    """The first tokens of a stream, in one block and one population unless these are given."""
    zeros = np.zeros(tokens, np.int32)
    usual = {"token": np.arange(tokens), "population": zeros, "block": zeros}
    return TokenBatch(**({**usual, "chosen": zeros[:, None]} | quantities))


AGREEMENT = REDUCTIONS["agreement"]


def folded_agreement(matches, margin, bound=None, group_margin=None):
    accumulator = AGREEMENT.start(Extent(1, 4, 1))
    batch = batch_of(
        len(matches),
        margin=np.asarray(margin, np.float64),
        group_margin=group_margin,
        float_bound=bound,
        matches_recording=np.asarray(matches),
    )
    accumulator.fold(batch, {})
    return accumulator.state()


def counted(state):
    return AGREEMENT.select(AGREEMENT.settle(state), None, None)[[EQUAL, NEAR_TIE, BEYOND]]


def test_differences_within_the_float_bound_are_near_ties_and_the_first_are_listed():
    state = folded_agreement([True, False, False], [0.0, 0.1, 0.1], np.array([1.0, 0.1, 0.05]))
    np.testing.assert_array_equal(counted(state), [1, 1, 1])
    # without a bound only an exact tie
    np.testing.assert_array_equal(
        counted(folded_agreement([False, False], [0.0, 1e-300])), [0, 1, 1]
    )
    # half the group margin counts like a margin
    state = folded_agreement([False], [5.0], np.array([0.1]), np.array([0.2]))
    np.testing.assert_array_equal(counted(state), [0, 1, 0])
    np.testing.assert_array_equal(state["margin"], [0.1])
    margin = np.arange(200.0)
    matches = np.arange(200) % 2 == 0
    state = folded_agreement(matches, margin)
    np.testing.assert_array_equal(state["token"], np.arange(1, 2 * NUM_LISTED, 2))
    np.testing.assert_array_equal(state["margin"], margin[state["token"]])


def histogram_of(lower, upper):
    ends = {"distance": np.array(lower), "distance_upper": np.array(upper)}
    batch = batch_of(len(lower), **ends)
    reduction = REDUCTIONS["bracket_histogram"]
    accumulator = reduction.start(Extent(1, 4, 1))
    accumulator.fold(batch, load_kernels("reference"))
    return reduction.select(reduction.settle(accumulator.state()), None, None)


def figures(lower, upper):
    histogram = histogram_of(lower, upper)
    facts = RouterFacts(router(RULES["softmax"]), len(lower))
    return METRICS["distance_bracket"].finish({"bracket_histogram": histogram}, facts)["layers"]


def test_the_first_bin_holds_exact_brackets_alone_and_figures_are_those_of_widths():
    exact = [0.0, 1.0, 1e-300, np.inf]
    np.testing.assert_array_equal(histogram_of(exact, exact)[0], 4)
    hardly = np.nextafter(exact[:3], np.inf)
    found = histogram_of(exact[:3], hardly)
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_array_equal(found[1], 2)  # 2^-52 wide, counted as 2^-40
    np.testing.assert_array_equal(found[-1], 1)  # from 0, as wide as can be
    bins = np.flatnonzero(histogram_of([2.0, 4.0], [3.0, 5.0]))
    np.testing.assert_array_equal(bins, bin_index(np.array([0.25, 0.5])))
    np.testing.assert_array_equal(histogram_of([2.0, 0.0], [np.inf, 3.0])[NUM_BINS - 1], 2)
    exact = figures([1.0, 2.0], [1.0, 2.0])
    np.testing.assert_equal(list(exact.values()), [1.0, None, 1.0])
    some = figures([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 5.0])
    np.testing.assert_equal(some["distance_exact_share"], 0.5)
    assert 1.25 <= some["distance_bracket_p50"] <= 1.25 * 1.0625
    assert 1.5 < some["distance_bracket_max"] <= 1.0 + 0.5 * 1.0625
    np.testing.assert_equal(figures([1.0], [np.inf])["distance_bracket_max"], None)  # the open bin
    np.testing.assert_equal(list(figures(np.empty(0), np.empty(0)).values()), [None, None, None])


DIRECTIONS = REDUCTIONS["directions"]
ROUTER = router_with(np.eye(4, dtype=np.float32), Rule(1, "softmax", SOFTMAX))


def folded_directions(direction, block):
    accumulator = DIRECTIONS.start(Extent(2, 4, 1, direction.shape[1]))
    batch = batch_of(len(block), block=np.asarray(block, np.int32), direction=direction)
    accumulator.fold(batch, {})
    return accumulator.state()


@pytest.fixture
def random():
    return np.random.default_rng(9)


@pytest.fixture
def directions(random):
    return unit_rows(random.standard_normal((500, 12))), random.integers(0, NUM_BLOCKS, 500)


def test_directions_are_torchs_unit_rows_but_of_a_zero_row_and_a_bad_one(random):
    values = (random.standard_normal((40, 7)) * random.uniform(1e-30, 1e30, (40, 1))).astype("f4")
    expected = torch.nn.functional.normalize(torch.from_numpy(values).double(), eps=0.0)
    np.testing.assert_allclose(unit_rows(values), expected.numpy(), rtol=1e-14)
    found = unit_rows(np.array([[0.0, 0.0], [3.0, -4.0], [np.nan, 1.0], [np.inf, 1.0]]))
    np.testing.assert_allclose(found[:2], [[0.0, 0.0], [0.6, -0.8]], rtol=1e-15)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.isnan(found[3]) | (found[3] == 0.0), [True, True])


def test_the_sum_of_every_block_is_that_of_its_tokens_and_exact_for_the_largest_batch(directions):
    direction, block = directions
    state = folded_directions(*directions)
    np.testing.assert_array_equal(state["counts"][:, 0], np.bincount(block, minlength=NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        own = direction[block == number]
        total = state["counts"][number, 1:] / FIXED_POINT
        np.testing.assert_allclose(total, own.sum(axis=0), atol=len(own) / FIXED_POINT)
    # 2^14 tokens that all point one way: every partial sum is a whole number below 2^53.
    tokens = 2**14
    one_way = np.tile([[1.0, -(2.0**-36)]], (tokens, 1))
    state = folded_directions(one_way, np.full(tokens, 5))
    assert state["counts"].dtype == np.int64
    assert state["counts"][5].tolist() == [tokens, tokens * 2**36, -tokens]
    np.testing.assert_array_less(np.abs(state["counts"]).max(), 2**53)


def resultant(direction, block):
    state = folded_directions(direction, block)
    counts = np.zeros((2, NUM_BLOCKS, 2), np.int64)
    counts[0, :, 0] = np.bincount(block, minlength=NUM_BLOCKS)
    states = {"directions": state, "token_counts": {"counts": counts}}
    rows = finish_router(ROUTER, states, ("a", "b"), [METRICS["directions"]], {}).rows["layers"]
    return rows[0]["mean_resultant_length"], rows[0]["mean_resultant_length_se"], rows[1:]


def test_the_length_of_inputs_that_point_one_way_cancel_or_are_independent(random):
    length, error, _ = resultant(np.tile([[0.6, 0.8]], (64, 1)), np.arange(64) % 16)
    np.testing.assert_allclose([length, error], [1.0, 0.0], atol=1e-10)
    length, _, _ = resultant(np.array([[1.0, 0.0], [-1.0, 0.0]] * 8), np.arange(16))
    np.testing.assert_allclose(length, 0.0, atol=1e-15)
    direction = unit_rows(random.standard_normal((4096, 64)))  # E|mean|^2 = 1 / tokens
    length, _, _ = resultant(direction, np.arange(4096) % NUM_BLOCKS)
    np.testing.assert_allclose(length, 1 / np.sqrt(4096), rtol=0.3)


def test_the_error_is_the_jackknife_over_blocks_and_populations_have_no_value(directions):
    direction, block = directions
    found, error, others = resultant(direction, block)
    np.testing.assert_allclose(found, np.linalg.norm(direction.mean(axis=0)), atol=1e-10)
    without = [np.linalg.norm(direction[block != b].mean(axis=0)) for b in range(NUM_BLOCKS)]
    expected = np.sqrt(15.0) * np.std(without)
    np.testing.assert_allclose(error, expected, rtol=1e-6)
    for row in others:
        assert row["mean_resultant_length"] is row["mean_resultant_length_se"] is None


SKETCH_EXPERTS, SKETCH_TOP_K = 40, 4
KERNELS = load_kernels("cpu")
EXPERT_SETS = REDUCTIONS["expert_sets"]


def drawn(tokens: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).random((tokens, SKETCH_EXPERTS))
    return np.argsort(scores, axis=1)[:, :SKETCH_TOP_K].astype(np.int32)


def fold(accumulator, chosen: np.ndarray) -> None:
    accumulator.fold(batch_of(len(chosen), chosen=chosen), KERNELS)


def folded_sets(chosen: np.ndarray, batch: int = 700):
    accumulator = EXPERT_SETS.start(Extent(1, SKETCH_EXPERTS, SKETCH_TOP_K))
    for start in range(0, len(chosen), batch):
        fold(accumulator, chosen[start : start + batch])
    return accumulator.state()


def distinct(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(np.sort(chosen, axis=1), axis=0, return_counts=True)


def test_under_the_capacity_every_set_is_counted_whatever_the_order_of_its_experts():
    chosen = drawn(3000, 0)[np.random.default_rng(1).integers(0, 3000, 9000)]
    state = folded_sets(chosen)
    found = EXPERT_SETS.select(EXPERT_SETS.settle(state), None, None)
    members, counts = distinct(chosen)
    order = np.lexsort(found["members"][found["row"]].T[::-1])
    np.testing.assert_array_equal(found["members"][found["row"]][order], members)
    np.testing.assert_array_equal(found["count"][order], counts)
    np.testing.assert_array_equal(found["rate"], 1.0)
    chosen = drawn(200, 9)
    keys = KERNELS["expert_set_key"](chosen, SKETCH_EXPERTS)
    other = KERNELS["expert_set_key"](
        np.random.default_rng(0).permuted(chosen, axis=1), SKETCH_EXPERTS
    )
    np.testing.assert_array_equal(other, keys)
    np.testing.assert_array_equal(len(np.unique(keys)), len(distinct(chosen)[0]))


def test_the_state_never_exceeds_the_capacity(monkeypatch):
    monkeypatch.setattr(sketch, "CAPACITY", 500)
    monkeypatch.setattr(sketch, "PENDING", 256)
    accumulator = EXPERT_SETS.start(Extent(1, SKETCH_EXPERTS, SKETCH_TOP_K))
    chosen = drawn(20_000, 2)
    for start in range(0, len(chosen), 1000):
        fold(accumulator, chosen[start : start + 1000])
        # besides the state, at most a batch and as many tokens as it holds are waiting
        np.testing.assert_array_less(accumulator._waiting, 501)
        np.testing.assert_array_less(len(accumulator._state["key"]), 501)
    np.testing.assert_array_less(len(accumulator.state()["key"]), 501)


def test_over_the_capacity_the_number_of_expert_sets_is_estimated_without_bias(monkeypatch):
    """Each of N expert sets is kept with probability ``rate``: N' = kept / rate has variance
    N (1 - rate) / rate. Streams differ, so do the expert sets that the fixed hash keeps."""
    monkeypatch.setattr(sketch, "CAPACITY", 400)
    errors = []
    for seed in range(40):
        chosen = drawn(3000, 100 + seed)
        found = EXPERT_SETS.select(EXPERT_SETS.settle(folded_sets(chosen)), None, None)
        rate, true = float(found["rate"]), len(distinct(chosen)[0])
        np.testing.assert_array_less(rate, 1.0)
        errors.append((len(found["count"]) / rate - true) / np.sqrt(true * (1 - rate) / rate))
    # stopping at the first rate that fits favours samples that came out small: under half a sigma
    np.testing.assert_array_less(np.abs(np.mean(errors)), 0.5 + 3 / np.sqrt(40))
    np.testing.assert_array_less(np.std(errors), 1.5)


def test_over_the_capacity_no_more_is_dropped_than_it_asks_for_and_counts_stay_exact(monkeypatch):
    """Of all keys, those below the threshold are kept; twice the threshold would be too many."""
    chosen = drawn(3000, 11)
    every = folded_sets(chosen)["key"]
    monkeypatch.setattr(sketch, "CAPACITY", 400)
    found = folded_sets(chosen)
    rate = 2.0 ** -float(found["halvings"][0])
    np.testing.assert_array_equal(found["key"], every[every < rate * 2.0**64])
    np.testing.assert_array_less(400, (every < 2 * rate * 2.0**64).sum())
    monkeypatch.setattr(sketch, "CAPACITY", 300)
    base = drawn(2000, 5)
    chosen = base[np.random.default_rng(6).integers(0, 2000, 8000)]
    found = EXPERT_SETS.select(EXPERT_SETS.settle(folded_sets(chosen)), None, None)
    true = {tuple(m.tolist()): int(c) for m, c in zip(*distinct(chosen), strict=True)}
    expected = [true[tuple(m.tolist())] for m in found["members"][found["row"]]]
    np.testing.assert_array_equal(found["count"], expected)


OPEN = Extent(1, 4, 2, hidden_size=3)


def _batch(start: int, stop: int) -> TokenBatch:
    token = np.arange(start, stop)
    chosen = np.stack([token % 4, (token + 1) % 4], axis=1).astype(np.int32)
    values = np.sin(token[:, None] * [1.0, 2.0, 3.0]).astype(np.float32)
    return batch_of(
        len(token), token=token, chosen=chosen, margin=np.cos(1.0 * token), input=values
    )


@pytest.mark.parametrize("total", [100, NUM_INPUTS, 3 * NUM_INPUTS + 5])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_sample_does_not_depend_on_when_the_length_is_known(total: int, num_parts: int) -> None:
    reduction = REDUCTIONS["input_sample"]
    told = reduction.start(replace(OPEN, num_tokens=total))
    told.fold(_batch(0, total), {})
    edges = np.linspace(0, total, 20).astype(int)
    parts = [reduction.start(replace(OPEN, num_tokens=None)) for _ in range(num_parts)]
    for part, (start, stop) in zip(itertools.cycle(parts), itertools.pairwise(edges), strict=False):
        part.fold(_batch(start, stop), {})
    states = [part.state() for part in parts]
    assert max(len(state["key"]) for state in states) <= 2 * NUM_INPUTS + total // 19
    found = states[0] if num_parts == 1 else reduction.merge(*states)
    found = reduction.ended(found, replace(OPEN, num_tokens=total))
    np.testing.assert_equal(found, told.state())


def test_of_neighbours_one_wins_each_round() -> None:
    won = np.array([rounds_won(tile, seed=3) for tile in range(256)])
    for rounds in range(1, 9):
        in_each = (won.reshape(-1, 2**rounds) >= rounds).sum(axis=1)
        np.testing.assert_array_equal(in_each, 1)
    other = [rounds_won(tile, seed=4) for tile in range(256)]
    assert (won != other).any()


@given(
    st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1),
    st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1),
    st.integers(1, 12),
)
@settings(max_examples=60)
def test_what_goes_from_a_part_goes_from_the_whole(
    first: dict[int, int], second: dict[int, int], most: int
) -> None:
    both = {r: first.get(r, 0) + second.get(r, 0) for r in {*first, *second}}
    gone = set(_dropped(both, most))
    left = {r: size for r, size in both.items() if r not in gone}
    assert sum(left.values()) <= most or len(left) == 1
    assert not gone or max(gone) < min(left)
    for part in (first, second):
        assert set(_dropped(part, most)) <= gone
