"""MGB201: every expert is used.

Looked for: experts that no token chose, or that got less than a tenth of the fair share. A small
set of tokens leaves experts out by chance, so fewer than 30 expected choices are not judged; the
finding says what even routing would give each expert at least. Next: more tokens of other domains,
then earlier checkpoints.
"""

from __future__ import annotations

import math

from moegeom.check._check import Check, Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured) -> list[Finding]:
    findings = []
    by_share = sorted(measured.layers, key=lambda row: -(row.get("starved_share") or 0.0))
    for row in by_share:
        starved = row.get("starved_share")
        experts = len(measured.experts[row["router"]])
        fair = sum(e["num_slots"] or 0 for e in measured.experts[row["router"]]) / experts
        # From 30 expected choices on, an even router keeps each expert four sigmas above a tenth.
        if not starved or fair < 30.0:
            continue
        low = [e["expert"] for e in measured.experts[row["router"]] if e["load"] < 0.1]
        dead = row["num_dead"]
        counted = [f"{dead} dead"] * bool(dead) + [f"{len(low) - dead} starved"] * (len(low) > dead)
        named = ", ".join(map(str, low[:8])) + (" ..." if len(low) > 8 else "")
        findings.append(
            Finding(
                "warning",
                CHECK.code,
                (row["router"],),
                f"{' and '.join(counted)} of {experts} experts on these tokens.",
                f"Less than a tenth of the fair {fair:,.0f} choices: expert {named}. Even routing "
                f"would give each at least {fair - 4 * math.sqrt(fair):,.0f}.",
                f"moegeom scan {measured.checkpoint} --tokens MORE_TOKENS "
                f"--layers {row['router'].split('/')[1]}",
            )
        )
    return findings


CHECK = Check("MGB201", "experts are dead or starved", "warning", ("starved_share",), _judge)
