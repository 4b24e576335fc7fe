"""Routing weights: how much each chosen expert counts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Weights
from moegeom.geometry.selection.score import sigmoid, softmax


def routing_weights(
    logits: Float[np.ndarray, "tokens experts"],
    scores: Float64[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    weights: Weights,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Float64[np.ndarray, "tokens k"]:
    r"""Weight of each chosen expert, in the order of ``chosen``.

    :math:`g_i = c\, s_i`, renormalised
    :math:`c\, s_i / \max(f, (\sum_{j \in S} s_j^p)^{1/p} + \epsilon)`, where s are the scores
    *without* selection bias, the softmax over the chosen logits alone, their sigmoids, or what
    :func:`sparsemixer` gives. ``shared_sum`` (scores of experts that always run) adds to the sum.
    Logits are those behind the logit map. nan where the sum is zero.
    Source: docs/theory.md A1, E1. Oracle in tests: the routers of transformers.
    """
    if weights.source == "sparsemixer":
        selected = sparsemixer(logits, chosen, weights.jitter)
    elif weights.source == "softmax_of_selected_logits":
        selected = softmax(np.take_along_axis(logits, chosen, axis=1))
    elif weights.source == "sigmoid_of_selected_logits":
        selected = sigmoid(np.take_along_axis(logits, chosen, axis=1))
    else:
        selected = np.take_along_axis(scores, chosen, axis=1)
    if weights.renormalise:
        total = (selected**weights.power).sum(axis=1)
        if shared_sum is not None:
            total = total + shared_sum
        total = np.maximum(total ** (1.0 / weights.power) + weights.epsilon, weights.floor)
        with np.errstate(invalid="ignore", divide="ignore"):
            selected = selected / total[:, None]
    return selected * weights.scale


def sparsemixer(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    jitter: float,
) -> Float64[np.ndarray, "tokens k"]:
    r"""Weights of experts taken one after the other, largest logit first.

    The r-th, of logit m: :math:`1 / \sum_j e^{z_j - m}` over the experts not taken yet that are
    near, :math:`(m - z_j) / \max(|z_j|, m) \le 2 \epsilon`. Float64, 0 to 1; a single near expert
    has weight 1. Source: transformers 5.23.0 modeling_phimoe.py, in evaluation mode.
    """
    z = logits.astype(np.float64)
    left = z.copy()
    out = np.empty(chosen.shape)
    for rank in range(chosen.shape[1]):
        expert = chosen[:, [rank]].astype(np.int64)
        largest = np.take_along_axis(z, expert, axis=1)
        # the distance is that of all experts: one taken before is far from none, but out of the sum
        with np.errstate(invalid="ignore", divide="ignore"):
            is_far = (largest - z) / np.maximum(np.abs(z), largest) > 2.0 * jitter
        out[:, rank] = 1.0 / np.where(is_far, 0.0, np.exp(left - largest)).sum(axis=1)
        np.put_along_axis(left, expert, -np.inf, axis=1)
    return out
