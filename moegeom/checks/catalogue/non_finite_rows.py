"""MGI101: every router row is finite.

Looked for: rows, or their biases, with nan or infinity.

A finding means: a token that meets such a row has no order among its experts, and engines differ
in what they make of it. The file is damaged, or training diverged before it was saved.

What to do: compare the file with its source, then look at earlier checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured, listed
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        if not row.get("num_non_finite_rows"):
            continue
        rows = measured.experts[row["router"]]
        experts = [e["expert"] for e in rows if e["is_row_finite"] is False]
        is_weight = measured.facts(row["router"]).get("num_non_finite_rows", len(experts))
        what = "router rows" if is_weight else "biases"
        yield CHECK.finding(
            row["router"],
            f"{len(experts)} of {len(rows)} {what} are not finite: expert {listed(experts)}.",
            "No token has an order among its experts here. The file is damaged, or training "
            "diverged before it was saved.",
        )


CHECK = Check("MGI101", "a router row is not finite", "error", _judge, ("num_non_finite_rows",))
