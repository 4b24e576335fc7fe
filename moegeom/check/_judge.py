"""From the measured rows of a run to its findings and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moegeom.check._measured import Measured
from moegeom.check._run import run_checks
from moegeom.core.finding import Finding
from moegeom.core.metric import RULE_HAS_NO


def judge(
    measured: Measured, reasons: Mapping[str, Mapping[str, str]], notes: Sequence[str]
) -> tuple[list[Finding], list[str]]:
    """Findings of all checks, then notes; and the codes of the checks that could not be judged.

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
    not_judged = [o.code for o in verdict.outcomes if o.state not in ("passed", "failed")]
    return findings, not_judged


def _are_null(metrics: Sequence[str]) -> str:
    return f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} null"
