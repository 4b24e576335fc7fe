"""What each stage of a recording can tell agrees with what router inputs tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from moegeom.core.errors import RecordingError, RouterRuleError
from moegeom.core.router import Rule, Weights
from moegeom.core.tokens import TILE, TopLogits
from moegeom.engine.products import tile_logits
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS

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


def test_logits_give_the_same_choices_margins_and_expert_sets(made, router, values, full):
    source = made.source("logits", made.columns(TOKENS), logits_of(router, values))
    same = ["tokens", "load", "margins", "expert_sets"]
    same += ["boundary_distance"] if router.rule.is_affine else []
    np.testing.assert_equal(only(made.layer(source, router), same), only(full, same))


def test_the_inputs_of_the_norm_give_what_its_outputs_give(made, values):
    router = made.router(norm=True)
    after = normed(values, "rms", 1e-6, router.gain)
    expected = made.measured(made.source("router_input", made.columns(TOKENS), after), router)
    found = made.measured(made.source("pre_norm", made.columns(TOKENS), values), router)
    np.testing.assert_equal(found, expected)


def test_ids_give_the_same_load_and_expert_sets_and_nothing_about_margins(
    made, router, values, full
):
    chosen = route(logits_of(router, values), router.rule, router.selection_bias).chosen
    source = made.source("ids", made.columns(TOKENS), chosen=chosen)
    run = made.run(source, router)
    measured = measure_router(run)
    found = made.layer(source, router)
    np.testing.assert_equal(
        only(found, ["load", "expert_sets"]), only(full, ["load", "expert_sets"])
    )
    absent = only(found, ["margins", "boundary_distance", "bf16_flip", "ambiguity", "exact_ties"])
    np.testing.assert_equal(absent, dict.fromkeys(absent))
    reasons = measured.facts["reasons"]
    assert {"margins", "boundary_distance", "bf16_flip", "ambiguity"} <= set(reasons)
    assert "expert ids only" in reasons["margins"]


def largest(logits, m):
    """The m largest logits of each token, as a recording holds them."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :m].astype(np.int32)
    return TopLogits(np.take_along_axis(logits, order, axis=1), order)


def test_the_largest_logits_give_the_same_load_and_margins(made, values):
    router = made.router()
    full = made.layer(made.source("router_input", made.columns(TOKENS), values), router)
    top = largest(logits_of(router, values), 5)
    source = made.source("top_logits", made.columns(TOKENS), top)
    same = ["tokens", "load", "margins", "expert_sets"]
    np.testing.assert_equal(only(made.layer(source, router), same), only(full, same))
    reasons = measure_router(made.run(source, router)).facts["reasons"]
    assert "the largest ones" in reasons["routing_entropy"]
    assert {"boundary_distance", "boundaries", "distance_bracket"}.isdisjoint(reasons)


def file_of_tokens(made, folder, source, router):
    """What ``--per-token`` writes, from a scan without the costlier metrics."""
    folder = folder / source.facts.stage
    folder.mkdir(exist_ok=True)
    measure_router(
        made.run(
            source,
            router,
            per_token=True,
            folder=folder,
            metrics=[METRICS["tokens"]],
            skip_non_finite=True,
        )
    )
    return pq.read_table(folder / "tokens.parquet")


def brackets_of(made, folder, source, router) -> dict[str, np.ndarray]:
    """Columns about distances from the file of tokens."""
    table = file_of_tokens(made, folder, source, router)
    columns = ("token", "boundary_distance", "boundary_distance_upper", "expert_out", "expert_in")
    return {column: table[column].to_numpy() for column in columns}


@pytest.mark.parametrize("m", [4, 5, 8])
def test_the_largest_logits_bracket_every_distance(made, values, tmp_path, m):
    router = made.router()
    logits = logits_of(router, values)
    columns = made.columns(TOKENS)
    full = brackets_of(made, tmp_path, made.source("logits", columns, logits), router)
    source = made.source("top_logits", columns, largest(logits, m))
    found = brackets_of(made, tmp_path, source, router)
    distance = full["boundary_distance"]
    lower, upper = found["boundary_distance"], found["boundary_distance_upper"]
    np.testing.assert_array_equal(full["boundary_distance_upper"], distance)
    np.testing.assert_array_equal(np.minimum(lower, distance), lower)
    np.testing.assert_array_equal(np.maximum(upper, distance), upper)
    exact = lower == upper
    assert 0 < exact.sum() < TOKENS
    np.testing.assert_array_equal(lower[exact], distance[exact])
    for column in ("expert_out", "expert_in"):
        np.testing.assert_array_equal(found[column][exact], full[column][exact])
        np.testing.assert_array_equal(found[column][~exact], np.full((~exact).sum(), -1))
    layer = made.layer(source, router)
    np.testing.assert_allclose(layer["distance_exact_share"], exact.mean(), rtol=1e-12)
    ratio = (upper / np.where(exact, 1.0, lower))[~exact]
    assert ratio.max() <= layer["distance_bracket_max"] <= 1.0 + 1.0625 * (ratio.max() - 1.0)
    middle = np.median(ratio) - 1.0
    np.testing.assert_allclose(layer["distance_bracket_p50"] - 1.0, middle, rtol=0.08)


