"""Balanced choices by Sinkhorn scaling: costs are the negative selection scores.

Shares exp(score / eps) of a batch are scaled to equal sums over experts; each token takes its k
largest shares, with the weights of the rule. Without ``log`` exponents are clipped at 50, which
loses the order of scores beyond 50 eps: counted. Experts of groups that a token does not keep stay
out. Hard limit: ``sinkhorn:steps=0,log`` is the router itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, WhatIf
from moegeom.variants.whatif._choices import admitted_scores, need_weights_of_sets
from moegeom.variants.whatif._plans import PARAMETERS, gate_of_plans


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_weights_of_sets(router)

    def cost(batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
        return -admitted_scores(router, batch)

    return gate_of_plans(router, values, cost, sample.kernels)


WHATIF = WhatIf(
    name="sinkhorn",
    text="The k largest shares of each token after Sinkhorn scaling of the scores of a batch.",
    parameters=PARAMETERS,
    make=_make,
)
