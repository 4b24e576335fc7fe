"""Tokens near another expert set, beside a random router and beside a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Limit, Limits, Tested, Unknown, check
from moegeom.checks.figure import change_check
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import p_above

COLUMN = "bf16_flip_share_isotropic"


@check(
    "MGN301",
    "more near-ties than chance",
    "warning",
    (COLUMN,),
    limits=(Limit("times_random", 1.5, "largest exposure, in exposures of the random router"),),
    inputs="tokens",
    absent="boundary distances are not known for this rule or recording",
    detects=lambda shift: f"{100 * shift:.2f} % of tokens more at near-ties than the limit",
)
def near_ties(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    """Near-ties are no more frequent than at a random router of the same shape.

    Looked for: an expected share of tokens flipped by rounding the router input to bfloat16 that is
    above a multiple of that of the random router (random rows of the same length on the same
    tokens) by more than chance.

    A finding means: other arithmetic, engines or quantisations will flip more tokens than the shape
    of the router makes inevitable. That is exposure, not loss of quality.

    What to do: list the nearest tokens and pairs of experts. The factor is heuristic.
    """

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
        finding = near_ties.finding(
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


@change_check(
    "MGN401",
    "near-boundary exposure is not what it was",
    "bf16_flip_share_isotropic",
    Limit("change", 0.001, "largest change of the share of tokens"),
    detects=lambda shift: f"an exposure that changed by {100 * shift:.2f} % of tokens",
    largest=0.5,
    absent="boundary distances are not known for this rule or recording",
)
def near_boundary_changed(old: float, new: float) -> str:
    """As many tokens are near another expert set as were.

    Looked for: the expected share of tokens flipped by rounding the router input to bfloat16,
    beside that of the baseline; a change counts when it is beyond the limit by more than chance.

    A finding means: margins, lengths of rows or the inputs changed, so that other arithmetic will
    flip more, or fewer, tokens than before. Exposure, not loss of quality.

    What to do: compare the rows (MGG401) and the directions of the inputs (MGG402).
    """
    return (
        f"rounding the input to bf16 would flip {100 * new:.2f} % of tokens; the baseline has "
        f"{100 * old:.2f} %."
    )
