"""What each stage of a recording can tell agrees with what router inputs tell, where it is believed."""

import dataclasses
from collections import Counter

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.special import expit, softmax

from moegeom.core.errors import RecordingError, RouterRuleError
from moegeom.core.router import Rule, Weights
from moegeom.core.tokens import TILE, TopLogits
from moegeom.engine.choice import tile_logits
from moegeom.engine.prepared import prepare
from moegeom.engine.trust import examine
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance
from moegeom.kernels.table import load_kernels
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from tests.unit.scan import made

TOKENS = 2 * TILE + 60
COLUMNS = made.columns(TOKENS)
VALUES = made.inputs(TOKENS)
INPUTS = made.Recorded(VALUES)

#: Metrics of choices, and of how near they are.
CHOICES = ("tokens", "load", "margins", "expert_sets")


def logits_of(router):
    bias = router.affine_bias if router.rule.is_affine else router.logit_bias
    return tile_logits(VALUES, np.ascontiguousarray(router.weight.T), bias)


def of_logits(router):
    return made.source("logits", COLUMNS, logits_of(router))


def largest(logits, m=5):
    """A recording of the m largest logits of each token."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :m].astype(np.int32)
    return of_largest(TopLogits(np.take_along_axis(logits, order, axis=1), order))


def of_largest(top):
    return made.source("top_logits", COLUMNS, top)


def only(row, metrics):
    """Columns of ``layers`` that some metrics fill, with standard errors."""
    columns = [c for name in metrics for c in METRICS[name].columns["layers"]]
    names = [c.name for c in columns] + [f"{c.name}_se" for c in columns if c.has_se]
    return {name: row[name] for name in names}


def figures(source, router, names):
    return only(made.layer(source, router, metrics=[METRICS[name] for name in names]), names)


@pytest.fixture(params=["softmax", "sigmoid"])
def router(request):
    return made.router(request.param)


def test_logits_give_the_same_choices_margins_and_expert_sets(router):
    same = (*CHOICES, *(["boundary_distance"] if router.rule.is_affine else []))
    np.testing.assert_equal(figures(of_logits(router), router, same), figures(INPUTS, router, same))


def test_inputs_of_the_norm_and_the_largest_logits_tell_what_inputs_tell():
    router = made.router(norm=True)
    after = made.Recorded(normed(VALUES, "rms", 1e-6, router.gain))
    expected = made.measured(after, router)
    np.testing.assert_equal(
        made.measured(made.source("pre_norm", COLUMNS, VALUES), router), expected
    )
    router = made.router()
    top = largest(logits_of(router))
    np.testing.assert_equal(figures(top, router, CHOICES), figures(INPUTS, router, CHOICES))
    reasons = measure_router(made.run(top, router)).facts["reasons"]
    assert "the largest ones" in reasons["routing_entropy"]
    assert {"boundary_distance", "boundaries", "distance_bracket"}.isdisjoint(reasons)


def test_ids_give_the_same_load_and_expert_sets_and_nothing_about_margins(router):
    chosen = route(logits_of(router), router.rule, router.selection_bias).chosen
    ids = made.source("ids", COLUMNS, chosen=chosen)
    measured = measure_router(made.run(ids, router))
    row = made.row_of(made.tables(measured)["layers"])
    same = ("load", "expert_sets")
    np.testing.assert_equal(only(row, same), figures(INPUTS, router, same))
    absent = ("margins", "boundary_distance", "bf16_flip", "ambiguity")
    assert set(only(row, absent).values()) == {None}
    reasons = measured.facts["reasons"]
    assert set(absent[:4]) <= set(reasons)
    assert "expert ids only" in reasons["margins"]


def file_of_tokens(folder, source, router, **options):
    """What ``--per-token`` writes, from a scan without the costlier metrics."""
    few = {"metrics": [METRICS["tokens"]], "non_finite": "skip"}
    measure_router(made.run(source, router, per_token=True, folder=folder, **(few | options)))
    return pq.read_table(folder / "tokens.parquet")


def array_of(column) -> np.ndarray:
    return np.array(column.to_pylist())


def brackets_of(folder, source, router) -> dict[str, np.ndarray]:
    """Columns about distances from the file of tokens."""
    table = file_of_tokens(folder, source, router)
    names = ("token", "boundary_distance", "boundary_distance_upper", "expert_out", "expert_in")
    return {name: table[name].to_numpy() for name in names}


@pytest.mark.parametrize("m", [4, 5, 8])
def test_the_largest_logits_bracket_every_distance(tmp_path, m):
    router = made.router()
    full = brackets_of(tmp_path, of_logits(router), router)
    top = largest(logits_of(router), m)
    columns = brackets_of(tmp_path, top, router)
    distance = full["boundary_distance"]
    lower, upper = columns["boundary_distance"], columns["boundary_distance_upper"]
    np.testing.assert_array_equal(full["boundary_distance_upper"], distance)
    assert (lower <= distance).all() and (distance <= upper).all()
    exact = lower == upper
    assert 0 < exact.sum() < TOKENS
    for name in ("expert_out", "expert_in"):
        np.testing.assert_array_equal(columns[name][exact], full[name][exact])
        assert (columns[name][~exact] == -1).all()
    layer = figures(top, router, ["distance_bracket"])
    np.testing.assert_allclose(layer["distance_exact_share"], exact.mean(), rtol=1e-12)
    ratio = (upper / np.where(exact, 1.0, lower))[~exact]
    assert ratio.max() <= layer["distance_bracket_max"] <= 1.0 + 1.0625 * (ratio.max() - 1.0)
    middle = np.median(ratio) - 1.0
    np.testing.assert_allclose(layer["distance_bracket_p50"] - 1.0, middle, rtol=0.08)


def test_all_logits_as_the_largest_ones_give_what_all_logits_give():
    router, names = made.router(), (*CHOICES, "boundary_distance", "distance_bracket")
    metrics = {"metrics": [METRICS[name] for name in (*names, "boundaries")]}
    full = made.measured(of_logits(router), router, **metrics)
    tables = made.measured(largest(logits_of(router), 12), router, **metrics)
    for row, other in zip(tables["layers"], full["layers"], strict=True):
        np.testing.assert_equal(only(row, names), only(other, names))
        bracket = [
            row[f"distance_{name}"] for name in ("exact_share", "bracket_p50", "bracket_max")
        ]
        assert bracket == [1.0, None, 1.0]
    for table in ("pairs", "margins"):
        np.testing.assert_equal(tables[table], full[table])


def test_tokens_that_are_not_finite_leave_the_brackets_of_the_others_alone(tmp_path):
    router = made.router()
    source = largest(logits_of(router))
    clean, top = brackets_of(tmp_path, source, router), source.values
    top.logits[7, 2], top.logits[TILE + 1, 0] = np.nan, np.inf
    top.logits[9, 4] = np.finfo(np.float32).min  # nothing is below it
    columns = brackets_of(tmp_path, source, router)
    others = np.delete(np.arange(TOKENS), [7, 9, TILE + 1])
    for name, expected in clean.items():
        np.testing.assert_array_equal(columns[name], expected[others])


EXPERTS = np.tile(np.arange(5, dtype=np.int32), (TOKENS, 1))


def wrong(at, expert):
    experts = EXPERTS.copy()
    experts[at] = expert
    return experts


def some_logits(experts, m=5):
    return of_largest(TopLogits(VALUES[:, :m], experts[:, :m]))


def ids(experts):
    return made.source("ids", COLUMNS, chosen=experts[:, :3].copy())


#: What is said of a recording -> the rule and the recording.
REFUSED = {
    f"token {TILE + 5} .*expert 12": ("softmax", some_logits(wrong((TILE + 5, 4), 12))),
    f"token {TILE + 5} .*twice": ("softmax", some_logits(wrong((TILE + 5, 1), 0))),
    "Record at least 4": ("softmax", some_logits(EXPERTS, 3)),
    "do not decide": ("sigmoid", some_logits(EXPERTS)),
    f"token {TILE + 6} .* expert 12": ("softmax", ids(wrong((TILE + 6, 1), 12))),
    f"token {TILE + 7} .* twice": ("softmax", ids(wrong(TILE + 7, 0))),
    "9 values a token": ("softmax", made.Recorded(np.zeros((TOKENS, 9), np.float32))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_router_made_is_refused_by_token(message):
    kind, source = REFUSED[message]
    with pytest.raises(RecordingError, match=message):
        made.measured(source, made.router(kind), metrics=[METRICS["load"], METRICS["margins"]])


def test_a_router_that_is_not_finite_is_refused():
    router = made.router()
    router.weight[4, 1] = np.inf
    with pytest.raises(RouterRuleError, match="expert 4"):
        made.measured(INPUTS, router)


def test_the_file_of_tokens_is_the_reference_route_and_adds_up_to_the_counts(router, tmp_path):
    few = {"metrics": [METRICS[name] for name in (*CHOICES, "boundaries")]}
    options = {"per_token": True, "folder": tmp_path, "num_workers": 2}
    tables = made.measured(INPUTS, router, **few, **options)
    np.testing.assert_equal(tables, made.measured(INPUTS, router, **few))
    rows = pq.read_table(tmp_path / "tokens.parquet")
    logits = logits_of(router)
    expected = route(logits, router.rule, router.selection_bias)
    chosen = array_of(rows["chosen"])
    np.testing.assert_array_equal(rows["token"], np.arange(TOKENS))
    np.testing.assert_array_equal(chosen, expected.chosen)
    np.testing.assert_allclose(rows["weights"].to_pylist(), expected.weights, rtol=1e-6)
    np.testing.assert_allclose(rows["margin"], expected.margin, rtol=1e-12, atol=1e-15)
    if router.rule.is_affine:
        nearest = boundary_distance(logits, expected.chosen, row_distances(router.weight))
        lower, upper, pair = nearest.distance, nearest.distance, nearest.pair
        np.testing.assert_allclose(rows["boundary_distance"], lower, rtol=1e-13)
        np.testing.assert_array_equal(rows["expert_in"], pair[:, 1])
        counted = {
            (row["expert_out"], row["expert_in"]): row["num_tokens"]
            for row in made.rows_of(tables["pairs"])
        }
        assert counted == Counter(map(tuple, pair.tolist()))
    else:
        curved = curved_rows(router.weight, router.rule, None, router.selection_bias)
        lower, upper, pair = curved_distance(logits, expected.chosen, curved)
        np.testing.assert_allclose(rows["boundary_distance"], lower, rtol=1e-6)
    np.testing.assert_allclose(rows["boundary_distance_upper"], upper, rtol=3e-6)
    np.testing.assert_array_equal(rows["expert_out"], pair[:, 0])
    slots = [row["num_slots"] for row in made.rows_of(tables["experts"])]
    np.testing.assert_array_equal(np.bincount(chosen.reshape(-1), minlength=12), slots)


def test_weights_do_not_hold_a_bias_that_only_selects(tmp_path):
    """Added to identity scores it is part of the logits that are compared, not of the weights."""
    bias = np.linspace(-1.0, 1.0, 12).astype(np.float32)
    rule = Rule(3, "identity", Weights("softmax_of_selected_logits"), has_selection_bias=True)
    router = dataclasses.replace(made.router(), rule=rule, selection_bias=bias)
    logits = VALUES @ router.weight.T
    expected = route(logits, rule, bias)
    clear = expected.margin > 1e-5
    for source in (INPUTS, made.source("logits", COLUMNS, logits)):
        rows = file_of_tokens(tmp_path, source, router)
        np.testing.assert_array_equal(array_of(rows["chosen"])[clear], expected.chosen[clear])
        weights = array_of(rows["weights"])[clear]
        np.testing.assert_allclose(weights, expected.weights[clear], rtol=1e-5)


def test_what_a_guard_takes_of_the_weights_is_1_less_their_sum_and_nothing_of_a_softmax():
    bias, scale = np.full(12, -16.0, np.float32), np.linspace(0.5, 2.0, 12, dtype=np.float32)
    for guard, loss in (
        ({"epsilon": 1e-6}, lambda total: 1e-6 / (total + 1e-6)),
        ({"floor": 1e-6}, lambda total: 1.0 - total / np.maximum(total, 1e-6)),
    ):
        rule = Rule(3, "sigmoid", Weights("scores", True, scale=2.5, **guard), has_logit_bias=True)
        router = dataclasses.replace(made.router(), rule=rule, logit_bias=bias, expert_scale=scale)
        total = np.sort(expit(logits_of(router).astype(np.float64)), axis=1)[:, -3:].sum(axis=1)
        (row,) = made.rows_of(
            made.measured(INPUTS, router, metrics=[METRICS["weight_sum"]])["layers"]
        )
        assert 0.01 < row["guarded_weight_share"] < 0.99
        np.testing.assert_allclose(row["guarded_weight_share"], loss(total).mean(), rtol=1e-5)
    soft = dataclasses.replace(
        made.router(), rule=Rule(3, "softmax", Weights("scores", True, 1e-20))
    )
    assert not len(made.measured(INPUTS, soft, metrics=[METRICS["weight_sum"]])["layers"])


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
def test_the_largest_logits_give_weights_where_they_decide_them(tmp_path, weights, score, decided):
    """Null, not a guess, where a sum over all experts counts."""
    router = dataclasses.replace(made.router(), rule=Rule(3, score, weights))
    full, top = (
        file_of_tokens(tmp_path, source, router)["weights"]
        for source in (of_logits(router), largest(logits_of(router)))
    )
    if decided:
        np.testing.assert_allclose(array_of(top), array_of(full), rtol=2e-7)
    else:
        assert (full.null_count, top.null_count) == (0, TOKENS)


def test_logits_do_not_give_weights_that_count_shared_experts(tmp_path):
    """The logits of experts that always run are not among those of a recording."""
    router = dataclasses.replace(made.router(), shared_rows=np.ones((1, 8), np.float32))
    for source in (of_logits(router), largest(logits_of(router))):
        assert file_of_tokens(tmp_path, source, router)["weights"].null_count == TOKENS


def test_recorded_choices_are_compared_with_the_recomputed():
    router = made.router()
    logits = logits_of(router)
    chosen = route(logits, router.rule).chosen[:, ::-1].copy()  # the order does not matter
    wrong = [5, TILE + 1]
    for token in wrong:
        outside = np.setdiff1d(np.arange(12), chosen[token])
        chosen[token, 0] = outside[np.argmin(logits[token, outside])]
    metrics = [METRICS["tokens"], METRICS["agreement"]]
    run = made.run(made.Recorded(VALUES, chosen=chosen), router, metrics=metrics)
    measured = measure_router(run)
    row = made.row_of(made.tables(measured)["layers"])
    counts = [row[f"num_{what}"] for what in ("reproduced", "near_tie", "not_reproduced")]
    assert sum(counts) == TOKENS
    tokens, listed = zip(*measured.facts["disagreements"], strict=True)
    assert list(tokens) == wrong
    # duplicate rows tie exactly, and a tie of the wrong token would be called near
    margins = route(logits, router.rule).margin[wrong]
    np.testing.assert_allclose(listed, margins, rtol=1e-6)
    assert counts[2] == (margins > 1e-4).sum()


# ------------------------------------------------------------------ what is believed of a recording
STRICT = {"stale_inputs": False, "unverified": False}
TRUST_TOKENS = 600
ROUTER = made.router(norm=True)
TRUST_COLUMNS = made.columns(TRUST_TOKENS)

#: Factors by which residuals in front of a norm differ in size.
SIZES = np.linspace(0.5, 4.0, TRUST_TOKENS, dtype=np.float32)[:, None]


def inputs_of(residual):
    """Inputs as the norm gives them, and the choices that follow from them."""
    values = normed(residual, "rms", 1e-6, ROUTER.gain)
    chosen = route(values @ ROUTER.weight.T, ROUTER.rule).chosen
    return made.source("router_input", TRUST_COLUMNS, values, chosen)


@pytest.fixture
def source():
    return inputs_of(made.inputs(TRUST_TOKENS))


@pytest.fixture
def small():
    """Inputs of a norm that are as small as the root of its eps, of this checkpoint."""
    source = inputs_of(made.inputs(TRUST_TOKENS) * 1e-3)
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:a")
    return source


def examined(source, router=ROUTER, **allow):
    prepared = [prepare(router)]
    return examine(prepared, source, "sha256:a", load_kernels("cpu"), STRICT | allow)


def refusal(source, router=ROUTER, allowed_by="unverified") -> RecordingError:
    """The error, which becomes a label where it is allowed."""
    with pytest.raises(RecordingError) as refused:
        examined(source, router)
    if allowed_by:
        assert len(examined(source, router, **{allowed_by: True}).overridden) == 1
    return refused.value


def test_true_inputs_are_believed_and_small_ones_for_the_choices_that_follow(source, small):
    trust = examined(source)
    assert (trust.fingerprint, trust.overridden) == ("unknown", ())
    np.testing.assert_allclose(trust.rms_median, 1.0, rtol=1e-3)
    np.testing.assert_array_equal(trust.share_reproduced, 1.0)
    # rows 2 and 7 are duplicate rows: another engine may take either
    chosen = source.chosen
    source.chosen = np.where(chosen == 2, 7, np.where(chosen == 7, 2, chosen)).astype(np.int32)
    np.testing.assert_array_equal(examined(source).share_reproduced, 1.0)
    trust = examined(small)
    assert trust.rms_median < 0.9
    assert trust.overridden == ()


def test_another_checkpoint_is_refused_unless_stale_inputs_are_allowed(source):
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:b")
    assert "recorded from another checkpoint" in str(refusal(source, allowed_by="stale_inputs"))
    assert examined(source, stale_inputs=True).fingerprint == "differs"


def test_inputs_before_the_gain_are_refused_unless_unverified_is_allowed(source):
    source.values = source.values / ROUTER.gain * 3
    assert "expected 1" in str(refusal(source, allowed_by=""))
    assert examined(source, unverified=True).rms_median > 1.5


def test_choices_of_another_rule_are_refused_with_the_share_or_the_number(source):
    source.chosen = (source.chosen + 1) % 12
    message = str(refusal(source, allowed_by=""))
    assert "of the first recorded choices follow" in message
    experts = np.tile(np.arange(12, dtype=np.int32), (TRUST_TOKENS, 1))
    wide = np.random.default_rng(1).permuted(experts, axis=1)[:, :5]
    refused = refusal(
        made.source("router_input", TRUST_COLUMNS, source.values, wide), allowed_by=""
    )
    message = "5 experts are recorded for each token, and the rule chooses 3"
    assert message in str(refused)
    assert "If the recorded model chose 5, write that into config.json" in refused.hint
    assert "--top-k where --router-pattern is given" in refused.hint


@pytest.mark.parametrize("change", ["another checkpoint", "other choices", "no choices", "larger"])
def test_inputs_that_eps_may_make_small_are_refused_unless_all_speaks_for_them(change, small):
    if change == "another checkpoint":
        small.facts = dataclasses.replace(small.facts, fingerprint="")
    if change == "other choices":
        small.chosen = (small.chosen + 1) % 12
    if change == "no choices":
        small.facts = dataclasses.replace(small.facts, has_chosen=False)
    if change == "larger":
        small.values = small.values * 2.5
    assert "expected 1" in str(refusal(small, allowed_by=""))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_inputs_behind_the_norm_are_not_taken_for_those_in_front_of_it(source, stored):
    """Also in bfloat16, as engines record them."""
    behind = made.source("pre_norm", TRUST_COLUMNS, source.values.astype(stored).astype(np.float32))
    refused = refusal(behind)
    assert "the norm was applied already" in str(refused)
    assert "--stage router_input" in refused.hint


@pytest.mark.parametrize(("factor", "is_guessed"), [(np.float32(3.0), False), (SIZES, True)])
def test_only_inputs_that_vary_in_size_are_taken_for_those_of_the_norm(source, factor, is_guessed):
    source.values = source.values * factor
    refused = refusal(source)
    assert "expected 1" in str(refused)
    assert ("--stage pre_norm" in refused.hint) == is_guessed
    assert ("stage pre_norm" in str(refused)) == is_guessed


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_scores_are_not_taken_for_logits(kind, stored):
    router = made.router(kind)
    logits = made.inputs(TRUST_TOKENS) @ router.weight.T
    scores = softmax(logits, axis=1) if kind == "softmax" else expit(logits)
    padded = scores.astype(stored).astype(np.float32)
    padded[3] = 0.0
    refused = refusal(made.source("logits", TRUST_COLUMNS, padded), router)
    what = {"softmax": "probabilities", "sigmoid": "scores behind the sigmoid"}[kind]
    assert f"these are {what}" in str(refused)
    assert "np.log" in refused.hint


def with_rows(values, rows, number=0.0):
    changed = values.copy()
    changed[rows] = number
    return changed


def test_logits_of_rows_that_no_token_made_are_refused_unless_allowed():
    """Also behind the first tokens: padding may lie anywhere."""
    router, tokens = made.router(), 40 * TILE
    logits = made.inputs(tokens) @ router.weight.T
    for number, what in {0.0: "nothing but 0", 0.7: "the same logit for every expert"}.items():
        wrong = with_rows(logits, [3, 20 * TILE, 35 * TILE + 7], number)
        message = str(refusal(made.Recorded(wrong, "logits"), router))
        assert f"of 8,192 tokens that were looked at, 3 hold {what}" in message
    assert examined(made.Recorded(logits, "logits"), router).overridden == ()


FOUR = np.tile(np.arange(4, dtype=np.int32), (TRUST_TOKENS, 1))


def test_zero_rows_are_refused_at_every_stage_that_holds_numbers():
    residual, largest = (
        made.inputs(TRUST_TOKENS) * SIZES,
        -np.sort(-made.inputs(TRUST_TOKENS)[:, :4], axis=1),
    )
    for stage, values in (
        ("pre_norm", with_rows(residual, [7, 8])),
        ("top_logits", TopLogits(with_rows(largest, [7, 8]), FOUR)),
        ("router_input", with_rows(normed(residual, "rms", 1e-6, ROUTER.gain), [7, 8])),
    ):
        message = str(refusal(made.source(stage, TRUST_COLUMNS, values), allowed_by=""))
        assert "2 hold nothing but 0: padding" in message


def uniform(low, high, tokens=TRUST_TOKENS):
    drawn = np.random.default_rng(2).uniform(low, high, (tokens, 12))
    return made.Recorded(drawn.astype(np.float32), "logits")


EQUAL_ROWS = dataclasses.replace(made.router(), weight=np.zeros_like(made.router().weight))
EQUAL_LOGITS = np.repeat(made.inputs(TRUST_TOKENS)[:, :1], 4, axis=1)


UNUSUAL = {
    **{f"narrow, {k}": (made.router(k), uniform(0.3, 0.7)) for k in ("softmax", "sigmoid")},
    **{f"few, {k}": (made.router(k), uniform(0.0, 1.0, 64)) for k in ("softmax", "sigmoid")},
    "equal rows": (EQUAL_ROWS, made.Recorded(np.zeros((TRUST_TOKENS, 12)), "logits")),
    # in bfloat16 the two largest are equal now and then; here at every token
    "equal largest": (
        made.router(),
        made.source("top_logits", TRUST_COLUMNS, TopLogits(EQUAL_LOGITS, FOUR)),
    ),
    "residual": (ROUTER, made.source("pre_norm", TRUST_COLUMNS, made.inputs(TRUST_TOKENS) * SIZES)),
    # numbers of size one that no norm made: their sizes spread by 3.3 / sqrt(hidden size)
    "of size one": (
        ROUTER,
        made.source("pre_norm", TRUST_COLUMNS, made.inputs(TRUST_TOKENS, seed=3)),
    ),
}


@pytest.mark.parametrize(("router", "source"), UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_only_unusual_is_believed(router, source):
    assert examined(source, router).overridden == ()
