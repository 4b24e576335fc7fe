"""Experts that did not move with their rows, and routers that cannot be compared."""

from __future__ import annotations

from moegeom.studies.changes.edit import Edit, always, says

LEFT_BEHIND = Edit(
    "experts left behind",
    "experts left behind",
    says("rows changed places and experts did not: tokens go to other experts."),
    always("failed"),
)

MOVED_ALONE = Edit(
    "experts moved alone",
    "experts moved alone",
    says("experts changed places and rows did not: tokens go to other experts."),
    always("failed"),
)

NOT_COMPARED = Edit(
    "not compared",
    "not compared: {kind}",
    says("nothing is known about these routers."),
    always("failed"),
)
