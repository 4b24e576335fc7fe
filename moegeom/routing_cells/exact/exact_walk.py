"""The walk over all vertices of the order-k diagram in exact arithmetic: the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from moegeom.routing_cells.exact.dictionary import Arrangement, Dictionary, dictionary

ExpertSet = frozenset[int]
Point = tuple[Fraction, ...]

#: Coordinates of the point from which the first vertex is looked for: integers without pattern.
_START = (7, -13, 29, 3, -41, 17, 53, -5, 61, -23, 37, -67)


@dataclass(eq=False)
class Hull:
    """Vertices and rays that span a cell or a facet."""

    vertices: list[Point] = field(default_factory=list)
    rays: list[Point] = field(default_factory=list)

    def inner(self) -> list[Fraction]:
        """A point of the relative interior: the mean of the vertices, and the sum of the rays."""
        count = len(self.vertices)
        return [
            sum(column, Fraction(0)) / count + sum((ray[m] for ray in self.rays), Fraction(0))
            for m, column in enumerate(zip(*self.vertices, strict=True))
        ]


@dataclass(eq=False)
class ExactDiagram:
    """Cells and facets of the perturbed instance, as hulls; facets by the pair of their cells."""

    cells: dict[ExpertSet, Hull] = field(default_factory=dict)
    facets: dict[tuple[ExpertSet, ExpertSet], Hull] = field(default_factory=dict)
    num_vertices: int = 0


def exact_walk(arrangement: Arrangement, k: int) -> ExactDiagram:
    """All cells with k experts above and the facets between them, for d >= 2 and full rank.

    The rows less the first must have rank d, and 0 < k < E. Ties are broken as if the bias of a
    lower number were larger by more: cells of the instance itself are among those found.
    """
    found = ExactDiagram()
    first = first_vertex(arrangement, k)
    if first is None:
        return found
    seen, left = {frozenset(first.on)}, [first]
    while left:
        vertex = left.pop()
        found.num_vertices += 1
        point = vertex.point(arrangement)
        for hull in _around(found, vertex.on, vertex.above, k):
            hull.vertices.append(point)
        for column, upwards in diagram_edges(vertex, k, arrangement.dimension):
            met = vertex.shot(column, upwards)
            if met is None:
                ray = vertex.direction(column, upwards)
                leaving = vertex.on[column]
                above = vertex.above | {leaving} if upwards else vertex.above
                rest = [expert for expert in vertex.on if expert != leaving]
                for hull in _around(found, rest, above, k):
                    hull.rays.append(ray)
                continue
            on = tuple(sorted({*vertex.on, met} - {vertex.on[column]}))
            if frozenset(on) not in seen:
                seen.add(frozenset(on))
                following = dictionary(arrangement, on)
                assert following is not None, "an edge ends in a vertex"
                left.append(following)
    return found


def diagram_edges(vertex: Dictionary, k: int, dimension: int) -> Iterator[tuple[int, bool]]:
    """Edges of the diagram at a vertex: which expert leaves the level, and to which side."""
    above = len(vertex.above)
    for column in range(len(vertex.on)):
        if above <= k - 2:
            yield column, True
        if above >= k - dimension + 1:
            yield column, False


def _around(
    found: ExactDiagram, on: Sequence[int], above: frozenset[int], k: int
) -> Iterator[Hull]:
    """Cells and facets that meet where ``on`` are on the level and ``above`` over it."""
    for some in itertools.combinations(on, k - len(above)):
        expert_set = above | set(some)
        yield found.cells.setdefault(expert_set, Hull())
        for out, into in itertools.product(some, (expert for expert in on if expert not in some)):
            if out < into:  # each facet once: from the side on which the lower number is chosen
                pair = (expert_set, expert_set - {out} | {into})
                yield found.facets.setdefault(pair, Hull())


def first_vertex(arrangement: Arrangement, k: int) -> Dictionary | None:
    """A vertex of the order-k diagram, from points without pattern; None where there is none."""
    for attempt in range(64):
        found = _descend(arrangement, k, attempt)
        if found is not None:
            return found
    for on in itertools.combinations(range(arrangement.num_experts), arrangement.dimension + 1):
        found = dictionary(arrangement, on)
        if found is not None and is_of_order(found, k, arrangement.dimension):
            return found
    return None


def is_of_order(vertex: Dictionary, k: int, dimension: int) -> bool:
    """Whether cells with k experts above meet at the vertex."""
    return k - dimension <= len(vertex.above) <= k - 1


def _descend(arrangement: Arrangement, k: int, attempt: int) -> Dictionary | None:
    """Experts around rank k at a point, as many as a vertex takes: often one of the diagram."""
    d = arrangement.dimension
    point = [Fraction(_START[(m + attempt) % len(_START)] * (attempt + 1), 97) for m in range(d)]
    values = [
        sum((w * x for w, x in zip(row, point, strict=True)), b)
        for row, b in zip(arrangement.weight, arrangement.bias, strict=True)
    ]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    for before in range(d + 1):
        start = max(0, k - 1 - before)
        on = order[start : start + d + 1]
        if len(on) == d + 1:
            found = dictionary(arrangement, sorted(on))
            if found is not None and is_of_order(found, k, d):
                return found
    return None
