"""Near flips: are the tokens that flip those that were nearly tied?

The margin is that of the router as stored: how far the last chosen expert is ahead of the first one
left out; where experts stand in groups, half the margin between groups if that is smaller. A small
disturbance, such as rounding, flips tokens with little margin only: most of the flips are
then among the tenth of the tokens with the least. Another rule, other inputs or other weights
flip tokens whatever their margin: ``flipped_margin_rank`` goes to 1/2. Where more than a tenth
of the tokens flip, ``flipped_near_share`` is at most a tenth over the share that flips. Both
are missing where no token flips, and come from histograms with bins of 6 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.histogram import mean_rank, share_among_least

#: Share of the tokens, those with the least margin, that count as near.
NEAR = 0.1


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    whole = reductions["effective_margin_histogram"]
    flipped = reductions["flipped_effective_margin_histogram"]
    if not flipped.any():
        return {"layers": {"flipped_near_share": None, "flipped_margin_rank": None}}
    return {
        "layers": {
            "flipped_near_share": share_among_least(flipped, whole, NEAR),
            "flipped_margin_rank": mean_rank(flipped, whole),
        }
    }


METRIC = Metric(
    name="near_flips",
    version=1,
    text="Whether the tokens that flip under a variant are those with the least margin.",
    scope="flip",
    needs=("effective_margin_histogram", "flipped_effective_margin_histogram"),
    columns={
        "layers": (
            Column(
                "flipped_near_share",
                "share of the flipped tokens among the tenth of all tokens with the least margin",
                formula="flipped_near_share",
                has_se=True,
            ),
            Column(
                "flipped_margin_rank",
                "mean share of tokens with less margin than a flipped one; 1/2 for any token",
                formula="flipped_margin_rank",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
