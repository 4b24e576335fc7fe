"""Cosines of router input and row instead of products: what the lengths of rows decide.

Cosines are multiplied by one number, ``scale``: the root mean square, over the tokens of the fit
and experts, of the product of both lengths, so that logits keep their size and weights can be
compared; 1 are plain cosines. Biases stay. Hard limit: rows of one length and inputs of one length
give the choices of the router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_OTHER_SCORES,
    absent,
    choice_of_logits,
    cosines,
    input_lengths,
    need_top_k,
    refuse,
    row_lengths,
    shared_sum,
)


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    if router.has_cosine_logits:
        raise refuse(router, "its logits are cosines already")
    scale = values["scale"]
    if scale is None:
        lengths = input_lengths(sample.tokens)
        scale = float(np.sqrt((lengths**2).mean() * (row_lengths(router) ** 2).mean()))

    def choose(batch: TokenBatch) -> WhatIfChoice:
        logits = scale * cosines(router, batch)
        if router.logit_bias is not None:
            logits = logits + router.logit_bias.astype(np.float64)
        return choice_of_logits(router, logits, shared_sum(router, batch))

    return FittedGate(
        choose=choose,
        reached={"scale": scale},
        absent=absent(OF_OTHER_SCORES, "boundaries of cosines have no known distance"),
    )


WHATIF = WhatIf(
    name="cosine",
    text="Cosines of router input and row in the place of logits: what row lengths decide.",
    parameters=(Parameter("scale", "what cosines are multiplied by", least=1e-12, most=1e12),),
    make=_make,
    needs=("input",),
)
