"""How undecided a router is about a token: entropy of its scores."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

from moegeom.geometry.selection.score import SCORES


def normalised_scores(
    logits: Float[np.ndarray, "tokens experts"], score: str
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Scores over their sum, :math:`p_i = s(z_i) / \sum_j s(z_j)`; rows sum to 1.

    Softmax scores are such a distribution already; raw logits (``identity``) are turned into one by
    softmax. Computed as the softmax of log s, so that scores which underflow keep their ratio.
    Source: docs/theory.md D3. Oracle in tests: torch.
    """
    z = logits.astype(np.float64)
    if score == "sigmoid":
        z = np.minimum(z, 0.0) - np.log1p(np.exp(-np.abs(z)))
    elif score == "sqrt_softplus":
        softplus = np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z)))
        # log(1 + e^z) ~ e^z far below 0, where the sum would lose it
        z = np.where(z < -30.0, z, np.log(np.maximum(softplus, 1e-300))) / 2.0
    return SCORES["softmax"](z)


def entropy_nats(
    probability: Float[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens"]:
    """Entropy of each row, -sum p log p with 0 log 0 = 0, in nats; 0 to log E.

    Oracle in tests: scipy.stats.entropy.
    """
    p = probability.astype(np.float64)
    # log 1 = 0 stands in for log 0; a nan stays a nan
    return -(p * np.log(np.where(p == 0.0, 1.0, p))).sum(axis=1) + 0.0


def top_k_entropy_nats(
    probability: Float[np.ndarray, "tokens experts"], top_k: int
) -> Float64[np.ndarray, "tokens"]:
    """Entropy of the ``top_k`` largest entries of each row over their sum, in nats; 0 to log k.

    nan for a row whose largest entries are all 0. Not the entropy over the chosen experts where a
    selection bias or a group mask decides: those need not be the largest. Source: docs/theory.md
    D3.
    """
    experts = probability.shape[1]
    kept = np.partition(probability.astype(np.float64), experts - top_k, axis=1)[:, -top_k:]
    total = kept.sum(axis=1, keepdims=True)
    share = np.divide(kept, total, out=np.full_like(kept, np.nan), where=total > 0.0)
    return entropy_nats(share)


def log_sum_exp(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens"]:
    """Logarithm of the sum of exponentials of each row; the largest entry is taken out first.

    Oracle in tests: scipy.special.logsumexp.
    """
    z = logits.astype(np.float64)
    largest = z.max(axis=1)
    return largest + np.log(np.exp(z - largest[:, None]).sum(axis=1))
