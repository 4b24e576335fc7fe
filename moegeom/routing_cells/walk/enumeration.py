"""All cells and facets of an affine top-k router: the road for each kind of instance, in one place.

The reference is :func:`moegeom.routing_cells.exact.exact_cells.exact_cells`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import comb

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16, Int64, UInt64
from moegeom.routing_cells.exact.exact_cells import ExactCells, exact_cells
from moegeom.routing_cells.exact.rank import common_tie, independent_columns_of
from moegeom.routing_cells.walk._level_diagram import Corners, cells_of, facets_of
from moegeom.routing_cells.walk._level_vertex import UNORDERED
from moegeom.routing_cells.walk.level_walk import Walked, WalkWatch, level_walk, points_of
from moegeom.routing_cells.walk.settled_cells import settled_cells

#: Sets of experts are kept as int16.
MOST_EXPERTS = 2**15


@dataclass(frozen=True, eq=False)
class SimpleVertices:
    """Vertices of d + 1 experts ``on`` the level, those ``above`` as bits and all others below."""

    on: Int16[np.ndarray, "vertices on"]
    above: UInt64[np.ndarray, "vertices words"]


@dataclass(frozen=True, eq=False)
class Enumeration:
    """Cells in the order of their sorted experts, with a point inside each, and facets as pairs.

    A facet's first cell is the one that comes first; its two cells differ in one expert but where
    several pairs tie on one hyperplane. ``road`` says how: "sweep", "walk", "charts", "exact
    walk", "one cell". ``num_exact`` vertices were settled in exact arithmetic, the others in
    float64 with proof; ``gap`` is how many error bounds the nearest of those is from a tie.
    ``is_whole`` is False where ``most`` vertices were found and more are left: then there are no
    cells. ``simple`` are vertices of the diagram, where they were asked for and are known. ``tied``
    are sets that would be cells with ties broken: equal experts tie all over an open set of inputs.
    """

    expert_set: Int16[np.ndarray, "cells k"]
    witness: Float64[np.ndarray, "cells dims"]
    is_bounded: Bool[np.ndarray, "cells"]
    facets: Int64[np.ndarray, "facets 2"]
    road: str
    tied: Int16[np.ndarray, "tied k"]
    num_vertices: int = 0
    num_exact: int = 0
    gap: float = np.inf
    is_whole: bool = True
    simple: SimpleVertices | None = None


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

    @property
    def num_facets(self) -> int:
        return self.num_cells * self.k * (self.num_experts - self.k) // 2


def enumerate_cells(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    k: int,
    *,
    tie_broken: bool = False,
    most: int = 10**7,
    threads: int = 1,
    watch: WalkWatch | None = None,
    most_simple: int = 0,
) -> Enumeration | AllSubsets:
    r"""The expert sets S for which some open set of inputs has S as its k largest logits.

    .. math:: C_S = \{x : z_i(x) > z_j(x), i \in S, j \notin S\}, \quad z = W x + b

    The numbers are taken as they are. Lines are swept exactly; in d >= 2 the vertices of the
    order-k diagram are walked, at most ``most`` of them; without bias (None), and where all experts
    tie at one point, two affine charts are walked instead. Vertices at which further experts tie
    (parallel facets, equal experts) take a millisecond each, in exact arithmetic; only where there
    are such ``tie_broken`` matters: then equal experts count as apart, the lower number ahead,
    while else no cell splits them. Where a walk found at most ``most_simple`` vertices, those that
    are ``simple`` are kept.

    Raises ValueError for k outside 1..E, for E above 2^15 and for numbers that are not finite.
    Source: docs/theory.md G1; oracle in tests: the certified instances there, and ``exact_cells``.
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
    kept = independent_columns_of(weight)
    if k < experts and experts > 1 and len(kept) == experts - 1:
        return AllSubsets(experts, k)
    job = _Job(weight, bias, k, tie_broken, most, threads, watch, most_simple)
    if k == experts or not kept:
        return job.one_cell()
    inner = np.ascontiguousarray(weight[:, kept])
    found = replace(job, weight=inner).run()
    if len(kept) == weight.shape[1]:
        return found
    witness = np.zeros((len(found.witness), weight.shape[1]))
    witness[:, kept] = found.witness
    unbounded = np.zeros(len(witness), dtype=bool)
    return replace(found, witness=witness, is_bounded=unbounded, simple=None)


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
    most_simple: int

    def run(self) -> Enumeration:
        if self.weight.shape[1] == 1:
            return self._exactly("sweep")
        if self.bias is None:
            return self._central()
        tip = common_tie(self.weight, self.bias)
        if tip is not None and _chart_column(self.weight) is not None:
            return _moved(replace(self, bias=None)._central(), tip)
        return self._walked()

    def one_cell(self) -> Enumeration:
        """All experts, or those with the largest biases where no row differs from another."""
        offset = np.zeros(len(self.weight)) if self.bias is None else self.bias
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
        if 2 * self.k > len(self.weight):
            return self._complement()
        walked = level_walk(self.weight, self.bias, self.k, self.most, self.threads, self.watch)
        if walked is None:
            return self._exactly("exact walk")
        if not walked.is_whole:
            return self._unfinished(walked)
        summary = len(walked.on), walked.num_exact, walked.gap
        simple, tied = None, _no_sets(self.k)
        if len(walked.on) <= self.most_simple:
            simple = SimpleVertices(walked.on[walked.is_simple], walked.bits[walked.is_simple])
        if walked.num_exact > 0 or (walked.rising & UNORDERED).any():
            found = settled_cells(walked, self.weight, self.bias, self.k, self.tie_broken)
            witness, facets, tied = found.witness, found.facets, found.tied
        else:
            found = cells_of(walked, walked.rising, self.k)
            loose = facets_of(walked, walked.rising, self.k, found.masks)
            corners, on = Corners.of(walked, found.vertex_of), walked.on
            # what is done with makes room for what comes
            del walked
            point = points_of(on, self.weight, self.bias)
            del on
            witness = corners.points_near(self.weight, found.masks, point)
            del corners, point
            facets = loose.in_order()
        return Enumeration(
            found.expert_set,
            witness,
            found.is_bounded,
            facets,
            "walk",
            tied,
            *summary,
            simple=simple,
        )

    def _unfinished(self, walked: Walked) -> Enumeration:
        d = self.weight.shape[1]
        return Enumeration(
            expert_set=_no_sets(self.k),
            witness=np.empty((0, d)),
            is_bounded=np.empty(0, dtype=bool),
            facets=np.empty((0, 2), np.int64),
            road="walk",
            tied=_no_sets(self.k),
            num_vertices=len(walked.on),
            num_exact=walked.num_exact,
            gap=walked.gap,
            is_whole=False,
        )

    def _complement(self) -> Enumeration:
        """Those that are not chosen are the k' = E - k largest of -z; numbers run backwards."""
        assert self.bias is not None
        experts = len(self.weight)
        found = replace(
            self, weight=-self.weight[::-1], bias=-self.bias[::-1], k=experts - self.k
        )._walked()
        expert_set = _others(found.expert_set, experts)
        tied = np.unique(_others(found.tied, experts), axis=0)
        return _sorted(replace(found, expert_set=expert_set, tied=tied, simple=None))

    def _central(self) -> Enumeration:
        """Cells are cones: each meets one of two affine charts, on either side of a coordinate."""
        d = self.weight.shape[1]
        column = _chart_column(self.weight)
        if column is None:
            return self._exactly("exact walk")
        others = [m for m in range(d) if m != column]
        charts = []
        for side in (1.0, -1.0):
            rows = np.ascontiguousarray(self.weight[:, others])
            offset = side * self.weight[:, column]
            part = replace(self, weight=rows, bias=offset)
            found = part.run()
            if not found.is_whole:
                return replace(found, witness=np.empty((0, d)))
            witness = np.empty((len(found.witness), d))
            witness[:, others], witness[:, column] = found.witness, side
            charts.append(replace(found, witness=witness))
        return _united(charts)

    def _exactly(self, road: str) -> Enumeration:
        found = exact_cells(self.weight, self.bias, self.k, self.tie_broken)
        return replace(_from_exact(found, self.weight.shape[1], self.k), road=road)


