"""The header says no more than was recorded, and whether a rule is verified is decided once."""

from dataclasses import replace

from moegeom.document.header import (
    gate_rule_line,
    routers_line,
    rule_line,
    skipped,
    tokens_line,
    trust_line,
)
from moegeom.document.model import Document, Fact, View
from moegeom.document.render import render
from moegeom.document.requested_layers import layers_without_router
from moegeom.document.rule_brief import rule_brief
from moegeom.document.rule_trust import assumed, rule_facts, rule_status, rule_trust
from moegeom.document.summary import Summary
from moegeom.results.run_file import LEAST_SHARE, is_verified_here


def summary(run: dict) -> Summary:
    return Summary(run, [], [], [], [])


def on_stage(
    run: dict, stage: str, exact: tuple[float | None, ...] = (), size_bytes: int = 10
) -> Summary:
    tokens = {**run["tokens"], "stage": stage, "size_bytes": size_bytes}
    affine = [{**router, "is_affine": True} for router in run["routers"][: len(exact)]]
    layers = [
        {"router": router["name"], "distance_exact_share": share}
        for router, share in zip(affine, exact, strict=True)
    ]
    return replace(summary({**run, "tokens": tokens, "routers": affine}), layers=layers)


EXACT = "Boundaries are linear: distances are exact."
BOUNDS = "distances are exact for at least 99.99 % of tokens, lower bounds for others."
NO_LOGITS = "Boundaries are linear, but there are no logits, hence no distances."


def test_distances_are_called_exact_only_where_all_of_them_are(run_on_tokens):
    for stage, exact, sentence in [
        ("router_input", (1.0, 1.0), EXACT),
        ("router_input", (None, None), EXACT),
        ("top_logits", (1.0, 1.0), EXACT),
        ("top_logits", (1.0, 0.999996), BOUNDS),
        ("ids", (None,), NO_LOGITS),
        ("counts", (None,), NO_LOGITS),
    ]:
        assert rule_line(on_stage(run_on_tokens, stage, exact)).endswith(sentence)


def test_folded_tokens_are_not_called_recorded_and_devices_are_named(run_on_tokens):
    stored = on_stage(run_on_tokens, "router_input")
    assert "recorded from this checkpoint" in tokens_line(stored)
    folded = tokens_line(on_stage(run_on_tokens, "router_input", size_bytes=0))
    assert "taken from the running model, nothing stored. 9.1 s" in folded
    assert "recorded" not in folded and "0 B" not in folded
    devices = {"kind": "cuda", "names": ["NVIDIA H200", "NVIDIA A"]}
    on_device = replace(stored, run=stored.run | {"device": devices})
    assert " on NVIDIA H200, NVIDIA A" in tokens_line(on_device)
    for facts in ({}, {"device": {"kind": "cpu", "names": []}}):
        assert " on " not in tokens_line(replace(stored, run=stored.run | facts))


def test_failed_tests_and_skipped_tensors_are_counted_in_english(run_on_tokens):
    for number, tests, tensors in [
        (1, "1 failed test allowed: b", "Skipped 1 tensor, a: why"),
        (2, "2 failed tests allowed: b", "Skipped 2 tensors, first a: why"),
    ]:
        trust = {**run_on_tokens["trust"], "overridden": ["b"] * number}
        left_out = [{"tensor": "a", "reason": "why"}] * number
        checkpoint = {**run_on_tokens["checkpoint"], "skipped": left_out}
        facts = summary({**run_on_tokens, "trust": trust, "checkpoint": checkpoint})
        assert tests in trust_line(facts)
        assert skipped(facts) == [tensors]


def test_layers_that_were_asked_for_in_vain_are_named(run):
    for layers, sentence in {
        None: "",
        "1": "",
        "1,3": "",
        "1,7": "layer 7 was asked for and has no router",
        "0-9": "layers 0,2,4-9 were asked for and have no router",
    }.items():
        assert layers_without_router(layers, ["text/1", "vision/3/second"]) == sentence
    line = routers_line(summary({**run, "layers_requested": "3-61"}))
    assert line.endswith(" Layer 61 was asked for and has no router.")
    assert "asked" not in routers_line(summary(run))


