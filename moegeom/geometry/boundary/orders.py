"""How many experts tie, or nearly tie, at the border of the chosen set."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int64


def _descending(
    selection: Float[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens experts"]:
    return -np.sort(-selection.astype(np.float64), axis=1)


def tie_spread(
    selection: Float[np.ndarray, "tokens experts"], k: int, order: int
) -> Float64[np.ndarray, "tokens"]:
    r"""Least spread of n + 1 consecutive sorted scores that hold ranks k and k + 1, n = ``order``.

    .. math:: \min_{a \le k < k + 1 \le a + n} z_{[a]} - z_{[a+n]}

    In units of the selection score. For n = 1 the margin; not decreasing in n; inf when there is no
    such window (k = E, or n >= E). A perturbation of every score by less than half of it creates no
    tie of n + 1 experts at the border. Source: docs/theory.md A2, A5 (S0 Definition 4.6 up to the
    factor 2, F-02). Oracle in tests: all windows by brute force.
    """
    ordered = _descending(selection)
    experts = ordered.shape[1]
    # ranks from 0: a window [a, a + n] holds k - 1 and k
    starts = np.arange(max(k - order, 0), min(k - 1, experts - 1 - order) + 1)
    if k >= experts or order < 1 or not starts.size:
        return np.full(len(ordered), np.inf)
    return (ordered[:, starts] - ordered[:, starts + order]).min(axis=1)


def order_exact(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> Int64[np.ndarray, "tokens"]:
    """Experts that share the k-th score exactly, less 1; 0 when the (k+1)-th does not share it.

    Ties inside the chosen set alone do not count: no input changes hands there. 0 for k = E.
    Source: docs/theory.md A2 (S0 Definition A.5, the largest order, F-01).
    """
    ordered = _descending(selection)
    if k >= ordered.shape[1]:
        return np.zeros(len(ordered), dtype=np.int64)
    last = ordered[:, [k - 1]]
    count = (ordered == last).sum(axis=1) - 1
    return np.where(ordered[:, k] == last[:, 0], count, 0).astype(np.int64)


def order_eps(
    selection: Float[np.ndarray, "tokens experts"], k: int, eps: float
) -> Int64[np.ndarray, "tokens"]:
    """Largest n whose tie spread is at most ``eps``; 0 when the margin is larger.

    Counts nearly tied experts on both sides of the border. Not decreasing in ``eps``; 0 for k = E.
    For each first rank a <= k the window reaches as far as scores stay above z_[a] - eps.
    Source: docs/theory.md A2. Oracle in tests: tie_spread for every n.
    """
    return _order_of(_descending(selection), k, eps)


def extra_experts(
    selection: Float[np.ndarray, "tokens experts"], k: int, eps: float
) -> Int64[np.ndarray, "tokens"]:
    """Experts outside the chosen set whose score is less than ``eps`` below the k-th.

    What a smoothed router would run beside the k chosen ones. At most :func:`order_eps`; 0 for
    k = E or eps = 0. Source: docs/theory.md 0, A11, A12.
    """
    return _extras_of(_descending(selection), k, eps)


def near_tie_ladder(
    selection: Float[np.ndarray, "tokens experts"], k: int, ladder: Float64[np.ndarray, "steps"]
) -> tuple[Int64[np.ndarray, "tokens steps"], Int64[np.ndarray, "tokens steps"]]:
    """:func:`order_eps` and :func:`extra_experts` for every ``eps`` of a ladder, sorted once."""
    ordered = _descending(selection)
    orders = [_order_of(ordered, k, eps) for eps in ladder.tolist()]
    extras = [_extras_of(ordered, k, eps) for eps in ladder.tolist()]
    return np.stack(orders, axis=1), np.stack(extras, axis=1)


def _order_of(
    ordered: Float64[np.ndarray, "tokens experts"], k: int, eps: float
) -> Int64[np.ndarray, "tokens"]:
    tokens, experts = ordered.shape
    found = np.zeros(tokens, dtype=np.int64)
    if k >= experts:
        return found
    for first in range(k):
        # differences, not sums: z_[a] - z_[b] <= eps is what tie_spread compares
        with np.errstate(invalid="ignore"):  # experts masked at -inf
            reach = (ordered[:, [first]] - ordered <= eps).sum(axis=1) - 1
        np.maximum(found, np.where(reach >= k, reach - first, 0), out=found)
    return found


def _extras_of(
    ordered: Float64[np.ndarray, "tokens experts"], k: int, eps: float
) -> Int64[np.ndarray, "tokens"]:
    if k >= ordered.shape[1]:
        return np.zeros(len(ordered), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        return (ordered[:, [k - 1]] - ordered[:, k:] < eps).sum(axis=1).astype(np.int64)
