"""The facts of the first screen, taken from the results, without their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from moegeom.core.errors import ResultsError
from moegeom.core.finding import SEVERITY_ORDER, Finding, Severity, Verdict
from moegeom.core.row_keys import ALL, OUTLIERS
from moegeom.core.text import number_of, quoted
from moegeom.document.place import place
from moegeom.document.verdict_text import places
from moegeom.results.reader import Results

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """Rows and facts that every reporter shows.

    ``layers`` holds a row per router for the whole population, ``random`` those of the random
    router; both keep the order of the checkpoint. ``num_outliers`` counts outlier tokens, once for
    each router that sees them so.
    """

    run: Mapping[str, Any]
    layers: Sequence[Row]
    random: Sequence[Row]
    findings: Sequence[Finding]
    notes: Sequence[Finding]
    num_outliers: int = 0

    @property
    def worst(self) -> dict[str, Finding]:
        """The worst finding of each router that has one."""
        by_router: dict[str, Finding] = {}
        for finding in self.findings:
            for router in finding.routers:
                by_router.setdefault(router, finding)
        return by_router

    @property
    def remainder(self) -> str:
        """Layers with findings, of those judged, and what could not be judged of them."""
        total, with_tokens = len(self.layers), sum(bool(r.get("num_tokens")) for r in self.layers)
        flagged = sum(row["router"] in self.worst for row in self.layers)
        sentence = f"findings in {flagged} of {number_of(total, 'layer')}"
        if self.findings and not flagged:
            sentence = f"of the checkpoint, none of one of {number_of(total, 'layer')} alone"
        if not with_tokens:
            return f"{sentence}; weights alone: how they choose is not judged."
        unjudged = self.run.get("checks_inconclusive") or ()
        if with_tokens < total:
            sentence += f"; {total - with_tokens} without tokens, not judged on load"
        if unjudged:
            sentence += f"; not judged, too few tokens or documents: {', '.join(unjudged)}"
        return f"{sentence}."

    def count(self, severity: str) -> int:
        """Findings of that severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def place(self, router: str) -> str:
        """``31`` when all routers are in one stack and slot, else the whole name."""
        return place(router, (row["router"] for row in self.layers))

    def places(self, routers: Sequence[str]) -> str:
        """``layer 31``, ``layers 2-3,5`` or ``all layers``; long lists are cut and counted."""
        if len(routers) == len(self.layers) > 1:
            return "all layers"
        return places(routers, {"routers": [{"name": row["router"]} for row in self.layers]})


def _severity(cell: object) -> Severity:
    for severity in get_args(Severity):
        if cell == severity:
            return severity
    raise ResultsError(
        f"findings.parquet: severity {quoted(cell)}; expected {', '.join(SEVERITY_ORDER)}.",
        "It is not as a scan wrote it: scan again.",
    )


def summarise(results: Results) -> Summary:
    """What the first screen needs, from a results directory."""
    rows = results.rows("layers")
    layers = [row for row in rows if row["population"] == ALL]
    listed = [
        Finding(
            _severity(row["severity"]),
            row["code"] or "",
            tuple(filter(None, row["routers"] or ())),
            row["title"] or "",
            row["detail"] or "",
            row["next_command"] or "",
            row.get("fix") or "",
        )
        for row in results.rows("findings")
    ]
    ordered = sorted(listed, key=lambda f: SEVERITY_ORDER[f.severity])  # else as they were judged
    return Summary(
        run=results.run,
        layers=[row for row in layers if row["variant"] == "as_stored"],
        random=[row for row in layers if row["variant"] == "random"],
        findings=[finding for finding in ordered if finding.severity != "note"],
        notes=[finding for finding in ordered if finding.severity == "note"],
        num_outliers=sum(
            row["num_tokens"] or 0
            for row in rows
            if (row["variant"], row["population"]) == ("as_stored", OUTLIERS)
        ),
    )


def summarise_verdict(verdict: Verdict, run: Mapping[str, Any]) -> Summary:
    """What the header needs, from a verdict: its findings, and routers without figures."""
    return Summary(
        run=run,
        layers=[{"router": router["name"]} for router in run["routers"]],
        random=[],
        findings=verdict.findings,
        notes=[],
    )
