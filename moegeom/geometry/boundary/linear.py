"""Exact distance from a router input to the nearest input whose chosen set differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int32
from moegeom.geometry.set_code import chosen_mask

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
    np.fill_diagonal(total, -1.0)
    for i, j in np.argwhere(squared <= 1e-8 * total):
        squared[i, j] = np.sum((rows[i] - rows[j]) ** 2)
    np.fill_diagonal(squared, 0.0)
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


# ------------------------------------------------------------------------- the largest logits alone
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


# ----------------------------------------------------------------------------- in front of the norm
@dataclass(frozen=True, eq=False)
class Cones:
    r"""For each two experts the cone of directions on which they tie, around
    :math:`a = \tilde w_i - \tilde w_j` with the effective rows :math:`\tilde w = w \odot g`.

    ``length`` is |a|, ``shift`` :math:`b_j - b_i`, ``angle`` of what the cone is off a right angle
    (nan where no direction is singled out), ``is_empty`` where no direction ties.
    """

    bias: Float64[np.ndarray, "experts"]
    length: Float64[np.ndarray, "experts experts"]
    shift: Float64[np.ndarray, "experts experts"]
    angle: Float64[np.ndarray, "experts experts"]
    is_empty: Bool[np.ndarray, "experts experts"]


def cones_of(
    effective_rows: Float64[np.ndarray, "experts hidden"], bias: Float64[np.ndarray, "experts"]
) -> Cones:
    r"""Cones :math:`\cos \phi_0 = (b_j - b_i) / (\sqrt D |a|)`; see :func:`boundary_angle`."""
    length = np.sqrt(squared_row_distances(effective_rows))
    shift = bias[None, :] - bias[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = shift / (np.sqrt(effective_rows.shape[1]) * length)
    angle = np.arcsin(np.clip(cosine, -1.0, 1.0))
    return Cones(bias, length, shift, angle, np.abs(cosine) > 1.0)


def boundary_angle(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    cones: Cones,
    unit_length: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Angle, in radians, from an RMS-normed input to the nearest direction with another choice.

    Two experts tie on the cone :math:`\cos \phi_0 = (b_j - b_i) / (\sqrt D |a|)` around
    :math:`a = \tilde w_i - \tilde w_j`, with :math:`\tilde w = w \odot g` the effective rows; the
    token is at :math:`\cos \phi = a \cdot u / (|a| |u|)`, u = y / g. The result is the least
    :math:`|\phi - \phi_0|` over i chosen, j not. Its sine times |x| is the distance before the
    norm (|x| itself from 90 degrees on). Without biases the cone is a plane through 0 and this is
    exact; with them the epsilon of the norm is neglected.

    ``unit_length`` is |u|, at most :math:`\sqrt D`. 0 on a boundary; inf when every expert is
    chosen, when no pair of rows can tie, and for an input of zeros (which has no direction) that
    is on no boundary. Absolute error about 1e-8 near 0 (arc cosine near 1: none, since boundaries
    without bias lie at 90 degrees). Source: docs/theory.md E3. Oracle in tests: minimisation over
    inputs before the norm.
    """
    tokens, experts = logits.shape
    z = logits.astype(np.float64) - cones.bias
    outside = ~chosen_mask(chosen, experts)
    nearest = np.full(tokens, np.inf)
    for rank in range(chosen.shape[1]):
        one = chosen[:, rank]
        projection = np.take_along_axis(z, one[:, None].astype(np.int64), axis=1) - z
        apart = cones.length[one]
        with np.errstate(divide="ignore", invalid="ignore"):
            here = projection / (apart * unit_length[:, None])
            angle = np.abs(np.arcsin(np.clip(here, -1.0, 1.0)) - cones.angle[one])
        angle = np.where(cones.is_empty[one] | ~np.isfinite(angle), np.inf, angle)
        # an exact tie, permanent or not
        angle = np.where(projection == cones.shift[one], 0.0, angle)
        nearest = np.minimum(nearest, np.where(outside, angle, np.inf).min(axis=1))
    return nearest


def angle_bound(
    distance: Float64[np.ndarray, "tokens"], unit_length: Float64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Lower bound of that angle from a lower bound of the distance among inputs without gain.

    Two inputs u, u' of one length r at the angle :math:`\phi` are :math:`2 r \sin(\phi / 2)` apart,
    and the distance d from u to another choice is measured over all inputs, those of length r among
    them: :math:`\phi \ge 2 \arcsin(d / 2 r)`. inf for d > 2 r, and for inf. For any rule; d is that
    of the effective rows. The bound is near the angle where the nearest boundary does not lean
    towards the input itself. Source: docs/theory.md E3. Oracle in tests: minimisation over inputs
    before the norm.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        chord = distance / (2.0 * unit_length)
        angle = 2.0 * np.arcsin(np.minimum(chord, 1.0))
    return np.where(chord > 1.0, np.inf, angle)
