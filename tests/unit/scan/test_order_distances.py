"""Distances to ties of three and four experts: which tokens, the same however the work is cut."""

import dataclasses

import numpy as np
import pytest

from moegeom.core.router import Rule
from moegeom.core.tokens import TILE, TopLogits
from moegeom.engine.batch import LazyBatch, tokens_of_tile
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.request import ComputeOptions
from moegeom.engine.task import Task
from moegeom.geometry.boundary.orders import (
    free_logit_distance,
    logit_distance,
    order_distance,
    row_coordinates,
)
from moegeom.kernels.batch import ORDERS
from moegeom.kernels.table import load_kernels
from moegeom.metrics import METRICS, metrics_of_scan
from tests.unit.scan import made
from tests.unit.scan.made import SUM_TO_ONE

COLUMNS = [column.name for column in METRICS["order_distance"].columns["layers"]]
ONLY = {"metrics": [METRICS[name] for name in ("tokens", "order_distance")]}
ROUTER = made.router()

#: The last tile is short.
TOKENS = 2 * TILE + 100


def batch_of(source, router=ROUTER, start=0, stop=None, **changes) -> LazyBatch:
    task = Task(prepare(router), source, load_kernels("cpu"), **changes)
    return LazyBatch(task, start, len(source.values) if stop is None else stop)


def brackets(batch) -> dict[int, tuple]:
    """Brackets by number of the token that was looked at."""
    of_sample = batch.order_distance
    ends = zip(of_sample.lower.tolist(), of_sample.upper.tolist(), strict=True)
    return dict(zip(batch.token[of_sample.row].tolist(), ends, strict=True))


@pytest.fixture(scope="module")
def whole():
    """All tokens at once: brackets of those that were drawn, and the logits of all."""
    source = made.recording(TOKENS)
    logits = source.values.astype(np.float64) @ ROUTER.weight.T.astype(np.float64)
    return brackets(batch_of(source)), logits


