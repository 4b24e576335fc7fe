"""MGI122: where the gain of the norm changed, the router followed.

Looked for: a gain that differs from the baseline's in front of a router that is bit for bit the
same, so that the effective router W diag(g) is another one.

A finding means: the router file is identical and routes differently. Smoothing (AWQ, SmoothQuant)
divided the gain by a scale that the router should have been multiplied by, the gain was left out or
applied in another way, or training went on with a frozen router.

What to do: multiply the columns of the router by the scale, or leave the norm in front of routers
out of the smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, Unknown
from moegeom.checks.drift import drifts
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding
from moegeom.core.text import percent


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    for compared in drifts(measured):
        if isinstance(compared, Unknown):
            yield compared
            continue
        row, drift = compared
        router = row["router"]
        if not is_gain_alone(measured, router, row):
            continue
        worst = float(drift.moved.max())
        if worst > limits("moved", router):
            yield CHECK.finding(
                router,
                "the gain in front changed and the router did not follow.",
                f"The weight is bit for bit that of the baseline; the effective rows W diag(g) "
                f"moved by up to {percent(worst)} of their length.",
            )


def is_gain_alone(measured: Measured, router: str, row: Row) -> bool:
    """True when the gain differs from the baseline's and the weight does not."""
    before = measured.before(router)
    if before is None:
        return False

    def is_same(name: str) -> bool:
        return before.digests.get(name) == row.get(name)

    return is_same("weight_digest") and not is_same("gain_digest")


CHECK = Check(
    "MGI122",
    "the gain changed and the router did not follow",
    "error",
    _judge,
    ("weight_digest",),
    (Limit("moved", 0.005, "largest movement of an effective row, over its length"),),
    inputs="baseline",
    severities={"training": "note"},
)
