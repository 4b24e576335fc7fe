"""MGB201: every expert is used.

Looked for: experts that no token chose, or whose load is below a tenth of the fair share by more
than chance. A small set of tokens leaves experts out, so fewer than 30 expected choices are not
judged; the finding says what even routing would give each expert at least.

A finding means: on these tokens the expert does nothing. It may serve a domain that they lack.

What to do: measure more tokens of other domains, then earlier checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured, listed
from moegeom.checks.statistics import p_above


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    by_share = sorted(measured.layers, key=lambda row: -(row.get("underused_share") or 0.0))
    for row in by_share:
        router = row["router"]
        rows = measured.experts[router]
        fair = sum(e["num_slots"] or 0 for e in rows) / len(rows)
        limit = limits("fair_share", router)
        least = limits("expected_choices", router)
        if row.get("underused_share") is None:
            continue
        if fair < least:
            few = f"{fair:,.3g} choices expected of each expert; needed: {least:g}, of more tokens"
            yield Unknown(router, few)
            continue
        low = [e for e in rows if e["load"] < limit]
        if not low:
            yield Tested(router, None, 1.0)
            continue
        if row["num_blocks"] < 2:
            yield Unknown(router, NO_ERROR)
            continue
        dead = sum(e["num_slots"] == 0 for e in low)
        counted = [f"{dead} dead"] * bool(dead) + [f"{len(low) - dead} underused"] * (
            len(low) > dead
        )
        freedom = row["num_blocks"] - 1
        p_values = [p_above(-e["load"], -limit, e["load_se"] or 0.0, freedom) for e in low]
        finding = CHECK.finding(
            router,
            f"{' and '.join(counted)} of {len(rows)} experts on these tokens.",
            f"Less than {limit:g} of the fair {fair:,.0f} choices: expert "
            f"{listed([e['expert'] for e in low])}. Even routing would give each at least "
            f"{fair - 4 * math.sqrt(fair):,.0f}.",
        )
        # the least of the layer's p-values, for as many experts as were looked at
        yield Tested(router, finding, min(1.0, len(rows) * min(p_values)))


CHECK = Check(
    "MGB201",
    "experts are dead or underused",
    "warning",
    _judge,
    ("underused_share",),
    (
        Limit("fair_share", 0.1, "least load in fair shares"),
        # From 30 expected choices on, an even router keeps each expert four sigmas above a tenth.
        Limit("expected_choices", 30.0, "fewest choices per expert that can be judged", "random"),
    ),
    inputs="tokens",
    absent="the tokens say nothing of load",
)
