"""MGG402: router inputs are as spread in direction as they were.

Looked for: the mean resultant length of the router inputs beside that of the baseline; a change
counts when it is beyond the limit by more than chance.

A finding means: what the router reads has changed: another norm in front, other hidden states, or
other tokens.

What to do: compare equal mixtures of text first, then the gain of the norm (MGI122).
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.change import changes
from moegeom.checks.check import Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured

COLUMN = "mean_resultant_length"


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    def words(old: float, new: float) -> str:
        return f"mean resultant length {new:.3f}; the baseline has {old:.3f}."

    return changes(CHECK, measured, limits, COLUMN, words, largest=1.0)


CHECK = Check(
    "MGG402",
    "router inputs are not spread as they were",
    "warning",
    _judge,
    (COLUMN,),
    (Limit("change", 0.02, "largest change of the mean resultant length"),),
    inputs="baseline and tokens",
    absent="the recording holds no router inputs",
    detects=lambda shift: f"a mean resultant length that changed by {shift:.3f} more than allowed",
)
