"""MGB403: the load entropy of a layer is what it was.

Looked for: the entropy of the load over log E beside that of the baseline; a change counts when it
is beyond the limit by more than chance.

A finding means: the layer uses more, or fewer, of its experts than when the baseline was made. On
other tokens that says nothing about the checkpoint: compare equal mixtures of text.

What to do: look which experts moved (MGB402) and in which domains.
"""

from __future__ import annotations

from moegeom.checks.check import Limit
from moegeom.checks.figure import change_check

CHECK = change_check(
    "MGB403",
    "the load entropy is not what it was",
    "load_entropy_normalised",
    Limit("change", 0.01, "largest change of the load entropy over log E"),
    lambda old, new: f"load entropy {new:.4f} of 1; the baseline has {old:.4f}.",
    lambda shift: f"a load entropy that changed by {shift:.4f} more than its limit",
    largest=1.0,
    absent="the tokens say nothing of load",
)
