"""MGG301: router inputs point different ways.

Looked for: the mean resultant length of the router inputs, that is the length of the mean of their
unit vectors: 0 when directions are spread, 1 when all are one.

A finding means: tokens differ little in direction, so few coalitions can occur whatever the router
does: the cause is in front of the router.

What to do: look at the hidden states, and at attention sinks. The limit is uncalibrated.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured
from moegeom.checks.statistics import p_above
from moegeom.core.intervals import range_text

COLUMN = "mean_resultant_length"


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    for row in sorted(measured.layers, key=lambda row: -(row.get(COLUMN) or 0.0)):
        router, value, error = row["router"], row.get(COLUMN), row.get(f"{COLUMN}_se")
        if value is None:
            continue
        if error is None:
            yield Unknown(router, NO_ERROR)
            continue
        limit, freedom = limits("length", router), row["num_blocks"] - 1
        told = range_text(value, error, row["num_blocks"], 3)
        finding = CHECK.finding(
            router,
            f"router inputs nearly all point the same way: mean resultant length {value:.3f}.",
            f"Limit {limit:g}, uncalibrated; 95 % range over documents {told}.",
            measured.measure_again(router),
        )
        p_value = p_above(value, limit, error, freedom)
        yield Tested(router, finding, p_value, error, freedom, room=1.0)


CHECK = Check(
    "MGG301",
    "router inputs have collapsed to one direction",
    "warning",
    _judge,
    (COLUMN,),
    (Limit("length", 0.95, "largest mean resultant length of the router inputs"),),
    inputs="tokens",
    absent="the recording holds no router inputs",
    detects=lambda shift: f"a mean resultant length {shift:.3f} above its limit",
)