def test_all_logits_as_the_largest_ones_give_what_all_logits_give(made, values):
    router = made.router()
    logits = logits_of(router, values)
    columns = made.columns(TOKENS)
    full = made.measured(made.source("logits", columns, logits), router)
    found = made.measured(made.source("top_logits", columns, largest(logits, 12)), router)
    metrics = ["tokens", "load", "margins", "boundary_distance", "distance_bracket", "expert_sets"]
    for one, other in zip(found["layers"], full["layers"], strict=True):
        np.testing.assert_equal(only(one, metrics), only(other, metrics))
        np.testing.assert_equal(one["distance_exact_share"], 1.0)
        np.testing.assert_equal(
            [one["distance_bracket_p50"], one["distance_bracket_max"]], [None, 1.0]
        )
    for table in ("pairs", "margins"):
        np.testing.assert_equal(found[table], full[table])


def test_tokens_that_are_not_finite_leave_the_brackets_of_the_others_alone(made, values, tmp_path):
    router = made.router()
    columns, top = made.columns(TOKENS), largest(logits_of(router, values), 5)
    source = made.source("top_logits", columns, top)
    clean = brackets_of(made, tmp_path, source, router)
    top.logits[7, 2], top.logits[TILE + 1, 0] = np.nan, np.inf
    top.logits[9, 4] = np.finfo(np.float32).min  # nothing is below it
    found = brackets_of(made, tmp_path, source, router)
    kept = np.delete(np.arange(TOKENS), [7, 9, TILE + 1])
    for column, expected in clean.items():
        np.testing.assert_array_equal(found[column], expected[kept])


@pytest.mark.parametrize(("slot", "expert", "words"), [(4, 12, "expert 12"), (1, None, "twice")])
def test_impossible_experts_of_the_largest_logits_are_refused_by_token(
    made, values, slot, expert, words
):
    top = largest(logits_of(made.router(), values), 5)
    top.expert[TILE + 5, slot] = top.expert[TILE + 5, 0] if expert is None else expert
    with pytest.raises(RecordingError, match=f"token {TILE + 5} .*{words}"):
        made.measured(made.source("top_logits", made.columns(TOKENS), top))


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
    tables = made.measured(source, router, per_token=True, folder=tmp_path, num_workers=2)
    np.testing.assert_equal(tables, made.measured(source, router))
    rows = pq.read_table(tmp_path / "tokens.parquet")
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
        curved = curved_rows(router.weight, router.rule, None, router.selection_bias)
        lower, upper, pair = curved_distance(logits, expected.chosen, curved)
        np.testing.assert_allclose(rows["boundary_distance"], lower, rtol=1e-6)
        np.testing.assert_allclose(rows["boundary_distance_upper"], upper, rtol=3e-6)
        np.testing.assert_array_equal(rows["expert_out"], pair[:, 0])
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
        source = made.source(stage, made.columns(TOKENS), given)
        made.measured(source, router, per_token=True, folder=tmp_path)
        rows = pq.read_table(tmp_path / "tokens.parquet")
        clear = expected.margin > 1e-5
        chosen = np.array(rows["chosen"].to_pylist())[clear]
        np.testing.assert_array_equal(chosen, expected.chosen[clear])
        weights = np.array(rows["weights"].to_pylist())[clear]
        np.testing.assert_allclose(weights, expected.weights[clear], rtol=1e-5)


#: Routing weights, the score they are of, and whether the largest logits decide them.
WEIGHTS = [
    (Weights("scores", True), "softmax", True),
    (Weights("scores", True, 1e-20, 2.5), "softmax", True),
    (Weights("scores", True, floor=6e-5), "softmax", True),
    (Weights("scores", True, power=2.0), "softmax", True),
    (Weights("softmax_of_selected_logits"), "identity", True),
    (Weights("sigmoid_of_selected_logits"), "identity", True),
    (Weights("scores"), "sigmoid", True),
    (Weights("scores", True, 1e-6), "sigmoid", True),
    (Weights("scores"), "softmax", False),
    (Weights("scores", True, 0.25), "softmax", False),
    (Weights("scores", True, floor=0.5), "softmax", False),
    (Weights("sparsemixer", jitter=0.1), "softmax", False),
]


@pytest.mark.parametrize(("weights", "score", "decided"), WEIGHTS)
def test_the_largest_logits_give_weights_where_they_decide_them(
    made, values, tmp_path, weights, score, decided
):
    """Null, not a guess, where a sum over all experts counts."""
    router = dataclasses.replace(made.router(), rule=Rule(3, score, weights))
    logits = logits_of(router, values)
    columns = made.columns(TOKENS)
    sources = {"logits": logits, "top_logits": largest(logits, 5)}
    found = {
        stage: file_of_tokens(made, tmp_path, made.source(stage, columns, given), router)["weights"]
        for stage, given in sources.items()
    }
    if decided:
        expected = np.array(found["logits"].to_pylist())
        np.testing.assert_allclose(np.array(found["top_logits"].to_pylist()), expected, rtol=2e-7)
    else:
        np.testing.assert_equal([found[stage].null_count for stage in sources], [0, TOKENS])


def test_logits_do_not_give_weights_that_count_shared_experts(made, values, tmp_path):
    """The logits of experts that always run are not among those of a recording."""
    router = dataclasses.replace(made.router(), shared_rows=np.ones((1, 8), np.float32))
    logits = logits_of(router, values)
    for stage, given in {"logits": logits, "top_logits": largest(logits, 5)}.items():
        source = made.source(stage, made.columns(TOKENS), given)
        table = file_of_tokens(made, tmp_path, source, router)
        np.testing.assert_equal(table["weights"].null_count, TOKENS)


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
    # duplicate rows tie exactly, and a tie of the wrong token would be called near
    margins = route(logits, router.rule).margin[wrong]
    np.testing.assert_allclose([margin for _, margin in listed], margins, rtol=1e-6)
    np.testing.assert_array_equal(counts[2], (margins > 1e-4).sum())
