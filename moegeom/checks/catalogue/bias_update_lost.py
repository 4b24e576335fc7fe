"""MGN113: an update of the selection bias is not lost in bfloat16.

Looked for: biases stored as bfloat16 that a step of 0.001 up or down leaves where they are.

A finding means: loss-free balancing adds such a step after each batch. Kept in bfloat16, every bias
of 0.5 or more stays as it is for ever, and the load is no longer balanced.

What to do: keep the bias in float32 in training and in checkpoints that training goes on from.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, has_selection_bias
from moegeom.checks.fixes import keep_in_float32
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda r: -(r.get("bias_lost_update_share") or 0.0)):
        share = row.get("bias_lost_update_share")
        if share is None or row["bias_bits"] is None or row["bias_bits"] > 7:
            continue
        router = row["router"]
        if share > limits("share", router):
            yield CHECK.finding(
                router,
                f"an update of 0.001 would not move {100 * share:.0f} % of the selection biases.",
                f"They are stored as {measured.facts(router).get('bias_dtype', 'bf16').lower()}, "
                f"which steps by {row['bias_ulp_bf16']:.2g} at the largest of them.",
                fix=keep_in_float32(measured, row),
            )


CHECK = Check(
    "MGN113",
    "updates of the selection bias are lost",
    "warning",
    _judge,
    ("bias_lost_update_share",),
    (Limit("share", 0.1, "largest share of experts whose bias an update of 0.001 does not move"),),
    absent="no router has a selection bias",
    concerns=has_selection_bias,
)
