r"""Distances of the facets whose nearest point is a vertex of the diagram, with proved bounds.

At a vertex v that d + 1 experts T share, the way from the centre c is
:math:`v - c = \sum_{i \in T} \mu_i w_i` with :math:`\sum \mu_i = 0`. On a facet at v where p and q
tie at the level t, further experts of T are chosen or not. For any multipliers that are positive
only where chosen and negative only where not, and any point x of it,

.. math:: \sum_{i \ne p, q} \mu_i (z_i(x) - t) \ge 0

which bounds its distance from below, by weak duality; with those above it is that of v, the
conditions of Karush, Kuhn and Tucker. So the signs of :math:`\mu` say of which facets v is the
nearest point, all at once, and rounding of :math:`\mu` only makes the bound smaller. Source:
docs/theory.md G2. Oracle in the tests: exact arithmetic.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int16, Int64

from moegeom.studies.cells.ball.nearest import shifted
from moegeom.studies.cells.walk._level_diagram import facets_at
from moegeom.studies.cells.walk.enumeration import SimpleVertices
from moegeom.studies.cells.walk.level_walk import Weighed, weighed

_UNIT = 2.0**-53

#: What is added to lengths, whose squares may have vanished.
_TINY = 1e-150


def nearest_vertices(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    facets: Int64[np.ndarray, "facets 2"],
    centre: Float64[np.ndarray, "dims"],
    simple: SimpleVertices,
) -> Float64[np.ndarray, "facets 2"]:
    """Brackets of the distances of ordered facets, infinite where no vertex is seen to be nearest.

    Vertices must be those of the instance, with all that is said of them proved.
    """
    bracket = np.full((len(facets), 2), np.inf)
    seen = weighed(simple.on, weight, bias, centre)
    bits = np.uint32(1) << np.arange(simple.on.shape[1], dtype=np.uint32)
    rising = (seen.multipliers > 0.0) @ bits
    facet, vertex = facets_at(simple.on, simple.above, rising, expert_set, facets)
    is_seen = np.zeros(len(rising), bool)
    is_seen[vertex] = True
    some = np.flatnonzero(is_seen)
    own = Weighed(seen.point[some], seen.error[some], seen.multipliers[some])
    upper = _upper(own, centre)
    lower = np.minimum(_lower(own, simple.on[some], weight, bias, centre), upper)
    bracket[facet] = np.stack([lower, upper], axis=1)[(np.cumsum(is_seen) - 1)[vertex]]
    return bracket


def _upper(seen: Weighed, centre: Float64[np.ndarray, "dims"]) -> Float64[np.ndarray, "vertices"]:
    """The length of the step to each vertex, rounded up; infinite where its place is not proved."""
    growth = 1.0 + 2.0 * (len(centre) + 4) * _UNIT
    away = np.linalg.norm(np.abs(seen.point - centre) * growth + seen.error, axis=1)
    return np.nan_to_num(away * growth + _TINY, nan=np.inf)


def _lower(
    seen: Weighed,
    on: Int16[np.ndarray, "vertices on"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    centre: Float64[np.ndarray, "dims"],
) -> Float64[np.ndarray, "vertices"]:
    r"""What the multipliers prove of every facet at a vertex that their signs allow.

    Logits and rows are less those of the first expert. Where the multipliers sum to
    :math:`\sigma` and not to 0, the level adds :math:`\sigma (z_p(x) - z_0(x))`.
    """
    shift, error = shifted(weight, bias, centre)
    num, size = on.shape
    gamma, most = 2.0 * (size + 4) * _UNIT, 2.0 * error.max()
    tallest, longest = np.ptp(shift) + most, 2.0 * np.linalg.norm(weight, axis=1).max()
    weights, sizes = seen.multipliers, np.abs(seen.multipliers)
    reach = sizes.sum(axis=1)
    surplus = 1.01 * (np.abs(weights.sum(axis=1)) + gamma * reach)
    rise, loss = np.zeros(num), most * reach
    total, total_reach = np.zeros((2, num, len(centre)))
    first_shift, first_row = shift[on[:, 0]], weight[on[:, 0]]
    for r in range(1, size):
        gap, slope = shift[on[:, r]] - first_shift, weight[on[:, r]] - first_row
        rise -= weights[:, r] * gap
        loss += gamma * sizes[:, r] * np.abs(gap)
        slope *= weights[:, r, None]
        total += slope
        total_reach += np.abs(slope)
    growth = 1.0 + 2.0 * (len(centre) + 4) * _UNIT
    length = np.linalg.norm(np.abs(total) + gamma * total_reach, axis=1) * growth
    length += 1.01 * surplus * longest + _TINY
    rise -= 1.01 * (loss + surplus * tallest) + _TINY
    return np.maximum(rise * (1.0 - 8.0 * _UNIT), 0.0) / length
