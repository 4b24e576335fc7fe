"""Checks of gates of attention: where they are judged, and which heads they name."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import Case, outcome_of
from tests.unit.check.defects import OF_ATTENTION, gates, with_attention

ATTENTIVE = Case(made=with_attention)


def test_gates_are_not_read_unless_asked_for(outcomes):
    assert not outcomes(ATTENTIVE).keys() & OF_ATTENTION.keys()


def test_checks_do_not_apply_where_no_gate_is_known(outcomes):
    of_each = outcomes(Case(request={"attention": True}))
    assert {(of_each[code].state, of_each[code].reason) for code in OF_ATTENTION} == {
        ("does not apply", "no gate and no sink of attention is known in this checkpoint")
    }


def test_a_check_that_is_required_and_not_asked_for_is_inconclusive(judged, tmp_path):
    (tmp_path / "moegeom.toml").write_text('require = ["MGA101"]\n')
    outcome = outcome_of(judged(ATTENTIVE), "MGA101")
    assert outcome.state == "inconclusive"
    assert "--attention" in outcome.reason


@pytest.mark.parametrize(("code", "change"), [("MGA101", 0.0), ("MGA102", np.inf)])
def test_the_head_that_was_spoilt_is_named(judged, code, change):
    spoil = gates(lambda rows: rows.fill(change))
    (finding,) = outcome_of(judged(ATTENTIVE, spoil, attention=True), code).findings
    assert finding.routers == ("text/1",)
    assert finding.title.startswith("1 of 4 attention")
    assert "head 1." in finding.title


@pytest.mark.parametrize("option", ["attention", "experts"])
def test_results_hold_neither_gates_nor_experts(judged, tmp_path, option):
    judged(out=tmp_path / "results")
    with pytest.raises(UsageError, match=f"--{option} comes too late"):
        gate(GateRequest("results", **{option: True}))
