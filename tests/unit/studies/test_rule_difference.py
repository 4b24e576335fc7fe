"""Two rules differ in words: every field has a name, and no record shows its Python."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.studies.changes.rule import rule_differences

PLAIN = Rule(top_k=3, score="softmax", weights=Weights("scores"))

#: Another value for each field, and how the difference is told.
OTHERS = {
    "top_k": (4, "experts chosen 3 in A, 4 in B"),
    "score": ("sqrt_softplus", "score softmax in A, sqrt softplus in B"),
    "has_selection_bias": (True, "selection bias no in A, yes in B"),
    "has_logit_bias": (True, "logit bias no in A, yes in B"),
    "groups": (
        GroupMask(8, 4, "top2_sum", float("-inf")),
        "groups none in A, 4 of 8 groups (fill -inf) by top2 sum in B",
    ),
    "logit_map": (
        LogitMap(0.5, 30.0),
        "map of the logits none in A, logits x 0.5, soft cap 30 in B",
    ),
    "capacity": (64, "expert capacity none in A, 64 in B"),
    "pick": ("threshold", "experts picked by top k in A, threshold in B"),
}
OTHER_WEIGHTS = {
    "source": (
        "softmax_of_selected_logits",
        "weights from scores in A, softmax of selected logits in B",
    ),
    "renormalise": (True, "weights divided by their sum no in A, yes in B"),
    "epsilon": (1e-3, "added to that sum 0 in A, 0.001 in B"),
    "scale": (2.5, "factor of the weights 1 in A, 2.5 in B"),
    "floor": (0.1, "least sum 0 in A, 0.1 in B"),
    "power": (2.0, "power inside the sum 1 in A, 2 in B"),
    "jitter": (0.01, "jitter of the weights 0 in A, 0.01 in B"),
}


def test_every_field_of_a_rule_is_covered():
    assert {*OTHERS, "weights"} == {field.name for field in fields(Rule)}
    assert set(OTHER_WEIGHTS) == {field.name for field in fields(Weights)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_changed_step_is_told_in_words(name):
    value, said = OTHERS[name]
    assert rule_differences(PLAIN, replace(PLAIN, **{name: value})) == [said]


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_changed_weights_are_told_in_words(name):
    value, said = OTHER_WEIGHTS[name]
    changed = replace(PLAIN, weights=replace(PLAIN.weights, **{name: value}))
    assert rule_differences(PLAIN, changed) == [said]


def test_equal_rules_do_not_differ():
    assert rule_differences(PLAIN, replace(PLAIN)) == []
