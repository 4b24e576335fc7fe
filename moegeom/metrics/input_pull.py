"""Pull of the mean input: how much of the choice is made before a token says what it is.

Scores of a token less their mean over experts have a mean over tokens, which favours some experts
whatever is read, and a rest, which tells tokens apart. ``input_pull`` is the rms of the first over
that of the second: 0 when no expert is favoured on average; beyond 1 the mean decides more than the
tokens do, loads are uneven and few expert sets occur. ``input_pull_with_bias`` is that of the
scores that are compared in the end, with the selection bias: a bias that balances loads takes the
pull away.

A router of random directions has a pull too, as large as its inputs are one-sided:
``input_pull_random`` and its standard deviation over such routers, of rows of the same lengths.

On a sample of at most 4096 tokens; the range of random routers on that of about 2048 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.input_pull import ScoreMoments

_FORMULA = "input_pull"


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    moments: ScoreMoments = reductions["score_sample"]
    bias = facts.router.selection_bias
    pulls = (moments.pull(), math.nan if bias is None else moments.pull(bias))
    # endless where scores are so small that all tokens score alike
    known = (pull if math.isfinite(pull) else None for pull in pulls)
    return {"layers": dict(zip(("input_pull", "input_pull_with_bias"), known, strict=True))}


METRIC = Metric(
    name="input_pull",
    version=1,
    text="How much of the choice the mean input makes, on a sample of at most 4096 tokens.",
    scope="router",
    needs=("score_sample",),
    columns={
        "layers": (
            Column(
                "input_pull",
                "rms over experts of the mean score over the rms of what differs between tokens, "
                "without selection bias",
                formula=_FORMULA,
                has_se=True,
            ),
            Column(
                "input_pull_with_bias",
                "the same of the scores with the selection bias; missing without one",
                formula=_FORMULA,
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"),
)
