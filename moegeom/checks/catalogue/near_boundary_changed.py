"""MGN401: as many tokens are near another expert set as were.

Looked for: the expected share of tokens flipped by rounding the router input to bfloat16, beside
that of the baseline; a change counts when it is beyond the limit by more than chance.

A finding means: margins, lengths of rows or the inputs changed, so that other arithmetic will
flip more, or fewer, tokens than before. Exposure, not loss of quality.

What to do: compare the rows (MGG401) and the directions of the inputs (MGG402).
"""

from __future__ import annotations

from moegeom.checks.check import Limit
from moegeom.checks.figure import change_check

CHECK = change_check(
    "MGN401",
    "near-boundary exposure is not what it was",
    "bf16_flip_share_isotropic",
    Limit("change", 0.001, "largest change of the share of tokens"),
    lambda old, new: (
        f"rounding the input to bf16 would flip {100 * new:.2f} % of tokens; the baseline has "
        f"{100 * old:.2f} %."
    ),
    lambda shift: f"an exposure that changed by {100 * shift:.2f} % of tokens",
    largest=0.5,
    absent="boundary distances are not known for this rule or recording",
)
