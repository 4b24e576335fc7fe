"""Euclidean norm of router inputs."""

from __future__ import annotations

import numpy as np
from numba import njit


# Only the order of the sum is free ("reassoc", "contract"), so that it runs in vector registers.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _squares(values, squares):
    for token in range(values.shape[0]):
        total = np.float32(0.0)
        for coordinate in range(values.shape[1]):
            total += values[token, coordinate] * values[token, coordinate]
        squares[token] = total


def input_norm(values: np.ndarray) -> np.ndarray:
    """|y| of each token; float32 sums, done again in float64 where they leave its range."""
    squares = np.empty(len(values))
    _squares(values, squares)
    # A sum outside [2^-100, inf) has overflowed, lost small squares, or met a non-finite value.
    for token in np.flatnonzero(~((squares >= 2.0**-100) & np.isfinite(squares))):
        row = values[token].astype(np.float64)
        squares[token] = np.dot(row, row)
    return np.sqrt(squares)
