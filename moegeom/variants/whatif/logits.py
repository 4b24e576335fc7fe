"""Other logits under the same rule: centred, cosines, disturbed, or those of a random router."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.keys import expert_codes, mix, token_hash
from moegeom.geometry.statistics import clustered_error
from moegeom.kernels.batch import RUN_TOKENS, TokenBatch
from moegeom.kernels.reference import num_shared
from moegeom.variants.random_router import random_router
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, Values, WhatIfChoice, what_if
from moegeom.variants.whatif._choices import (
    OF_OTHER_SCORES,
    absent,
    choice_of_logits,
    cosines,
    input_lengths,
    known,
    need_top_k,
    refuse,
    row_lengths,
    rows_of,
    scored_logits,
    shared_sum,
)


@what_if()
def centred(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Logits less their mean over the tokens.

    The mean of each logit, over all tokens that the what-if was fitted to, is taken off its bias.
    Hard limit: where every mean is 0 it is the router itself, bit for bit.
    """
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


@what_if(
    Parameter("scale", "what cosines are multiplied by", least=1e-12, most=1e12), needs=("input",)
)
def cosine(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Cosines of router input and row in the place of logits: what row lengths decide.

    Cosines are multiplied by one number, ``scale``: the root mean square, over the tokens of the
    fit and experts, of the product of both lengths, so that logits keep their size and weights can
    be compared; 1 are plain cosines. Biases stay. Hard limit: rows of one length and inputs of one
    length give the choices of the router.
    """
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


#: Draws behind the share of flips, and tokens of the sample that it is measured on: noise on the
#: input takes a product for every draw.
_DRAWS = 16
_MOST = {"logits": 8192, "input": 2048}

#: Tokens of a product. Of one shape for all, so that no bit of a token depends on its batch.
_BLOCK = 64


@what_if(
    Parameter("size", "j, the largest relative change", 0.01, least=0.0, most=1.0, is_swept=True),
    Parameter("on", "what is multiplied: logits or input", "logits", words=("logits", "input")),
)
def jitter(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Logits or inputs times factors drawn from [1 - j, 1 + j]: how often sets change.

    On logits, or on the coordinates of the router input (``on=input``). One draw is shown; how
    often the set of a token changes is measured over 16. A draw follows from seed, router and
    token, so that cutting the tokens into batches changes nothing. Hard limit: ``jitter:0`` is the
    router itself, bit for bit.
    """
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


@what_if()
def random_rows(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Rows of random direction, with the lengths, biases and rule of the router: chance.

    What differs from it is what training made of the rows. No limit of it is the model; the same
    seed gives the same router.
    """
    need_top_k(router)
    return FittedGate(router=random_router(router, sample.seed))
