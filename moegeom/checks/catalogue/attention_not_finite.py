"""MGA102: every attention gate and every learned sink is finite.

Looked for: with --attention, gate rows, their biases and sink logits with nan or infinity. A sink
of minus infinity is a head without one, and passes.

A finding means: what this head gives is nan, or its gate is shut or open for every token. The file
is damaged, or training diverged before it was saved.

What to do: compare the file with its source, then look at earlier checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, Unknown
from moegeom.checks.measured import Measured, listed
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    for one in measured.run["attention_gates"]:
        if one["refused"] and not one["is_shape"]:
            yield Unknown(one["layer"], one["refused"])
        elif one.get("not_finite"):
            yield CHECK.finding(
                one["layer"],
                f"{len(one['not_finite'])} of {one['num_heads']} attention heads have a gate or a "
                f"sink that is not finite: head {listed(one['not_finite'])}.",
                f"{one['tensor']}: what these heads give is not a number, or does not depend on "
                "the token.",
            )


CHECK = Check(
    "MGA102",
    "an attention gate or sink is not finite",
    "error",
    _judge,
    inputs="attention",
    facts="attention_gates",
    absent="no gate and no sink of attention is known in this checkpoint",
)
