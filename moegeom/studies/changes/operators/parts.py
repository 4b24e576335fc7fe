"""Parts that are neither rows, gain nor bias: scales of experts, gate and rows of shared ones."""

from __future__ import annotations

from moegeom.studies.changes.edit import Edit, error

PART = Edit(
    "part changed",
    "{kind}",
    "rows do not tell it: what experts add to the output changes, and where it is in front of the "
    "router, choices.",
    gate=error,
)
