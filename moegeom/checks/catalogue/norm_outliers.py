"""MGG203: no expert's row is much longer or shorter than those of its layer.

Looked for: the length of each centred effective row over the median of its layer.

A finding means: a long row wins and loses by its length more than by its direction and takes the
tokens it leans to; a short one hardly competes.

What to do: look at the load of the expert on real tokens. The limit is from practice.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    def excess(row: Row) -> float:
        low, high = row.get("centred_norm_min_over_median"), row.get("centred_norm_max_over_median")
        return max(high or 1.0, 1.0 / low if low else 1.0)

    for row in sorted(measured.layers, key=excess, reverse=True):
        router, median = row["router"], row.get("centred_norm_median")
        limit = limits("ratio", router)
        if not median or excess(row) <= limit:
            continue
        ratios = {
            e["expert"]: e["centred_row_norm"] / median
            for e in measured.experts[router]
            if e["centred_row_norm"] is not None and e.get("row_norm")  # zero rows: MGI103
        }
        far = [(e, r) for e, r in ratios.items() if r > limit or r < 1.0 / limit]
        far.sort(key=lambda pair: -max(pair[1], 1.0 / pair[1] if pair[1] else float("inf")))
        if far:
            shown = ", ".join(f"{expert} ({ratio:.2g}x)" for expert, ratio in far[:4])
            more = f" and {len(far) - 4} more" if len(far) > 4 else ""
            yield CHECK.finding(
                router,
                f"rows far from the median length: expert {shown}{more}.",
                f"Limit {limit:g} times or 1/{limit:g} of the median, heuristic; rows centred, "
                "gain folded in.",
            )


CHECK = Check(
    "MGG203",
    "a row is much longer or shorter than its layer's",
    "warning",
    _judge,
    ("centred_norm_median",),
    (Limit("ratio", 3.0, "largest ratio of a row's length to the median of its layer"),),
    absent="no row is finite",
    severities={"release": "error"},
)
