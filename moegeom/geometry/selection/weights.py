"""Routing weights: how much each chosen expert counts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Weights
from moegeom.geometry.selection.score import softmax


def routing_weights(
    logits: Float[np.ndarray, "tokens experts"],
    scores: Float64[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    weights: Weights,
) -> Float64[np.ndarray, "tokens k"]:
    r"""Weight of each chosen expert, in the order of ``chosen``.

    :math:`g_i = c\, s_i`, renormalised :math:`c\, s_i / (\sum_{j \in S} s_j + \epsilon)`,
    where s are the scores *without* selection bias, or the softmax over the chosen logits alone.
    Source: THEORY.md A1, E1. Oracle in tests: the routers of transformers.
    """
    if weights.source == "softmax_of_selected_logits":
        selected = softmax(np.take_along_axis(logits, chosen, axis=1))
    else:
        selected = np.take_along_axis(scores, chosen, axis=1)
    if weights.renormalise:
        selected = selected / (selected.sum(axis=1, keepdims=True) + weights.epsilon)
    return selected * weights.scale