def _no_sets(k: int) -> Int16[np.ndarray, "0 k"]:
    return np.empty((0, k), np.int16)


def _others(expert_set: Int16[np.ndarray, "sets k"], experts: int) -> Int16[np.ndarray, "sets k2"]:
    """The experts that are in none of the sets, whose numbers run backwards, ascending."""
    is_member = np.ones((len(expert_set), experts), dtype=bool)
    rows = np.arange(len(is_member))[:, None]
    is_member[rows, experts - 1 - expert_set.astype(np.int64)] = False
    kept = experts - expert_set.shape[1]
    return np.nonzero(is_member)[1].reshape(len(is_member), kept).astype(np.int16)


def _chart_column(weight: Float64[np.ndarray, "experts dims"]) -> int | None:
    """A coordinate along which no facet lies: no two rows differ in it alone; None without any."""
    distinct = len(np.unique(weight, axis=0))
    for column in reversed(range(weight.shape[1])):
        others = np.delete(weight, column, axis=1)
        if len(np.unique(others, axis=0)) == distinct:
            return column
    return None


def _moved(found: Enumeration, tip: Sequence[Fraction]) -> Enumeration:
    """Cones whose tip is not at 0, with points about as far from it as it is from there."""
    place = np.array([float(value) for value in tip])
    return replace(found, witness=place + max(1.0, np.abs(place).max()) * found.witness)


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
        gap=min(chart.gap for chart in charts),
    )


def _ordered(facets: Int64[np.ndarray, "facets 2"]) -> Int64[np.ndarray, "facets 2"]:
    """The cell that comes first in front, and facets in their order."""
    one, other = facets.reshape(-1, 2).T
    first, second = np.minimum(one, other), np.maximum(one, other)
    key = first * (second.max(initial=0) + 1) + second
    order = np.argsort(key) if (key[1:] < key[:-1]).any() else slice(None)
    return np.stack([first[order], second[order]], axis=1)


def _sorted(found: Enumeration) -> Enumeration:
    """Cells in the order of their experts."""
    order = np.lexsort(found.expert_set.T[::-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return replace(
        found,
        expert_set=found.expert_set[order],
        witness=found.witness[order],
        is_bounded=found.is_bounded[order],
        facets=_ordered(place[found.facets]),
    )


def _from_exact(found: ExactCells, dims: int, k: int) -> Enumeration:
    cells = sorted(found.cells, key=sorted)
    number = {cell: n for n, cell in enumerate(cells)}
    facets = [(number[one], number[other]) for one, other in found.facets]
    witness = [[float(value) for value in found.cells[cell]] for cell in cells]
    return Enumeration(
        expert_set=np.array([sorted(cell) for cell in cells], np.int16).reshape(-1, k),
        witness=np.array(witness, np.float64).reshape(-1, dims),
        is_bounded=np.array([cell not in found.unbounded for cell in cells], dtype=bool),
        facets=_ordered(np.array(facets, np.int64).reshape(-1, 2)),
        road="exact walk",
        tied=np.array(sorted(map(sorted, found.tied)), np.int16).reshape(-1, k),
    )
