"""How far the boundary distance is known.

Behind linear boundaries a recording of all logits or of router inputs gives the distance of every
token exactly (``distance_exact_share`` 1). One of the m largest logits gives a bracket, because a
logit that is not known may be anything up to the least known one. So do the boundaries of groups,
and of softmax scores with a selection bias: below by a certified bound, above by a step after which
the rule really chooses another set. Where the bracket is a point (closed to 1e-6 for curved
boundaries) the distance is exact. Elsewhere its lower end stands for it: distances, and with them
the columns of ``boundary_distance``, are then lower bounds, and the nearest boundary of such a
token is not counted unless every other boundary is farther. More logits narrow the brackets; 16
more than are chosen close nearly all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.histogram import bin_edges, quantile
from moegeom.metrics._ladder import within_ends


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["bracket_histogram"]
    total = int(histogram.sum())
    if not total:
        unknown = ("distance_exact_share", "distance_bracket_p50", "distance_bracket_max")
        return {"layers": dict.fromkeys(unknown)}
    return {
        "layers": {
            "distance_exact_share": int(histogram[0]) / total,
            "distance_bracket_p50": _median(histogram),
            "distance_bracket_max": _largest(histogram),
        }
    }


def _median(histogram: Int64[np.ndarray, "bins"]) -> float | None:
    """Median ratio of the tokens that are not exact; None where all are."""
    open_ = histogram.copy()
    open_[0] = 0
    return within_ends(1.0 + float(quantile(open_, np.array([0.5]))[0])) if open_.any() else None


def _largest(histogram: Int64[np.ndarray, "bins"]) -> float | None:
    """1, or 1 plus the upper edge of the last bin that holds a token; None for the open bin."""
    last = int(np.flatnonzero(histogram)[-1])
    return within_ends(1.0 + float(bin_edges()[last + 1])) if last else 1.0


METRIC = Metric(
    name="distance_bracket",
    version=1,
    text="Share of tokens whose boundary distance is exact, and how wide the other brackets are.",
    scope="router",
    needs=("bracket_histogram",),
    columns={
        "layers": (
            Column(
                "distance_exact_share",
                "share of tokens whose boundary distance is exact; for the others it is a lower "
                "bound",
                formula="distance_bracket",
                has_se=True,
            ),
            Column(
                "distance_bracket_p50",
                "median of upper over lower bound, of tokens whose distance is not exact; missing "
                "where all are",
                formula="distance_bracket",
            ),
            Column(
                "distance_bracket_max",
                "largest upper over lower bound, its excess over 1 rounded up by at most 6 %; 1 "
                "where all are exact",
                formula="distance_bracket",
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift"),
)
