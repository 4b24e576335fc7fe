"""MGB401: the load of a layer is as uneven as it was.

Looked for: the coefficient of variation of the load beside that of the baseline; a change counts
when it is beyond the limit by more than chance.

A finding means: experts are used more, or less, evenly than when the baseline was made. On other
tokens that says nothing about the checkpoint: compare equal mixtures of text.

What to do: look which experts moved (MGB402) and in which domains.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.change import changes
from moegeom.checks.check import Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured

COLUMN = "load_cv_ddof0"


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    def words(old: float, new: float) -> str:
        return f"load CV {new:.3f}; the baseline has {old:.3f}."

    return changes(CHECK, measured, limits, COLUMN, words, largest=10.0)


CHECK = Check(
    "MGB401",
    "the load is not as even as it was",
    "warning",
    _judge,
    (COLUMN,),
    (Limit("change", 0.03, "largest change of the load CV"),),
    inputs="baseline and tokens",
    absent="the tokens say nothing of load",
    detects=lambda shift: f"a load CV that changed by {shift:.3f} more than its limit",
)
