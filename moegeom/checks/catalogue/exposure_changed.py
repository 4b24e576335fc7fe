"""MGN401: as many tokens are near another coalition as were.

Looked for: the expected share of tokens switched by rounding the router input to bfloat16, beside
that of the baseline; a change counts when it is beyond the limit by more than chance.

A finding means: margins, lengths of rows or the inputs changed, so that other arithmetic will
switch more, or fewer, tokens than before. Exposure, not loss of quality.

What to do: compare the rows (MGG401) and the directions of the inputs (MGG402).
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.change import changes
from moegeom.checks.check import Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured

COLUMN = "bf16_switch_share_isotropic"


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    def words(old: float, new: float) -> str:
        return (
            f"rounding the input to bf16 would switch {100 * new:.2f} % of tokens; the baseline "
            f"has {100 * old:.2f} %."
        )

    return changes(CHECK, measured, limits, COLUMN, words, largest=0.5)


CHECK = Check(
    "MGN401",
    "near-boundary exposure is not what it was",
    "warning",
    _judge,
    (COLUMN,),
    (Limit("change", 0.001, "largest change of the share of tokens"),),
    inputs="baseline and tokens",
    absent="boundary distances are not known for this rule or recording",
    detects=lambda shift: f"an exposure that changed by {100 * shift:.2f} % of tokens",
)
