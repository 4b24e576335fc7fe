"""All cells and facets of an affine top-k router, by the method that fits the instance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import comb
from operator import mul

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16, Int64, UInt32
from moegeom.routing_cells.exact.certificate_check import CellPoint
from moegeom.routing_cells.exact.dictionary import (
    Arrangement,
    Dictionary,
    common_tie,
    dictionary,
    equal_classes,
    independent_columns_of,
)
from moegeom.routing_cells.facet_graph import swaps
from moegeom.routing_cells.walk._level_diagram import Corners, cells_of, facets_of
from moegeom.routing_cells.walk._level_vertex import RAY, UNORDERED
from moegeom.routing_cells.walk.level_walk import Walked, WalkWatch, level_walk, points_of
from moegeom.routing_cells.walk.segment_crossings import sweep

#: Sets of experts are kept as int16.
MOST_EXPERTS = 2**15


@dataclass(frozen=True, eq=False, kw_only=True)
class Enumeration:
    """Cells in the order of their sorted experts, with a point inside each, and facets as pairs.

    A facet's first cell is the one that comes first; its two cells differ in one expert but where
    several pairs tie on one hyperplane. ``road`` says how: "sweep", "walk", "charts", "one cell".
    ``num_exact`` vertices were settled in exact arithmetic, the others in float64 with proof;
    ``gap`` is how many error bounds the nearest of those vertices is from a tie. At
    ``num_concurrent`` points of a walk more than d + 1 tie. ``is_whole`` is False where a limit was
    reached and more is left: then a walk has no cells. ``tied`` are sets that would be cells with
    ties broken: equal experts tie all over an open set of inputs. ``exact`` has a rational point of
    each cell in which no float64 point was found: there the witness is nan.
    """

    expert_set: Int16[np.ndarray, "cells k"]
    witness: Float64[np.ndarray, "cells dims"]
    facets: Int64[np.ndarray, "facets 2"]
    road: str
    is_bounded: Bool[np.ndarray, "cells"]
    tied: Int16[np.ndarray, "tied k"]
    num_vertices: int = 0
    num_exact: int = 0
    num_concurrent: int = 0
    gap: float = np.inf
    is_whole: bool = True
    exact: Mapping[int, CellPoint] = field(default_factory=dict)

    @property
    def exchanged(self) -> tuple[Int16[np.ndarray, "facets"], Int16[np.ndarray, "facets"]]:
        """The lowest expert that only the first cell of each facet has, and that of the second."""
        return swaps(self.expert_set, self.facets).first


@dataclass(frozen=True)
class AllSubsets:
    """Rows whose differences have rank E - 1: every set of k experts is a cell.

    All k (E - k) pairs are facets of each. Certified modulo a prime.
    """

    num_experts: int
    k: int

    @property
    def num_cells(self) -> int:
        return comb(self.num_experts, self.k)


def enumerate_cells(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    k: int,
    *,
    tie_broken: bool = False,
    most: int = 10**7,
    threads: int = 1,
    watch: WalkWatch | None = None,
) -> Enumeration | AllSubsets:
    r"""The expert sets S for which some open set of inputs has S as its k largest logits.

    .. math:: C_S = \{x : z_i(x) > z_j(x), i \in S, j \notin S\}, \quad z = W x + b

    The numbers are taken as they are. Lines are swept exactly; in d >= 2 the vertices of the
    order-k diagram are walked, at most ``most`` of them; without bias (None), and where all experts
    tie at one point, two affine charts are walked instead. Vertices at which further experts tie
    (parallel facets, equal experts) take a millisecond each, in exact arithmetic; only where there
    are such ``tie_broken`` matters: then equal experts count as apart, the lower number ahead,
    while else no cell splits them.

    Raises ValueError for k outside 1..E, for E above 2^15 and for numbers that are not finite.
    Source: docs/theory.md G1; oracle in tests: the certified instances there, and exact arithmetic.
    """
    experts = len(weight)
    if not 1 <= k <= experts:
        raise ValueError(f"top_k {k} of {experts} experts")
    if experts > MOST_EXPERTS:
        raise ValueError(f"{experts} experts; at most {MOST_EXPERTS} are told apart")
    if not np.isfinite(weight).all() or not (bias is None or np.isfinite(bias).all()):
        raise ValueError("a row or a bias is not finite")
    if bias is not None and (bias == bias[0]).all():
        bias = None  # a common shift changes no choice
    columns = independent_columns_of(weight)
    if k < experts and experts > 1 and len(columns) == experts - 1:
        return AllSubsets(experts, k)
    job = _Job(weight, bias, k, tie_broken, most, threads, watch)
    if k == experts or not columns:
        return job.one_cell()
    inner = np.ascontiguousarray(weight[:, columns])
    whole = replace(job, weight=inner).run()
    if len(columns) == weight.shape[1]:
        return whole
    witness = np.zeros((len(whole.witness), weight.shape[1]))
    witness[:, columns] = whole.witness
    unbounded = np.zeros(len(witness), dtype=bool)
    return replace(whole, witness=witness, is_bounded=unbounded)


@dataclass(frozen=True, eq=False)
class _Job:
    """An instance whose differences of rows have full rank."""

    weight: Float64[np.ndarray, "experts dims"]
    bias: Float64[np.ndarray, "experts"] | None
    k: int
    tie_broken: bool
    most: int
    threads: int
    watch: WalkWatch | None

    def run(self) -> Enumeration:
        if self.weight.shape[1] == 1:
            return self._swept()
        if self.bias is None:
            return self._central()
        tip = common_tie(self.weight, self.bias)
        if tip is not None and _chart(self.weight) is not None:
            return _moved(replace(self, bias=None)._central(), tip)
        return self._walked()

    @property
    def _offset(self) -> Float64[np.ndarray, "experts"]:
        return np.zeros(len(self.weight)) if self.bias is None else self.bias

    def _swept(self) -> Enumeration:
        """The intervals of a line, from end to end in exact arithmetic."""
        arrangement = Arrangement.of(self.weight, self._offset)
        pieces = [*sweep([row[0] for row in arrangement.weight], arrangement.bias, self.k)]
        ends = [(start, stop) for _, start, stop in pieces]
        sets = np.array([sorted(chosen) for chosen, *_ in pieces], np.int16)
        label = equal_classes(self.weight, self._offset)
        others = [np.delete(label, chosen) for chosen in sets]
        is_tied = [np.isin(label[own], rest).any() for own, rest in zip(sets, others, strict=True)]
        is_cell = np.full(len(sets), self.tie_broken) | ~np.array(is_tied)
        beside = np.array([*pairwise(range(len(sets)))], np.int64).reshape(-1, 2)
        beside = beside[is_cell[beside].all(axis=1)]
        middles = [float(interval_middle(*both)) for both in ends]
        return _sorted(
            Enumeration(
                expert_set=sets[is_cell],
                witness=np.array(middles)[is_cell, None],
                is_bounded=np.array([None not in both for both in ends])[is_cell],
                facets=(np.cumsum(is_cell) - 1)[beside],
                road="sweep",
                tied=np.unique(sets[~is_cell], axis=0),
            )
        )

    def one_cell(self) -> Enumeration:
        """All experts, or those with the largest biases where no row differs from another."""
        offset = self._offset
        order = np.argsort(-offset, kind="stable")
        chosen, rest = np.sort(order[: self.k]), order[self.k :]
        is_tie = len(rest) > 0 and offset[order[self.k - 1]] == offset[rest[0]]
        num = int(not is_tie or self.tie_broken)
        return Enumeration(
            expert_set=chosen[None, :].astype(np.int16)[:num],
            witness=np.zeros((num, self.weight.shape[1])),
            is_bounded=np.zeros(num, dtype=bool),
            facets=np.empty((0, 2), np.int64),
            road="one cell",
            tied=chosen[None, :].astype(np.int16)[num:],
        )

    def _walked(self) -> Enumeration:
        assert self.bias is not None
        walked = level_walk(self.weight, self.bias, self.k, self.most, self.threads, self.watch)
        facts = {"num_vertices": len(walked.on), "num_exact": walked.num_exact, "gap": walked.gap}
        if not walked.is_whole:
            return replace(_nothing(self.weight.shape[1], self.k), is_whole=False, **facts)
        if walked.num_exact > 0 or (walked.rising & UNORDERED).any():
            settled = settled_cells(walked, self.weight, self.bias, self.k, self.tie_broken)
            return replace(settled, **facts)
        cells = cells_of(walked, walked.rising, self.k)
        loose = facets_of(walked, walked.rising, self.k, cells.masks)
        corners, on = Corners.of(walked, cells.vertex_of), walked.on
        # what is done with makes room for what comes
        del walked
        point = points_of(on, self.weight, self.bias)
        del on
        witness = corners.points_near(self.weight, cells.masks, point)
        del corners, point
        return replace(
            _nothing(self.weight.shape[1], self.k),
            expert_set=cells.expert_set,
            witness=witness,
            is_bounded=cells.is_bounded,
            facets=loose.in_order(),
            **facts,
        )

    def _central(self) -> Enumeration:
        """Cells are cones: each meets one of two affine charts, on either side of a coordinate."""
        d, chart = self.weight.shape[1], _chart(self.weight)
        if chart is None:
            return replace(self, bias=self._offset)._walked()
        others = [m for m in range(d) if m != chart.column]
        charts = []
        for side in (1.0, -1.0):
            part = replace(self, weight=chart.rows, bias=side * self.weight[:, chart.column])
            cells = part.run()
            if not cells.is_whole:
                return replace(cells, witness=np.empty((0, d)))
            witness = np.empty((len(cells.witness), d))
            witness[:, others] = cells.witness
            witness[:, chart.column] = side - cells.witness @ chart.mixture
            charts.append(replace(cells, witness=witness))
        return _united(charts)


def _nothing(dims: int, k: int) -> Enumeration:
    """A walk without cells."""
    no_sets = np.empty((0, k), np.int16)
    return Enumeration(
        expert_set=no_sets,
        witness=np.empty((0, dims)),
        is_bounded=np.empty(0, dtype=bool),
        facets=np.empty((0, 2), np.int64),
        road="walk",
        tied=no_sets,
    )


#: Shares of the other coordinates in the one on which a chart lies, where none alone will do:
#: without pattern.
_MIXTURE = (3, -7, 11, -13, 17, -19, 23, -29, 31, -37, 41)


@dataclass(frozen=True, eq=False)
class _Chart:
    """Where a coordinate and a ``mixture`` of the others sum to 1 or -1; the ``rows`` there."""

    column: int
    mixture: Float64[np.ndarray, "others"]
    rows: Float64[np.ndarray, "experts others"]


def _chart(weight: Float64[np.ndarray, "experts dims"]) -> _Chart | None:
    """A chart along which no facet lies: rows that differ do so on it; None where none is exact."""
    dims, distinct = weight.shape[1], len(np.unique(weight, axis=0))
    for mixture in (np.zeros(dims - 1), np.resize(_MIXTURE, dims - 1).astype(np.float64)):
        for column in reversed(range(dims)):
            others = np.delete(weight, column, axis=1)
            rows = np.ascontiguousarray(others - np.outer(weight[:, column], mixture))
            if len(np.unique(rows, axis=0)) == distinct and (
                not mixture.any() or _is_exact(rows, others, weight[:, column], mixture)
            ):
                return _Chart(column, mixture, rows)
    return None


def _is_exact(rows: np.ndarray, others: np.ndarray, own: np.ndarray, mixture: np.ndarray) -> bool:
    """Whether rounding changed no row of a chart."""
    return all(
        Fraction(made) == Fraction(value) - Fraction(factor) * Fraction(share)
        for new, old, factor in zip(rows.tolist(), others.tolist(), own.tolist(), strict=True)
        for made, value, share in zip(new, old, mixture.tolist(), strict=True)
    )


def _moved(cones: Enumeration, tip: Sequence[Fraction]) -> Enumeration:
    """The cones moved to a tip that is not 0, with witnesses scaled to the distance of the tip."""
    place = np.array([float(value) for value in tip])
    return replace(cones, witness=place + max(1.0, np.abs(place).max()) * cones.witness)


def _united(charts: list[Enumeration]) -> Enumeration:
    """Cells and facets of both charts, each once."""
    expert_set = np.concatenate([chart.expert_set for chart in charts])
    rows, first, number_of = np.unique(expert_set, axis=0, return_index=True, return_inverse=True)
    number_of = number_of.reshape(-1)
    starts = (0, len(charts[0].expert_set))
    facets = np.concatenate(
        [number_of[chart.facets + start] for chart, start in zip(charts, starts, strict=True)]
    )
    return Enumeration(
        expert_set=rows,
        witness=np.concatenate([chart.witness for chart in charts])[first],
        is_bounded=np.zeros(len(rows), dtype=bool),
        facets=np.unique(_ordered(facets), axis=0),
        tied=np.unique(np.concatenate([chart.tied for chart in charts]), axis=0),
        road="charts" if charts[0].road == charts[1].road == "walk" else charts[0].road,
        num_vertices=sum(chart.num_vertices for chart in charts),
        num_exact=sum(chart.num_exact for chart in charts),
        num_concurrent=sum(chart.num_concurrent for chart in charts),
        gap=min(chart.gap for chart in charts),
    )


def _ordered(facets: Int64[np.ndarray, "facets 2"]) -> Int64[np.ndarray, "facets 2"]:
    """The facets in order, the lower cell of each in front."""
    one, other = facets.reshape(-1, 2).T
    first, second = np.minimum(one, other), np.maximum(one, other)
    key = first * (second.max(initial=0) + 1) + second
    order = np.argsort(key) if (key[1:] < key[:-1]).any() else slice(None)
    return np.stack([first[order], second[order]], axis=1)


def _sorted(cells: Enumeration) -> Enumeration:
    """Cells in the order of their experts."""
    order = np.lexsort(cells.expert_set.T[::-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return replace(
        cells,
        expert_set=cells.expert_set[order],
        witness=cells.witness[order],
        is_bounded=cells.is_bounded[order],
        facets=_ordered(place[cells.facets]),
    )


# ---------------------------------------------------------------- walks with ties
def interval_middle(start: Fraction | None, stop: Fraction | None) -> Fraction:
    """A point inside an interval of a line; None is an end at infinity."""
    if start is None:
        return Fraction(0) if stop is None else stop - 1
    return start + 1 if stop is None else (start + stop) / 2


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
    _dictionaries: dict[int, Dictionary] = field(default_factory=dict)

    def at(self, vertex: int) -> Dictionary:
        """The dictionary of one vertex."""
        if vertex not in self._dictionaries:
            made = dictionary(self.arrangement, self.on[vertex])
            assert made is not None, "the hyperplanes of a vertex meet"
            self._dictionaries[vertex] = made
        return self._dictionaries[vertex]


@dataclass(frozen=True, eq=False)
class Faces:
    """The cells and facets that meet the vertices that are not simple.

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
    faces = Faces()
    is_simple = walked.is_simple.tolist()
    vertices = np.flatnonzero(~walked.is_simple).tolist()
    above = masks_of(walked.bits[vertices])
    links = walked.links[vertices].tolist()
    for vertex, over, ends in zip(vertices, above, links, strict=True):
        for edge, end in enumerate(ends):
            if end >= 0 and is_simple[end]:
                cells, facets = _around(*_along(settled.on[vertex], over, edge), k)
                faces.simple_vertex.update((cell, end) for cell in cells)
                faces.simple_facets.update(facets)
    for vertex, over, ends in zip(vertices, above, links, strict=True):
        cells, facets = _left(faces, *_around(settled.on[vertex], over, k))
        if not cells and not facets:
            continue
        _meet(faces, cells, facets, mask_of(settled.at(vertex).tied))
        for cell in cells:
            faces.vertices.setdefault(cell, []).append(vertex)
        for edge, end in enumerate(ends):
            if end != RAY:
                continue
            cells, facets = _left(faces, *_around(*_along(settled.on[vertex], over, edge), k))
            # the experts that stay as far from the level along the edge
            rates = enumerate(settled.at(vertex).slope(edge // 2))
            _meet(faces, cells, facets, mask_of(j for j, rate in rates if rate == 0))
            for cell in cells:
                faces.rays.setdefault(cell, []).append((vertex, edge))
    return faces


def _along(on: list[int], over: Mask, edge: int) -> tuple[list[int], Mask]:
    """The experts on the level along an edge, and those above it."""
    leaving = on[edge // 2]
    return [expert for expert in on if expert != leaving], over | (edge % 2) << leaving


def _around(on: list[int], over: Mask, k: int) -> tuple[list[Mask], list[Swap]]:
    """Cells and facets that meet where ``on`` are on the level and ``over`` above it."""
    missing = k - over.bit_count()
    cells = [over | mask_of(some) for some in combinations(on, missing)]
    if missing < 1:
        return cells, []
    facets = [
        (over | mask_of(some), out, into)
        for some in combinations(on, missing - 1)
        for out, into in combinations(sorted(set(on).difference(some)), 2)
    ]
    return cells, facets


def _left(faces: Faces, cells: list[Mask], facets: list[Swap]) -> tuple[list[Mask], list[Swap]]:
    """The cells and facets that have no simple vertex."""
    return (
        [cell for cell in cells if cell not in faces.simple_vertex],
        [facet for facet in facets if facet not in faces.simple_facets],
    )


def _meet(faces: Faces, cells: list[Mask], facets: list[Swap], tied: Mask) -> None:
    for cell in cells:
        faces.cells[cell] = faces.cells.get(cell, -1) & tied
    for facet in facets:
        faces.facets[facet] = faces.facets.get(facet, -1) & tied


def settled_cells(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    tie_broken: bool = False,
) -> Enumeration:
    r"""The cells and facets of the instance of a whole walk, in integers only where experts tie.

    The walk is that of an instance whose ties are broken by a symbolic perturbation. Around a
    vertex that float64 proved simple (all but its d + 1 experts are off the level) the instance
    itself looks the same, so that each cell there is open and each facet there a facet between two
    cells at which one pair ties. Left are the cells and facets all of whose vertices tie further
    experts. Of such a cell S, let T be the experts on the level at all its vertices and along all
    its rays. A pair :math:`i \in S, j \notin S` with :math:`z_i = z_j` all over the limit of the
    cell has both in T, because the level is between S and the others at every vertex. Hence S is a
    cell of the instance where T does not meet both S and its complement; else the limit is flat.
    Likewise a facet is a facet where the differences of the rows of T have rank 1, and what lies
    behind it takes of T those with the largest slopes. Each facet of a cell is the limit of one
    facet, so that none is left out.

    With ``tie_broken`` equal experts (rows and biases) count as apart, the lower number ahead; else
    no cell splits them. A tenth of a millisecond for each vertex that was settled in exact
    arithmetic, some more where no vertex of a cell is simple. Oracle in tests: a walk in
    exact arithmetic alone.
    """
    arrangement = Arrangement.of(weight, bias)
    rising = _rising(walked, arrangement)
    cells = cells_of(walked, rising, k)
    between = facets_of(walked, rising, k, cells.masks).in_order()
    settled = Settled(arrangement, walked.on.tolist())
    faces = settled_faces(walked, k, settled)
    masks = masks_of(cells.masks)
    number = {mask: n for n, mask in enumerate(masks)}
    class_of, apart = equal_classes(weight, bias).tolist(), range(len(bias))
    is_open, is_tied = np.ones(len(masks), bool), np.zeros(len(masks), bool)
    vertex_of = cells.vertex_of.copy()
    for cell, tied in faces.cells.items():
        is_open[number[cell]] = _is_open(cell, tied, class_of)
        is_tied[number[cell]] = not tie_broken and not _is_open(cell, tied, apart)
    is_cell = is_open & ~is_tied
    for cell, vertex in faces.simple_vertex.items():
        vertex_of[number[cell]] = vertex
    point, concurrent = points_of(walked.on, weight, bias), set()
    for vertex in np.flatnonzero(~walked.is_simple).tolist():
        point[vertex] = [float(value) for value in settled.at(vertex).point()]
        if len(tied := settled.at(vertex).tied) > walked.on.shape[1]:
            concurrent.add(tied)
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
    return Enumeration(
        expert_set=expert_set[order],
        witness=witness[order],
        is_bounded=cells.is_bounded[order],
        road="walk",
        facets=np.unique(facets[facets[:, 0] >= 0], axis=0).reshape(-1, 2),
        tied=expert_set[ties],
        num_concurrent=len(concurrent),
    )


def _rising(walked: Walked, arrangement: Arrangement) -> UInt32[np.ndarray, "vertices"]:
    """The experts whose edge upwards climbs along ``upwards``, with proof at every vertex.

    Should an edge be level, its first coordinate decides, and so it does at the other end.
    """
    rising = walked.rising.copy()
    along = [Fraction(value) for value in walked.upwards.tolist()]
    unit = max(value.denominator for value in along)  # a power of two, as all of them
    scaled = [int(value * unit) for value in along]
    for vertex in np.flatnonzero(rising & UNORDERED).tolist():
        at = dictionary(arrangement, walked.on[vertex].tolist())
        assert at is not None, "the hyperplanes of a vertex meet"
        edges = zip(*at.inverse[:-1], strict=True)
        climbs = [next(v for v in (sum(map(mul, scaled, e)), *e, 0, 1) if v) > 0 for e in edges]
        rising[vertex] = mask_of(column for column, climb in enumerate(climbs) if climb)
    return rising


def _is_open(cell: Mask, tied: Mask, class_of: Sequence[int]) -> bool:
    """Whether no pair ties all over the cell, but for equal experts of one class."""
    pairs = product(experts_of(tied & cell), experts_of(tied & ~cell))
    return all(class_of[i] == class_of[j] for i, j in pairs)


def _inner(cell: Mask, faces: Faces, settled: Settled) -> list[Fraction]:
    """A point inside a cell: the mean of its vertices, and the sum of its rays."""
    places = {settled.at(v).point() for v in faces.vertices[cell]}
    rays = faces.rays.get(cell, [])
    away = [settled.at(v).direction(edge // 2, edge % 2 == 1) for v, edge in rays]
    means = [sum(column, Fraction(0)) / len(places) for column in zip(*places, strict=True)]
    return [mean + sum((ray[m] for ray in away), Fraction(0)) for m, mean in enumerate(means)]


def _facets(faces: Faces, arrangement: Arrangement, k: int) -> Iterator[tuple[Mask, Mask]]:
    """Pairs of sets on both sides of true facets without a simple vertex, seen from either side.

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
    slopes = {}
    for expert in experts_of(tied):
        row = [value - own for value, own in zip(rows[expert], rows[out], strict=True)]
        if any(a * across[column] != b * row[column] for a, b in zip(row, across, strict=True)):
            return None
        slopes[expert] = row[column] if across[column] > 0 else -row[column]
    return slopes


def _without(
    facets: Int64[np.ndarray, "facets 2"], left: list[tuple[int, int]]
) -> Int64[np.ndarray, "kept 2"]:
    """The facets without those of the second list."""
    some = np.array(left, np.int64).reshape(-1, 2)
    count = max(int(facets.max(initial=0)), int(some.max(initial=0))) + 1
    return facets[~np.isin(facets[:, 0] * count + facets[:, 1], some[:, 0] * count + some[:, 1])]
