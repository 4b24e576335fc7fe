"""MGN118: the values of a router use the precision they are stored in.

Looked for: the number of different values in windows of 32 weights, beside that of Gaussian rows in
the stored dtype; and float32 storage that holds bfloat16 numbers only, unless the file is a GGUF,
which stores routers in float32, or the baseline held bfloat16 numbers too.

A finding means: the router was rounded before it was stored, to integers or short floats by a
quantiser, or to bfloat16 by a transfer, and written back in a longer format.

What to do: take the routers from the original. Behind a transfer between trainer and engine, send
routers in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured, Row, listed
from moegeom.core.finding import Finding

_BF16_BITS = 7

#: Different values are counted in windows of so many.
_WINDOW = 32


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda row: row.get("levels_share") or 1.0):
        router, share = row["router"], row.get("levels_share")
        if _is_padded_bf16(row) and not _may_be_padded(measured, router):
            stored = measured.facts(router).get("stored_dtype", "?").lower()
            yield CHECK.finding(
                router,
                f"stored as {stored}, and every value is a bfloat16 number.",
                "The router went through bfloat16 on its way here.",
            )
            continue
        if share is None:
            continue
        least = limits("row_share", router)
        experts = measured.experts[router]
        coarse = [e["expert"] for e in experts if (e.get("row_levels_share") or 1.0) < least]
        if share < limits("share", router) or coarse:
            who = f"expert {listed(coarse)}" if coarse else "the rows on average"
            yield CHECK.finding(
                router,
                f"the rows hold {100 * share:.0f} % of the different values that their dtype "
                "would.",
                f"Too few: {who}. Rounded to a coarser format before they were stored.",
            )


def _may_be_padded(measured: Measured, router: str) -> bool:
    """Whether nothing was lost: GGUF stores routers in float32, whatever they were trained in, and
    the baseline may have held bfloat16 numbers as well.
    """
    before = measured.before(router)
    was = None if before is None else before.columns.get("is_weight_bf16")
    is_gguf = str(measured.facts(router).get("file", "")).endswith(".gguf")
    return is_gguf or (was is not None and was[0] == 1.0)


def _is_padded_bf16(row: Row) -> bool:
    """float32 that holds bfloat16 numbers, in a family that does not keep bfloat16 anyway."""
    bits, kept = row.get("weight_bits"), row.get("weight_bits_kept")
    return bool(
        bits and bits > _BF16_BITS and row["is_weight_bf16"] and (kept is None or kept > _BF16_BITS)
    )


def _has_windows(measured: Measured, row: Row) -> bool:
    """Whether rows are plain floats, and as long as a window."""
    is_plain = row.get("weight_bits") is not None
    return is_plain and measured.facts(row["router"]).get("hidden_size", 0) >= _WINDOW


CHECK = Check(
    "MGN118",
    "a router was rounded before it was stored",
    "warning",
    _judge,
    ("levels_share",),
    (
        Limit("share", 0.965, "least different values in windows of 32, over Gaussian rows"),
        Limit("row_share", 0.7, "the same for a single row"),
    ),
    absent="rows are shorter than a window of 32",
    concerns=_has_windows,
    severities={"release": "error"},
)
