"""Distances from a centre to cells and facets, with proved bounds: the quadratic program, compiled.

A search ends as soon as the radius is passed, and an answer that float64 cannot prove stays OPEN:
:func:`moegeom.routing_cells.exact.exact_nearest.exact_nearest` settles it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Bool, Float64, Int16, Int64, UInt8
from moegeom.kernels.cpu import UNCOUNTED, kernel
from moegeom.routing_cells.ball._cell_answer import (
    BEYOND,
    EMPTY,
    MET,
    OPEN,
    Ball,
    answer,
    excluded,
    ordered,
    shifted,
    work_for,
)
from moegeom.routing_cells.walk._level_diagram import facets_at
from moegeom.routing_cells.walk.enumeration import SimpleVertices
from moegeom.routing_cells.walk.level_walk import Weighed, weighed

#: Cells or facets that are worth a thread.
_LEAST = 4096


class Distances(NamedTuple):
    """What is known of each cell or facet, and proved brackets of its distance.

    ``state`` is OPEN, MET, BEYOND or EMPTY. ``step`` leads from the centre to a point inside each
    that is MET, no farther than ``upper``, NaN elsewhere; with a facet the point may be off the
    hyperplane by rounding. ``pairs`` are the active constraints, -1 where there are fewer, and
    ``multipliers`` their weights: of Farkas where the state is EMPTY.
    """

    state: UInt8[np.ndarray, "cells"]
    lower: Float64[np.ndarray, "cells"]
    upper: Float64[np.ndarray, "cells"]
    step: Float64[np.ndarray, "cells dims"]
    pairs: Int64[np.ndarray, "cells active 2"]
    multipliers: Float64[np.ndarray, "cells active"]


class BallFacets(NamedTuple):
    """Room for facets: cell, out and into of each, what is known of it, and its bracket.

    ``margin[0]`` becomes the least distance of rejected facets from the radius, ``tests[0]`` the
    number of facets that were asked for.
    """

    facet: Int64[np.ndarray, "most 3"]
    state: UInt8[np.ndarray, "most"]
    bracket: Float64[np.ndarray, "most 2"]
    margin: Float64[np.ndarray, "1"]
    tests: Int64[np.ndarray, "1"]


def cell_distance(
    ball: Ball,
    inside: Bool[np.ndarray, "cells experts"],
    exchanged: Int64[np.ndarray, "cells 2"],
    threads: int = 1,
) -> Distances:
    """Distance of each cell, or of its facet where the pair (out, into) ties; (-1, -1) for none.

    A search that passes the radius ends there with a lower bound beyond it. Threads change nothing
    of what is found.
    """
    num, dims = len(inside), ball.weight.shape[1]
    found = Distances(
        np.zeros(num, np.uint8),
        np.empty(num),
        np.empty(num),
        np.full((num, dims), np.nan),
        np.full((num, dims + 1, 2), -1, np.int64),
        np.zeros((num, dims + 1)),
    )
    rows, pairs = np.ascontiguousarray(inside), np.ascontiguousarray(exchanged)
    cuts = np.linspace(0, num, max(1, min(threads, num // _LEAST)) + 1).astype(int).tolist()
    parts = [slice(*ends) for ends in pairwise(cuts)]

    def fill(part: slice) -> None:
        own = Distances(*(values[part] for values in found))
        _distance_loop(ball, rows[part], pairs[part], own)

    if len(parts) == 1:
        fill(parts[0])
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(fill, parts))
    return found


@kernel()
def _distance_loop(ball, inside, exchanged, found):
    """One cell or facet after the other."""
    experts, dims = ball.weight.shape
    work = work_for(experts, dims)
    order, place = np.empty(experts, np.int64), np.empty(experts, np.int64)
    k = 0
    for n in range(len(inside)):
        if n == 0 or not _is_same(inside[n - 1], inside[n]):
            k = ordered(ball, inside[n], order, work.columns, work.shift)
            for m in range(experts):
                place[order[m]] = m
        out = place[exchanged[n, 0]] if exchanged[n, 0] >= 0 else -1
        into = place[exchanged[n, 1]] if exchanged[n, 0] >= 0 else -1
        state, found.lower[n], found.upper[n], q = answer(work, ball.limits, k, out, into)
        found.state[n] = state
        if state == MET:
            for c in range(dims):  # an array at once would bring the text of its errors along
                found.step[n, c] = work.moved[c]
        for m in range(q):
            found.pairs[n, m, 0] = order[work.pairs[m, 0]]
            found.pairs[n, m, 1] = order[work.pairs[m, 1]]
            found.multipliers[n, m] = work.multipliers[m]


@njit(**UNCOUNTED)
def _is_same(one, other):
    """Whether two cells are one; neighbours in a list of facets often share the first."""
    found = True
    for j in range(len(one)):
        found = found and one[j] == other[j]
    return found


@kernel()
def facet_distance_loop(ball, sure, foot, inside, first, known, facets):
    """All facets of cells from ``first`` on that are MET or OPEN; the next cell, and how many.

    Ends before a cell whose facets may be too many for the room in ``facets``. ``known`` has facets
    of the same form, in order, that are passed over; ``sure[i, j]`` is true where i is above j in
    the whole ball, ``foot`` bounds the distance of the tie of two.
    """
    experts, dims = ball.weight.shape
    work, order = work_for(experts, dims), np.empty(experts, np.int64)
    limits, radius = ball.limits, ball.limits.radius
    facet, margin, tests = facets.facet, facets.margin, facets.tests
    found, at = 0, 0
    is_known = np.zeros((experts, experts), np.bool_)
    is_free = np.empty(experts, np.bool_)
    while at < len(known) and known[at, 0] < first:
        at += 1
    for n in range(first, len(inside)):
        k = ordered(ball, inside[n], order, work.columns, work.shift)
        if found + k * (experts - k) > len(facet):
            return n, found
        start = at
        while at < len(known) and known[at, 0] == n:
            is_known[known[at, 1], known[at, 2]] = True
            at += 1
        for m in range(experts):
            own, free = order[m], True
            for l in range(k) if m < k else range(k, experts):
                other = order[l]
                if sure[own, other] if m < k else sure[other, own]:
                    free = False
                    break
            is_free[m] = free
        for m in range(experts):
            if is_free[m]:
                tests[0] += 1
                out, into = (m, -1) if m < k else (-1, m)
                state, lower, _, _ = excluded(work, limits, k, out, into)
                if state == BEYOND:
                    margin[0] = min(margin[0], lower - radius)
                is_free[m] = state == OPEN
        for out in range(k):
            if not is_free[out]:
                continue
            for into in range(k, experts):
                own, other = order[out], order[into]
                if not is_free[into] or foot[own, other] >= radius or is_known[own, other]:
                    continue
                tests[0] += 1
                state, lower, upper, _ = answer(work, limits, k, out, into)
                if state == BEYOND:
                    margin[0] = min(margin[0], lower - radius)
                if state in (BEYOND, EMPTY):
                    continue
                facet[found, 0], facet[found, 1], facet[found, 2] = n, own, other
                facets.state[found] = state
                facets.bracket[found, 0], facets.bracket[found, 1] = lower, upper
                found += 1
        for m in range(start, at):
            is_known[known[m, 1], known[m, 2]] = False
    return len(inside), found


# --------------------------------------------------------------------------------- nearest vertices
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
