"""Logits without their mean over tokens: what the router says of a token beyond its favourites.

The mean of each logit, over all tokens that the what-if was fitted to, is taken off its bias.
Hard limit: where every mean is 0 it is the router itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.variants.what_if import FitSample, FittedGate, WhatIf
from moegeom.variants.whatif._choices import need_top_k, refuse, scored_logits


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    if router.has_cosine_logits:
        raise refuse(
            router, "its logits are divided by the length of each input: no bias moves them"
        )
    mean = scored_logits(router, sample.tokens).mean(axis=0)
    reached = {"mean_logit_rms": float(np.sqrt(np.mean((mean - mean.mean()) ** 2)))}
    if not mean.any():
        return FittedGate(router=router, reached=reached)
    bias = -mean if router.logit_bias is None else router.logit_bias - mean
    centred = replace(
        router,
        logit_bias=bias.astype(router.weight.dtype),
        rule=replace(router.rule, has_logit_bias=True),
    )
    return FittedGate(router=centred, reached=reached)


WHATIF = WhatIf(
    name="centred",
    text="Logits less their mean over the tokens.",
    parameters=(),
    make=_make,
)
