"""Sums of unit vectors: whole numbers, so that no order of summation shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.geometry.rows import unit_rows
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions.scores import FIXED_POINT
from moegeom.measure.finish import finish_router
from moegeom.metrics import METRICS

REDUCTION = REDUCTIONS["directions"]
ROUTER = Router(
    name="text/0",
    stack="text",
    layer=0,
    weight=np.eye(4, dtype=np.float32),
    rule=Rule(1, "softmax", Weights("scores")),
    provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F32"),
)


def folded(*parts, hidden):
    """State after folding (direction, block) batches one after the other."""
    accumulator = REDUCTION.start(Extent(2, 4, 1, hidden))
    for direction, block in parts:
        tokens = len(block)
        accumulator.fold(
            TokenBatch(
                token=np.arange(tokens),
                population=np.zeros(tokens, np.int32),
                block=np.asarray(block, np.int32),
                chosen=np.zeros((tokens, 1), np.int32),
                direction=direction,
            ),
            {},
        )
    return accumulator.state()


@pytest.fixture
def random():
    return np.random.default_rng(9)


@pytest.fixture
def stream(random):
    return unit_rows(random.standard_normal((500, 12))), random.integers(0, NUM_BLOCKS, 500)


def test_directions_are_torchs_unit_rows(random):
    values = (random.standard_normal((40, 7)) * random.uniform(1e-30, 1e30, (40, 1))).astype("f4")
    expected = torch.nn.functional.normalize(torch.from_numpy(values).double(), eps=0.0)
    np.testing.assert_allclose(unit_rows(values), expected.numpy(), rtol=1e-14)


def test_a_zero_row_has_no_direction_and_a_bad_row_no_length():
    found = unit_rows(np.array([[0.0, 0.0], [3.0, -4.0], [np.nan, 1.0], [np.inf, 1.0]]))
    np.testing.assert_allclose(found[:2], [[0.0, 0.0], [0.6, -0.8]], rtol=1e-15)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.isnan(found[3]) | (found[3] == 0.0), [True, True])


def test_the_sum_of_every_block_is_that_of_its_tokens(stream):
    direction, block = stream
    state = folded(stream, hidden=12)
    np.testing.assert_array_equal(state["tokens"], np.bincount(block, minlength=NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        own = direction[block == number]
        found = state["sums"][number] / FIXED_POINT
        np.testing.assert_allclose(found, own.sum(axis=0), atol=len(own) / FIXED_POINT)


def test_the_largest_batch_is_summed_exactly():
    """2^14 tokens that all point one way: every partial sum is a whole number below 2^53."""
    tokens = 2**14
    one_way = np.tile([[1.0, -(2.0**-36)]], (tokens, 1))
    state = folded((one_way, np.full(tokens, 5)), hidden=2)
    assert state["sums"].dtype == np.int64
    assert state["sums"][5].tolist() == [tokens * 2**36, -tokens]
    np.testing.assert_array_less(np.abs(state["sums"]).max(), 2**53)


def test_cuts_and_order_change_no_bit(stream, random):
    direction, block = stream
    whole = folded(stream, hidden=12)
    order = random.permutation(500)
    np.testing.assert_equal(folded((direction[order], block[order]), hidden=12), whole)
    cut = [(direction[a:b], block[a:b]) for a, b in ((0, 1), (1, 300), (300, 300), (300, 500))]
    np.testing.assert_equal(folded(*cut, hidden=12), whole)
    states = [folded(part, hidden=12) for part in cut]
    merged = REDUCTION.merge(REDUCTION.merge(states[3], states[1]), REDUCTION.merge(*states[:3:2]))
    np.testing.assert_equal(merged, whole)


def test_leaving_out_a_block_leaves_out_its_tokens(stream):
    direction, block = stream
    state = folded(stream, hidden=12)
    for left_out in (None, 3):
        kept = block != left_out if left_out is not None else np.ones(500, dtype=bool)
        total, tokens = REDUCTION.select(state, None, left_out)
        assert tokens == kept.sum()
        np.testing.assert_allclose(total, direction[kept].sum(axis=0), atol=500 / FIXED_POINT)


def test_one_population_gives_no_token(stream):
    total, tokens = REDUCTION.select(folded(stream, hidden=12), 1, None)
    assert tokens == 0
    np.testing.assert_array_equal(total, np.zeros(12))


def test_no_token_gives_no_sum():
    total, tokens = REDUCTION.select(folded(hidden=3), None, None)
    assert tokens == 0
    np.testing.assert_array_equal(total, np.zeros(3))


def resultant(direction, block):
    """mean_resultant_length and its error as the metric gives them."""
    hidden = direction.shape[1]
    state = folded((direction, block), hidden=hidden)
    counts = np.zeros((2, NUM_BLOCKS, 2), np.int64)
    counts[0, :, 0] = np.bincount(block, minlength=NUM_BLOCKS)
    states = {"directions": state, "token_counts": {"counts": counts}}
    rows = finish_router(ROUTER, states, ("a", "b"), [METRICS["directions"]], {}).rows["layers"]
    return rows[0]["mean_resultant_length"], rows[0]["mean_resultant_length_se"], rows[1:]


def test_inputs_that_point_one_way_have_length_one():
    found, error, _ = resultant(np.tile([[0.6, 0.8]], (64, 1)), np.arange(64) % 16)
    np.testing.assert_allclose([found, error], [1.0, 0.0], atol=1e-10)


def test_inputs_that_cancel_have_length_zero():
    found, _, _ = resultant(np.array([[1.0, 0.0], [-1.0, 0.0]] * 8), np.arange(16))
    np.testing.assert_allclose(found, 0.0, atol=1e-15)


def test_independent_inputs_have_the_length_that_chance_gives(random):
    """E|mean|^2 = 1 / T for independent directions."""
    direction = unit_rows(random.standard_normal((4096, 64)))
    found, _, _ = resultant(direction, np.arange(4096) % NUM_BLOCKS)
    np.testing.assert_allclose(found, 1 / np.sqrt(4096), rtol=0.3)


def test_the_error_is_the_jackknife_over_blocks_and_populations_have_no_value(stream):
    direction, block = stream
    found, error, others = resultant(direction, block)
    np.testing.assert_allclose(found, np.linalg.norm(direction.mean(axis=0)), atol=1e-10)
    without = [np.linalg.norm(direction[block != b].mean(axis=0)) for b in range(NUM_BLOCKS)]
    expected = np.sqrt(15.0) * np.std(without)
    np.testing.assert_allclose(error, expected, rtol=1e-6)
    for row in others:
        np.testing.assert_equal(row["mean_resultant_length"], None)
        np.testing.assert_equal(row["mean_resultant_length_se"], None)
