"""MGN123: the selection bias moves when the rows do.

Looked for: a bias that is bit for bit the baseline's beside rows that changed as training changes
them: without a pattern, and without losing digits.

A finding means: training went on and the bias was not updated with it, or not saved. Late in
training a bias may be frozen on purpose: then ignore this check with that reason.

What to do: look whether the buffer is in the optimiser step and in the saved state.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.catalogue.precision_lost import lost_levels
from moegeom.checks.check import Check, Limit, Limits, Unknown, has_selection_bias
from moegeom.checks.drift import drifts
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import percent


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    name = "selection_bias_digest"
    for compared in drifts(measured):
        if isinstance(compared, Unknown):
            yield compared
            continue
        row, drift = compared
        router, before = row["router"], measured.before(row["router"])
        if before is None or row.get(name) is None:
            continue
        moved = float(drift.moved.mean())
        is_trained = drift.is_trained() and not lost_levels(before, row)
        if before.digests.get(name) == row[name] and is_trained and moved > limits("moved", router):
            yield CHECK.finding(
                router,
                "the rows moved since the baseline, and not one selection bias did.",
                f"Rows moved by {percent(moved)} of their length on average.",
            )


CHECK = Check(
    "MGN123",
    "the selection bias is frozen",
    "warning",
    _judge,
    ("selection_bias_digest",),
    (
        Limit(
            "moved",
            0.003,  # rounding to bfloat16 alone moves rows by 0.0018
            "mean movement of the rows from which on a bias should move too",
        ),
    ),
    inputs="baseline",
    absent="no router has a selection bias",
    concerns=has_selection_bias,
    severities={"release": "error"},
)
