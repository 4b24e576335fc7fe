"""MGN125: routers are stored as precisely as in the baseline.

Looked for: fewer mantissa bits in the stored weight or selection bias than the baseline has,
weights that hold bfloat16 numbers only where the baseline's did not, and fewer different values in
windows of 32 weights than the baseline held in the same dtype.

A finding means: a conversion rounded the router since the baseline was made. Fewer values in the
same dtype are an error: a router was quantised and written back.

What to do: convert again with the routers, and their selection bias, on the list of modules to
keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moegeom.checks.baseline import BaselineRouter
from moegeom.checks.check import Check, Limits, without_saying
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding

#: Different values in windows of 32, over those of Gaussian rows: more than this is no chance.
_LEVELS_LOST = 0.03

_PARTS = {"weight_bits": "weight", "bias_bits": "selection bias"}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        before = measured.before(row["router"])
        yield from _rounded_since(measured, row)
        if lost := lost_levels(before, row):
            yield replace(
                CHECK.finding(
                    row["router"],
                    f"the rows lost {100 * lost:.0f} % of the different values that they held.",
                    "They are stored as before and were quantised in between, to integers or short "
                    "floats.",
                ),
                severity="error",
            )
        for column, what in _PARTS.items():
            old = None if before is None else before.columns.get(column)
            if old is not None and row.get(column) is not None and row[column] < old[0]:
                yield CHECK.finding(
                    row["router"],
                    f"the {what} is stored with {row[column]} mantissa bits; the baseline has "
                    f"{old[0]:.0f}.",
                    "What was rounded away cannot be had back from this file.",
                )


def lost_levels(before: BaselineRouter | None, row: Row) -> float | None:
    """How many of the different values that the baseline held are gone, as a share; None unless
    it is more than chance, and in the same dtype.
    """
    was = None if before is None else before.columns.get("levels_share")
    bits = None if before is None else before.columns.get("weight_bits")
    now = row.get("levels_share")
    if was is None or now is None or bits is None or row.get("weight_bits") != bits[0]:
        return None
    lost = was[0] - now
    return lost if lost > _LEVELS_LOST else None


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
    concerns=without_saying,
    inputs="baseline",
    severities={"release": "error"},
)
