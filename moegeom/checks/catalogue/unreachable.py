"""MGI110: some input reaches every expert, and some input leaves it out.

Looked for: experts that no input leaves out, and experts that at least k others beat for every
input that the norm in front lets through. The others are named: they are the certificate. Reachable
experts are proved by a point, or by affine independence of the rows; what is neither is counted as
open and is no finding.

A finding means: the expert can never be chosen, or never lose, whatever the tokens are. Its bias is
too low, or too high, for its row.

What to do: look at the selection bias. A bias that ran away in training, or lost its centre, shuts
experts out for good.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, without_saying
from moegeom.checks.measured import Measured, listed
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda row: -(row.get("num_unreachable") or 0)):
        router = row["router"]
        rows = measured.experts[router]
        if row.get("num_certain"):
            always = [e["expert"] for e in rows if e.get("is_certain")]
            yield CHECK.finding(
                router,
                f"{len(always)} of {len(rows)} experts are chosen for every input: expert "
                f"{listed(always)}.",
                "They beat so many others wherever the input lies that they cannot lose.",
            )
        if not row.get("num_unreachable"):
            continue
        shut = [e for e in rows if e["reach"] == "beaten everywhere"]
        first = shut[0]
        yield CHECK.finding(
            router,
            f"{len(shut)} of {len(rows)} experts can never be chosen: expert "
            f"{listed([e['expert'] for e in shut])}.",
            f"Certificate: {number_of(first['num_beaten_by'], 'expert beats', 'experts beat')} "
            f"expert {first['expert']} for every input ({listed(first['beaten_by'])}). "
            f"Proved reachable: {row['num_reachable']}, open: {row['num_reach_open']}.",
        )


CHECK = Check(
    "MGI110",
    "experts can never be chosen, or never lose",
    "error",
    _judge,
    ("num_unreachable",),
    absent="nothing is derived for the norm in front",
    concerns=without_saying,
    severities={"training": "warning"},
)
