"""Near switches: are the tokens that switch those that were nearly tied?

The margin is that of the router as stored: how far the last chosen expert is ahead of the first one
left out; where experts stand in groups, half the margin between groups if that is smaller. A small
disturbance, such as rounding, switches tokens with little margin only: most of the switches are
then among the tenth of the tokens with the least. Another rule, other inputs or other weights
switch tokens whatever their margin: ``switched_margin_rank`` goes to 1/2. Where more than a tenth
of the tokens switch, ``switched_near_share`` is at most a tenth over the share that switches. Both
are null where no token switches, and come from histograms with bins of 6 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load.histogram_ranks import mean_rank, share_among_least

#: Share of the tokens, those with the least margin, that count as near.
NEAR = 0.1


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    whole = reductions["tightness_histogram"]
    switched = reductions["switched_tightness_histogram"]
    if not switched.any():
        return {"layers": {"switched_near_share": None, "switched_margin_rank": None}}
    return {
        "layers": {
            "switched_near_share": share_among_least(switched, whole, NEAR),
            "switched_margin_rank": mean_rank(switched, whole),
        }
    }


METRIC = Metric(
    name="near_switches",
    version=1,
    text="Whether the tokens that switch under a variant are those with the least margin.",
    scope="switch",
    needs=("tightness_histogram", "switched_tightness_histogram"),
    columns={
        "layers": (
            Column(
                "switched_near_share",
                "share of the switched tokens among the tenth of all tokens with the least margin",
                formula="switched_near_share",
                has_se=True,
            ),
            Column(
                "switched_margin_rank",
                "mean share of tokens with less margin than a switched one; 1/2 for any token",
                formula="switched_margin_rank",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
