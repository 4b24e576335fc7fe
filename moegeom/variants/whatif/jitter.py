"""Multiplicative noise, as some routers are trained with: factors drawn evenly from [1 - j, 1 + j].

On logits, or on the coordinates of the router input (``on=input``). One draw is shown; how often
the set of a token changes is measured over 16. A draw follows from seed, router and token, so that
cutting the tokens into batches changes nothing. Hard limit: ``jitter:0`` is the router itself, bit
for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.statistics import clustered_error
from moegeom.kernels.batch import RUN_TOKENS, TokenBatch
from moegeom.kernels.reference import expert_codes, mix, num_shared, token_hash
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_OTHER_SCORES,
    absent,
    choice_of_logits,
    known,
    need_top_k,
    refuse,
    rows_of,
    scored_logits,
    shared_sum,
)

#: Draws behind the share of flips, and tokens of the sample that it is measured on: noise on the
#: input takes a product for every draw.
_DRAWS = 16
_MOST = {"logits": 8192, "input": 2048}

#: Tokens of a product. Of one shape for all, so that no bit of a token depends on its batch.
_BLOCK = 64


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    size, on = values["size"], values["on"]
    if size == 0.0:
        return FittedGate(router=router, reached={"flipped_share": 0.0})
    if on == "input" and sample.tokens.input is None:
        raise refuse(router, "on=input needs recorded router inputs")
    if on == "input" and router.has_cosine_logits:
        raise refuse(router, "its logits are divided by the length of the input that is disturbed")
    key = _key(router, sample.seed)

    def drawn(batch: TokenBatch, draw: int) -> WhatIfChoice:
        logits = scored_logits(router, batch)
        if on == "logits":
            logits = logits * (1.0 + size * _signs(batch.token, router.num_experts, key, draw))
        else:
            values = known(batch.input).astype(np.float64)
            moved = size * _signs(batch.token, values.shape[1], key, draw) * values
            logits = logits + _products(moved, router.weight.astype(np.float64).T)
        return choice_of_logits(router, logits, shared_sum(router, batch))

    def measure(sample: FitSample) -> dict[str, float]:
        rows = np.arange(min(len(sample.tokens.chosen), _MOST[on]))
        some = rows_of(sample.tokens, rows)
        k = router.rule.top_k
        flipped = np.zeros(len(rows))
        for draw in range(_DRAWS):
            flipped += num_shared(drawn(some, draw).chosen, some.chosen) < k
        share = flipped / _DRAWS
        error = clustered_error((share - share.mean()) / len(rows), _unit(some))
        figures = {"flipped_share": float(share.mean()), "flipped_tokens": float(len(rows))}
        return figures if error is None else figures | {"flipped_share_se": error}

    return FittedGate(
        choose=lambda batch: drawn(batch, 0),
        measure=measure,
        absent=absent(OF_OTHER_SCORES, "the boundaries of disturbed logits move with each draw"),
    )


def _unit(batch: TokenBatch) -> Int64[np.ndarray, "tokens"]:
    """Tokens that are not independent: of a document, or of a run where none is known."""
    run = -1 - batch.token // RUN_TOKENS
    return run if batch.document is None else np.where(batch.document < 0, run, batch.document)


def _key(router: Router, seed: int) -> np.uint64:
    digest = hashlib.sha256(f"{seed}:{router.name}".encode()).digest()
    return np.frombuffer(digest[:8], dtype="<u8")[0]


def _signs(
    token: Int64[np.ndarray, "tokens"], size: int, key: np.uint64, draw: int
) -> Float64[np.ndarray, "tokens size"]:
    """Numbers spread evenly over [-1, 1), independent of each other."""
    state = mix(token_hash(token) ^ key)
    state = mix(state + np.uint64(draw))
    bits = mix(state[:, None] + expert_codes(size)[None, :]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-52 - 1.0


def _products(
    values: Float64[np.ndarray, "tokens hidden"], columns: Float64[np.ndarray, "hidden experts"]
) -> Float64[np.ndarray, "tokens experts"]:
    products = np.empty((len(values), columns.shape[1]))
    for start in range(0, len(values), _BLOCK):
        part = values[start : start + _BLOCK]
        padded = np.zeros((_BLOCK, values.shape[1]))
        padded[: len(part)] = part
        products[start : start + _BLOCK] = (padded @ columns)[: len(part)]
    return products


WHATIF = WhatIf(
    name="jitter",
    text="Logits or inputs times factors drawn from [1 - j, 1 + j]: how often sets change.",
    parameters=(
        Parameter(
            "size",
            "j, the largest relative change",
            0.01,
            least=0.0,
            most=1.0,
            is_first=True,
            is_swept=True,
        ),
        Parameter("on", "what is multiplied: logits or input", "logits", words=("logits", "input")),
    ),
    make=_make,
)
