"""How fast the difference of two group scores can change with the router input."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from moegeom.core.router import GroupMask

#: Sets of experts of one group up to which all vertices are looked at: groups of 64.
MOST_SETS = 2100


def group_slopes(
    gram: Float64[np.ndarray, "experts experts"],
    groups: GroupMask | None,
    steepest: float,
    widest: float,
) -> Float64[np.ndarray, "groups groups"]:
    r"""Largest slope of :math:`T_g - T_h`, a bound for every input.

    For scores of one logit, :math:`L_{gh} = s \max |\sum_{p} w - \sum_{p'} w|` over sets
    :math:`p \subset g, p' \subset h` of at most as many experts as a group score adds, the empty
    set among them, and s the steepest slope: coefficients between 0 and s have their largest norm
    at a vertex. In larger groups, twice the largest row or row difference stands in for it. For
    softmax (``steepest`` 0), :math:`T_g - T_h` is a mean of numbers -1, 0, 1 under
    p, and its slope a covariance with logits: at most half of the ``widest`` row distance.

    No rows without groups. Source: docs/theory.md E2 and E1b. Oracle in tests: all vertices in
    turn.
    """
    if groups is None:
        return np.empty((0, 0))
    number = groups.num_groups
    if steepest == 0.0:
        return np.full((number, number), widest / 2.0)
    size = len(gram) // number
    takes = 2 if groups.score == "top2_sum" and size > 1 else 1
    if size * (size + 1) // 2 >= MOST_SETS and takes == 2:
        longest = np.sqrt(np.diag(gram).max())
        return np.full((number, number), 2.0 * steepest * max(widest, longest))
    sets = _subsets(size, takes)
    out = np.zeros((number, number))
    blocks = gram.reshape(number, size, number, size)
    turned = -2.0 * sets.T.copy()
    squares = np.stack([_quadratic(sets, blocks[g, :, g].copy()) for g in range(number)])
    for g in range(number):
        for h in range(g):
            squared = (sets @ blocks[g, :, h].copy()) @ turned
            squared += squares[g][:, None]
            squared += squares[h][None, :]
            out[g, h] = out[h, g] = steepest * np.sqrt(max(squared.max(), 0.0))
    return out


def _subsets(size: int, most: int) -> Float64[np.ndarray, "sets size"]:
    """Indicator rows of all sets of at most ``most`` (1 or 2) members."""
    single = np.eye(size)
    first, second = np.triu_indices(size, 1)
    pairs = single[first] + single[second] if most == 2 else np.empty((0, size))
    return np.concatenate([np.zeros((1, size)), single, pairs])


def _quadratic(
    sets: Float64[np.ndarray, "sets size"], block: Float64[np.ndarray, "size size"]
) -> Float64[np.ndarray, "sets"]:
    return ((sets @ block) * sets).sum(axis=1)
