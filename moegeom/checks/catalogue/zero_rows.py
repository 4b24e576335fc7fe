"""MGI103: no router row is zero.

Looked for: rows whose every weight is 0, as stored or times the gain of the norm in front.

A finding means: such an expert has the same logit for every token. It was never initialised, or
never written.

What to do: compare the file with its source.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured, listed
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        rows = measured.experts[row["router"]]
        experts = [e["expert"] for e in rows if 0.0 in (e["row_norm"], e.get("effective_row_norm"))]
        if not experts:
            continue
        stored = row.get("num_zero_rows")
        because = "" if stored else " The gain of the norm in front makes them so."
        yield CHECK.finding(
            row["router"],
            f"{len(experts)} of {len(rows)} router rows are zero: expert {listed(experts)}.",
            "Their logit is the same for every token: nothing was trained or written here."
            + because,
        )


CHECK = Check("MGI103", "a router row is zero", "error", _judge, ("num_zero_rows",))
