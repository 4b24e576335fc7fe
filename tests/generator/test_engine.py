"""The engine serves as engines do, and a fault changes what its truth says and nothing else. Of the
verdicts on faults that nobody listed: how many are named, and that twins are not blamed.

Scored cases are those of the seeds 0 to 69, one of each operator, on which limits were set; the others
are left alone until a count of all is wanted (`python -m tests.generator.scoring`).
"""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

import moegeom as mg
from moegeom.studies.explain.record import CauseVerdict
from tests.by_day import by_day, one_of_each
from tests.generator import scoring
from tests.generator.cases import SELECTIONS, Case, Selection, differences, draw
from tests.generator.engine import Arithmetic, Schedule, serve
from tests.generator.faults import KINDS, may_differ
from tests.generator.files import write_checkpoint
from tests.generator.kinds import SCOPES
from tests.generator.model import FAMILIES, SHAPES, Model, Text, choose, draw_model, draw_text

OLD = SELECTIONS["old"]
PARTS: tuple[Selection, ...] = ("old", "new")

#: Seeds that draw every operator once; by day one of each stage of the engine.
SEEDS = one_of_each(
    [(part, seed) for part in PARTS for seed in range(len(SELECTIONS[part]))],
    lambda case: (case[0], KINDS[SELECTIONS[case[0]][case[1]]].stage),
)

FLOAT32, BFLOAT16 = Arithmetic(), Arithmetic(is_bf16=True)

#: Tokens that rounding alone may move where products of other shapes are added.
ROUNDING_SHARE = 0.01


@cache
def case_of(seed: int, selection: Selection) -> Case:
    return draw(seed, "small", selection)


@cache
def world(family: str) -> tuple[Model, Text]:
    rng = np.random.default_rng(5)
    shape = SHAPES["small"]
    model = draw_model(rng, family, shape, "bfloat16")
    return model, draw_text(rng, shape.documents, shape.length, shape.vocabulary)


def whole(text: Text) -> Schedule:
    documents, length = text.token_id.shape
    return Schedule((np.arange(documents),), length, length)


