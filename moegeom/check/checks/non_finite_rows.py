"""MGI101: every router row is finite.

Looked for: rows or biases with nan or infinity. A token that meets such a row has no order among
its experts, and engines differ in what they make of it. The file is damaged, or training diverged
before it was saved. Next: compare the file with its source, then look at earlier checkpoints.
"""

from __future__ import annotations

from moegeom.check._check import Check, Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured) -> list[Finding]:
    findings = []
    for row in measured.layers:
        count = row.get("num_non_finite_rows")
        if not count:
            continue
        router = row["router"]
        experts = [e["expert"] for e in measured.experts[router] if e["is_row_finite"] is False]
        findings.append(
            Finding(
                "error",
                CHECK.code,
                (router,),
                f"{count} of {len(measured.experts[router])} router rows are not finite: "
                f"expert {', '.join(map(str, experts[:8]))}.",
                "No token has an order among its experts here. The file is damaged, or training "
                "diverged before it was saved.",
                f"moegeom routers {measured.checkpoint} --layers {router.split('/')[1]}",
            )
        )
    return findings


CHECK = Check("MGI101", "a router row is not finite", "error", ("num_non_finite_rows",), _judge)
