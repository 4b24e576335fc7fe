"""Distances to ties of three and four experts: which tokens, the same however the work is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.router import Rule, Weights
from moegeom.core.tokens import TILE, TopLogits
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.sampled import tokens_of_tile
from moegeom.engine.task import Task
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.boundary.order_distance import order_distance, row_coordinates
from moegeom.geometry.boundary.orders import free_logit_distance, logit_distance
from moegeom.geometry.selection import top_k
from moegeom.kernels.batch import ORDERS
from moegeom.kernels.table import load_kernels
from moegeom.metrics import METRICS

COLUMNS = [column.name for column in METRICS["order_distance"].columns["layers"]]
ONLY = [METRICS[name] for name in ("tokens", "order_distance")]


def task_of(source, router, **changes) -> Task:
    return Task(prepare(router), source, load_kernels("cpu"), **changes)


def looked_at(batch) -> dict[int, tuple]:
    """Brackets by number of the token."""
    found = batch.order_distance
    ends = zip(found.lower.tolist(), found.upper.tolist(), strict=True)
    return dict(zip(batch.token[found.row].tolist(), ends, strict=True))


@pytest.fixture(scope="module")
def whole(made):
    """All tokens at once, with the router and the logits."""
    router, source = made.router(), made.recording()
    found = looked_at(LazyBatch(task_of(source, router), 0, len(source.values)))
    logits = source.values.astype(np.float64) @ router.weight.T.astype(np.float64)
    return router, logits, found


def test_brackets_are_those_of_the_tokens_that_were_drawn(whole):
    router, logits, found = whole
    rows = row_coordinates(router.weight)
    tokens = list(found)
    np.testing.assert_array_equal(tokens, sorted(tokens))
    for token in tokens[::5]:
        for column, order in enumerate(ORDERS):
            expected = order_distance(logits[token], rows, router.rule.top_k, order)
            lower, upper = found[token]
            # logits of a scan are float32
            np.testing.assert_allclose(upper[column], expected.upper, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(lower[column], expected.lower, rtol=1e-3, atol=1e-5)


def test_a_higher_order_is_not_nearer_and_order_1_is_the_boundary(whole):
    router, logits, found = whole
    tokens = np.array(list(found))
    picked = logits[tokens]
    nearest = boundary_distance(picked, top_k(picked, 3), row_distances(router.weight)).distance
    first = [order_distance(of, row_coordinates(router.weight), 3, 1) for of in picked[:12]]
    np.testing.assert_allclose([bracket.upper for bracket in first], nearest[:12], rtol=1e-7)
    second, third = np.array([found[token][1] for token in tokens]).T
    assert (nearest <= second * (1.0 + 1e-4)).all()
    assert (second <= third * (1.0 + 1e-7)).all()


def test_every_tile_gives_its_share_of_tokens(whole):
    tiles, counts = np.unique(np.array(list(whole[2])) // TILE, return_counts=True)
    np.testing.assert_array_equal(tiles, np.arange(5))
    np.testing.assert_array_equal(counts, tokens_of_tile(12, 4 * TILE + 100))


@pytest.mark.parametrize(
    ("experts", "tokens", "expected"),
    [(12, 4 * TILE, 16), (64, 10**9, 16), (256, 10**9, 4), (4096, 10**9, 2), (64, 5, 64)],
)
def test_a_sample_is_the_smaller_the_more_experts(experts, tokens, expected):
    np.testing.assert_array_equal(tokens_of_tile(experts, tokens), expected)


def test_any_batch_gives_the_same_brackets(made, whole):
    router, _, found = whole
    source = made.recording()
    parts = {}
    for start in range(0, len(source.values), TILE):
        stop = min(start + TILE, len(source.values))
        parts |= looked_at(LazyBatch(task_of(source, router), start, stop))
    np.testing.assert_equal(parts, found)


@pytest.mark.parametrize("pace", [{"batch_tokens": 10**9, "num_workers": 2}, {"num_workers": 3}])
def test_any_pace_gives_the_same_columns(made, pace):
    expected = made.layer(made.recording(), metrics=ONLY)
    np.testing.assert_equal(made.layer(made.recording(), metrics=ONLY, **pace), expected)
    assert 0.0 < expected["order_2_distance_rms_p50_upper"] < np.inf


def test_another_seed_looks_at_other_tokens(made, whole):
    router, _, found = whole
    other = looked_at(LazyBatch(task_of(made.recording(), router, seed=1), 0, TILE))
    assert set(other) - set(found)


def test_tokens_that_are_left_out_are_not_looked_at(made, whole):
    source, router = made.recording(), whole[0]
    source.values[list(whole[2])] = np.nan
    found = LazyBatch(task_of(source, router, exclude_first=40), 0, TILE)
    tokens = np.array(list(looked_at(found)))
    np.testing.assert_array_equal(len(tokens), 16)
    assert (tokens % 97 >= 40).all()
    assert not set(tokens.tolist()) & set(whole[2])


def test_columns_are_medians_over_the_tokens_looked_at(made, whole):
    router, _, _ = whole
    source = made.recording(2 * TILE)
    found = looked_at(LazyBatch(task_of(source, router), 0, 2 * TILE))
    layer = made.layer(source, router, metrics=ONLY)
    np.testing.assert_array_equal(layer["num_order_distance_tokens"], len(found))
    lower, upper = np.array(list(found.values())).transpose(1, 2, 0)
    for column, order in enumerate(ORDERS):
        name = f"order_{order}_distance"
        for end, values in (("lower", lower), ("upper", upper)):
            median = np.sort(values[column])[(len(found) - 1) // 2]
            np.testing.assert_allclose(layer[f"{name}_rms_p50_{end}"], median / np.sqrt(8))
        share = np.mean(lower[column] == upper[column])
        np.testing.assert_array_equal(layer[f"{name}_exact_share"], share)


def test_the_ladder_holds_shares_of_the_tokens_looked_at(made, whole):
    router = whole[0]
    source = made.recording(2 * TILE)
    found = looked_at(LazyBatch(task_of(source, router), 0, 2 * TILE))
    rows = made.measured(source, router, metrics=ONLY)["order_ladder"]
    rows = [row for row in rows if row["population"] == "all"]
    ends = np.array(list(found.values()))
    assert [row["width"] for row in rows[:2]] == [2.0**-12, 2.0**-11]
    for row in rows:
        lower, upper = ends[:, :, ORDERS.index(row["order"])].T
        assert row["share_lower"] == (upper < row["width"]).mean()
        assert row["share_upper"] == (lower < row["width"]).mean()
    assert rows[-1]["share_lower"] == 1.0


def test_dependent_rows_move_logits_further_than_half_the_margin(made, whole):
    # rows on a plane: inputs move twelve logits along two directions
    weight = np.where(np.arange(8) < 2, whole[0].weight, np.float32(0.0))
    router, source = dataclasses.replace(whole[0], weight=weight), made.recording(TILE)
    found = LazyBatch(task_of(source, router), 0, TILE)
    logits = found.logits[found.order_distance.row[:8]].astype(np.float64)
    half = free_logit_distance(logits, 3, 1)
    logits, half = logits[half > 0.0], half[half > 0.0]
    away = [logit_distance(one, weight, 3, 1).upper for one in logits]
    column = "logit_stretch_p50"
    expected = np.sort(np.array(away) / half)[(len(half) - 1) // 2]
    np.testing.assert_allclose(made.layer(source, router, metrics=ONLY)[column], expected, 1e-6)
    assert expected > 1.1
    # six rows of eight numbers are independent
    assert made.layer(source, affine(made, 6, 2), metrics=ONLY)[column] is None


def affine(made, experts: int, k: int):
    """A router of few experts."""
    whole = made.router()
    return dataclasses.replace(
        whole, weight=whole.weight[:experts], rule=Rule(k, "softmax", Weights("scores", True))
    )


def test_where_no_tie_is_possible_the_distance_is_infinite(made):
    source = made.recording(200)
    every = made.layer(source, affine(made, 6, 6), metrics=ONLY)
    np.testing.assert_array_equal([every[name] for name in COLUMNS[:2]], np.inf)
    three = made.layer(source, affine(made, 3, 1), metrics=ONLY)
    assert three["order_2_distance_rms_p50_upper"] < np.inf
    np.testing.assert_array_equal(three["order_3_distance_rms_p50_lower"], np.inf)
    np.testing.assert_array_equal(three["order_3_distance_exact_share"], 1.0)


def test_logits_that_were_recorded_serve_as_well_as_inputs(made):
    router, inputs = made.router(), made.recording(TILE)
    logits = made.source("logits", inputs.columns, inputs.values @ router.weight.T)
    ours, theirs = (made.layer(source, router, metrics=ONLY) for source in (inputs, logits))
    np.testing.assert_allclose(
        [ours[name] for name in COLUMNS], [theirs[name] for name in COLUMNS], rtol=1e-4
    )


def test_it_is_null_with_a_reason_where_boundaries_are_grouped_or_logits_are_lacking(made):
    source = made.recording(TILE)
    grouped = made.router("sigmoid")
    assert "straight" in unavailable(grouped, source.facts)["order_distance"]
    layer = made.layer(source, grouped, metrics=ONLY)
    np.testing.assert_equal([layer[name] for name in COLUMNS], [None] * len(COLUMNS))
    top = TopLogits(np.zeros((TILE, 5), np.float32), np.zeros((TILE, 5), np.int32))
    ids = np.zeros((TILE, 3), np.int32)
    for stage, values, reason in (
        ("top_logits", top, "needs all logits"),
        ("ids", ids, "needs logits"),
    ):
        facts = made.source(stage, source.columns, values).facts
        assert reason in unavailable(made.router(), facts)["order_distance"]


def test_a_random_router_is_not_searched(made):
    rows = made.measured(made.recording(TILE), metrics=ONLY)["layers"]
    random = next(row for row in rows if row["variant"] == "random")
    np.testing.assert_equal([random[name] for name in COLUMNS], [None] * len(COLUMNS))


def test_it_is_measured_where_something_is_compared_and_nowhere_else():
    from moegeom.metrics import metrics_of_scan

    without, asked = ({m.name for m in metrics_of_scan(compares=is_so)} for is_so in (False, True))
    assert "order_distance" not in without
    assert "order_distance" in asked
