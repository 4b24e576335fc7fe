"""Which row of one matrix each row of another is: rows that changed places, and by how much."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

#: A row has changed places when the other place is nearer than this share of the distance to its
#: own: less than a quarter of the squared change is left.
NEARER = 0.5

#: ... and its own place is further away than this share of its length.
AWAY = 0.05

#: Rows that are equal stay where they are: a place of its own counts this much of a mean square.
_OWN_PLACE = 1e-6


def squared_distances(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "others dimension"]
) -> Float64[np.ndarray, "others rows"]:
    r""":math:`|b_i - a_j|^2 = |b_i|^2 + |a_j|^2 - 2 b_i \cdot a_j`, at least 0.

    True to 1e-15 of the squared lengths. Oracle in tests: the differences themselves.
    """
    lengths = [np.einsum("ij,ij->i", rows, rows) for rows in (b, a)]
    return np.maximum(lengths[0][:, None] + lengths[1][None, :] - 2.0 * (b @ a.T), 0.0)


def nearest_order(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Int64[np.ndarray, "rows"]:
    r"""The permutation p that minimises :math:`\sum_i |b_i - a_{p_i}|^2`.

    Among equal rows the one in the same place. Hungarian method (scipy). Oracle in tests: all
    permutations of up to six rows.
    """
    from scipy.optimize import linear_sum_assignment

    cost = squared_distances(a, b)
    np.fill_diagonal(cost, np.diag(cost) - _OWN_PLACE * cost.mean())
    return linear_sum_assignment(cost)[1].astype(np.int64)


def matched_places(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Int64[np.ndarray, "rows"]:
    r"""For each row of b the row of a that it is: i itself unless rows changed places.

    :func:`nearest_order` after a common factor is taken out (the median ratio of lengths in order
    of length). A cycle of it is kept only where each of its rows is nearer to the other place than
    NEARER times the distance to its own, and further from its own than AWAY of its length; so rows
    that merely moved keep their places, and the answer is always a permutation. Rows with values
    that are not finite, or all zero, give the identity.
    """
    own = np.arange(len(a))
    scale = _length_ratio(a, b)
    if not 0.0 < scale < np.inf or len(a) < 2:
        return own
    b = b / scale
    stayed = np.linalg.norm(b - a, axis=1)
    is_away = stayed > AWAY * np.linalg.norm(a, axis=1)
    if is_away.sum() < 2:
        return own
    order = nearest_order(a, b)
    moved = np.linalg.norm(b - a[order], axis=1)
    is_elsewhere = is_away & (moved < NEARER * stayed)
    for cycle in cycles(order):
        if not is_elsewhere[cycle].all():
            order[cycle] = cycle
    return order


def cycles(order: Int64[np.ndarray, "rows"]) -> list[list[int]]:
    """The cycles of a permutation that move anything."""
    left, found = set(np.flatnonzero(order != np.arange(len(order))).tolist()), []
    while left:
        cycle = [min(left)]
        while (after := int(order[cycle[-1]])) != cycle[0]:
            cycle.append(after)
        left -= set(cycle)
        found.append(cycle)
    return found


def _length_ratio(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    """The same whatever rows changed places; nan when nothing can be compared."""
    lengths = [np.sort(np.linalg.norm(rows, axis=1)) for rows in (a, b)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = lengths[1] / lengths[0]
    known = ratios[np.isfinite(ratios)]
    return float(np.median(known)) if known.size else float("nan")
