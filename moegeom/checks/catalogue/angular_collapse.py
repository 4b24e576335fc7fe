"""MGG301: router inputs point different ways.

Looked for: the mean resultant length of the router inputs, that is the length of the mean of their
unit vectors: 0 when directions are spread, 1 when all are one.

A finding means: tokens differ little in direction, so few expert sets can occur whatever the router
does: the cause is in front of the router.

What to do: look at the hidden states, and at attention sinks. The limit is heuristic.
"""

from __future__ import annotations

from moegeom.checks.check import Limit
from moegeom.checks.figure import figure_check

CHECK = figure_check(
    "MGG301",
    "router inputs have collapsed to one direction",
    "mean_resultant_length",
    Limit("length", 0.95, "largest mean resultant length of the router inputs"),
    lambda figure: (
        f"router inputs nearly all point the same way: mean resultant length {figure.value:.3f}.",
        f"Limit {figure.limit:g}, {figure.basis(3)}.",
    ),
    lambda shift: f"a mean resultant length {shift:.3f} above its limit",
    room=lambda figure: 1.0 - figure.limit,
    absent="the recording holds no router inputs",
)
