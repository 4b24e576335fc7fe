"""MGN115: the selection biases of a layer have no common offset.

Looked for: a middle of the biases that is many times their spread away from 0.

A finding means: nothing is wrong with the choices, which a common offset does not touch. But it
grows from update to update, and the larger it is, the fewer digits are left for what differs.

What to do: recentre the biases now and then in training.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, has_selection_bias
from moegeom.checks.fixes import recentre
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    def ratio(row: Row) -> float:
        return abs(row["bias_middle"]) / row["bias_spread"] if row.get("bias_spread") else 0.0

    for row in sorted(measured.layers, key=ratio, reverse=True):
        if ratio(row) > limits("offset_over_spread", row["router"]):
            yield CHECK.finding(
                row["router"],
                f"the selection biases lie {ratio(row):.0f} times their spread away from 0.",
                f"They spread {row['bias_spread']:.2g} around {row['bias_middle']:.3g}.",
                fix=recentre(measured, row).strip(),
            )


CHECK = Check(
    "MGN115",
    "the selection biases have a common offset",
    "note",
    _judge,
    ("bias_spread",),
    (Limit("offset_over_spread", 10.0, "largest |middle| over the spread of the biases"),),
    absent="no router has a selection bias",
    concerns=has_selection_bias,
)
