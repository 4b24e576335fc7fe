"""Cells and walls around the vertices of a walk that only exact arithmetic settled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from moegeom.cells.exact.dictionary import Arrangement, Dictionary, dictionary
from moegeom.cells.walk._level_vertex import RAY
from moegeom.cells.walk.level_walk import Walked

#: A set of experts, as the bits of an integer.
Mask = int

#: A wall: the experts of both cells, the one that only the first has and that of the second.
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

    ``simple_vertex`` and ``simple_walls`` are the cells and walls with a simple vertex as well.
    ``cells`` and ``walls`` are those without: the experts that are on the level at all of their
    vertices and along all of their rays. ``vertices`` and ``rays`` span those cells; a ray is a
    vertex and an edge.
    """

    simple_vertex: dict[Mask, int] = field(default_factory=dict)
    simple_walls: set[Swap] = field(default_factory=set)
    cells: dict[Mask, Mask] = field(default_factory=dict)
    walls: dict[Swap, Mask] = field(default_factory=dict)
    vertices: dict[Mask, list[int]] = field(default_factory=dict)
    rays: dict[Mask, list[tuple[int, int]]] = field(default_factory=dict)


def settled_faces(walked: Walked, k: int, settled: Settled) -> Faces:
    """The cells and walls at the vertices of a whole walk that exact arithmetic settled.

    Vertices and edges of a cell are connected, and those of a wall too: where no edge leads from a
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
                cells, walls = _around(*_along(settled.on[vertex], over, edge), k)
                found.simple_vertex.update((cell, end) for cell in cells)
                found.simple_walls.update(walls)
    for vertex, over, ends in zip(vertices, above, links, strict=True):
        cells, walls = _left(found, *_around(settled.on[vertex], over, k))
        if not cells and not walls:
            continue
        _meet(found, cells, walls, settled.tied(vertex))
        for cell in cells:
            found.vertices.setdefault(cell, []).append(vertex)
        for edge, end in enumerate(ends):
            if end != RAY:
                continue
            cells, walls = _left(found, *_around(*_along(settled.on[vertex], over, edge), k))
            _meet(found, cells, walls, settled.tied_along(vertex, edge))
            for cell in cells:
                found.rays.setdefault(cell, []).append((vertex, edge))
    return found


def _along(on: list[int], over: Mask, edge: int) -> tuple[list[int], Mask]:
    """The experts on the level along an edge, and those above it."""
    leaving = on[edge // 2]
    return [expert for expert in on if expert != leaving], over | (edge % 2) << leaving


def _around(on: list[int], over: Mask, k: int) -> tuple[list[Mask], list[Swap]]:
    """Cells and walls that meet where ``on`` are on the level and ``over`` above it."""
    wanted = k - over.bit_count()
    cells = [over | mask_of(some) for some in combinations(on, wanted)]
    if wanted < 1:
        return cells, []
    walls = [
        (over | mask_of(some), out, into)
        for some in combinations(on, wanted - 1)
        for out, into in combinations(sorted(set(on).difference(some)), 2)
    ]
    return cells, walls


def _left(found: Faces, cells: list[Mask], walls: list[Swap]) -> tuple[list[Mask], list[Swap]]:
    """Those without a simple vertex."""
    return (
        [cell for cell in cells if cell not in found.simple_vertex],
        [wall for wall in walls if wall not in found.simple_walls],
    )


def _meet(found: Faces, cells: list[Mask], walls: list[Swap], tied: Mask) -> None:
    for cell in cells:
        found.cells[cell] = found.cells.get(cell, -1) & tied
    for wall in walls:
        found.walls[wall] = found.walls.get(wall, -1) & tied
