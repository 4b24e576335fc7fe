"""Scores as probabilities, their entropy, and the log-sum-exp of the logits."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

from moegeom.geometry.load.routing_entropy import entropy_nats, log_sum_exp, normalised_scores


def score_statistics(
    logits: Float[np.ndarray, "tokens experts"], score: str
) -> tuple[
    Float[np.ndarray, "tokens experts"],
    Float64[np.ndarray, "tokens"],
    Float64[np.ndarray, "tokens"],
]:
    """Probabilities (of the dtype of the logits), entropy in nats and log-sum-exp of each token."""
    probability = normalised_scores(logits, score)
    return probability.astype(logits.dtype), entropy_nats(probability), log_sum_exp(logits)
