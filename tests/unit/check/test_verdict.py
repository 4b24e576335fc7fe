"""The exit code follows from the outcomes alone: failed before inconclusive before passed.

Of figures with a standard error the worst is told first, and its p-value is Student's.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations, product

import pytest
from scipy import stats

from moegeom.checks import CHECKS, check
from moegeom.checks.check import NOTHING_FOUND
from moegeom.checks.measured import measured_rows
from moegeom.checks.profile import DEFAULT
from moegeom.checks.run import JudgedCheck, verdict_of
from moegeom.core.finding import STATES, Finding, Outcome, Verdict

SEVERITIES = ("error", "warning", "note")


def _outcome(state, severity) -> Outcome:
    findings = (Finding(severity, "MGI999", (), "said."),) if state == "failed" else ()
    return Outcome("MGI999", "a title", severity, state, findings=findings)


EVERY = [_outcome(state, severity) for state, severity in product(STATES, SEVERITIES)]


@pytest.mark.parametrize("fail_on", ["error", "warning"])
def test_the_exit_code_of_no_outcome_and_of_every_pair(fail_on):
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    for pair in ((), *combinations(EVERY, 2)):
        fails = any(o.state == "failed" and o.severity in failing for o in pair)
        open_ = any(o.state == "inconclusive" for o in pair)
        judged = any(o.state in ("passed", "failed", "ignored") for o in pair)
        expected = 1 if fails else 4 if open_ or not judged else 0
        assert Verdict(pair, fail_on).exit_code == expected


def test_findings_of_failed_checks_come_worst_first():
    verdict = Verdict(tuple(_outcome("failed", severity) for severity in reversed(SEVERITIES)))
    assert [finding.severity for finding in verdict.findings] == list(SEVERITIES)


def test_a_failure_that_does_not_count_hides_no_open_layer():
    outcome = Outcome("MGB203", "a title", "warning", "failed", "open", num_open=1)
    assert Verdict((outcome,), "error").exit_code == 4
    assert Verdict((outcome,), "warning").exit_code == 1


def claims(name: str, column: str, values: list[float], error: float = 0.01) -> list[check.Tested]:
    shared = {"variant": "as_stored", "population": "all", "num_blocks": 16, f"{column}_se": error}
    facts = {"effective_experts": 1.0, "router": ""}
    rows = [shared | facts | {column: v, "router": f"text/{i}"} for i, v in enumerate(values)]
    experts = [{**shared, "router": row["router"], "expert": 0} for row in rows]
    return list(CHECKS[name].judge(measured_rows(rows, experts), lambda name, router: 0.5))


@pytest.mark.parametrize(
    ("name", "column", "order"),
    [
        ("angular_collapse", "mean_resultant_length", [2, 0, 1]),
        ("uneven_load", "load_entropy_normalised", [1, 0, 2]),
    ],
)
def test_the_worst_figure_comes_first_also_where_it_is_0(name, column, order):
    found = claims(name, column, [0.4, 0.0, 0.9])
    assert [claim.router for claim in found] == [f"text/{i}" for i in order]


@pytest.mark.parametrize(
    ("name", "column", "beyond"),
    [
        ("angular_collapse", "mean_resultant_length", 1.0),
        ("uneven_load", "load_entropy_normalised", -1.0),
    ],
)
def test_the_p_value_is_that_of_a_one_sided_t_test_towards_the_finding(name, column, beyond):
    for value in (0.48, 0.5, 0.53):
        (claim,) = claims(name, column, [value], 0.02)
        expected = stats.t(df=15).sf(beyond * (value - 0.5) / 0.02)
        assert claim.p_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("value", "error", "state"),
    [(0.4, 0.001, "passed"), (0.4, 0.3, "inconclusive"), (0.0, 0.05, "passed")],
)
def test_a_test_without_power_is_open_unless_the_figure_is_within_its_limit(value, error, state):
    """A limit of 0.5 leaves 0.5 of room; with the last error 0.31 beyond it would be found."""
    found = claims("angular_collapse", "mean_resultant_length", [value], error)
    (outcome,) = verdict_of([JudgedCheck(CHECKS["angular_collapse"], found)], DEFAULT).outcomes
    assert (outcome.state, NOTHING_FOUND in outcome.reason) == (state, state == "inconclusive")


def test_what_is_within_its_limit_needs_no_room_beyond_it():
    """As the load of 4 chosen of 16 experts on 20 documents: far below 3 of at most 4 shares."""
    (claim,) = claims("angular_collapse", "mean_resultant_length", [0.1], 0.02)
    narrow = dataclasses.replace(claim, room=0.01)
    (passed,) = verdict_of([JudgedCheck(CHECKS["angular_collapse"], [narrow])], DEFAULT).outcomes
    near = dataclasses.replace(narrow, p_beyond=0.3)
    (left,) = verdict_of([JudgedCheck(CHECKS["angular_collapse"], [near])], DEFAULT).outcomes
    assert (passed.state, left.state) == ("passed", "inconclusive")
