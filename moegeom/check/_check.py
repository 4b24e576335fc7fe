"""What a check is, and running those that can be run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.core.finding import SEVERITY_ORDER, Finding, Severity
from moegeom.core.registry import Registry

Row = Mapping[str, Any]

#: Findings of one check that are told one by one; more are told as one.
MOST_ALIKE = 2


@dataclass(frozen=True)
class Measured:
    """Rows of the results that checks look at.

    ``layers`` has one row per router (as stored, population all), ``null`` the rows of the random
    router by router name, ``experts`` and ``domains`` the rows of a router by its name.
    """

    layers: Sequence[Row]
    null: Mapping[str, Row]
    experts: Mapping[str, Sequence[Row]]
    domains: Mapping[str, Sequence[Row]]
    checkpoint: str
    tokens: str


@dataclass(frozen=True)
class Check:
    """A statement to be judged. ``code`` is never reused; ``needs`` are columns of ``layers``.

    ``judge`` returns a finding for each router concerned, the worst first.
    """

    code: str
    title: str
    severity: Severity
    needs: tuple[str, ...]
    judge: Callable[[Measured], list[Finding]]


#: Checks by file name.
CHECKS: Registry[Check] = Registry("check", "moegeom.check.checks", "CHECK", Check)


def run_checks(measured: Measured) -> tuple[list[Finding], list[str]]:
    """Findings, worst first, and the codes of the checks that lacked what they need."""
    findings: list[Finding] = []
    skipped: list[str] = []
    for check in sorted(CHECKS.all(), key=lambda check: check.code):
        if all(row.get(need) is None for row in measured.layers for need in check.needs):
            skipped.append(check.code)
            continue
        findings += _gathered(check, check.judge(measured))
    return sorted(findings, key=lambda f: (SEVERITY_ORDER[f.severity], f.code)), skipped


def _gathered(check: Check, findings: list[Finding]) -> list[Finding]:
    """Findings as they are, or one for all layers with the evidence of the worst, the first."""
    if len(findings) <= MOST_ALIKE:
        return findings
    worst = findings[0]
    routers = tuple(router for finding in findings for router in finding.routers)
    title = f"{check.title}, worst in {worst.routers[0]}: {worst.title}"
    return [dataclasses.replace(worst, routers=routers, title=title)]


def measured_rows(
    layers: Sequence[Row], experts: Sequence[Row], checkpoint: str, tokens: str
) -> Measured:
    """The rows of the tables ``layers`` and ``experts``, sorted for the checks."""
    stored = [row for row in layers if row["variant"] == "as_stored"]
    by_expert: dict[str, list[Row]] = {}
    for row in experts:
        if row["variant"] == "as_stored" and not _is_domain(row):
            by_expert.setdefault(row["router"], []).append(row)
    by_domain: dict[str, list[Row]] = {}
    for row in stored:
        if _is_domain(row):
            by_domain.setdefault(row["router"], []).append(row)
    return Measured(
        layers=[row for row in stored if not _is_domain(row)],
        null={
            row["router"]: row for row in layers if row["variant"] == "null" and not _is_domain(row)
        },
        experts=by_expert,
        domains=by_domain,
        checkpoint=checkpoint,
        tokens=tokens,
    )


def _is_domain(row: Row) -> bool:
    return row["population"].startswith("domain=")
