"""From the measured rows of a run to its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moegeom.check._check import Row, measured_rows, run_checks
from moegeom.core.finding import Finding


def judge(
    layers: Sequence[Row],
    experts: Sequence[Row],
    reasons: Mapping[str, Mapping[str, str]],
    notes: Sequence[str],
    checkpoint: str,
    tokens: str,
) -> tuple[list[Finding], list[str]]:
    """Findings of all checks, then notes; and the codes of the checks that could not be judged.

    ``reasons`` says by router and metric why a figure is null; equal reasons make one note.
    ``checkpoint`` and ``tokens`` are what was typed, for the commands that findings suggest.
    """
    findings, not_judged = run_checks(measured_rows(layers, experts, checkpoint, tokens))
    where: dict[tuple[str, str], list[str]] = {}
    for router, why in reasons.items():
        for metric, reason in why.items():
            where.setdefault((metric, reason), []).append(router)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (metric, reason), routers in where.items():
        alike.setdefault((reason, tuple(routers)), []).append(metric)
    findings += [
        Finding("note", "", routers, f"{_are_null(metrics)}: {reason}.")
        for (reason, routers), metrics in alike.items()
    ]
    findings += [Finding("note", "", (), note) for note in notes]
    return findings, not_judged


def _are_null(metrics: Sequence[str]) -> str:
    return f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} null"
