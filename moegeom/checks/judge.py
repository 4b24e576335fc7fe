"""From the measured rows of a run to its findings and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moegeom.checks.measured import Measured
from moegeom.checks.run import run_checks
from moegeom.core.finding import Finding
from moegeom.core.metric import RULE_HAS_NO


def judge(
    measured: Measured, reasons: Mapping[str, Mapping[str, str]], notes: Sequence[str]
) -> tuple[list[Finding], dict[str, list[str]]]:
    """Findings of all checks, then notes; and by fact of ``run.json`` the codes of checks.

    ``checks_not_judged`` did not pass and did not fail; ``checks_inconclusive``, which are among
    them or passed in part, had what they need, and it was too little.

    ``reasons`` says by router and metric why a figure is null; equal reasons make one note,
    and what the rule does not have makes none.
    """
    verdict = run_checks(measured)
    findings = list(verdict.findings)
    where: dict[tuple[str, str], list[str]] = {}
    for router, why in reasons.items():
        for metric, reason in why.items():
            if not reason.startswith(RULE_HAS_NO):
                where.setdefault((metric, reason), []).append(router)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (metric, reason), routers in where.items():
        alike.setdefault((reason, tuple(routers)), []).append(metric)
    findings += [
        Finding("note", "", routers, f"{_are_null(metrics)}: {reason}.")
        for (reason, routers), metrics in alike.items()
    ]
    findings += [Finding("note", "", (), note) for note in notes]
    codes = {
        "checks_not_judged": [
            o.code for o in verdict.outcomes if o.state not in ("passed", "failed")
        ],
        "checks_inconclusive": [o.code for o in verdict.open],
    }
    return findings, codes


def _are_null(metrics: Sequence[str]) -> str:
    return f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} null"
