"""MGN301: near-ties are no more frequent than at a random router of the same shape.

Looked for: an expected share of tokens switched by rounding the router input to bfloat16 that is
at least 1.5 times that of the null, with the difference beyond three standard errors. The factor is
uncalibrated; the share is exposure, not loss of quality. Next: the boundary report.
"""

from __future__ import annotations

import math

from moegeom.check._check import Check, Measured
from moegeom.core.finding import Finding

FACTOR = 1.5
COLUMN = "bf16_switch_share_isotropic"


def _judge(measured: Measured) -> list[Finding]:
    exposed = []
    for row in measured.layers:
        null = measured.null.get(row["router"], {})
        share, normal = row.get(COLUMN), null.get(COLUMN)
        # Equal rows tie for ever: that is MGI104's to say.
        if share is None or normal is None or row.get("num_twin_rows"):
            continue
        error = math.hypot(row.get(f"{COLUMN}_se") or 0.0, null.get(f"{COLUMN}_se") or 0.0)
        if share > FACTOR * normal and share - normal > 3.0 * error:
            exposed.append((share, normal, row["router"]))
    if not exposed:
        return []
    share, normal, worst = max(exposed)
    return [
        Finding(
            "warning",
            CHECK.code,
            tuple(router for _, _, router in exposed),
            "more near-ties than a random router of this shape would have.",
            f"Rounding the input to bf16 would switch about {100 * share:.1f} % of tokens at "
            f"{worst}; a random router {100 * normal:.1f} % (limit {FACTOR} times, uncalibrated).",
            f"moegeom scan {measured.checkpoint} --tokens {measured.tokens} "
            f"--layers {worst.split('/')[1]} --per-token",
        )
    ]


CHECK = Check("MGN301", "more near-ties than chance", "warning", (COLUMN,), _judge)
