"""Scores as probabilities, their entropy, and the log-sum-exp of the logits.

NumPy's exponential of float32 arrays runs in vector registers, which a compiled loop over
``math.exp`` does not: here it is the faster one.
"""

from __future__ import annotations

import numpy as np

#: Tokens at a time, so that the arrays stay in the cache.
_CHUNK = 256


def _log_scores(z: np.ndarray, score: str) -> np.ndarray:
    """Logarithm of the score, so that its softmax is the score over its sum."""
    if score == "sigmoid":
        return np.minimum(z, 0) - np.log1p(np.exp(-np.abs(z)))
    if score == "sqrt_softplus":
        # log(1 + e^z) ~ e^z far below 0, where the sum would lose it
        softplus = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
        with np.errstate(divide="ignore"):
            return np.where(z < -15, z, np.log(softplus)) / 2
    return z


def score_statistics(logits: np.ndarray, score: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities (of the dtype of the logits), entropy and log-sum-exp."""
    probability = np.empty(logits.shape, logits.dtype)
    entropy = np.empty(len(logits))
    log_sum_exp = np.empty(len(logits))
    monotone_of_logits = score in ("softmax", "identity")
    for start in range(0, len(logits), _CHUNK):
        part = slice(start, start + _CHUNK)
        z = np.ascontiguousarray(logits[part])
        u = _log_scores(z, score)
        total, largest = _softmax(u, probability[part], entropy[part])
        if not monotone_of_logits:
            largest = z.max(axis=1, keepdims=True)
            with np.errstate(over="ignore"):
                total = np.exp(z - largest).sum(axis=1)
        log_sum_exp[part] = largest[:, 0].astype(np.float64) + np.log(total.astype(np.float64))
    return probability, entropy, log_sum_exp


def _softmax(
    u: np.ndarray, probability: np.ndarray, entropy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fills the two outputs; returns the sum of powers and the largest entry."""
    largest = u.max(axis=1, keepdims=True)
    with np.errstate(over="ignore", under="ignore"):  # as far below as its format goes is enough
        shifted = np.maximum(u - largest, np.finfo(u.dtype).min)
    np.exp(shifted, out=probability)
    total = probability.sum(axis=1)
    probability /= total[:, None]
    shifted *= probability
    entropy[:] = np.log(total.astype(np.float64)) - shifted.sum(axis=1, dtype=np.float64)
    # rounding may leave -1e-8 where one expert has all
    np.maximum(entropy, 0.0, out=entropy)
    return total, largest
