"""MGB401: the load of a layer is as uneven as it was.

Looked for: the coefficient of variation of the load beside that of the baseline; a change counts
when it is beyond the limit by more than chance.

A finding means: experts are used more, or less, evenly than when the baseline was made. On other
tokens that says nothing about the checkpoint: compare equal mixtures of text.

What to do: look which experts moved (MGB402) and in which domains.
"""

from __future__ import annotations

from moegeom.checks.check import Limit
from moegeom.checks.figure import change_check

CHECK = change_check(
    "MGB401",
    "the load is not as even as it was",
    "load_cv_ddof0",
    Limit("change", 0.03, "largest change of the load CV"),
    lambda old, new: f"load CV {new:.3f}; the baseline has {old:.3f}.",
    lambda shift: f"a load CV that changed by {shift:.3f} more than its limit",
    largest=10.0,
    absent="the tokens say nothing of load",
)
