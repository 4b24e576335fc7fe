"""One router from counts to rows: what can be said when no token is known, only who was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from moegeom.core.metric import Metric
from moegeom.core.router import Router
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.kernels.reductions.choices import TOKENS
from moegeom.measure.finish import finish_router
from moegeom.measure.passes import MeasuredRouter

_REASON = "needs the choices of each token; this log counts experts only"


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
    missing = dict.fromkeys(set(REDUCTIONS.names()) - set(states), _REASON)
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
