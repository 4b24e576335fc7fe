"""Figures of studies hold the numbers of their records, and none that are not there."""

import numpy as np
import pytest

import moegeom as mg
from moegeom.core.finding import Finding, Outcome, Verdict
from moegeom.document.chart import Bars, Chart, Guide, Heat
from moegeom.studies.changes.record import RouterChange
from moegeom.studies.check.document import gate_figures
from moegeom.studies.check.record import Gate
from moegeom.studies.diff.document import row_figures
from moegeom.studies.diff.record import Difference
from moegeom.studies.signoff.document import sign_off_figures
from moegeom.studies.signoff.record import Line, SignOff
from tests.unit.studies.samples import BALANCED, few_tokens

ROUTERS = {"routers": [{"name": "text/0"}, {"name": "text/1"}]}


def column(figure: Chart, name: str) -> list:
    return list(dict(figure.columns)[name])


def bars_of(figure: Chart) -> list:
    return [(mark.role, mark.y) for mark in figure.panels[0].marks if isinstance(mark, Bars)]


def finding(*routers: str) -> Finding:
    return Finding("warning", "X1", routers, "t")


def outcome(code: str, state, *findings: Finding, **facts) -> Outcome:
    return Outcome(code, "bad", "warning", state, findings=findings, statement="good", **facts)


def drawn(*outcomes: Outcome) -> list[Chart]:
    return [*gate_figures(Gate(Verdict(outcomes), ROUTERS))]


def test_a_map_of_checks_says_for_each_layer_how_each_check_ended_if_one_was_looked_at():
    (figure,) = drawn(
        outcome("A1", "passed"),
        outcome("A2", "failed", finding("text/1")),
        outcome("A3", "failed", finding()),
        outcome("A4", "inconclusive"),
        outcome("A5", "ignored", accepted=((finding("text/0"), "known"),)),
        outcome("A6", "passed", num_open=1),
        outcome("A7", "needs tokens"),
    )
    ends: dict[str, list[str]] = {}
    for code, end in zip(column(figure, "check"), column(figure, "end"), strict=True):
        ends.setdefault(code, []).append(end)
    assert ends == {
        "A1": ["passed", "passed"],
        "A2": ["passed", "warning"],
        "A3": ["warning", "warning"],
        "A4": ["not judged", "not judged"],
        "A5": ["accepted", "passed"],
        "A6": ["not judged", "not judged"],
    }
    # amber for warnings and what is not judged, grey for what is accepted, nothing for the rest
    assert bars_of(figure) == [("other", [3.0, 4.0]), ("random", [1.0, None])]
    assert "A2 (bad): 1; A3 (bad): 0, 1." in figure.alt
    (figure,) = drawn(outcome("A1", "passed"), outcome("A7", "needs a baseline"))
    assert bars_of(figure) == [("tokens", [1.0, 1.0])]
    assert drawn(outcome("A7", "needs a baseline")) == []
    assert [*gate_figures(Gate(Verdict((outcome("A1", "passed"),)), {"routers": []}))] == []


def flips(share: float, error: float | None) -> dict:
    by_router = {"text/0": share / 2, "text/1": 1.5 * share}
    return {"share": share, "error": error, "num_documents": 64, "by_router": by_router}


def signed(**evidence) -> list[Chart]:
    text = Line("routing on text", "passed", "s", evidence=evidence)
    lines = (Line("storage", "passed", "s"), text)
    return [*sign_off_figures(SignOff((None, None), lines))]


def test_routing_on_text_is_drawn_against_its_limit_and_a_run_again():
    assert signed() == []  # nothing in common
    (figure,) = signed(between=flips(0.2, 0.01), rerun=flips(0.02, None), limit=0.04)
    b, again, limit = figure.panels[0].marks
    assert isinstance(b, Bars)
    assert isinstance(again, Bars)
    assert isinstance(limit, Guide)
    assert b.y == pytest.approx([20.0, 10.0, 30.0])
    assert again.y == pytest.approx([2.0, 1.0, 3.0])
    assert limit.at == pytest.approx(4.0)
    # Student's quantile for 63 degrees of freedom
    assert b.low[0] == pytest.approx(20.0 - 1.998, abs=1e-3)
    assert not again.low
    assert "the limit is 4 %; A run again differs in 2 %; the most in layer 1, 30 %" in figure.alt


def test_what_changed_in_each_router_is_red_where_it_failed():
    trained = {"word": "trained on", "state": "failed", "size": 0.1}
    folded = {"word": "folded", "state": "passed", "size": None}
    routers = {
        "text/0": {"state": "failed", "changes": [folded, trained]},
        "text/1": {"state": "passed", "changes": [folded]},
    }
    (figure,) = signed(routers=routers)
    assert bars_of(figure) == [("limit", [10.0, None]), ("tokens", [None, 0.0])]
    assert column(figure, "size") == [None, 0.1, None]
    assert "2 routers compared, 1 failed; the largest change is 10 %, in layer 0." in figure.alt


def rows_moved(num_routers: int) -> Chart:
    moved = [(0.1, 0.02, np.inf), (0.0, 0.0)]
    routers = [RouterChange(f"text/{n}", (), (), (), moved[n > 0]) for n in range(num_routers)]
    (figure,) = row_figures(Difference((None, None), routers))
    return figure


def test_rows_that_moved_are_bars_by_router_and_of_many_a_map_of_every_row():
    assert bars_of(rows_moved(2)) == [("tokens", [2.0, 0.0]), ("other", [10.0, 0.0])]
    assert (
        "Most for expert 0 of layer 0: 10 % of its row; 1 of 2 routers moved." in rows_moved(2).alt
    )
    (heat,) = rows_moved(20).panels[0].marks
    assert isinstance(heat, Heat)
    assert (list(heat.values[0]), list(heat.values[1])) == ([10.0, 2.0, None], [0.0, 0.0, None])
    still = RouterChange("text/0", (), (), (), (0.0, 0.0))
    assert [*row_figures(Difference((None, None), [still]))] == []


def test_figures_of_studies_hold_the_numbers_of_their_records():
    ckpt, tokens = BALANCED / "step_1500", few_tokens(BALANCED.name)
    report = mg.imbalance(ckpt, tokens, layers=[0, 2])
    causes, loads, bias = report.document.figures()
    routers = report.value.routers
    assert column(causes, "mean") == [router.parts["max_vio"].mean for router in routers]
    assert column(loads, "max_vio") == [router.tokens.max_vio for router in routers]
    assert column(loads, "max_vio_with_bias_other_documents") == [
        router.evening.worst.after.max_vio for router in routers
    ]
    assert column(bias, "change") == [c for router in routers for c in router.evening.change]
    report = mg.boundary_report(ckpt, tokens, arithmetics="bf16", layers=[0, 2])
    assert set(report.figures()) == {"near_boundary", "flips"}
    figure = next(f for f in report.document.figures() if f.name == "flips")
    (variant,) = report.value.variants
    assert column(figure, "bf16") == [row["flipped_share"] for row in variant.rows]
    heat = figure.panels[1].marks[0]
    assert isinstance(heat, Heat)
    shares = [100.0 * row["flipped_share"] for row in variant.rows]
    assert heat.values == [shares]
    assert figure.panels[0].marks[0].y == [max(shares)]  # one unit, as the cells and the sentence
