"""Selection scores of curved rules."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _softmax(logits, bias, out):
    experts = logits.shape[1]
    for token in range(logits.shape[0]):
        largest = np.float64(logits[token, 0])
        for expert in range(experts):
            largest = max(largest, np.float64(logits[token, expert]))
        total = 0.0
        for expert in range(experts):
            power = math.exp(logits[token, expert] - largest)
            out[token, expert] = power
            total += power
        for expert in range(experts):
            out[token, expert] = out[token, expert] / total + bias[expert]


@njit(nogil=True, cache=True)
def _sigmoid(logits, bias, out):
    for token in range(logits.shape[0]):
        for expert in range(logits.shape[1]):
            z = np.float64(logits[token, expert])
            decay = math.exp(-abs(z))
            out[token, expert] = (1.0 if z >= 0 else decay) / (1.0 + decay) + bias[expert]


@njit(nogil=True, cache=True)
def _sqrt_softplus(logits, bias, out):
    for token in range(logits.shape[0]):
        for expert in range(logits.shape[1]):
            z = np.float64(logits[token, expert])
            out[token, expert] = (
                math.sqrt(max(z, 0.0) + math.log1p(math.exp(-abs(z)))) + bias[expert]
            )


@njit(nogil=True, cache=True)
def _identity(logits, bias, out):
    for token in range(logits.shape[0]):
        for expert in range(logits.shape[1]):
            out[token, expert] = np.float64(logits[token, expert]) + bias[expert]


_LOOPS = {
    "identity": _identity,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}


def selection_scores(logits: np.ndarray, score: str, bias: np.ndarray) -> np.ndarray:
    """``score(logit) + bias`` in float64."""
    out = np.empty(logits.shape)
    _LOOPS[score](logits, bias, out)
    return out
