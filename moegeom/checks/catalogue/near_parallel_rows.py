"""MGG201: no two experts have nearly the same direction.

Looked for: pairs of rows whose cosine, after centring and with the gain folded in, is near 1.

A finding means: the two experts are chosen by nearly the same tokens and differ by their length
alone. An expert was copied and trained a little, or two have collapsed onto each other.

What to do: compare the two experts' load and weights. The limit is from practice.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda row: -(row.get("max_cosine_centred") or -1.0)):
        router, largest = row["router"], row.get("max_cosine_centred")
        limit = limits("cosine", router)
        if largest is None or largest <= limit:
            continue
        close = [
            e
            for e in measured.experts[router]
            if (e["nearest_cosine"] or -1.0) > limit and not _are_duplicates(measured, router, e)
        ]
        if not close:
            continue  # bit-equal rows are MGI104's to say
        pairs = {tuple(sorted((e["expert"], e["nearest_expert"]))) for e in close}
        shown = ", ".join(f"{a} and {b}" for a, b in sorted(pairs)[:3])
        worst = max(e["nearest_cosine"] for e in close)
        yield CHECK.finding(
            router,
            f"experts {shown} have nearly the same direction"
            + (f" ({number_of(len(pairs), 'such pair')})." if len(pairs) > 3 else "."),
            f"Largest cosine {_below_one(worst)} (limit {limit:g}, heuristic), rows centred and "
            "the gain of the norm folded in.",
        )


def _below_one(cosine: float) -> str:
    """Four digits, more where they would all be nines."""
    return (
        f"{cosine:.4f}"
        if cosine < 0.99995
        else "1 to six digits"
        if cosine > 1 - 5e-7
        else f"{cosine:.6f}"
    )


def _are_duplicates(measured: Measured, router: str, expert: Row) -> bool:
    rows = {e["expert"]: e for e in measured.experts[router]}
    other = rows[expert["nearest_expert"]]
    return expert["duplicate_of"] == other["expert"] or other["duplicate_of"] == expert["expert"]


CHECK = Check(
    "MGG201",
    "two experts have nearly the same direction",
    "warning",
    _judge,
    ("max_cosine_centred",),
    (Limit("cosine", 0.98, "largest cosine between two centred effective rows"),),
    absent="fewer than two rows are finite",
    severities={"release": "error"},
)
