"""MGB402: every expert carries the load it did.

Looked for: the load of each expert, in fair shares, beside that of the baseline; a change counts
when it is beyond the limit by more than chance, with as many tests counted as there are experts.

A finding means: tokens moved from some experts to others, even where the load is as even as before.
On other tokens that says nothing about the checkpoint: compare equal mixtures of text.

What to do: look at the rows of these experts (MGG401) and at the norm in front.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.drift import places_in_baseline
from moegeom.checks.figure import difference_error
from moegeom.checks.measured import Measured
from moegeom.checks.statistics import p_above


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    for row in measured.layers:
        router = row["router"]
        before = measured.before(router)
        rows = measured.experts[router]
        if before is None or row.get("load_cv_ddof0") is None:
            continue
        if before.load is None:
            yield Unknown(router, "the baseline holds no load of its experts")
            continue
        if before.load_error is None or any(e["load_se"] is None for e in rows):
            yield Unknown(router, NO_ERROR)
            continue
        if len(rows) != len(before.load):
            continue  # MGI124 says so
        place = places_in_baseline(measured, router)
        limit, tests = limits("change", router), len(rows)
        told = []
        for e in rows:
            old, old_error = (
                float(x[place[e["expert"]]]) for x in (before.load, before.load_error)
            )
            both, freedom = difference_error(row, before, e["load_se"], old_error)
            p_value = p_above(abs(e["load"] - old), limit, both, freedom)
            told.append((p_value, e["expert"], old, e["load"], both, freedom))
        told.sort()
        p_value, expert, old, new, both, freedom = told[0]
        finding = CHECK.finding(
            router,
            f"expert {expert} gets {new:.2f} fair shares; the baseline has {old:.2f}.",
            f"Standard error of the difference {both:.2g}; limit {limit:g}, heuristic. Next: "
            + ", ".join(f"expert {e} {a:.2f} -> {b:.2f}" for _, e, a, b, *_ in told[1:4])
            + ".",
            measured.measure_again(router),
        )
        p_value = min(1.0, 2.0 * tests * p_value)
        yield Tested(router, finding, p_value, both, freedom, 2 * tests, float(tests))


CHECK = Check(
    "MGB402",
    "an expert does not carry the load it did",
    "warning",
    _judge,
    ("load_cv_ddof0",),
    (Limit("change", 0.1, "largest change of an expert's load, in fair shares"),),
    inputs="baseline and tokens",
    absent="the tokens say nothing of load",
    detects=lambda shift: (
        f"an expert's load that changed by {shift:.2f} fair shares more than its limit"
    ),
    severities={"training": "note"},
)
