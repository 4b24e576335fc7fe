"""MGG402: router inputs are as spread in direction as they were.

Looked for: the mean resultant length of the router inputs beside that of the baseline; a change
counts when it is beyond the limit by more than chance.

A finding means: what the router reads has changed: another norm in front, other hidden states, or
other tokens.

What to do: compare equal mixtures of text first, then the gain of the norm (MGI122).
"""

from __future__ import annotations

from moegeom.checks.check import Limit
from moegeom.checks.figure import change_check

CHECK = change_check(
    "MGG402",
    "router inputs are not spread as they were",
    "mean_resultant_length",
    Limit("change", 0.02, "largest change of the mean resultant length"),
    lambda old, new: f"mean resultant length {new:.3f}; the baseline has {old:.3f}.",
    lambda shift: f"a mean resultant length that changed by {shift:.3f} more than allowed",
    largest=1.0,
    absent="the recording holds no router inputs",
)
