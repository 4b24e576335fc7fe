"""MGG401: the rows of every router are where they were.

Looked for: the distance of each centred effective row to its place in the baseline, over its
length, from 32 seeded projections: right for a row that was scaled, turned round or zeroed, else to
12 % (one standard error). A vector that was added to all rows is taken out where the rule does not
depend on it, so that no row is blamed for another one that moved; rows that changed places with
their experts are compared in the new place. What has a name of its own is MGI128's.

A finding means: these rows route other tokens than they did. Between two steps of a training that
is expected; after a conversion or a quantisation it is not.

What to do: look at the numbers per layer: one layer alone points at a file, all layers at training.
The limit is heuristic; a profile for conversions may well put it at 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.checks.catalogue.gain_not_followed import is_gain_alone
from moegeom.checks.check import Check, Limit, Limits, Unknown
from moegeom.checks.drift import drifts
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import percent


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    found = []
    for compared in drifts(measured):
        if isinstance(compared, Unknown):
            yield compared
            continue
        row, drift = compared
        router = row["router"]
        if is_gain_alone(measured, router, row) or drift.faults("rows"):
            continue  # MGI122 and MGI128 name the cause
        moved, limit = drift.moved[~drift.renumbered], limits("moved", router)
        if not moved.size or not moved.max() > limit:
            continue
        count = int((moved > limit).sum())
        expert = int(np.argmax(np.where(drift.renumbered, -1.0, drift.moved)))
        found.append(
            (
                float(moved.max()),
                CHECK.finding(
                    router,
                    f"expert {expert} moved by about {percent(moved.max())} of its length since "
                    f"the baseline; {count} of {len(drift.moved)} rows moved.",
                    f"All rows together by {percent(drift.size)}, the median row by "
                    f"{percent(float(np.median(moved)))}; limit {percent(limit)}, heuristic.",
                ),
            )
        )
    found.sort(key=lambda pair: -pair[0])
    for _, finding in found:
        yield finding


CHECK = Check(
    "MGG401",
    "rows moved since the baseline",
    "warning",
    _judge,
    ("weight_digest",),
    (Limit("moved", 0.05, "largest movement of a centred effective row, over its length"),),
    inputs="baseline",
    severities={"release": "error", "training": "note"},
)