SENTENCE = "softmax, top 2 of 12"


def router(top_k: int, **facts) -> dict:
    plain = {"score": "softmax", "has_selection_bias": False, "num_groups": 1, "num_experts": 12}
    return {"top_k": top_k, **plain, **facts}


#: What another step of a router is called.
STEPS = {
    "sqrt-softplus": {"score": "sqrt_softplus"},
    "logits": {"score": "identity"},
    "softmax + selection bias": {"has_selection_bias": True},
    "softmax, groups": {"num_groups": 4},
}


def test_routers_that_choose_alike_share_a_sentence_and_others_are_counted(run):
    assert rule_brief(SENTENCE, []) == rule_brief(SENTENCE, [router(2)] * 3) == SENTENCE
    several = [router(2), router(3), router(4), router(3)]
    counted = "softmax, top 3 of 12 (2 of 4 routers), 2 of 12 (1), 4 of 12 (1)"
    assert rule_brief(SENTENCE, several) == counted
    for step, facts in STEPS.items():
        told_apart = f"softmax, top 2 of 12 (2 of 3 routers); {step}, top 2 of 12 (1)"
        assert rule_brief(SENTENCE, [router(2), router(2), router(2, **facts)]) == told_apart
    odd = {**run["routers"][1], "top_k": 4}
    changed = {**run, "routers": [*run["routers"][:-1], odd]}
    assert run["checkpoint"]["rule"] in rule_line(summary(run))
    assert "top 8 of 256 (57 of 58 routers), 4 of 256 (1)" in rule_line(summary(changed))


def run_of(share: float | None, overridden=()) -> dict:
    """The facts of a run on tokens whose first recorded choices were reproduced at this share."""
    return {
        "checkpoint": {"name": "model"},
        "tokens": {"stage": "router_input"},
        "trust": {"share_reproduced": share, "overridden": list(overridden), "rms_median": None},
    }


#: Runs, and whether their choices verify the rule.
VERIFIED = [
    (run_of(1.0), True),
    (run_of(LEAST_SHARE), True),
    (run_of(LEAST_SHARE - 1e-9), False),
    (run_of(0.5), False),
    (run_of(1.0, ["rec: recorded from another checkpoint."]), False),
    (run_of(None), False),
    ({"checkpoint": {"name": "model"}, "tokens": None, "trust": None}, False),
]


def test_a_rule_is_verified_by_the_choices_of_the_run_or_assumed():
    for run, is_verified in VERIFIED:
        trust = "verified by recorded choices" if is_verified else assumed()
        assert rule_trust(run) == trust
        assert is_verified_here(run) == is_verified
        assert rule_status(run) == ("verified" if is_verified else "assumed")
        if run["trust"] and run["trust"]["share_reproduced"] is not None:
            assert ("NOT verified" in gate_rule_line(run)) != is_verified
        elif run["trust"]:
            assert trust in gate_rule_line(run)
            assert trust in trust_line(summary(run))


def test_an_assumed_rule_says_what_it_was_taken_from(refused_run):
    described = {"checkpoint": {"family": "described"}, "tokens": None, "trust": None}
    assert rule_trust(described) == "assumed from options"
    of_a_file = {**described, "checkpoint": {"family": "mine", "rule_origin": "the family file"}}
    assert rule_trust(of_a_file) == "assumed from the family file"
    # routers that could not be read have none
    assert rule_facts(refused_run) == {"rule_status": None, "rule_trust": None}


def test_what_stands_at_the_right_has_two_columns_of_its_own_or_a_line():
    """A word of 10 columns behind a label of 9 and the text, 40 columns wide."""
    for text, num_lines in {"a" * 19: 1, "a" * 20: 2, "a" * 29: 2}.items():
        fact = Fact("label", text, right="exit 44444", indent=9)
        screen = render(Document("x", "x", [[fact]], dict), "table", View(40))
        lines = screen.rstrip("\n").split("\n")
        assert len(lines[-1]) == 40
        assert len(lines) == num_lines, text