def in_chunks(text: Text) -> Schedule:
    documents, length = text.token_id.shape
    batches = np.array_split(np.random.default_rng(1).permutation(documents), 3)
    return Schedule(tuple(batches), 7, length // 2)


def sets(run, layer):
    return np.sort(run.chosen[layer], axis=1)


# ------------------------------------------------------------------------------------ healthy runs
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_batches_and_decoding_give_what_a_whole_prefill_gives(family):
    model, text = world(family)
    plain = serve(model, text, FLOAT32, whole(text))
    packed = serve(model, text, FLOAT32, in_chunks(text))
    for layer in range(model.shape.layers):
        np.testing.assert_allclose(packed.inputs[layer], plain.inputs[layer], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(sets(packed, layer), sets(plain, layer))
        np.testing.assert_allclose(packed.weights[layer], plain.weights[layer], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "arithmetic"),
    one_of_each(itertools.product(FAMILIES, (FLOAT32, BFLOAT16)), lambda case: case[0]),
)
def test_what_is_recorded_is_what_the_router_on_disk_chooses(family, arithmetic, tmp_path):
    model, text = world(family)
    run = serve(model, text, arithmetic, in_chunks(text))
    write_checkpoint(model, model.routers, tmp_path / "checkpoint")
    routers = mg.open(tmp_path / "checkpoint").routers
    assert len(routers) == model.shape.layers
    for layer, router in enumerate(routers):
        routed = mg.route(router, run.inputs[layer])
        is_clear = routed.margin > 1e-5
        assert is_clear.mean() > 0.99
        order, recorded = np.argsort(routed.chosen, axis=1), np.argsort(run.chosen[layer], axis=1)
        there = np.take_along_axis(routed.chosen, order, axis=1)
        np.testing.assert_array_equal(there[is_clear], sets(run, layer)[is_clear])
        np.testing.assert_allclose(
            np.take_along_axis(routed.weights, order, axis=1)[is_clear],
            np.take_along_axis(run.weights[layer], recorded, axis=1)[is_clear],
            atol=1e-4,
        )


@pytest.mark.parametrize(
    ("family", "arithmetic"),
    one_of_each(
        itertools.product(
            [name for name in FAMILIES if name != "deepseek_v3"],
            [Arithmetic(is_reversed=True), BFLOAT16],
        ),
        lambda case: case[1],
    ),
)
def test_healthy_engines_disagree_at_near_ties_alone(family, arithmetic):
    model, text = world(family)
    run = serve(model, text, FLOAT32, whole(text))
    twin = serve(model, text, arithmetic, in_chunks(text))
    differ = (sets(run, 0) != sets(twin, 0)).any(axis=1)
    selection = choose(run.logits[0], model.routers[0].bias, model.rule).selection
    if model.rule.score == "softmax":
        selection = run.logits[0]
    descending = -np.sort(-selection, axis=1)
    gap = descending[:, model.rule.top_k - 1] - descending[:, model.rule.top_k]
    assert (gap[differ] < 0.05 * selection.std()).all()
    assert np.median(gap) > 0.1 * selection.std()
    for layer in range(model.shape.layers):
        assert (sets(run, layer) != sets(twin, layer)).any(axis=1).mean() < 0.03


# ------------------------------------------------------------------------------------------ faults
def test_every_scope_has_an_operator():
    assert {scope for kind in KINDS.values() for scope in kind.scopes} == set(SCOPES)


@pytest.mark.parametrize(("selection", "seed"), SEEDS)
def test_a_fault_changes_what_its_truth_says_and_nothing_that_it_cannot_reach(selection, seed):
    case = case_of(seed, selection)
    assert case.truths[0].operator is SELECTIONS[selection][seed]
    for truth in case.truths:
        assert truth.effect.sets + truth.effect.weights + truth.effect.later_sets > 0
    if len(case.truths) == 2:
        one, other = (injected.fault.reach for injected in case.injected)
        assert selection == "old" or one.layers == other.layers
        assert selection == "old" or (one.tokens == other.tokens).all()
        return  # one fault may carry what the other did to places that it cannot reach alone
    (injected,) = case.injected
    possible = may_differ(injected.fault, case.text, case.model.shape.layers)
    for layer in range(case.model.shape.layers):
        moved, weighed = differences(case.b, case.twin, layer)
        reached = possible[layer][case.text.is_token]
        outside = (moved | weighed)[~reached]
        assert outside.sum() <= ROUNDING_SHARE * case.text.num_tokens


# ------------------------------------------------------------------------------------------- scores
#: Seeds of small cases that are named: one of each kind of operator.
NAMED = (1, 4, 8, 17, 27, 32, 48, 69)


@pytest.mark.parametrize("seed", by_day(NAMED, {"rows damaged": 4}))
def test_a_fault_is_named_and_its_twin_is_not_blamed(seed, tmp_path):
    one = scoring.scored(seed, "small", tmp_path)
    assert one.outcome == "named", one.verdict.detail
    assert one.twin_outcome in ("healthy", "open"), one.twin.detail


@pytest.mark.nightly
@pytest.mark.parametrize("size", ["small", "middle"])
def test_most_faults_are_named_hardly_any_wrongly_and_no_twin_is_blamed(size):
    cases = list(scoring.all_scored(size, range(len(OLD))))
    assert {len(one.operators) for one in cases} == {1, 2}
    ends = [one.outcome for one in cases]
    assert ends.count("named") >= 0.6 * len(cases)
    assert ends.count("wrong") <= 0.05 * len(cases)
    assert [one.seed for one in cases if one.twin_outcome == "wrong"] == []


# ------------------------------------------------------------------------ margins and healthy pairs
NOISE = CauseVerdict("arithmetic noise only", "")


def verdicts(cause: Any, margin: float | None, outcome: str, **twin: Any) -> scoring.Scored:
    known = {"twin": NOISE, "twin_outcome": "healthy"} | twin
    said = CauseVerdict(cause, "", margin=margin)
    return scoring.Scored(0, ("rows_permuted",), ("all",), "ids", said, outcome, **known)


def test_verdicts_are_counted_by_their_margin_and_open_ones_are_not():
    found = [
        verdicts("rows damaged", 40.0, "named"),
        verdicts("rows damaged", 99.0, "wrong"),
        verdicts("bias missing", 1000.0, "named"),
        verdicts("inconclusive", 5000.0, "open"),
        verdicts("not the router", None, "named"),
    ]
    classes = scoring.reliability(scoring.named(found))
    assert [one.least for one in classes] == list(scoring.CLASSES)
    assert [(one.number, one.right) for one in classes] == [(0, 0), (2, 1), (0, 0), (0, 0), (1, 1)]
    assert "| 30 to 100 | 2 | 50.0 % |" in scoring.table(classes)
    assert "| 1000 and more | 1 | 100.0 % |" in scoring.table(classes)

    # a fault that is seen in a twin is wrong unless it is rounding
    rounded = CauseVerdict("inputs rounded", "", margin=50.0)
    for outcome in ("wrong", "rounding"):
        of_twin = verdicts("inconclusive", None, "open", twin=rounded, twin_outcome=outcome)
        assert list(scoring.named([of_twin])) == [(50.0, outcome == "rounding")]


def test_results_count_what_can_be_told_by_form_and_the_rest_apart():
    found = [verdicts("rows damaged", None, "named", num_different=20) for _ in range(3)]
    found.append(verdicts("rows damaged", None, "wrong", num_different=19))
    lines = scoring.results(found).splitlines()[2:]
    assert lines == [
        "| old, all that can be told | 3 | 3 | 0 | 0 | 0 | 0 |",
        "| old, ids | 3 | 3 | 0 | 0 | 0 | 0 |",
        "| old, under 20 tokens differ | 1 | 0 | 1 | 0 | 0 | 0 |",
    ]


def test_a_pair_of_another_format_and_another_order_is_not_called_faulty():
    (one,) = scoring.all_noise_pairs([14])
    assert one.arithmetic == "both"
    assert one.outcome != "wrong", one.verdict.detail


@pytest.mark.nightly
def test_of_200_pairs_none_is_called_faulty():
    found = list(scoring.all_noise_pairs(range(200)))
    assert {one.arithmetic for one in found} == set(scoring.ARITHMETICS)
    assert [(one.seed, one.verdict.cause) for one in found if one.outcome == "wrong"] == []
    assert sum(one.outcome == "open" for one in found) <= 0.5 * len(found)
