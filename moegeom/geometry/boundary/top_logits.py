"""What the largest logits alone tell about the distance to the boundary: a bracket, often exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32

from moegeom.geometry.boundary.linear import RowDistances, boundary_distance

#: A logit so low that no boundary of it counts (the quotient is beyond ``boundary.NEVER``); finite,
#: so that a permanent tie stays at distance 0.
BELOW_ALL = -1e300


@dataclass(frozen=True, eq=False)
class Bracket:
    """Least and largest distance that logits which are not known allow.

    The distance is exact where the two are equal (both may be inf: no boundary). ``pair`` is then a
    nearest boundary (expert out, expert in), and (-1, -1) where they differ or there is none.
    """

    lower: Float64[np.ndarray, "tokens"]
    upper: Float64[np.ndarray, "tokens"]
    pair: Int32[np.ndarray, "tokens 2"]

    @property
    def is_exact(self) -> Bool[np.ndarray, "tokens"]:
        return self.lower == self.upper


def distance_bracket(
    logits: Float[np.ndarray, "tokens m"],
    expert: Int32[np.ndarray, "tokens m"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: RowDistances,
) -> Bracket:
    r"""Bounds of the boundary distance of an affine rule from the m largest logits of each token.

    With T the experts whose logits are known (in any order) and S the k chosen ones among them,

    .. math:: u(y) = \min_{i \in S,\, j \in T \setminus S} \frac{z_i - z_j}{|w_i - w_j|}, \quad
        l(y) = \min\Bigl(u(y),\,
        \min_{i \in S,\, j \notin T} \frac{z_i - \min_T z}{|w_i - w_j|}\Bigr), \quad
        l \le d \le u

    because a logit that is not known is at most the least known one: l is d when all of them are
    as large as that, u when none is near. A permanent tie of a chosen expert with one outside T
    counts in both, its distance 0 does not depend on a logit. In units of the router input.

    Where l = u, this is what :func:`~moegeom.geometry.boundary.linear.boundary_distance` gives from
    all logits, bit for bit: differences and products are rounded in order. Logits of another
    engine, within e of these, move a distance by no more than 2 e over the row distance, exact or
    not. With every logit known l = u; u is inf when k = m < E.

    Source: docs/theory.md A3. Oracle in tests: the distance from all logits, also by scipy.
    """
    num_experts = len(rows.inverse)
    least = logits.min(axis=1).astype(np.float64)
    lower = boundary_distance(spread(logits, expert, least, num_experts), chosen, rows)
    far = np.full(len(logits), BELOW_ALL)
    upper = boundary_distance(spread(logits, expert, far, num_experts), chosen, rows)
    is_exact = lower.distance == upper.distance
    pair = np.where(is_exact[:, None], upper.pair, np.int32(-1))
    return Bracket(lower.distance, upper.distance, pair)


def spread(
    logits: Float[np.ndarray, "tokens m"],
    expert: Int32[np.ndarray, "tokens m"],
    rest: Float[np.ndarray, "tokens"],
    num_experts: int,
) -> Float[np.ndarray, "tokens experts"]:
    """Logits by expert, those that are not known at ``rest``, in the dtype of ``rest``."""
    by_expert = np.repeat(rest[:, None], num_experts, axis=1)
    np.put_along_axis(by_expert, expert.astype(np.int64), logits.astype(rest.dtype), axis=1)
    return by_expert
