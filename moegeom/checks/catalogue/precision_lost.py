"""MGN125: routers are stored as precisely as in the baseline.

Looked for: fewer mantissa bits in the stored weight or selection bias than the baseline has, and
weights that hold bfloat16 numbers only where the baseline's did not.

A finding means: a conversion rounded the router since the baseline was made.

What to do: convert again with the routers, and their selection bias, on the list of modules to
keep.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding

_PARTS = {"weight_bits": "weight", "bias_bits": "selection bias"}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        before = measured.before(row["router"])
        yield from _rounded_since(measured, row)
        for column, what in _PARTS.items():
            old = None if before is None else before.columns.get(column)
            if old is not None and row.get(column) is not None and row[column] < old[0]:
                yield CHECK.finding(
                    row["router"],
                    f"the {what} is stored with {row[column]} mantissa bits; the baseline has "
                    f"{old[0]:.0f}.",
                    "What was rounded away cannot be had back from this file.",
                )


def _rounded_since(measured: Measured, row: Row) -> Iterator[Finding]:
    """Storage that was used in full and now holds bfloat16 numbers only."""
    before = measured.before(row["router"])
    was = None if before is None else before.columns.get("is_weight_bf16")
    if was is not None and was[0] == 0.0 and row.get("is_weight_bf16"):
        yield CHECK.finding(
            row["router"],
            "every value of the weight is a bfloat16 number; in the baseline it was not.",
            "The router went through bfloat16 since: a transfer, or a conversion.",
        )


CHECK = Check(
    "MGN125",
    "a router is stored more coarsely than it was",
    "warning",
    _judge,
    ("weight_bits",),
    inputs="baseline",
    severities={"release": "error"},
)
