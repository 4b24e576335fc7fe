"""MGN112: the selection bias survives a cast to bfloat16.

Looked for: a step of bfloat16, at the largest bias, that is not small beside the spread of the
biases, and the number of different values that a cast would leave.

A finding means: the file is sound, but an engine that casts the bias (some do as soon as a
quantisation config is present) routes most tokens elsewhere.

What to do: keep the tensor in float32 in every engine; or subtract a constant from all biases of a
layer before the cast, where the rule makes that neutral (the finding says so, with the proof).
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, has_selection_bias
from moegeom.checks.fixes import either, keep_in_float32, recentre
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    def step(row: Row) -> float:
        spread = row.get("bias_spread")
        return row["bias_ulp_bf16"] / spread if spread and not row["is_bias_bf16"] else 0.0

    for row in sorted(measured.layers, key=step, reverse=True):
        router = row["router"]
        if step(row) <= limits("step_over_spread", router):
            continue
        shut = row.get("num_unreachable_bf16") or 0
        sure = row.get("num_certain_bf16") or 0
        lost = f" {number_of(shut, 'expert')} could no longer be chosen at all." if shut else ""
        lost += f" {number_of(sure, 'expert')} could no longer lose." if sure else ""
        yield CHECK.finding(
            router,
            "the selection bias does not survive a cast to bfloat16.",
            f"{row['bias_num_distinct']} distinct values become {row['bias_num_distinct_bf16']}: "
            f"they spread {row['bias_spread']:.2g} around {row['bias_middle']:.3g}, where bfloat16 "
            f"steps by {row['bias_ulp_bf16']:.2g}. {_moved(measured, row)}{lost} Harmless as "
            f"stored ({measured.facts(router).get('bias_dtype', 'F32').lower()}).",
            fix=either(recentre(measured, row), keep_in_float32(measured, row)),
        )


def _moved(measured: Measured, row: Row) -> str:
    """Who would gain and who would lose most by the cast."""
    moves = {
        e["expert"]: e["bias_cast_shift"]
        for e in measured.experts[row["router"]]
        if e.get("bias_cast_shift") is not None
    }
    if not moves:
        return ""
    up, down = max(moves, key=moves.__getitem__), min(moves, key=moves.__getitem__)
    return (
        f"The cast would favour expert {up} by {moves[up]:.2g} and hold back expert {down} by "
        f"{-moves[down]:.2g}."
    )


CHECK = Check(
    "MGN112",
    "the selection bias does not survive a cast to bfloat16",
    "warning",
    _judge,
    ("bias_spread",),
    (Limit("step_over_spread", 0.05, "largest step of bfloat16 over the spread of the biases"),),
    absent="no router has a selection bias",
    concerns=has_selection_bias,
    severities={"release": "error"},
)
