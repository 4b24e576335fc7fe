"""MGN301: near-ties are no more frequent than at a random router of the same shape.

Looked for: an expected share of tokens flipped by rounding the router input to bfloat16 that is
above a multiple of that of the random router (random rows of the same length on the same tokens) by
more than chance.

A finding means: other arithmetic, engines or quantisations will flip more tokens than the shape
of the router makes inevitable. That is exposure, not loss of quality.

What to do: list the nearest tokens and pairs of experts. The factor is heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import p_above

COLUMN = "bf16_flip_share_isotropic"


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    def ratio(row: Row) -> float:
        normal = measured.random.get(row["router"], {}).get(COLUMN)
        return (row.get(COLUMN) or 0.0) / normal if normal else 0.0

    for row in sorted(measured.layers, key=ratio, reverse=True):
        router, random = row["router"], measured.random.get(row["router"], {})
        share, normal = row.get(COLUMN), random.get(COLUMN)
        # Equal rows tie for ever: that is MGI104's to say.
        if share is None or row.get("num_duplicate_rows"):
            continue
        if normal is None:
            yield Unknown(router, f"{COLUMN} of a random router cannot be computed")
            continue
        own, chance = row.get(f"{COLUMN}_se"), random.get(f"{COLUMN}_se")
        if own is None or chance is None:
            yield Unknown(router, NO_ERROR)
            continue
        factor, freedom = limits("times_random", router), row["num_blocks"] - 1
        error = math.hypot(own, factor * chance)
        finding = CHECK.finding(
            router,
            "more near-ties than a random router of this shape would have.",
            f"Rounding the input to bf16 would flip about {100 * share:.1f} % of tokens; a "
            f"random router {100 * normal:.1f} % (limit {factor:g} times, heuristic).",
            measured.measure_again(router, extra="--per-token"),
        )
        yield Tested(
            router,
            finding,
            p_above(share, factor * normal, error, freedom),
            error,
            freedom,
            # a share of tokens on average at most half certain to flip
            room=0.5 - factor * normal,
            p_beyond=p_above(-share, -factor * normal, error, freedom),
        )


CHECK = Check(
    "MGN301",
    "more near-ties than chance",
    "warning",
    _judge,
    (COLUMN,),
    (Limit("times_random", 1.5, "largest exposure, in exposures of the random router"),),
    inputs="tokens",
    absent="boundary distances are not known for this rule or recording",
    detects=lambda shift: f"{100 * shift:.2f} % of tokens more at near-ties than the limit",
)
