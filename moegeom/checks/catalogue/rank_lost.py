"""MGG202: the rows of a router span all the directions they can.

Looked for: a rank below the largest possible, a condition number far above that of trained routers,
and an effective rank (exp of the entropy of the singular values) far below the rank.

A finding means: experts are chosen by few directions of the input; many expert sets cannot occur,
or only by large inputs. A low-rank update, a merge, or collapse.

What to do: compare with earlier checkpoints. The limits are from practice. A router of about as
many experts as columns has a large condition number by chance: there the limit is raised by what
random rows of the shape would show, so that it raises no false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

#: Rows as parallel as this lower the rank by one for each pair: MGG201 names them.
_PARALLEL = 1.0 - 1e-6


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda row: row.get("effective_rank") or 0.0):
        router, rank, possible = row["router"], row.get("row_rank"), row.get("row_rank_possible")
        if (
            not possible
            or rank is None
            or row.get("num_zero_rows")
            or row.get("num_duplicate_rows")
        ):
            continue  # equal rows lower the rank: that is said where they are named
        if (row.get("max_cosine_centred") or 0.0) > _PARALLEL:
            continue  # so do parallel ones
        effective = row["effective_rank"] or 0.0
        condition = row["row_condition"]
        least = limits("effective_rank_share", router) * possible
        if rank < possible:
            said = f"the rows have rank {rank} of {possible}."
        elif condition is not None and condition > limits("condition", router) * _raised(
            measured, router
        ):
            said = f"the rows have condition number {condition:.3g}."
        elif effective < least:
            said = f"the rows use {effective:.1f} of {possible} directions."
        else:
            continue
        yield CHECK.finding(
            router,
            said,
            f"Effective rank {effective:.1f} of {possible}, condition number "
            f"{'infinite' if condition is None or rank < possible else format(condition, '.3g')} "
            f"(limits {least:.1f} and {limits('condition', router):g}, heuristic).",
        )


def _raised(measured: Measured, router: str) -> float:
    """(1 + sqrt(g)) / (1 - sqrt(g)), the condition number of large random matrices, over ten.

    g is the smaller of rows and columns over the larger; at least 1, and infinite for a square.
    """
    facts = measured.facts(router)
    sides = sorted((max(facts.get("num_experts", 1) - 1, 0), facts.get("hidden_size", 0)))
    root = math.sqrt(sides[0] / sides[1]) if sides[1] else 0.0
    return max(1.0, 0.1 * (1.0 + root) / (1.0 - root)) if root < 1.0 else math.inf


CHECK = Check(
    "MGG202",
    "the rows of a router span too few directions",
    "warning",
    _judge,
    ("row_rank",),
    (
        Limit("condition", 1000.0, "largest condition number of the centred effective rows"),
        Limit("effective_rank_share", 0.25, "least effective rank over the largest possible rank"),
    ),
    severities={"release": "error"},
)
