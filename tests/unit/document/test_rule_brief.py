"""The header's sentence about the rule is true of every router, and so are its small words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moegeom.document.header import routers_line, rule_line, skipped, trust_line
from moegeom.document.requested_layers import layers_without_router
from moegeom.document.rule_brief import rule_brief
from moegeom.document.summary import Summary

SENTENCE = "softmax, top 2 of 12"


def router(top_k: int, experts: int = 12, **facts) -> dict:
    plain = {"score": "softmax", "has_selection_bias": False, "num_groups": 1}
    return {"top_k": top_k, "num_experts": experts, **plain, **facts}


def test_routers_that_choose_alike_have_the_sentence_of_their_family():
    assert rule_brief(SENTENCE, [router(2)] * 3) == SENTENCE
    assert rule_brief(SENTENCE, []) == SENTENCE


def test_routers_that_choose_differently_are_counted_the_most_frequent_first():
    said = rule_brief(SENTENCE, [router(2), router(3), router(4), router(3)])
    assert said == "softmax, top 3 of 12 (2 of 4 routers), 2 of 12 (1), 4 of 12 (1)"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"score": "sqrt_softplus"}, "sqrt-softplus, top 2 of 12 (1)"),
        ({"score": "identity"}, "logits, top 2 of 12 (1)"),
        ({"has_selection_bias": True}, "softmax + selection bias, top 2 of 12 (1)"),
        ({"num_groups": 4}, "softmax, groups, top 2 of 12 (1)"),
    ],
)
def test_a_router_with_another_step_is_told_apart(facts, said):
    routers = [router(2), router(2), router(2, **facts)]
    assert rule_brief(SENTENCE, routers) == f"softmax, top 2 of 12 (2 of 3 routers); {said}"


def test_the_header_does_not_say_of_all_routers_what_the_first_does(run):
    odd = {**run["routers"][1], "top_k": 4}
    changed = {**run, "routers": [*run["routers"][:-1], odd]}
    assert run["checkpoint"]["rule"] in rule_line(summary(run))
    assert "top 8 of 256 (57 of 58 routers), 4 of 256 (1)" in rule_line(summary(changed))


def summary(run: dict) -> Summary:
    return Summary(run, [], [], [], [])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, ""),
        ("1", ""),
        ("1,3", ""),
        ("1,7", "layer 7 was asked for and has no router"),
        ("0-9", "layers 0,2,4-9 were asked for and have no router"),
    ],
)
def test_layers_that_were_asked_for_in_vain_are_named(asked, said):
    assert layers_without_router(asked, ["text/1", "vision/3/second"]) == said


def test_the_header_names_layers_that_were_asked_for_in_vain(run):
    asked = {**run, "layers_requested": "3-61"}
    assert routers_line(summary(asked)).endswith(" Layer 61 was asked for and has no router.")
    assert "asked" not in routers_line(summary(run))


@pytest.mark.parametrize(
    ("number", "said"), [(1, "Skipped 1 tensor, a: why"), (2, "Skipped 2 tensors, first a: why")]
)
def test_skipped_tensors_are_counted_in_english(run, number, said):
    left_out = [{"tensor": "a", "reason": "why"}] * number
    checkpoint = {**run["checkpoint"], "skipped": left_out}
    assert skipped(summary({**run, "checkpoint": checkpoint})) == [said]


@pytest.mark.parametrize(
    ("number", "said"), [(1, "1 failed test allowed: b"), (3, "3 failed tests allowed: b")]
)
def test_failed_tests_are_counted_in_english(run_on_tokens, number, said):
    trust = {**run_on_tokens["trust"], "overridden": ["b"] * number}
    assert said in trust_line(
        replace(summary(run_on_tokens), run={**run_on_tokens, "trust": trust})
    )
