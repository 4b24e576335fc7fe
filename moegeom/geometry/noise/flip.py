"""What changes between two choices for the same tokens."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32


def shares_expert(
    chosen: Int32[np.ndarray, "tokens k"], other: Int32[np.ndarray, "tokens k2"]
) -> Bool[np.ndarray, "tokens k"]:
    """Which experts of ``chosen`` are in ``other`` as well."""
    return (chosen[:, :, None] == other[:, None, :]).any(axis=2)


def certainly_differs(
    compared: Float[np.ndarray, "tokens experts"], chosen: Int32[np.ndarray, "tokens k"]
) -> Bool[np.ndarray, "tokens"]:
    """True where no way of breaking exact ties of ``compared`` gives the set ``chosen``.

    A set is possible when it holds every expert above its own least score. False for a set that
    is chosen by some way of breaking them. Oracle in tests: all ways.
    """
    of_chosen = np.take_along_axis(compared, chosen.astype(np.int64), axis=1)
    least = of_chosen.min(axis=1, keepdims=True)
    return (compared > least).sum(axis=1) != (of_chosen > least).sum(axis=1)


def weight_moved(
    weights: Float64[np.ndarray, "tokens k"],
    chosen: Int32[np.ndarray, "tokens k"],
    other: Int32[np.ndarray, "tokens k2"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Share of the routing weight on experts of ``chosen`` that ``other`` leaves out, 0 to 1.

    :math:`\sum_{i \in S \setminus S'} g_i / \sum_{i \in S} g_i`; 0 for equal sets, nan where all
    weights are 0. Oracle in tests: Python's sets.
    """
    stays = shares_expert(chosen, other)
    with np.errstate(invalid="ignore", divide="ignore"):
        moved = np.where(stays, 0.0, weights).sum(axis=1) / weights.sum(axis=1)
    return np.where(stays.all(axis=1), 0.0, moved)


def swapped_pairs(
    chosen: Int32[np.ndarray, "tokens k"], other: Int32[np.ndarray, "tokens k"]
) -> Int32[np.ndarray, "swaps 3"]:
    """(token, expert out, expert in) of every exchange, in order of rank.

    Where several experts change, the first that leaves is paired with the first that comes.
    """
    leaves, comes = ~shares_expert(chosen, other), ~shares_expert(other, chosen)
    token, rank = np.nonzero(leaves)
    into = other[comes]  # as many in each row, in the same order of rows
    return np.stack([token.astype(np.int32), chosen[token, rank], into], axis=1)
