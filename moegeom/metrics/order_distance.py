"""How far it is to where more than two experts tie at the border of the chosen set.

Across a boundary one expert is exchanged for another. Boundaries meet where three experts or four
have the logit of the border between chosen and not chosen, order 2 and 3: around such an input a
small disturbance can lead to any of several sets, and a router that is smoothed runs experts
besides the k. The distance to the nearest such input, wherever the other experts are, is found by
branch and bound, and stands between two ends that are both certain; a bracket is a point where the
search came to its end (``order_2_distance_exact_share``). The boundary distance is that of order 1,
and none is less than the one before.

Linear boundaries only. On a sample, because each search takes milliseconds:
``num_order_distance_tokens`` says how many tokens, 64 for a router of 64 experts and 16 for one of
256. The medians are of these tokens, so that ``boundary_distance_rms_p50``, which is of all, is
known more finely than they are. docs/theory.md A4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.batch import ORDERS
from moegeom.metrics._ladder import within_ends

_UNIT = "rms of the input"

#: Widths in units of the router input, those of ``boundary_distance``.
_WIDTHS = 2.0 ** np.arange(-12, 9)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    found = reductions["order_distances"]
    lower, upper = found["lower"], found["upper"]
    if not len(lower):
        return {"layers": {}}
    values: dict[str, float | int | None] = {"num_order_distance_tokens": len(lower)}
    stretch = found["stretch"][~np.isnan(found["stretch"])]
    if len(stretch):
        median = np.quantile(stretch, 0.5, method="inverted_cdf")
        values["logit_stretch_p50"] = within_ends(float(median))
    for column, order in enumerate(ORDERS):
        name = f"order_{order}_distance"
        for end, distances in (("lower", lower), ("upper", upper)):
            # a value of the sample: distances may be infinite, and have no mean then
            median = np.quantile(distances[:, column], 0.5, method="inverted_cdf")
            values[f"{name}_rms_p50_{end}"] = median / np.sqrt(facts.router.hidden_size)
        values[f"{name}_exact_share"] = float(np.mean(lower[:, column] == upper[:, column]))
    return {"layers": values, "order_ladder": _ladder(lower, upper)}


def _ladder(
    lower: Float64[np.ndarray, "tokens orders"], upper: Float64[np.ndarray, "tokens orders"]
) -> dict[str, Any]:
    """Shares below each width, for each order: what is certain and what may be."""
    return {
        "order": np.repeat(ORDERS, len(_WIDTHS)),
        "width": np.tile(_WIDTHS, len(ORDERS)),
        "share_lower": (upper[:, :, None] < _WIDTHS).mean(axis=0).ravel(),
        "share_upper": (lower[:, :, None] < _WIDTHS).mean(axis=0).ravel(),
    }


def _columns(order: int) -> tuple[Column, ...]:
    name = f"order_{order}_distance"
    return (
        Column(
            f"{name}_rms_p50_lower",
            f"median lower end of the distance to a tie of {order + 1} experts at the border, over "
            "the root of the hidden size",
            _UNIT,
            formula="order_distance",
        ),
        Column(
            f"{name}_rms_p50_upper",
            "median upper end, over the root of the hidden size",
            _UNIT,
            formula="order_distance",
        ),
        Column(
            f"{name}_exact_share",
            "share of the tokens looked at whose lower and upper end are one number",
            formula="order_distance",
        ),
    )


METRIC = Metric(
    name="order_distance",
    version=2,
    text="Distance to where three or four experts tie at the border, as brackets on a sample.",
    scope="exposure",
    needs=("order_distances",),
    columns={
        "layers": (
            *(column for order in ORDERS for column in _columns(order)),
            Column(
                "num_order_distance_tokens",
                "tokens that were looked at",
                "tokens",
                kind="int",
                formula="order_distance",
            ),
            Column(
                "logit_stretch_p50",
                "median of how far logits must move to the boundary, over half the margin, which "
                "it is where rows are independent; only for dependent ones",
                formula="logit_distance",
            ),
        ),
        "order_ladder": (
            Column("order", "experts that tie at the border, less 1", "", "int"),
            Column("width", "distance that counts as near", "router input"),
            Column(
                "share_lower",
                "share of the tokens looked at that are certainly nearer",
                formula="order_distance",
            ),
            Column(
                "share_upper",
                "share of them that may be nearer: the same where searches came to their end",
                formula="order_distance",
            ),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift"),
)
