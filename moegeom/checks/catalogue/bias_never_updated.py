"""MGN116: the selection bias was trained.

Looked for: biases that are the same for every expert of a layer, mostly all 0.

A finding means: the update after each batch never reached them, or they were lost in a conversion
and written as zeros. The rule adds them in vain, and nothing balances the load.

What to do: compare with the source; in training, look whether the update runs and whether the
buffer is saved.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.catalogue.bias_collapsed import SWALLOWS
from moegeom.checks.check import Check, Limits, has_selection_bias
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        if row.get("bias_num_distinct") != 1 or len(measured.experts[row["router"]]) < 2:
            continue
        if not row["is_bias_bf16"] or row["bias_ulp_bf16"] < SWALLOWS:  # else MGN111 names the cast
            yield CHECK.finding(
                row["router"],
                f"every expert has the selection bias {row['bias_mean']:.3g}: none was ever moved.",
                "Either training never updated it, or a conversion wrote a constant.",
            )


CHECK = Check(
    "MGN116",
    "the selection bias was never updated",
    "warning",
    _judge,
    ("bias_num_distinct",),
    absent="no router has a selection bias",
    concerns=has_selection_bias,
    severities={"release": "error", "training": "note"},
)
