"""What every kind of what-if promises: of the registry, so that a new kind is held to it too."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import MoeGeomError
from moegeom.variants.what_if import WHAT_IFS, Choice, Gate, parse_what_ifs
from moegeom.variants.whatif._choices import OF_CHOICE, OF_SCORES, rows_of
from tests.unit.variants.conftest import BATCH, EXPERTS, TOKENS, TOP_K

#: How a kind is written that says nothing without a parameter, and other forms worth a look.
WRITTEN = {
    "smooth": ("smooth:extra=0.5", "smooth:eps=0.2,a=2,b=9"),
    "topk": ("topk:2", "topk:5"),
    "temperature": ("temperature:0.5",),
    "without": ("without:1,7",),
    "relu": ("relu", "relu:experts=2.5"),
    "sinkhorn": ("sinkhorn", "sinkhorn:eps=0.5,steps=20,log"),
    "capacity": ("capacity:0.8", "capacity:0.8,order=score"),
    "jitter": ("jitter:0.1", "jitter:0.1,on=input"),
    "osr": ("osr", "osr:lambda=0,steps=0"),
}

TEXTS = [text for name in WHAT_IFS.names() for text in WRITTEN.get(name, (name.replace("_", "-"),))]
CHOOSING = [t for t in TEXTS if t.split(":")[0] not in ("random", "topk", "temperature", "centred")]


def rows_in(choice: Choice, rows: np.ndarray) -> list[tuple[tuple, tuple]]:
    """Experts and weights of some tokens, without empty slots."""
    return [
        (tuple(chosen[chosen >= 0]), tuple(weights[chosen >= 0]))
        for chosen, weights in zip(choice.chosen[rows], choice.weights[rows], strict=True)
    ]


def is_hard_choice(gate: Gate, made) -> bool:
    """Whether a gate chooses for each token as stored, bit for bit."""
    if gate.router is not None:
        found = made.batch(gate.router)
    else:
        found = gate.choose(made.tokens)
    width = found.chosen.shape[1]
    is_same = width == TOP_K and np.array_equal(found.chosen, made.tokens.chosen)
    return is_same and np.array_equal(found.weights, made.tokens.weights)


# ------------------------------------------------------------------------------------------- records
def test_the_texts_cover_every_kind():
    assert {asked.kind.name for asked in parse_what_ifs(TEXTS)} == set(WHAT_IFS.names())
    assert len(WHAT_IFS.names()) >= 13


@pytest.mark.parametrize("name", WHAT_IFS.names())
def test_a_record_has_the_name_of_its_file_and_texts_for_people(name):
    kind = WHAT_IFS[name]
    assert kind.text.endswith(".")
    assert len(kind.text) > 30
    assert [p.name for p in kind.parameters if not p.text or p.text.endswith(".")] == []
    assert sum(p.is_first for p in kind.parameters) <= 1


# ------------------------------------------------------------------------------------------- choices
@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", TEXTS)
def test_a_gate_is_another_router_or_chooses(made, text):
    gate = made.gate(text)
    assert (gate.router is None) != (gate.choose is None)
    assert all(np.isfinite(list(gate.reached.values())))
    assert all(note.endswith(".") for note in gate.notes)
    if gate.router is not None:
        batch = made.batch(gate.router)
        assert batch.chosen.shape == (TOKENS, gate.router.rule.top_k)
        assert np.isfinite(batch.weights).all()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", CHOOSING)
def test_a_choice_is_sets_filled_from_the_left_with_their_weights(made, text):
    gate = made.gate(text)
    choice = gate.choose(made.tokens)
    assert choice.chosen.dtype == np.int32
    assert choice.weights.dtype == np.float64
    assert choice.chosen.shape == choice.weights.shape
    filled = choice.chosen >= 0
    assert (choice.chosen < EXPERTS).all()
    assert (np.diff(filled.astype(int), axis=1) <= 0).all(), "a hole on the left"
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in choice.chosen)
    np.testing.assert_array_equal(choice.weights[~filled], 0.0)
    assert np.isfinite(choice.weights).all()
    assert (choice.weights[filled] >= 0.0).all()
    if gate.has_fixed_size:
        np.testing.assert_array_equal(filled.sum(axis=1), TOP_K)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", CHOOSING)
def test_every_quantity_of_a_choice_is_there_or_has_a_reason(made, text):
    gate = made.gate(text)
    choice = gate.choose(made.tokens)
    given, missing = set(choice.quantities), set(gate.absent)
    optional = {"group_margin"} if made.router.rule.groups is None else set()
    assert given & missing == set()
    assert set(OF_CHOICE) - given - missing - optional == set()
    assert given <= set(OF_CHOICE)
    assert all(reason and not reason.endswith(".") for reason in gate.absent.values())
    for name, values in choice.quantities.items():
        assert len(values) == TOKENS, name
        assert not np.isnan(values).any(), name


@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", CHOOSING)
def test_what_it_measures_are_finite_numbers(made, text):
    gate = made.gate(text)
    if gate.measure is not None:
        found = gate.measure(made.sample(rows_of(made.tokens, np.arange(2 * BATCH))))
        assert found
        assert np.isfinite(list(found.values())).all()
        assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize("text", ["smooth:extra=0.5", "sinkhorn", "expert-choice", "capacity:0.8"])
def test_a_gate_that_takes_the_scores_as_they_are_leaves_what_follows_from_them(made, text):
    told = rows_of(made.tokens, np.arange(TOKENS))
    found = made.gate(text).choose(told).quantities
    for name in OF_SCORES:
        np.testing.assert_array_equal(found[name], getattr(made.tokens, name), err_msg=name)


# -------------------------------------------------------------------------------------------- claims
@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", CHOOSING)
def test_a_gate_of_single_tokens_chooses_the_same_in_any_batch_and_others_do_not(made, text):
    gate = made.gate(text)
    whole = gate.choose(made.tokens)
    order = np.random.default_rng(1).permutation(TOKENS)
    parts = [order[:5], order[5:6], order[6:77], order[77:]]
    found = [
        row for p in parts for row in rows_in(gate.choose(rows_of(made.tokens, p)), slice(None))
    ]
    is_same = found == rows_in(whole, order)
    assert is_same == gate.is_token_local


@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", CHOOSING)
def test_later_tokens_change_earlier_choices_unless_a_gate_is_causal(made, text):
    gate = made.gate(text)
    is_causal = True
    for start in range(0, TOKENS - 2 * BATCH, BATCH):
        first = np.arange(start, start + BATCH // 2)
        early = slice(0, BATCH // 2)
        found = [
            rows_in(gate.choose(rows_of(made.tokens, np.concatenate([first, later]))), early)
            for later in (np.arange(BATCH // 2) + start + BATCH // 2, np.arange(BATCH // 2) + 160)
        ]
        is_causal &= found[0] == found[1]
    assert is_causal == gate.is_causal


# ------------------------------------------------------------------------------------------- limits
LIMITS = (
    "topk:3",
    "temperature:1",
    "smooth:eps=0",
    "smooth:extra=0",
    "smooth:eps=1e-12",
    "sinkhorn:steps=0,log",
    "sinkhorn:eps=0.001,steps=0,log",
    "capacity:inf",
    "capacity:4",
    "jitter:0",
    "jitter:0,on=input",
    "without",
)


@pytest.mark.parametrize("text", LIMITS)
def test_the_hard_limit_is_the_router_bit_for_bit(made, text):
    assert is_hard_choice(made.gate(text), made)


@pytest.mark.parametrize("text", ["topk:2", "smooth:extra=0.5", "sinkhorn", "capacity:0.8"])
def test_what_is_no_limit_is_another_choice(made, text):
    assert not is_hard_choice(made.gate(text), made)


# ---------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("text", TEXTS)
def test_a_rule_without_a_fixed_number_is_refused_or_answered(made_by, text):
    made = made_by["softmax"]
    listed = dataclasses.replace(made.router, listed="a table chooses")
    with pytest.raises(MoeGeomError, match="a table chooses"):
        made.gate(text, listed)
    varying = dataclasses.replace(made.router.rule, pick="varying")
    with pytest.raises(MoeGeomError, match="no fixed number"):
        made.gate(text, dataclasses.replace(made.router, rule=varying))
