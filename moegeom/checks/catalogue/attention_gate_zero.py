"""MGA101: no head has an attention gate of zeros.

Looked for: with --attention, gate rows, and the biases beside them, that are all zero in a head.

A finding means: the gate of this head is one number whatever it reads, a half for a sigmoid. In a
trained model that is a tensor that was never loaded, or was lost in a conversion.

What to do: where this is a model before its training, nothing. Else compare the file with its
source, and the name of the tensor with what the loader looks for; docs/attention.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, same_sentence
from moegeom.checks.measured import Measured, listed
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for one in measured.run["attention_gates"]:
        if one.get("zero"):
            yield CHECK.finding(
                one["layer"],
                f"{len(one['zero'])} of {one['num_heads']} attention gates are zero: head "
                f"{listed(one['zero'])}.",
                f"{one['tensor']}: these gates are the same number for every token.",
            )


CHECK = Check(
    "MGA101",
    "an attention gate is zero",
    "warning",
    _judge,
    inputs="attention",
    facts="attention_gates",
    absent="no gate and no sink of attention is known in this checkpoint",
    alike=same_sentence,
)
