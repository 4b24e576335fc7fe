r"""Cells and facets of a walk with vertices at which experts tie, in integers only around those.

The walk is that of an instance whose ties are broken by a symbolic perturbation. Around a vertex
that float64 proved simple (all but its d + 1 experts are off the level) the instance itself looks
the same, so that each cell there is open and each facet there a facet between two cells at which
one pair ties. Left are the cells and facets all of whose vertices tie further experts. Of such a
cell S, let T be the experts on the level at all its vertices and along all its rays. A pair
:math:`i \in S, j \notin S` with :math:`z_i = z_j` all over the limit of the cell has both in T,
because the level is between S and the others at every vertex. Hence S is a cell of the instance
where T does not meet both S and its complement; else the limit is flat. Likewise a facet is a facet
where the differences of the rows of T have rank 1, and what lies behind it takes of T those with
the largest slopes. Each facet of a cell is the limit of one facet, so that none is left out.

The reference is :func:`moegeom.routing_cells.exact.exact_cells.exact_cells`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, product
from operator import mul

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16, Int64, UInt32
from moegeom.routing_cells.exact.dictionary import Arrangement, Dictionary, dictionary
from moegeom.routing_cells.exact.exact_walk import Hull
from moegeom.routing_cells.walk._level_diagram import Corners, cells_of, facets_of
from moegeom.routing_cells.walk._level_vertex import RAY, UNORDERED
from moegeom.routing_cells.walk.level_walk import Walked, points_of

#: A set of experts, as the bits of an integer.
Mask = int

#: A facet: the experts of both cells, the one that only the first has and that of the second.
Swap = tuple[Mask, int, int]


def mask_of(experts: Iterable[int]) -> Mask:
    """The bits of some experts."""
    return sum(1 << expert for expert in experts)


def experts_of(mask: Mask) -> Iterator[int]:
    """The experts of some bits, in order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def masks_of(words: np.ndarray) -> list[Mask]:
    """Rows of words of 64 bits as integers."""
    return [int.from_bytes(row.astype("<u8").tobytes(), "little") for row in words]


