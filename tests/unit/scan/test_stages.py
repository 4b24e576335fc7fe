"""What each stage of a recording can tell agrees with what router inputs tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from moegeom.core.errors import RecordingError, RouterRuleError
from moegeom.core.router import Rule, Weights
from moegeom.core.tokens import TILE, TopLogits
from moegeom.geometry.boundary import boundary_distance, row_distances
from moegeom.geometry.norm import normed
from moegeom.geometry.selection.route import route
from moegeom.metrics import METRICS, measure_router
from moegeom.scan.products import tile_logits

TOKENS = 2 * TILE + 60


def logits_of(router, values):
    bias = router.affine_bias if router.rule.is_affine else router.logit_bias
    return tile_logits(values, np.ascontiguousarray(router.weight.T), bias)


def columns_of(metric: str) -> list[str]:
    """Columns of ``layers`` that one metric fills, with standard errors."""
    found = METRICS[metric].columns["layers"]
    return [c.name for c in found] + [f"{c.name}_se" for c in found if c.has_se]


def only(row, metrics):
    return {name: row[name] for metric in metrics for name in columns_of(metric)}


@pytest.fixture(params=["softmax", "sigmoid"])
def router(request, made):
    return made.router(request.param)


@pytest.fixture
def values(made):
    return made.inputs(TOKENS)


@pytest.fixture
def full(made, router, values):
    return made.layer(made.source("router_input", made.columns(TOKENS), values), router)


def test_logits_give_the_same_choices_margins_and_coalitions(made, router, values, full):
    source = made.source("logits", made.columns(TOKENS), logits_of(router, values))
    same = ["tokens", "load", "margins", "coalitions"]
    same += ["boundary_distance"] if router.rule.is_affine else []
    np.testing.assert_equal(only(made.layer(source, router), same), only(full, same))


def test_the_inputs_of_the_norm_give_what_its_outputs_give(made, values):
    router = made.router(norm=True)
    after = normed(values, "rms", 1e-6, router.gain)
    expected = made.measured(made.source("router_input", made.columns(TOKENS), after), router)
    found = made.measured(made.source("pre_norm", made.columns(TOKENS), values), router)
    np.testing.assert_equal(found, expected)


def test_ids_give_the_same_load_and_coalitions_and_nothing_about_margins(
    made, router, values, full
):
    chosen = route(logits_of(router, values), router.rule, router.selection_bias).chosen
    source = made.source("ids", made.columns(TOKENS), chosen=chosen)
    run = made.run(source, router)
    measured = measure_router(run)
    found = made.layer(source, router)
    np.testing.assert_equal(only(found, ["load", "coalitions"]), only(full, ["load", "coalitions"]))
    absent = only(found, ["margins", "boundary_distance", "bf16_switch", "ambiguity"])
    np.testing.assert_equal(absent, dict.fromkeys(absent))
    reasons = measured.facts["reasons"]
    assert {"margins", "boundary_distance", "bf16_switch", "ambiguity"} <= set(reasons)
    assert "expert ids only" in reasons["margins"]


def test_the_largest_logits_give_the_same_load_and_margins(made, values):
    router = made.router()
    full = made.layer(made.source("router_input", made.columns(TOKENS), values), router)
    logits = logits_of(router, values)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5].astype(np.int32)
    top = TopLogits(np.take_along_axis(logits, order, axis=1), order)
    source = made.source("top_logits", made.columns(TOKENS), top)
    same = ["tokens", "load", "margins", "coalitions"]
    np.testing.assert_equal(only(made.layer(source, router), same), only(full, same))
    reasons = measure_router(made.run(source, router)).facts["reasons"]
    assert "the largest ones" in reasons["boundary_distance"]


def test_too_few_logits_are_refused(made, values):
    router = made.router()
    top = TopLogits(values[:, :3], np.tile(np.arange(3, dtype=np.int32), (TOKENS, 1)))
    with pytest.raises(RecordingError, match="Record at least 4"):
        made.measured(made.source("top_logits", made.columns(TOKENS), top), router)


def test_the_largest_logits_do_not_decide_a_rule_with_groups(made, values):
    top = TopLogits(values[:, :5], np.tile(np.arange(5, dtype=np.int32), (TOKENS, 1)))
    with pytest.raises(RecordingError, match="do not decide"):
        made.measured(made.source("top_logits", made.columns(TOKENS), top), made.router("sigmoid"))


def test_ids_beyond_the_experts_are_refused_by_token(made):
    chosen = np.tile(np.arange(3, dtype=np.int32), (TOKENS, 1))
    chosen[TILE + 5, 1] = 12
    with pytest.raises(RecordingError, match=f"token {TILE + 5} .* expert 12"):
        made.measured(made.source("ids", made.columns(TOKENS), chosen=chosen))


def test_an_expert_named_twice_is_refused_by_token(made):
    chosen = np.tile(np.arange(3, dtype=np.int32), (TOKENS, 1))
    chosen[TILE + 7] = 0
    with pytest.raises(RecordingError, match=f"token {TILE + 7} .* twice"):
        made.measured(made.source("ids", made.columns(TOKENS), chosen=chosen))


def test_a_recording_of_another_width_is_refused(made):
    source = made.source("router_input", made.columns(TOKENS), np.zeros((TOKENS, 9), np.float32))
    with pytest.raises(RecordingError, match="9 values a token"):
        made.measured(source)


def test_a_router_that_is_not_finite_is_refused(made):
    router = made.router()
    router.weight[4, 1] = np.inf
    with pytest.raises(RouterRuleError, match="expert 4"):
        made.measured(made.recording(TOKENS), router)


def test_the_file_of_tokens_is_the_reference_route_and_adds_up_to_the_counts(
    made, router, values, tmp_path
):
    source = made.source("router_input", made.columns(TOKENS), values)
    path = tmp_path / "tokens.parquet"
    tables = made.measured(source, router, per_token=path, num_workers=2)
    np.testing.assert_equal(tables, made.measured(source, router))
    rows = pq.read_table(path)
    logits = logits_of(router, values)
    expected = route(logits, router.rule, router.selection_bias)
    chosen = np.array(rows["chosen"].to_pylist())
    np.testing.assert_array_equal(rows["token"], np.arange(TOKENS))
    np.testing.assert_array_equal(chosen, expected.chosen)
    np.testing.assert_allclose(rows["weights"].to_pylist(), expected.weights, rtol=1e-6)
    np.testing.assert_allclose(rows["margin"], expected.margin, rtol=1e-12, atol=1e-15)
    if router.rule.is_affine:
        nearest = boundary_distance(logits, expected.chosen, row_distances(router.weight))
        np.testing.assert_allclose(rows["boundary_distance"], nearest.distance, rtol=1e-13)
        np.testing.assert_array_equal(rows["expert_out"], nearest.pair[:, 0])
        np.testing.assert_array_equal(rows["expert_in"], nearest.pair[:, 1])
    else:
        np.testing.assert_array_equal(rows["boundary_distance"].null_count, TOKENS)
    slots = [
        row["num_slots"]
        for row in tables["experts"]
        if (row["variant"], row["population"]) == ("as_stored", "all")
    ]
    np.testing.assert_array_equal(np.bincount(chosen.reshape(-1), minlength=12), slots)


def test_weights_do_not_hold_a_bias_that_only_selects(made, values, tmp_path):
    """Added to identity scores it is part of the logits that are compared, not of the weights."""
    bias = np.linspace(-1.0, 1.0, 12).astype(np.float32)
    rule = Rule(3, "identity", Weights("softmax_of_selected_logits"), has_selection_bias=True)
    router = dataclasses.replace(made.router(), rule=rule, selection_bias=bias)
    expected = route(values @ router.weight.T, rule, bias)
    for stage in ("router_input", "logits"):
        given = values if stage == "router_input" else values @ router.weight.T
        path = tmp_path / f"{stage}.parquet"
        made.measured(made.source(stage, made.columns(TOKENS), given), router, per_token=path)
        rows = pq.read_table(path)
        clear = expected.margin > 1e-5
        chosen = np.array(rows["chosen"].to_pylist())[clear]
        np.testing.assert_array_equal(chosen, expected.chosen[clear])
        weights = np.array(rows["weights"].to_pylist())[clear]
        np.testing.assert_allclose(weights, expected.weights[clear], rtol=1e-5)


def test_the_largest_logits_do_not_give_weights(made, values, tmp_path):
    """A softmax over all experts needs all logits: null, not a guess."""
    router = made.router()
    logits = logits_of(router, values)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5].astype(np.int32)
    top = TopLogits(np.take_along_axis(logits, order, axis=1), order)
    path = tmp_path / "tokens.parquet"
    made.measured(made.source("top_logits", made.columns(TOKENS), top), router, per_token=path)
    for column in ("weights", "boundary_distance", "expert_out", "expert_in"):
        np.testing.assert_array_equal(pq.read_table(path)[column].null_count, TOKENS)


def test_recorded_choices_are_compared_with_the_recomputed(made, values):
    router = made.router()
    logits = logits_of(router, values)
    chosen = route(logits, router.rule).chosen[:, ::-1].copy()  # the order does not matter
    wrong = [5, TILE + 1]
    for token in wrong:
        outside = np.setdiff1d(np.arange(12), chosen[token])
        chosen[token, 0] = outside[np.argmin(logits[token, outside])]
    source = made.source("router_input", made.columns(TOKENS), values, chosen)
    row = made.layer(source, router)
    counts = [row[f"num_{what}"] for what in ("reproduced", "near_tie", "not_reproduced")]
    np.testing.assert_array_equal(sum(counts), TOKENS)
    listed = measure_router(made.run(source, router)).facts["disagreements"]
    np.testing.assert_array_equal([token for token, _ in listed], wrong)
    # twin rows tie exactly, and a tie of the wrong token would be called near
    margins = route(logits, router.rule).margin[wrong]
    np.testing.assert_allclose([margin for _, margin in listed], margins, rtol=1e-6)
    np.testing.assert_array_equal(counts[2], (margins > 1e-4).sum())
