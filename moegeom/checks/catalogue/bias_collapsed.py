"""MGN111: the stored selection bias tells experts apart.

Looked for: biases that are bfloat16 numbers throughout, at most half as many different values as
experts, and a step of bfloat16 that is no longer small beside their spread.

A finding means: the bias was cast to bfloat16 on its way into this file, and the differences that
balance the experts are gone. Training kept them in float32.

What to do: take the bias from a checkpoint that keeps it in float32. The lost digits cannot be had
back from this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, has_selection_bias
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

#: Where all biases are one number, a cast made them so only if its step swallows their spread: at
#: this step, around 4, it does in known models.
SWALLOWS = 2.0**-5


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    worst = sorted(measured.layers, key=lambda row: row.get("bias_num_distinct") or 0)
    for row in worst:
        distinct, spread = row.get("bias_num_distinct"), row.get("bias_spread")
        if distinct is None or not row["is_bias_bf16"]:
            continue
        router = row["router"]
        experts = len(measured.experts[router])
        if distinct == 1:
            # all alike: a cast made them so only where its steps swallow updates of training
            step = math.inf if row["bias_ulp_bf16"] >= SWALLOWS else 0.0
        else:
            step = row["bias_ulp_bf16"] / spread
        if 2 * distinct <= experts and step > limits("step_over_spread", router):
            yield CHECK.finding(
                router,
                f"the selection bias has {distinct} different value{'s' * (distinct > 1)} for "
                f"{experts} experts.",
                f"All are bfloat16 numbers. They spread {spread:.2g} around "
                f"{row['bias_middle']:.3g}, where bfloat16 steps by {row['bias_ulp_bf16']:.2g}: "
                "the cast that made them took away what told experts apart.",
            )


CHECK = Check(
    "MGN111",
    "the selection bias has collapsed in the file",
    "error",
    _judge,
    ("bias_num_distinct",),
    (Limit("step_over_spread", 0.05, "largest step of bfloat16 over the spread of the biases"),),
    absent="no router has a selection bias",
    concerns=has_selection_bias,
)
