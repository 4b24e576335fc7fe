"""Routing weights of the chosen experts."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.core.router import Rule
from moegeom.kernels.cpu.selection_scores import selection_scores
from moegeom.kernels.reference.routing_weights import routing_weights as reference


@njit(nogil=True, cache=True)
def _select(scores, chosen, renormalise, epsilon, scale, out):
    for token in range(chosen.shape[0]):
        total = 0.0
        for rank in range(chosen.shape[1]):
            value = scores[token, chosen[token, rank]]
            out[token, rank] = value
            total += value
        factor = scale / (total + epsilon) if renormalise else scale
        for rank in range(chosen.shape[1]):
            out[token, rank] *= factor


@njit(nogil=True, cache=True)
def _softmax_of_selected(logits, chosen, scale, out):
    for token in range(chosen.shape[0]):
        # the largest chosen logit is not the first one when a bias decided the order
        largest = -np.inf
        for rank in range(chosen.shape[1]):
            largest = max(largest, np.float64(logits[token, chosen[token, rank]]))
        total = 0.0
        for rank in range(chosen.shape[1]):
            power = math.exp(logits[token, chosen[token, rank]] - largest)
            out[token, rank] = power
            total += power
        for rank in range(chosen.shape[1]):
            out[token, rank] *= scale / total


def routing_weights(
    logits: np.ndarray, chosen: np.ndarray, rule: Rule, shared_sum: np.ndarray | None = None
) -> np.ndarray:
    """Weights in the order of ``chosen``."""
    facts = rule.weights
    if facts.source not in _LOOPS or shared_sum is not None or (facts.floor, facts.power) != (0, 1):
        return reference(logits, chosen, rule, shared_sum)  # rare rules: no loop of their own
    out = np.empty(chosen.shape)
    _LOOPS[facts.source](logits, chosen, rule, out)
    return out


def _of_scores(logits: np.ndarray, chosen: np.ndarray, rule: Rule, out: np.ndarray) -> None:
    facts = rule.weights
    scores = selection_scores(logits, rule.score, np.zeros(logits.shape[1]))
    _select(scores, chosen, facts.renormalise, facts.epsilon, facts.scale, out)


def _of_selected(logits: np.ndarray, chosen: np.ndarray, rule: Rule, out: np.ndarray) -> None:
    facts = rule.weights
    scale = facts.scale / (1.0 + facts.epsilon) if facts.renormalise else facts.scale
    _softmax_of_selected(logits, chosen, scale, out)


_LOOPS = {"scores": _of_scores, "softmax_of_selected_logits": _of_selected}
