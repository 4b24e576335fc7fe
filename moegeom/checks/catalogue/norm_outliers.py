"""MGG203: no expert's row is much longer or shorter than those of its layer.

Looked for: the length of each centred effective row over the median of its layer, where the spread
of the other lengths does not explain it: a layer whose lengths spread widely has long rows among
many, and none of them is an exception.

A finding means: a long row wins and loses by its length more than by its direction and takes the
tokens it leans to; a short one hardly competes.

What to do: look at the load of the expert on real tokens. The limit is from practice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import MAD
from moegeom.core.finding import Finding

#: Standard error of a robust standard deviation of n normal numbers, times sqrt(n), over it.
_MAD_ERROR = 1.17


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
        if not ratios:
            continue
        bound = max(math.log(limit), limits("sigmas", router) * _spread(ratios.values()))
        far = [(e, r) for e, r in ratios.items() if not r or abs(math.log(r)) > bound]
        far.sort(key=lambda pair: -max(pair[1], 1.0 / pair[1] if pair[1] else float("inf")))
        if far:
            shown = ", ".join(f"{expert} ({ratio:.2g}x)" for expert, ratio in far[:4])
            more = f" and {len(far) - 4} more" if len(far) > 4 else ""
            yield CHECK.finding(
                router,
                f"rows far from the median length: expert {shown}{more}.",
                f"Limit {limit:g} times or 1/{limit:g} of the median, heuristic, and "
                f"{limits('sigmas', router):g} robust standard deviations of the layer; rows "
                "centred, gain folded in.",
            )


def _spread(ratios: Collection[float]) -> float:
    """Robust standard deviation of the logarithms of lengths over their median, with three of its
    standard errors: of few rows it is hardly known.
    """
    steps = [abs(math.log(ratio)) if ratio else math.inf for ratio in ratios]
    return MAD * statistics.median(steps) * (1.0 + 3.0 * _MAD_ERROR / math.sqrt(len(steps)))


CHECK = Check(
    "MGG203",
    "a row is much longer or shorter than its layer's",
    "warning",
    _judge,
    ("centred_norm_median",),
    (
        Limit("ratio", 3.0, "largest ratio of a row's length to the median of its layer"),
        # Of 61 layers of 256 rows with lengths of a log-normal law one row in a hundred models.
        Limit("sigmas", 5.0, "the same in robust standard deviations of the layer's lengths"),
    ),
    absent="no row is finite",
    severities={"release": "error"},
)