def test_brackets_are_those_of_the_tokens_that_were_drawn_from_every_tile(whole):
    drawn, logits = whole
    tiles, counts = np.unique(np.array(list(drawn)) // TILE, return_counts=True)
    np.testing.assert_array_equal(tiles, np.arange(3))
    np.testing.assert_array_equal(counts, tokens_of_tile(12, TOKENS))
    rows = row_coordinates(ROUTER.weight)
    assert list(drawn) == sorted(drawn)
    for token in list(drawn)[::7]:
        for column, order in enumerate(ORDERS):
            expected = order_distance(logits[token], rows, ROUTER.rule.top_k, order)
            lower, upper = drawn[token]
            # logits of a scan are float32
            np.testing.assert_allclose(upper[column], expected.upper, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(lower[column], expected.lower, rtol=1e-3, atol=1e-5)


def test_a_sample_shrinks_with_experts_and_without_ties_distances_are_infinite():
    shapes = {(12, 4 * TILE): 16, (64, 10**9): 16, (256, 10**9): 4, (4096, 10**9): 2, (64, 5): 64}
    assert {shape: tokens_of_tile(*shape) for shape in shapes} == shapes
    source = made.recording(200)
    every = made.layer(source, of_few_experts(6, 6), **ONLY)
    np.testing.assert_array_equal([every[name] for name in COLUMNS[:2]], np.inf)
    three = made.layer(source, of_few_experts(3, 1), **ONLY)
    assert three["order_2_distance_rms_p50_upper"] < np.inf
    assert three["order_3_distance_rms_p50_lower"] == np.inf
    assert three["order_3_distance_exact_share"] == 1.0


@pytest.fixture(scope="module")
def tables():
    return made.measured(made.recording(TOKENS), ROUTER, **ONLY)


def test_any_batch_and_pace_give_the_same_brackets(whole, tables):
    source, parts = made.recording(TOKENS), {}
    for start in range(0, TOKENS, TILE):
        parts |= brackets(batch_of(source, start=start, stop=min(start + TILE, TOKENS)))
    np.testing.assert_equal(parts, whole[0])
    other = made.layer(source, **ONLY, batch_tokens=10**9, num_workers=2)
    np.testing.assert_equal(made.row_of(tables["layers"]), other)


def test_other_tokens_are_looked_at_for_another_seed_and_none_that_is_left_out(whole):
    source, drawn = made.recording(TOKENS), whole[0]
    assert brackets(batch_of(source, stop=TILE, options=ComputeOptions(seed=1))).keys() - drawn
    source.values[list(drawn)] = np.nan
    tokens = np.array(
        list(brackets(batch_of(source, stop=TILE, options=ComputeOptions(exclude_first=40))))
    )
    assert len(tokens) == tokens_of_tile(12, TOKENS)
    assert (tokens % 97 >= 40).all()
    assert not set(tokens.tolist()) & drawn.keys()


def test_columns_are_medians_and_shares_over_the_tokens_looked_at(whole, tables):
    drawn = whole[0]
    layer = made.row_of(tables["layers"])
    assert layer["num_order_distance_tokens"] == len(drawn)
    ends = np.array(list(drawn.values()))  # by token, end, order
    for column, order in enumerate(ORDERS):
        lower, upper = ends[:, :, column].T
        for end, values in (("lower", lower), ("upper", upper)):
            median = np.sort(values)[(len(drawn) - 1) // 2]
            name = f"order_{order}_distance_rms_p50_{end}"
            np.testing.assert_allclose(layer[name], median / np.sqrt(8))
        assert layer[f"order_{order}_distance_exact_share"] == (lower == upper).mean()
    ladder = [row for row in tables["order_ladder"] if row["population"] == "all"]
    assert [row["width"] for row in ladder[:2]] == [2.0**-12, 2.0**-11]
    for row in ladder:
        lower, upper = ends[:, :, ORDERS.index(row["order"])].T
        assert row["share_lower"] == (upper < row["width"]).mean()
        assert row["share_upper"] == (lower < row["width"]).mean()
    assert ladder[-1]["share_lower"] == 1.0
    # a random router is not searched
    random = made.row_of(tables["layers"], "random")
    assert {random[name] for name in COLUMNS} == {None}


def of_few_experts(experts: int, k: int):
    rule = Rule(k, "softmax", SUM_TO_ONE)
    return dataclasses.replace(ROUTER, weight=ROUTER.weight[:experts], rule=rule)


def test_dependent_rows_move_logits_further_than_half_the_margin():
    # rows on a plane: inputs move twelve logits along two directions
    weight = np.where(np.arange(8) < 2, ROUTER.weight, np.float32(0.0))
    router, source = dataclasses.replace(ROUTER, weight=weight), made.recording(3)
    batch = batch_of(source, router)
    logits = batch.logits[batch.order_distance.row[:8]].astype(np.float64)
    half = free_logit_distance(logits, 3, 1)
    logits, half = logits[half > 0.0], half[half > 0.0]
    away = [logit_distance(one, weight, 3, 1).upper for one in logits]
    expected = np.sort(np.array(away) / half)[(len(half) - 1) // 2]
    stretch = made.layer(source, router, **ONLY)["logit_stretch_p50"]
    np.testing.assert_allclose(stretch, expected, 1e-6)
    assert expected > 1.1
    # six rows of eight numbers are independent
    assert made.layer(source, of_few_experts(6, 2), **ONLY)["logit_stretch_p50"] is None


def test_logits_serve_as_well_as_inputs_and_without_them_or_in_groups_it_is_null():
    inputs = made.recording(TILE)
    logits = made.Recorded(inputs.values @ ROUTER.weight.T, "logits")
    ours, theirs = (made.layer(source, ROUTER, **ONLY) for source in (inputs, logits))
    figures = [[of[name] for name in COLUMNS] for of in (ours, theirs)]
    np.testing.assert_allclose(*figures, rtol=1e-4)
    source, grouped = made.recording(TILE), made.router("sigmoid")
    assert "straight" in unavailable(grouped, source.facts)["order_distance"]
    layer = made.layer(source, grouped, **ONLY)
    assert {layer[name] for name in COLUMNS} == {None}
    top = TopLogits(np.zeros((TILE, 5), np.float32), np.zeros((TILE, 5), np.int32))
    for stage, values, reason in (
        ("top_logits", top, "needs all logits"),
        ("ids", np.zeros((TILE, 3), np.int32), "needs logits"),
    ):
        facts = made.source(stage, source.columns, values).facts
        assert reason in unavailable(ROUTER, facts)["order_distance"]
    for compares in (False, True):
        names = {metric.name for metric in metrics_of_scan(compares=compares)}
        assert ("order_distance" in names) == compares
