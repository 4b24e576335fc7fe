"""Scores: what a router makes of its logits before it compares them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float64

Score = Callable[[Float[np.ndarray, "tokens experts"]], Float64[np.ndarray, "tokens experts"]]


def identity(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    """The logits themselves, s_i = z_i, as float64."""
    return logits.astype(np.float64)


def softmax(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    r"""Softmax, :math:`s_i = e^{z_i} / \sum_j e^{z_j}`, over all experts.

    The maximum is subtracted first, so that nothing overflows. Rows sum to 1 within 1e-15 E.
    Oracle in tests: scipy.special.softmax.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    r"""Logistic function, :math:`s_i = 1 / (1 + e^{-z_i})`, each expert by itself.

    Float64 keeps scores apart up to z = 36, where float32 saturates at 17 (docs/theory.md E1).
    The exponential of -|z| never overflows. Oracle in tests: scipy.special.expit.
    """
    z = logits.astype(np.float64)
    decay = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, decay) / (1.0 + decay)


def sqrt_softplus(
    logits: Float[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Root of softplus, :math:`s_i = \sqrt{\log(1 + e^{z_i})}`; slope at most 0.3191.

    Source: docs/theory.md E1b. Oracle in tests: numpy.logaddexp.
    """
    z = logits.astype(np.float64)
    return np.sqrt(np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z))))


#: Score functions by the name that a family file uses.
SCORES: dict[str, Score] = {
    "identity": identity,
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": sqrt_softplus,
}

#: Largest change of a score per unit of the largest change of a logit: turns an error bound of
#: logits into one of scores. Softmax: dp_i = p_i sum_a (delta_ia - p_a) dz_a, so
#: |dp_i| <= 2 p_i (1 - p_i) max |dz| <= max |dz| / 2, reached by two equal experts pushed apart.
LARGEST_SLOPE: dict[str, float] = {
    "identity": 1.0,
    "softmax": 0.5,
    "sigmoid": 0.25,
    "sqrt_softplus": 0.3191,
}
