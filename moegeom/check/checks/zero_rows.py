"""MGI103: no router row is zero.

Looked for: rows whose every weight is 0. Such an expert has the same logit for every token; it was
never initialised, or never written. Next: compare the file with its source.
"""

from __future__ import annotations

from moegeom.check._check import Check, Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured) -> list[Finding]:
    findings = []
    for row in measured.layers:
        count = row.get("num_zero_rows")
        if count:
            experts = [e["expert"] for e in measured.experts[row["router"]] if e["row_norm"] == 0]
            findings.append(
                Finding(
                    "error",
                    CHECK.code,
                    (row["router"],),
                    f"{count} of {len(measured.experts[row['router']])} router rows are zero: "
                    f"expert {', '.join(map(str, experts[:8]))}.",
                    "Their logit is the same for every token: nothing was trained or written here.",
                    f"moegeom routers {measured.checkpoint} --layers {row['router'].split('/')[1]}",
                )
            )
    return findings


CHECK = Check("MGI103", "a router row is zero", "error", ("num_zero_rows",), _judge)
