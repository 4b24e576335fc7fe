"""Sums of unit vectors: whole numbers, so that no order of summation shows."""

import numpy as np
import pytest
import torch

from moegeom.core.router import Rule
from moegeom.geometry.rows import unit_rows
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions.scores import FIXED_POINT
from moegeom.measure.finish import finish_router
from moegeom.metrics import METRICS
from tests.unit.kernels.batches import batch_of
from tests.unit.scan.routers import SOFTMAX, router_with

REDUCTION = REDUCTIONS["directions"]
ROUTER = router_with(np.eye(4, dtype=np.float32), Rule(1, "softmax", SOFTMAX))


def folded(direction, block):
    accumulator = REDUCTION.start(Extent(2, 4, 1, direction.shape[1]))
    batch = batch_of(len(block), block=np.asarray(block, np.int32), direction=direction)
    accumulator.fold(batch, {})
    return accumulator.state()


@pytest.fixture
def random():
    return np.random.default_rng(9)


@pytest.fixture
def stream(random):
    return unit_rows(random.standard_normal((500, 12))), random.integers(0, NUM_BLOCKS, 500)


def test_directions_are_torchs_unit_rows_but_of_a_zero_row_and_a_bad_one(random):
    values = (random.standard_normal((40, 7)) * random.uniform(1e-30, 1e30, (40, 1))).astype("f4")
    expected = torch.nn.functional.normalize(torch.from_numpy(values).double(), eps=0.0)
    np.testing.assert_allclose(unit_rows(values), expected.numpy(), rtol=1e-14)
    found = unit_rows(np.array([[0.0, 0.0], [3.0, -4.0], [np.nan, 1.0], [np.inf, 1.0]]))
    np.testing.assert_allclose(found[:2], [[0.0, 0.0], [0.6, -0.8]], rtol=1e-15)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.isnan(found[3]) | (found[3] == 0.0), [True, True])


def test_the_sum_of_every_block_is_that_of_its_tokens_and_exact_for_the_largest_batch(stream):
    direction, block = stream
    state = folded(*stream)
    np.testing.assert_array_equal(state["tokens"], np.bincount(block, minlength=NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        own = direction[block == number]
        total = state["sums"][number] / FIXED_POINT
        np.testing.assert_allclose(total, own.sum(axis=0), atol=len(own) / FIXED_POINT)
    # 2^14 tokens that all point one way: every partial sum is a whole number below 2^53.
    tokens = 2**14
    one_way = np.tile([[1.0, -(2.0**-36)]], (tokens, 1))
    state = folded(one_way, np.full(tokens, 5))
    assert state["sums"].dtype == np.int64
    assert state["sums"][5].tolist() == [tokens * 2**36, -tokens]
    np.testing.assert_array_less(np.abs(state["sums"]).max(), 2**53)


def resultant(direction, block):
    state = folded(direction, block)
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


def test_the_error_is_the_jackknife_over_blocks_and_populations_have_no_value(stream):
    direction, block = stream
    found, error, others = resultant(direction, block)
    np.testing.assert_allclose(found, np.linalg.norm(direction.mean(axis=0)), atol=1e-10)
    without = [np.linalg.norm(direction[block != b].mean(axis=0)) for b in range(NUM_BLOCKS)]
    expected = np.sqrt(15.0) * np.std(without)
    np.testing.assert_allclose(error, expected, rtol=1e-6)
    for row in others:
        assert row["mean_resultant_length"] is row["mean_resultant_length_se"] is None
