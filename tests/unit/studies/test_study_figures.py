"""Figures of studies hold the numbers of their records, and none that are not there."""

import pytest

import moegeom as mg
from moegeom.core.finding import Finding, Outcome, Verdict
from moegeom.document.chart import Bars, Chart, Guide, Heat
from moegeom.studies.check.document import gate_figures
from moegeom.studies.check.record import Gate
from moegeom.studies.signoff.document import sign_off_figures
from moegeom.studies.signoff.record import Line, SignOff
from tests.unit.studies.samples import BALANCED, few_tokens

ROUTERS = {"routers": [{"name": "text/0"}, {"name": "text/1"}]}


def column(figure: Chart, name: str) -> list:
    return list(dict(figure.columns)[name])


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
    (heat,) = figure.panels[0].marks
    assert isinstance(heat, Heat)
    assert heat.values[1][1] > heat.values[1][0] == 0.0 > heat.values[3][0]
    assert "A2 (bad): 1; A3 (bad): 0, 1." in figure.alt
    assert drawn(outcome("A7", "needs a baseline")) == []
    assert [*gate_figures(Gate(Verdict((outcome("A1", "passed"),)), {"routers": []}))] == []


def flips(share: float, error: float | None) -> dict:
    by_router = {"text/0": share / 2, "text/1": 1.5 * share}
    return {"share": share, "error": error, "num_documents": 64, "by_router": by_router}


def signed(**evidence) -> list[Chart]:
    text = Line("routing on text", "passed", "s", evidence=evidence)
    lines = (Line("storage", "passed", "s"), text)
    return [*sign_off_figures(SignOff((None, None), lines))]  # type: ignore[arg-type]


def test_routing_on_text_is_drawn_against_its_limit_and_a_run_again():
    assert signed() == []  # nothing in common
    (figure,) = signed(between=flips(0.2, 0.01), rerun=flips(0.02, None), limit=0.04)
    b, again, limit = figure.panels[0].marks
    assert isinstance(b, Bars)
    assert isinstance(again, Bars)
    assert isinstance(limit, Guide)
    assert b.y == [0.2, 0.1, pytest.approx(0.3)]
    assert again.y == [0.02, 0.01, pytest.approx(0.03)]
    assert limit.at == 0.04
    # Student's quantile for 63 degrees of freedom
    assert b.low[0] == pytest.approx(0.2 - 1.998 * 0.01, abs=1e-5)
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
    red, blue = figure.panels[0].marks
    assert isinstance(red, Bars)
    assert isinstance(blue, Bars)
    assert (red.role, red.y, blue.y) == ("limit", [0.1, None], [None, 0.0])
    assert column(figure, "size") == [None, 0.1, None]
    assert "2 routers compared, 1 failed; the largest change is 10 %, in layer 0." in figure.alt


def test_figures_of_studies_hold_the_numbers_of_their_records():
    ckpt, tokens = BALANCED / "step_1500", few_tokens(BALANCED.name)
    report = mg.imbalance(ckpt, tokens, layers=[0, 2])
    causes, loads, bias, near = report.document.figures()
    routers = report.value.routers
    assert column(causes, "mean") == [router.parts["max_vio"].mean for router in routers]
    assert column(near, "tokens") == [router.tokens.near_share for router in routers]
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
