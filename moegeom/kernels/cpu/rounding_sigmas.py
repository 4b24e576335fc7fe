"""Nearest boundary in standard deviations of the rounding of the router input."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.geometry.arithmetic.rounding import ROUNDING_RMS, UNIT_BFLOAT16


@njit(nogil=True, cache=True)
def _variance(first, second, squares):
    total = 0.0
    for coordinate in range(squares.shape[0]):
        difference = np.float64(first[coordinate]) - np.float64(second[coordinate])
        total += difference * difference * squares[coordinate]
    return total


@njit(nogil=True, cache=True)
def _nearest(values, logits, chosen, weight, row_distance, unit, out):
    tokens, experts = logits.shape
    inside = np.zeros(experts, dtype=np.bool_)
    squares = np.empty(values.shape[1])
    for token in range(tokens):
        largest = 0.0
        for coordinate in range(values.shape[1]):
            value = np.float64(values[token, coordinate])
            squares[coordinate] = value * value
            largest = max(largest, abs(value))
        inside[:] = False
        for rank in range(chosen.shape[1]):
            inside[chosen[token, rank]] = True
        best = np.inf
        for rank in range(chosen.shape[1] - 1, -1, -1):
            one = chosen[token, rank]
            for other in range(experts):
                if inside[other]:
                    continue
                gap = np.float64(logits[token, one]) - np.float64(logits[token, other])
                # no coordinate moves by more than the largest one does: a pair that cannot be
                # nearer even so needs no sum
                if gap > best * unit * largest * row_distance[one, other] * (1.0 + 1e-9):
                    continue
                scale = unit * math.sqrt(_variance(weight[one], weight[other], squares))
                if gap == 0.0:
                    best = 0.0
                elif scale > 0.0:
                    best = min(best, gap / scale)
        out[token] = best


def rounding_sigmas(
    values: np.ndarray, logits: np.ndarray, chosen: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """As :mod:`moegeom.geometry.arithmetic.rounding`; skips pairs that a bound rules out."""
    rows = weight.astype(np.float64)
    squares = (rows**2).sum(axis=1)
    squared = squares[:, None] + squares[None, :] - 2.0 * (rows @ rows.T)
    # the product may lose what is equal up to rounding: it only has to be an upper bound
    distance = np.sqrt(np.maximum(squared, 0.0) + 1e-12 * (squares[:, None] + squares[None, :]))
    out = np.empty(len(values))
    unit = ROUNDING_RMS * UNIT_BFLOAT16
    _nearest(values, logits, chosen, weight, distance, unit, out)
    return out
