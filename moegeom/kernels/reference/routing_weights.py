"""Routing weights of the chosen experts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Rule
from moegeom.geometry.selection import weights
from moegeom.geometry.selection.score import SCORES


def routing_weights(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rule: Rule,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Float64[np.ndarray, "tokens k"]:
    """Weights in the order of ``chosen``; see :mod:`moegeom.geometry.selection.weights`.

    Logits are those behind the logit map.
    """
    scores = SCORES[rule.score](logits)
    return weights.routing_weights(logits, scores, chosen, rule.weights, shared_sum)
