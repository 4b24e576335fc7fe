"""What every kind of what-if promises: of the registry, so that a new kind is held to it too;
presets of arithmetic are data that parse, say what they copy, and change what they say.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from moegeom.core.documents import record_of_file
from moegeom.core.errors import InternalError, MoeGeomError, UsageError
from moegeom.variants.emulated import Arithmetic, arithmetic, arithmetic_names, describe_arithmetics
from moegeom.variants.what_if import WHAT_IFS, FittedGate, WhatIfChoice, parse_what_ifs
from moegeom.variants.whatif._choices import OF_CHOICE, OF_SCORES, rows_of
from tests.by_day import by_day
from tests.unit.variants.conftest import BATCH, EXPERTS, RULES, TOKENS, TOP_K

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


def rows_in(choice: WhatIfChoice, rows: np.ndarray) -> list[tuple[tuple, tuple]]:
    """Experts and weights of some tokens, without empty slots."""
    return [
        (tuple(chosen[chosen >= 0]), tuple(weights[chosen >= 0]))
        for chosen, weights in zip(choice.chosen[rows], choice.weights[rows], strict=True)
    ]


def is_hard_choice(gate: FittedGate, made) -> bool:
    """Whether a gate chooses for each token as stored, bit for bit."""
    choice = made.batch(gate.router) if gate.router is not None else gate.choose(made.tokens)
    stored = made.tokens
    is_same = np.array_equal(choice.chosen, stored.chosen)
    return is_same and np.array_equal(choice.weights, stored.weights)


def test_the_texts_cover_every_kind():
    assert {asked.kind.name for asked in parse_what_ifs(TEXTS)} == set(WHAT_IFS.names())
    assert len(WHAT_IFS.names()) >= 13


def test_a_kind_has_texts_for_people():
    for name in WHAT_IFS.names():
        kind = WHAT_IFS[name]
        assert kind.text.endswith(".") and len(kind.text) > 30, name
        assert [p.name for p in kind.parameters if not p.text or p.text.endswith(".")] == []
        assert sum(p.is_first for p in kind.parameters) <= 1, name


def under_rules(texts):
    """A what-if under every rule; by day under one, rules in turn."""
    day = list(zip(texts, itertools.cycle(RULES), strict=False))
    return pytest.mark.parametrize(("text", "rule"), by_day(itertools.product(texts, RULES), day))


@under_rules(TEXTS)
def test_a_gate_is_another_router_or_chooses(made_by, text, rule):
    made = made_by[rule]
    gate = made.gate(text)
    assert (gate.router is None) != (gate.choose is None)
    assert all(np.isfinite(list(gate.reached.values())))
    assert all(note.endswith(".") for note in gate.notes)
    if gate.router is not None:
        batch = made.batch(gate.router)
        assert batch.chosen.shape == (TOKENS, gate.router.rule.top_k)
        assert np.isfinite(batch.weights).all()
    if gate.measure is not None:
        figures = gate.measure(made.sample(rows_of(made.tokens, np.arange(2 * BATCH))))
        assert figures
        assert np.isfinite(list(figures.values())).all()
        assert {type(value) for value in figures.values()} == {float}


@under_rules(CHOOSING)
def test_a_choice_is_sets_filled_from_the_left_with_weights_and_quantities(made_by, text, rule):
    made = made_by[rule]
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
    # every quantity is there or has a reason
    given, missing = set(choice.quantities), set(gate.absent)
    optional = {"group_margin"} if made.router.rule.groups is None else set()
    assert given & missing == set()
    assert set(OF_CHOICE) - given - missing - optional == set()
    assert given <= set(OF_CHOICE)
    assert all(reason and not reason.endswith(".") for reason in gate.absent.values())
    for name, values in choice.quantities.items():
        assert len(values) == TOKENS, name
        assert not np.isnan(values).any(), name


@pytest.mark.parametrize("text", ["smooth:extra=0.5", "sinkhorn", "expert-choice", "capacity:0.8"])
def test_a_gate_that_takes_the_scores_as_they_are_leaves_what_follows_from_them(made, text):
    quantities = made.gate(text).choose(rows_of(made.tokens, np.arange(TOKENS))).quantities
    for name in OF_SCORES:
        np.testing.assert_array_equal(quantities[name], getattr(made.tokens, name), err_msg=name)


@under_rules(CHOOSING)
def test_a_gate_depends_on_other_and_later_tokens_where_it_says_so(made_by, text, rule):
    made = made_by[rule]
    gate, order = made.gate(text), np.random.default_rng(1).permutation(TOKENS)

    def rows_at(tokens: np.ndarray, rows=slice(None)) -> list:
        return rows_in(gate.choose(rows_of(made.tokens, tokens)), rows)

    parts = [order[:5], order[5:6], order[6:77], order[77:]]
    rows = [row for part in parts for row in rows_at(part)]
    assert (rows == rows_in(gate.choose(made.tokens), order)) == gate.is_token_local
    is_causal, half = True, np.arange(BATCH // 2)
    for start in range(0, TOKENS - 2 * BATCH, BATCH):
        one, other = (
            rows_at(np.concatenate([start + half, later + half]), slice(0, BATCH // 2))
            for later in (start + BATCH // 2, 160)
        )
        is_causal &= one == other
    assert is_causal == gate.is_causal


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


def test_what_is_no_limit_is_another_choice(made):
    for text in ("topk:2", "smooth:extra=0.5", "sinkhorn", "capacity:0.8"):
        assert not is_hard_choice(made.gate(text), made), text


def test_a_rule_without_a_fixed_number_is_refused_or_answered(made_by):
    made = made_by["softmax"]
    listed = dataclasses.replace(made.router, listed="a table chooses")
    varying = dataclasses.replace(made.router.rule, pick="varying")
    for text in TEXTS:
        with pytest.raises(MoeGeomError, match="a table chooses"):
            made.gate(text, listed)
        with pytest.raises(MoeGeomError, match="no fixed number"):
            made.gate(text, dataclasses.replace(made.router, rule=varying))


def test_each_preset_says_what_it_copies_and_its_row_says_its_steps() -> None:
    for name in arithmetic_names():
        how = arithmetic(name)
        assert how.name == name and how.text and how.source
        assert how.engine.startswith("none") or how.version
    rows = {row["name"]: row for row in describe_arithmetics()}
    assert tuple(rows) == arithmetic_names()
    assert rows["bf16-logits"]["steps"].endswith("output bfloat16")
    assert "0487d5c2" in rows["bf16-gemm-fp32-out"]["engine"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="bf15") as caught:
        arithmetic("bf15")
    assert "bf16" in (caught.value.hint or "")


def test_a_preset_with_a_word_that_is_not_known_is_an_error() -> None:
    preset = 'text = "t"\nengine = "none"\nversion = ""\nsource = "s"\n'
    with pytest.raises(InternalError, match=r"made.toml: input is 'bfloat17', expected one of"):
        record_of_file(Arithmetic, "made", preset + 'input = "bfloat17"')
    with pytest.raises(InternalError, match="unknown key 'scores'.\n  hint: Did you mean score"):
        record_of_file(Arithmetic, "made", preset + 'scores = "red"')
