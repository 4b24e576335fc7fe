"""MGI128: nothing was done to a router since the baseline that only a fault does.

Looked for: rows that are those of another layer or of no router of the baseline, copied over each
other, negated, or multiplied by numbers to the last digit; biases that are zero, negated, scaled,
rounded, of another layer or of other experts, or whose bytes were read as another dtype; a common
offset of biases where dropped groups are filled with a number. Rows are compared by 32 seeded
projections, biases as they are.

A finding means: training leaves none of these; a conversion wrote other numbers than it read. What
a baseline cannot know: columns that were scaled, small rotations, updates of low rank and casts of
rows look like training there (moegeom diff, with both checkpoints, tells them apart).

What to do: compare with the source: moegeom diff SOURCE CHECKPOINT. Where the change is meant,
write a new baseline (--update-baseline).
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, same_sentence
from moegeom.checks.drift import drifts
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for compared in drifts(measured):
        if not isinstance(compared, tuple):
            continue  # MGG401 says so
        row, drift = compared
        for change in drift.changes:
            if change.severity is not None:
                subject = "the rows: " if change.subject == "rows" else ""
                detail = change.meaning[:1].upper() + change.meaning[1:]
                yield CHECK.finding(row["router"], f"{subject}{change.text}.", detail)


CHECK = Check(
    "MGI128",
    "a router was changed as only a fault changes it",
    "error",
    _judge,
    ("weight_digest",),
    inputs="baseline",
    alike=same_sentence,
)
