"""MGB201: every expert is used.

Looked for: experts that no token chose, or that got less than a tenth of the fair share. A small
set of tokens leaves experts out by chance: the finding gives the number that chance would leave
out. Next: more tokens of other domains, then earlier checkpoints.
"""

from __future__ import annotations

import math

from moegeom.check._check import Check, Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured) -> list[Finding]:
    findings = []
    for row in measured.layers:
        starved = row.get("starved_share")
        experts = len(measured.experts[row["router"]])
        fair = sum(e["num_slots"] or 0 for e in measured.experts[row["router"]]) / experts
        # Below 30 expected choices an even router leaves experts under a tenth by chance.
        if not starved or fair < 30.0:
            continue
        low = [e["expert"] for e in measured.experts[row["router"]] if e["load"] < 0.1]
        chance = experts * math.exp(-fair)
        findings.append(
            Finding(
                "warning",
                CHECK.code,
                (row["router"],),
                f"{row['num_dead']} of {experts} experts are dead and "
                f"{len(low) - row['num_dead']} starved on these tokens.",
                f"Experts {', '.join(map(str, low[:8]))}{' ...' if len(low) > 8 else ''} get less "
                f"than a tenth of the fair {fair:,.0f} choices; even routing would leave out "
                f"{chance:.2g}. Holds for these tokens.",
                f"moegeom scan {measured.checkpoint} --tokens MORE_TOKENS "
                f"--layers {row['router'].split('/')[1]}",
            )
        )
    return findings


CHECK = Check("MGB201", "experts are dead or starved", "warning", ("starved_share",), _judge)
