"""Checks of gates of attention: where they are judged, and which heads they name."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import Case, keep, write_model
from tests.unit.check.defects import OF_ATTENTION, gates, with_attention

CODES = sorted(OF_ATTENTION)


def test_gates_are_not_read_unless_asked_for(outcomes) -> None:
    assert not outcomes(Case(made=with_attention)).keys() & set(CODES)


def test_checks_do_not_apply_where_no_gate_is_known(outcomes) -> None:
    found = outcomes(Case(request={"attention": True}))
    said = {(found[code].state, found[code].reason) for code in CODES}
    assert said == {
        ("does not apply", "no gate and no sink of attention is known in this checkpoint")
    }


def test_a_check_that_is_required_and_not_asked_for_is_inconclusive(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    model = write_model(tmp_path / "a", Case(made=with_attention), keep)
    (tmp_path / "moegeom.toml").write_text('require = ["MGA101"]\n')
    (outcome,) = [o for o in gate(GateRequest(str(model))).verdict.outcomes if o.code == "MGA101"]
    assert outcome.state == "inconclusive"
    assert "--attention" in outcome.reason


@pytest.mark.parametrize(("code", "change"), [("MGA101", 0.0), ("MGA102", np.inf)])
def test_the_head_that_was_spoilt_is_named(outcomes, code, change) -> None:
    case = Case(
        gates(lambda rows: rows.fill(change)), made=with_attention, request={"attention": True}
    )
    (finding,) = outcomes(case)[code].findings
    assert finding.routers == ("text/1",)
    assert finding.title.startswith("1 of 4 attention")
    assert "head 1." in finding.title


def test_results_hold_no_gates(tmp_path) -> None:
    from moegeom.pipeline import ScanRequest, scan

    model = write_model(tmp_path, Case(), keep)
    scan(ScanRequest(str(model), out=tmp_path / "results"))
    with pytest.raises(UsageError, match="--attention comes too late"):
        gate(GateRequest(str(tmp_path / "results"), attention=True))
