"""MGB203: no expert takes several times its fair share.

Looked for: a busiest expert whose load, less twice its standard error over documents, is above
three times the fair share. The limit is uncalibrated. Load holds for the tokens it was measured on.
Next: follow the expert over the training steps, and look at its row and its domains.
"""

from __future__ import annotations

from moegeom.check._check import Check, Measured, Row
from moegeom.core.finding import Finding

#: Times the fair share. From practice, uncalibrated: healthy trained layers stay below 2.
LIMIT = 3.0


def _evidence(measured: Measured, row: Row) -> str:
    router, expert = row["router"], row["busiest_expert"]
    experts = {e["expert"]: e for e in measured.experts[router]}
    domains = measured.domains.get(router, ())
    same = [d for d in domains if d["busiest_expert"] == expert]
    where = f" It leads in {len(same)} of {len(domains)} domains." if len(domains) > 1 else ""
    ratio = experts[expert]["row_norm"] / row["row_norm_median"] if row["row_norm_median"] else 0.0
    length = f" Its row is {ratio:.1f}x the median length."
    return where + length


def _judge(measured: Measured) -> list[Finding]:
    findings = []
    by_load = sorted(measured.layers, key=lambda row: -(row.get("max_vio_global") or 0.0))
    for row in by_load:
        vio = row.get("max_vio_global")
        if vio is None:
            continue
        load, error = 1.0 + vio, row.get("max_vio_global_se") or 0.0
        if load - 2.0 * error <= LIMIT:
            continue
        router, expert = row["router"], row["busiest_expert"]
        slots = {e["expert"]: e["num_slots"] for e in measured.experts[router]}[expert]
        share = slots / row["num_tokens"]
        findings.append(
            Finding(
                "warning",
                CHECK.code,
                (router,),
                f"expert {expert} is chosen by {100 * share:.0f} % of the tokens.",
                f"It gets {load:.1f}x its fair share (limit {LIMIT:.1f}, uncalibrated; 95 % range "
                f"over documents {load - 2 * error:.1f}-{load + 2 * error:.1f})."
                + _evidence(measured, row),
                f"moegeom scan {measured.checkpoint} --tokens {measured.tokens} "
                f"--layers {router.split('/')[1]} --per-token",
            )
        )
    return findings


CHECK = Check(
    "MGB203", "one expert takes several fair shares", "warning", ("max_vio_global",), _judge
)
