"""MGG204: the rows of a router are not far from orthogonal.

Looked for: the Gram score of the centred effective rows, 1 - rms cosine, beside the score of random
rows of the same shape and the best score that any rows could have (Welch).

A finding means: rows crowd into a few directions. Raw scores, without centring, fall with any
vector that is common to all rows and mean nothing by themselves.

What to do: look at the effective rank and at the nearest pairs. The limit is heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda row: row.get("gram_score_centred") or 2.0):
        router, score = row["router"], row.get("gram_score_centred")
        if score is None:
            continue
        fall = row["gram_score_random"] - score
        if fall > limits("fall", router):
            z, raw = row.get("gram_score_z"), row.get("gram_score_raw")
            sigmas = "" if z is None else f"; {abs(z):.0f} sigmas below random rows"
            stored = (
                "no score, for rows of zeros have no direction" if raw is None else f"{raw:.3f}"
            )
            yield CHECK.finding(
                router,
                f"rows crowd together: Gram score {score:.3f}, random rows "
                f"{row['gram_score_random']:.3f}.",
                f"Best possible {row['gram_score_best']:.3f}{sigmas} "
                f"(limit {limits('fall', router):g} below, heuristic). "
                f"As stored, not centred: {stored}.",
            )


CHECK = Check(
    "MGG204",
    "router rows crowd together",
    "warning",
    _judge,
    ("gram_score_centred",),
    (Limit("fall", 0.3, "largest fall of the Gram score below that of random rows"),),
    absent="fewer than two rows are finite",
    severities={"training": "note"},
)
