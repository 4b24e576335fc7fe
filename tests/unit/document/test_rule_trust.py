"""Whether a rule is verified or assumed is decided once, and every header says the same."""

from __future__ import annotations

import pytest

from moegeom.document.header import gate_rule_line, trust_line
from moegeom.document.rule_trust import (
    LEAST_SHARE,
    assumed,
    is_verified_here,
    rule_facts,
    rule_status,
    rule_trust,
)
from moegeom.document.summary import Summary

HERE = "verified by recorded choices"
ASSUMED = assumed()


def run_of(share: float | None, overridden=()) -> dict:
    """The facts of a run on tokens whose first recorded choices were reproduced at this share."""
    return {
        "checkpoint": {"name": "model"},
        "tokens": {"stage": "router_input"},
        "trust": {"share_reproduced": share, "overridden": list(overridden), "rms_median": None},
    }


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (run_of(1.0), HERE),
        (run_of(LEAST_SHARE), HERE),
        (run_of(LEAST_SHARE - 1e-9), ASSUMED),
        (run_of(1.0, ["rec: recorded from another checkpoint."]), ASSUMED),
        (run_of(None), ASSUMED),
        ({"checkpoint": {"name": "model"}, "tokens": None, "trust": None}, ASSUMED),
    ],
)
def test_a_rule_is_verified_by_the_choices_of_the_run_or_assumed(run, said):
    assert rule_trust(run) == said
    assert is_verified_here(run) == (said == HERE)
    assert rule_status(run) == ("assumed" if said == ASSUMED else "verified")


def test_an_assumed_rule_says_what_it_was_taken_from():
    described = {"checkpoint": {"family": "described"}, "tokens": None, "trust": None}
    assert rule_trust(described) == "assumed from options"
    assert "rule_origin" not in described["checkpoint"]
    told = {**described, "checkpoint": {"family": "mine", "rule_origin": "the family file"}}
    assert rule_trust(told) == "assumed from the family file"


def test_routers_that_could_not_be_read_have_no_rule(refused_run):
    assert rule_facts(refused_run) == {"rule_status": None, "rule_trust": None}


def test_without_choices_every_header_says_the_same():
    run = run_of(None)
    for line in (gate_rule_line(run), trust_line(Summary(run, [], [], [], []))):
        assert rule_trust(run) in line


@pytest.mark.parametrize("share", [1.0, LEAST_SHARE, 0.98, 0.5])
def test_the_gate_says_verified_exactly_where_the_rule_is(share):
    run = run_of(share)
    assert ("NOT verified" in gate_rule_line(run)) == (rule_trust(run) == ASSUMED)
