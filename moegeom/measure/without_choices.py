"""Routers of which nobody knows what they chose token by token: from weights, or from counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64

from moegeom.core.metric import Metric
from moegeom.core.router import Router
from moegeom.engine.plan import on_all_cores
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import REDUCTIONS, reduction_of
from moegeom.kernels.reductions.choices import TOKENS
from moegeom.measure.finish import MeasuredRouter, finish_router

#: Why a log of counts gives some metrics no value.
_COUNTS_ALONE = "needs the choices of each token; this log counts experts only"


def measure_weights(router: Router, metrics: Sequence[Metric], reason: str) -> MeasuredRouter:
    """Rows of the metrics that need no tokens; the others are missing for ``reason``."""
    missing = {
        reduction_of(need): reason for m in metrics if m.scope != "weights" for need in m.needs
    }
    finished = finish_router(router, {}, (), metrics, missing)
    return MeasuredRouter(finished.rows, {"num_tokens": 0, "reasons": finished.reasons})


def measure_weights_of(
    wanted: Sequence[tuple[Router, Sequence[Metric]]],
) -> Iterator[MeasuredRouter]:
    """What :func:`measure_weights` gives for each router without tokens, on all cores, in order."""
    return on_all_cores(lambda one: measure_weights(one[0], one[1], "no tokens"), wanted)


def measure_counts(
    router: Router, counts: Int64[np.ndarray, "steps experts"], metrics: Sequence[Metric]
) -> MeasuredRouter:
    """Rows of the load metrics and of weights; the others are missing with the reason.

    Step n belongs to block n modulo 16, so that standard errors are those of steps; a log of one
    step has none.
    """
    blocks = np.zeros((1, NUM_BLOCKS, router.num_experts), np.int64)
    np.add.at(blocks[0], np.arange(len(counts)) % NUM_BLOCKS, counts)
    tokens = np.zeros((1, NUM_BLOCKS, 2), np.int64)
    tokens[..., TOKENS] = blocks.sum(axis=2) // router.rule.top_k
    states = {"expert_counts": {"counts": blocks}, "token_counts": {"counts": tokens}}
    missing = dict.fromkeys(set(REDUCTIONS.names()) - set(states), _COUNTS_ALONE)
    finished = finish_router(router, states, ("domain=(none)",), metrics, missing)
    facts = {
        "num_tokens": int(tokens.sum()),
        "num_excluded": 0,
        "num_non_finite": 0,
        "first_non_finite": [],
        "reasons": finished.reasons,
        "disagreements": [],
    }
    return MeasuredRouter(finished.rows, facts)
