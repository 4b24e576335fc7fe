"""MGA103: attention gates and sinks have the shape that their heads use.

Looked for: with --attention, the rows of gate matrices and the lengths of sinks beside the number
of heads, which follows from the output matrix and the width of a head.

A finding means: rows are left over or missing. A loader stops, or gives heads the gates of others.

What to do: compare shapes with config.json and with the source of the file; a conversion that parts
or joins heads has to do the same to their gates and sinks.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for one in measured.run["attention_gates"]:
        if one["refused"] and one["is_shape"]:
            yield CHECK.finding(
                one["layer"],
                f"heads cannot use {one['tensor'].rpartition('.self_attn.')[2]}.",
                f"{one['refused']}.",
            )


CHECK = Check(
    "MGA103",
    "an attention gate has another shape than its heads",
    "error",
    _judge,
    inputs="attention",
    facts="attention_gates",
    absent="no gate and no sink of attention is known in this checkpoint",
)
