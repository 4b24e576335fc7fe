"""Exact distance from a router input to the nearest input whose chosen set differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32

#: Inverse row distance of a pair that is no boundary: equal rows, different biases. Finite, so that
#: a product with a zero gap is 0 and not nan, and small enough that no product with a gap of
#: float32 logits overflows; products above NEVER, which is less than any other gap gives, are
#: infinite.
NO_BOUNDARY = 1e260
NEVER = 1e200


@dataclass(frozen=True, eq=False)
class RowDistances:
    """1 / |w_i - w_j| for each pair of rows, ready for :func:`boundary_distance`.

    ``inverse`` is 0 for a permanent tie (equal rows and biases: the distance is 0 wherever one of
    the two is chosen and the other is not), and NO_BOUNDARY for equal rows with different biases
    (never a boundary). The diagonal is NO_BOUNDARY. ``smallest`` is the least entry of each row: no
    boundary of expert i is nearer than ``gap * smallest[i]``.
    """

    inverse: Float64[np.ndarray, "experts experts"]
    smallest: Float64[np.ndarray, "experts"]
    permanent_ties: Int32[np.ndarray, "pairs 2"]


def squared_row_distances(
    rows: Float64[np.ndarray, "experts dims"],
) -> Float64[np.ndarray, "experts experts"]:
    r"""Squared Euclidean distances between rows; 0 for equal ones.

    :math:`|w_i - w_j|^2 = G_{ii} + G_{jj} - 2 G_{ij}` with :math:`G = W W^T`; where the difference
    cancels (below 1e-8 of the sum) it is computed again from the rows themselves.
    """
    gram = rows @ rows.T
    squares = np.diag(gram)
    total = squares[:, None] + squares[None, :]
    squared = np.maximum(total - 2.0 * gram, 0.0)
    for i, j in np.argwhere(squared <= 1e-8 * total):
        squared[i, j] = np.sum((rows[i] - rows[j]) ** 2)
    return squared


def row_distances(
    weight: Float[np.ndarray, "experts hidden"], bias: Float[np.ndarray, "experts"] | None = None
) -> RowDistances:
    r"""Inverse Euclidean distances between router rows, in float64.

    Source: docs/theory.md A3. Oracle in tests: scipy.spatial.distance.
    """
    rows = weight.astype(np.float64)
    squared = squared_row_distances(rows)
    equal = squared == 0.0
    np.fill_diagonal(equal, False)
    offsets = np.zeros(len(rows)) if bias is None else bias.astype(np.float64)
    tied = equal & (offsets[:, None] == offsets[None, :])
    with np.errstate(divide="ignore"):
        inverse = np.where(squared > 0.0, 1.0 / np.sqrt(squared), NO_BOUNDARY)
    inverse[tied] = 0.0
    return RowDistances(
        inverse=inverse,
        smallest=inverse.min(axis=1),
        permanent_ties=np.argwhere(np.triu(tied)).astype(np.int32),
    )


@dataclass(frozen=True, eq=False)
class Boundary:
    """Distance to the boundary and the pair (expert out, expert in) of the nearest boundary.

    The pair is (-1, -1) where no boundary exists.
    """

    distance: Float64[np.ndarray, "tokens"]
    pair: Int32[np.ndarray, "tokens 2"]


def boundary_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: RowDistances,
) -> Boundary:
    r"""Euclidean distance from each router input to the boundary of its cell, and the nearest
    boundary.

    .. math:: d(y) = \min_{i \in S,\, j \notin S} \frac{z_i(y) - z_j(y)}{\lVert w_i - w_j \rVert}

    Exact for every affine rule, redundant boundaries included: the distance to the complement of an
    intersection of half-spaces is the least distance to a half-space. In units of the router
    input. 0 on a boundary and on a permanent tie; inf when every expert is chosen or no pair of
    rows differs. Equal quotients: the first pair in order of rank in S from the k-th upwards, then
    of expert. The nearest boundary is not that of the k-th and (k+1)-th logit in 12-16 % of tokens
    (F-07). Absolute error: that of the logits, divided by the row distance.

    Source: docs/theory.md A3 (S0 Theorem 5.1 with unit diffusion). Oracle in tests: a quadratic
    program for the nearest point of each neighbouring cell.
    """
    tokens, experts = logits.shape
    distance = np.full(tokens, np.inf)
    pair = np.full((tokens, 2), -1, dtype=np.int32)
    z = logits.astype(np.float64)
    for token in range(tokens):
        outside = np.ones(experts, dtype=bool)
        outside[chosen[token]] = False
        others = np.flatnonzero(outside)
        for expert in chosen[token][::-1]:
            if others.size == 0:
                continue
            with np.errstate(over="ignore"):  # NO_BOUNDARY times a large gap is inf, which is meant
                quotient = (z[token, expert] - z[token, others]) * rows.inverse[expert, others]
            nearest = int(np.argmin(quotient))
            if quotient[nearest] < min(distance[token], NEVER):
                distance[token] = quotient[nearest]
                pair[token] = expert, others[nearest]
    return Boundary(distance, pair)