@dataclass(frozen=True, eq=False)
class Settled:
    """The dictionaries of vertices in exact arithmetic, each computed once."""

    arrangement: Arrangement
    on: list[list[int]]
    _found: dict[int, Dictionary] = field(default_factory=dict)

    def at(self, vertex: int) -> Dictionary:
        """What is known of one vertex."""
        if vertex not in self._found:
            made = dictionary(self.arrangement, self.on[vertex])
            assert made is not None, "the hyperplanes of a vertex meet"
            self._found[vertex] = made
        return self._found[vertex]

    def tied(self, vertex: int) -> Mask:
        """The experts that are on the level there without perturbation."""
        return mask_of(self.at(vertex).tied)

    def tied_along(self, vertex: int, edge: int) -> Mask:
        """The experts that stay as far from the level along an edge."""
        rates = self.at(vertex).slope(edge // 2)
        return mask_of(j for j, rate in enumerate(rates) if rate == 0)


@dataclass(frozen=True, eq=False)
class Faces:
    """What meets the vertices that are not simple.

    ``simple_vertex`` and ``simple_facets`` are the cells and facets with a simple vertex as well.
    ``cells`` and ``facets`` are those without: the experts that are on the level at all of their
    vertices and along all of their rays. ``vertices`` and ``rays`` span those cells; a ray is a
    vertex and an edge.
    """

    simple_vertex: dict[Mask, int] = field(default_factory=dict)
    simple_facets: set[Swap] = field(default_factory=set)
    cells: dict[Mask, Mask] = field(default_factory=dict)
    facets: dict[Swap, Mask] = field(default_factory=dict)
    vertices: dict[Mask, list[int]] = field(default_factory=dict)
    rays: dict[Mask, list[tuple[int, int]]] = field(default_factory=dict)


def settled_faces(walked: Walked, k: int, settled: Settled) -> Faces:
    """The cells and facets at the vertices of a whole walk that exact arithmetic settled.

    Vertices and edges of a cell are connected, and those of a facet too: where no edge leads from a
    vertex that is not simple to one that is, all vertices are of the first kind.
    """
    found = Faces()
    is_simple = walked.is_simple.tolist()
    vertices = np.flatnonzero(~walked.is_simple).tolist()
    above = masks_of(walked.bits[vertices])
    links = walked.links[vertices].tolist()
    for vertex, over, ends in zip(vertices, above, links, strict=True):
        for edge, end in enumerate(ends):
            if end >= 0 and is_simple[end]:
                cells, facets = _around(*_along(settled.on[vertex], over, edge), k)
                found.simple_vertex.update((cell, end) for cell in cells)
                found.simple_facets.update(facets)
    for vertex, over, ends in zip(vertices, above, links, strict=True):
        cells, facets = _left(found, *_around(settled.on[vertex], over, k))
        if not cells and not facets:
            continue
        _meet(found, cells, facets, settled.tied(vertex))
        for cell in cells:
            found.vertices.setdefault(cell, []).append(vertex)
        for edge, end in enumerate(ends):
            if end != RAY:
                continue
            cells, facets = _left(found, *_around(*_along(settled.on[vertex], over, edge), k))
            _meet(found, cells, facets, settled.tied_along(vertex, edge))
            for cell in cells:
                found.rays.setdefault(cell, []).append((vertex, edge))
    return found


def _along(on: list[int], over: Mask, edge: int) -> tuple[list[int], Mask]:
    """The experts on the level along an edge, and those above it."""
    leaving = on[edge // 2]
    return [expert for expert in on if expert != leaving], over | (edge % 2) << leaving


def _around(on: list[int], over: Mask, k: int) -> tuple[list[Mask], list[Swap]]:
    """Cells and facets that meet where ``on`` are on the level and ``over`` above it."""
    wanted = k - over.bit_count()
    cells = [over | mask_of(some) for some in combinations(on, wanted)]
    if wanted < 1:
        return cells, []
    facets = [
        (over | mask_of(some), out, into)
        for some in combinations(on, wanted - 1)
        for out, into in combinations(sorted(set(on).difference(some)), 2)
    ]
    return cells, facets


def _left(found: Faces, cells: list[Mask], facets: list[Swap]) -> tuple[list[Mask], list[Swap]]:
    """Those without a simple vertex."""
    return (
        [cell for cell in cells if cell not in found.simple_vertex],
        [facet for facet in facets if facet not in found.simple_facets],
    )


def _meet(found: Faces, cells: list[Mask], facets: list[Swap], tied: Mask) -> None:
    for cell in cells:
        found.cells[cell] = found.cells.get(cell, -1) & tied
    for facet in facets:
        found.facets[facet] = found.facets.get(facet, -1) & tied


@dataclass(frozen=True, eq=False)
class SettledCells:
    """Cells in the order of their sorted experts, with a point inside each, and facets as pairs.

    The first cell of a facet comes first, and facets are in order. The two cells differ in one
    expert but where several pairs tie on one hyperplane. ``tied`` are the open sets that are left
    out, in order too, as equal experts tie all over them.
    """

    expert_set: Int16[np.ndarray, "cells k"]
    witness: Float64[np.ndarray, "cells dims"]
    is_bounded: Bool[np.ndarray, "cells"]
    facets: Int64[np.ndarray, "facets 2"]
    tied: Int16[np.ndarray, "tied k"]


def settled_cells(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    tie_broken: bool = False,
) -> SettledCells:
    """The cells and facets of the instance of a whole walk, with or without ties.

    With ``tie_broken`` equal experts (rows and biases) count as apart, the lower number ahead; else
    no cell splits them. A tenth of a millisecond for each vertex that was settled in exact
    arithmetic, some more where no vertex of a cell is simple. Oracle in tests: ``exact_cells``.
    """
    arrangement = Arrangement.of(weight, bias)
    rising = _rising(walked, arrangement)
    cells = cells_of(walked, rising, k)
    between = facets_of(walked, rising, k, cells.masks).in_order()
    settled = Settled(arrangement, walked.on.tolist())
    faces = settled_faces(walked, k, settled)
    masks = masks_of(cells.masks)
    number = {mask: n for n, mask in enumerate(masks)}
    class_of, apart = _classes(arrangement), range(len(bias))
    is_open, is_tied = np.ones(len(masks), bool), np.zeros(len(masks), bool)
    vertex_of = cells.vertex_of.copy()
    for cell, tied in faces.cells.items():
        is_open[number[cell]] = _is_open(cell, tied, class_of)
        is_tied[number[cell]] = not tie_broken and not _is_open(cell, tied, apart)
    is_cell = is_open & ~is_tied
    for cell, vertex in faces.simple_vertex.items():
        vertex_of[number[cell]] = vertex
    point = points_of(walked.on, weight, bias)
    for vertex in np.flatnonzero(~walked.is_simple).tolist():
        point[vertex] = [float(value) for value in settled.at(vertex).point(arrangement)]
    witness = Corners.of(walked, vertex_of).points_near(weight, cells.masks, point)
    for cell in faces.cells:
        if is_cell[number[cell]]:
            witness[number[cell]] = [float(value) for value in _inner(cell, faces, settled)]
    left = [(number[common | 1 << a], number[common | 1 << b]) for common, a, b in faces.facets]
    behind = [
        (number[one], number[other])
        for one, other in _facets(faces, arrangement, k)
        if one in number and other in number
    ]
    facets = np.concatenate([_without(between, left), np.array(behind, np.int64).reshape(-1, 2)])
    expert_set = np.array([list(experts_of(mask)) for mask in masks], np.int16).reshape(-1, k)
    order = np.lexsort(expert_set.T[::-1])
    ties = order[(is_open & is_tied)[order]]
    order = order[is_cell[order]]
    place = np.full(len(masks), -1, np.int64)
    place[order] = np.arange(len(order))
    facets = np.sort(place[facets], axis=1)
    return SettledCells(
        expert_set=expert_set[order],
        witness=witness[order],
        is_bounded=cells.is_bounded[order],
        facets=np.unique(facets[facets[:, 0] >= 0], axis=0).reshape(-1, 2),
        tied=expert_set[ties],
    )


def _rising(walked: Walked, arrangement: Arrangement) -> UInt32[np.ndarray, "vertices"]:
    """The experts whose edge upwards climbs along ``upwards``, with proof at every vertex.

    Should an edge be level, its first coordinate decides, and so it does at the other end.
    """
    found = walked.rising.copy()
    along = [Fraction(value) for value in walked.upwards.tolist()]
    unit = max(value.denominator for value in along)  # a power of two, as all of them
    units = arrangement.integers.units
    scaled = [int(value * unit) * scale for value, scale in zip(along, units, strict=True)]
    for vertex in np.flatnonzero(found & UNORDERED).tolist():
        at = dictionary(arrangement, walked.on[vertex].tolist())
        assert at is not None, "the hyperplanes of a vertex meet"
        edges = zip(*at.inverse[:-1], strict=True)
        climbs = [next(v for v in (sum(map(mul, scaled, e)), *e, 0, 1) if v) > 0 for e in edges]
        found[vertex] = mask_of(column for column, climb in enumerate(climbs) if climb)
    return found


def _classes(arrangement: Arrangement) -> list[int]:
    """For each expert the first one that is equal to it."""
    first: dict[tuple[Fraction, ...], int] = {}
    experts = zip(arrangement.weight, arrangement.bias, strict=True)
    return [first.setdefault((*row, offset), j) for j, (row, offset) in enumerate(experts)]


def _is_open(cell: Mask, tied: Mask, class_of: Sequence[int]) -> bool:
    """Whether no pair ties all over the cell, but for equal experts of one class."""
    pairs = product(experts_of(tied & cell), experts_of(tied & ~cell))
    return all(class_of[i] == class_of[j] for i, j in pairs)


def _inner(cell: Mask, faces: Faces, settled: Settled) -> list[Fraction]:
    """A point inside a cell that is spanned by these vertices and rays."""
    places = {settled.at(v).point(settled.arrangement) for v in faces.vertices[cell]}
    rays = faces.rays.get(cell, [])
    away = [settled.at(v).direction(edge // 2, edge % 2 == 1) for v, edge in rays]
    return Hull(list(places), away).inner()


def _facets(faces: Faces, arrangement: Arrangement, k: int) -> Iterator[tuple[Mask, Mask]]:
    """Both sides of the facets without a simple vertex that are facets, seen from either of them.

    Pairs of sets of experts, of which some may be no cells.
    """
    for (common, out, into), tied in faces.facets.items():
        slopes = _slopes(arrangement, tied, out, into)
        if slopes is None:
            continue
        for own, sign in ((out, -1), (into, 1)):
            cell = common | 1 << own
            sure = cell & ~tied
            ranked = sorted((sign * slope, expert) for expert, slope in slopes.items())
            taken = (expert for _, expert in ranked[: k - sure.bit_count()])
            yield cell, sure | mask_of(taken)


def _slopes(arrangement: Arrangement, tied: Mask, out: int, into: int) -> dict[int, int] | None:
    """How the experts on a facet rise from the first cell to the second, up to a common factor.

    None where their rows differ by more than multiples of one another: then they tie in fewer
    dimensions than a facet has.
    """
    rows = arrangement.integers.rows
    across = [b - a for a, b in zip(rows[out], rows[into], strict=True)]
    column = next((m for m, value in enumerate(across) if value), None)
    if column is None:
        return None
    found = {}
    for expert in experts_of(tied):
        row = [value - own for value, own in zip(rows[expert], rows[out], strict=True)]
        if any(a * across[column] != b * row[column] for a, b in zip(row, across, strict=True)):
            return None
        found[expert] = row[column] if across[column] > 0 else -row[column]
    return found


def _without(
    facets: Int64[np.ndarray, "facets 2"], left: list[tuple[int, int]]
) -> Int64[np.ndarray, "kept 2"]:
    """The facets that are not among those left."""
    some = np.array(left, np.int64).reshape(-1, 2)
    count = max(int(facets.max(initial=0)), int(some.max(initial=0))) + 1
    return facets[~np.isin(facets[:, 0] * count + facets[:, 1], some[:, 0] * count + some[:, 1])]
