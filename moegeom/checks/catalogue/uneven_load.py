"""MGB202: the load is spread over the experts.

Looked for: the entropy of the load over log E, 1 for even load.

A finding means: on these tokens the layer works as if it had far fewer experts (exp of the entropy
says how many).

What to do: look at the busiest experts and their domains; follow the entropy over training. The
limit is uncalibrated.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured
from moegeom.checks.statistics import p_above
from moegeom.core.intervals import range_text
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    name = "load_entropy_normalised"
    for row in sorted(measured.layers, key=lambda row: row.get(name) or 2.0):
        router, value, error = row["router"], row.get(name), row.get(f"{name}_se")
        if value is None:
            continue
        if error is None:
            yield Unknown(router, NO_ERROR)
            continue
        limit, freedom = limits("entropy", router), row["num_blocks"] - 1
        told = range_text(value, error, row["num_blocks"], 2)
        finding = CHECK.finding(
            router,
            f"load entropy {value:.2f} of 1: {row['effective_experts']:.1f} of "
            f"{number_of(len(measured.experts[router]), 'expert does', 'experts do')} the work.",
            f"Limit {limit:g}, uncalibrated; 95 % range over documents {told}.",
            measured.measure_again(router),
        )
        p_value = p_above(-value, -limit, error, freedom)
        yield Tested(router, finding, p_value, error, freedom, room=limit)


CHECK = Check(
    "MGB202",
    "the load is spread over few experts",
    "warning",
    _judge,
    ("load_entropy_normalised",),
    (Limit("entropy", 0.8, "least load entropy over log E"),),
    inputs="tokens",
    absent="the tokens say nothing of load",
    detects=lambda shift: f"a load entropy {shift:.3f} below its limit",
)
