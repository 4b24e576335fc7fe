"""Smoothed top-k: experts less than eps below the k-th score run too, with a weight that fades.

``extra`` finds the eps at which tokens run that many more experts in the mean. The whole transition
happens in the first tenth of the strip, so it takes away the jitter of disturbances below about
eps / 18 alone. With groups the strip lies inside the groups that a token keeps, and what another
group would change still jumps. Hard limit: ``smooth:eps=0`` and ``smooth:extra=0`` are the router
itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.geometry.selection import group_margin, margin, selection_scores
from moegeom.geometry.whatif import A, B, gaps, largest_slope, smooth_activations, smoothing_budget
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_SCORES,
    absent,
    admitted_scores,
    choice_of_sets,
    need_weights_of_sets,
    refuse,
    scored_logits,
)


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_weights_of_sets(router)
    eps, extra, a, b = (values[name] for name in ("eps", "extra", "a", "b"))
    k = router.rule.top_k
    gap_sizes = gaps(admitted_scores(router, sample.tokens), k)
    if eps is None:
        try:
            eps = smoothing_budget(gap_sizes, extra).eps
        except ValueError as error:
            raise refuse(router, f"no eps brings so many: {error}") from None
    reached = {
        "eps": eps,
        "calmed_below": eps / largest_slope(a, b),
        **_reached(gap_sizes, k, eps),
        **_discontinuous(router, sample.tokens),
    }
    if eps == 0.0:
        return FittedGate(router=router, reached=reached)

    kernels = sample.kernels

    def choose(batch: TokenBatch) -> WhatIfChoice:
        admitted = admitted_scores(router, batch)
        faded = smooth_activations(admitted, k, eps, a, b)
        return choice_of_sets(router, batch, faded > 0.0, admitted, kernels, faded)

    return FittedGate(
        choose=choose,
        has_fixed_size=False,
        reached=reached,
        absent=absent(OF_SCORES, "a smoothed gate has no boundary where its output jumps"),
        notes=(_note(router, largest_slope(a, b)),),
    )


def _note(router: Router, steepest: float) -> str:
    return (
        f"The transition fills the last tenth of the strip (slope {steepest:.3g} / eps): smoothing "
        f"takes away the jitter of disturbances below about eps / {steepest:.0f} alone "
        f"(calmed_below, {router.rule.selection_score_unit})."
    )


def _reached(gap_sizes: np.ndarray, k: int, eps: float) -> dict[str, float]:
    extra = (gap_sizes < eps).sum(axis=1)
    mean = float(extra.mean())
    return {
        "experts_mean": k + mean,
        "extra_experts_p99": float(np.quantile(extra, 0.99, method="higher")),
        "smoothed_share": float((extra > 0).mean()),
        "flop_factor": (k + mean) / k,
    }


def _discontinuous(router: Router, tokens: TokenBatch) -> dict[str, float]:
    """Share of tokens that are nearer to another choice of groups than of experts, by scores.

    A sum of two scores moves twice as far as one.
    """
    rule = router.rule
    if rule.groups is None:
        return {}
    scores = selection_scores(scored_logits(router, tokens), rule, router.selection_bias)
    times = 2.0 if rule.groups.score == "top2_sum" else 1.0
    within = margin(admitted_scores(router, tokens), rule.top_k)
    nearer = group_margin(scores, rule.groups) / times < within
    return {"still_discontinuous_share": float(nearer.mean())}


WHATIF = WhatIf(
    name="smooth",
    text="Experts less than eps below the k-th run too, with a weight that fades to 0 there.",
    parameters=(
        Parameter("eps", "width of the strip, in units of the selection score", least=0.0),
        Parameter("extra", "mean number of further experts that eps is found for", least=0.0),
        Parameter("a", "exponent at the lower end of the strip", A, least=1.0, most=1e3),
        Parameter("b", "exponent at the upper end of the strip", B, least=1.0, most=1e3),
    ),
    make=_make,
    one_of=("eps", "extra"),
)
