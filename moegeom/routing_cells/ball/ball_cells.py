r"""Cells and facets that meet an open ball, breadth first over the facets.

From a cell every pair (out, into) is asked whether its facet meets :math:`|x - c| < R`: no, by weak
duality; yes, by a point where that pair alone ties; and where float64 proves neither, in exact
arithmetic. Facets inside the ball are one-swap facets unless a second pair ties on the whole of
one: that is found, and refused. Cells inside a ball are connected through its facets, so that none
is missed. Source: docs/theory.md G2. Oracle in the tests: certified instances and the level walk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.geometry.set_code import chosen_mask
from moegeom.routing_cells.ball.cell_distance import (
    BEYOND,
    MET,
    OPEN,
    Ball,
    BallFacets,
    ball_around,
    cell_distance,
    facet_distance_loop,
    nearest_vertices,
    shifted,
)
from moegeom.routing_cells.exact.dictionary import Arrangement
from moegeom.routing_cells.exact.exact_nearest import Inner, exact_nearest, inner, root_bracket
from moegeom.routing_cells.walk.enumeration import Enumeration
from moegeom.routing_cells.walk.level_walk import WalkWatch

_UNIT = 2.0**-53


class TooManyTies(ValueError):
    """A search left more facets to exact arithmetic than its limit allows."""


@dataclass(frozen=True, eq=False)
class BallProblem:
    """A ball, and the experts in it that are contested: neither surely chosen nor surely not."""

    experts: int
    fixed: Int64[np.ndarray, "fixed"]
    contested: Int64[np.ndarray, "contested"]
    k: int
    ball: Ball
    sure: Bool[np.ndarray, "contested contested"]
    foot: Float64[np.ndarray, "contested contested"]
    centre: Float64[np.ndarray, "dims"]
    own: tuple[Float64[np.ndarray, "contested dims"], Float64[np.ndarray, "contested"]]

    @staticmethod
    def of(
        weight: Float64[np.ndarray, "experts dims"],
        bias: Float64[np.ndarray, "experts"],
        k: int,
        centre: Float64[np.ndarray, "dims"],
        radius: float,
    ) -> BallProblem:
        """Raises ValueError for arguments without a meaning."""
        _check(weight, bias, k, centre, radius)
        shift, error = shifted(weight, bias, centre)
        gap = shift[:, None] - shift[None]
        loss = 1.01 * (error[:, None] + error[None]) + 4.0 * _UNIT * np.abs(gap)
        slope = weight[:, None] - weight[None]
        # rounded up, and more where squares may have vanished
        length = np.linalg.norm(slope, axis=2) * (1.0 + 2.0 * (slope.shape[2] + 4) * _UNIT)
        length += 1e-150 * slope.any(axis=2)
        change = np.zeros_like(length)
        np.multiply(radius * (1.0 + 4.0 * _UNIT), length, out=change, where=length > 0.0)
        sure = gap - loss > change
        foot = np.full_like(gap, np.inf)
        np.divide(np.abs(gap) - loss, length, out=foot, where=length > 0.0)
        foot *= 1.0 - 4.0 * _UNIT
        foot[(length == 0.0) & (np.abs(gap) <= loss)] = 0.0
        is_fixed = sure.sum(axis=1) >= len(bias) - k
        is_kept = ~is_fixed & (sure.sum(axis=0) < k)
        fixed, contested = np.flatnonzero(is_fixed), np.flatnonzero(is_kept)
        feet = foot[np.isfinite(foot) & (foot > 0.0)]
        typical = float(np.median(feet)) if len(feet) else 1.0
        among = np.ix_(contested, contested)
        return BallProblem(
            len(bias),
            fixed,
            contested,
            k - len(fixed),
            ball_around(
                weight[contested],
                shift[contested],
                error[contested].max(initial=0.0),
                radius,
                min(radius, typical),
            ),
            np.ascontiguousarray(sure[among]),
            np.ascontiguousarray(foot[among]),
            centre,
            (weight[contested], bias[contested]),
        )

    @cached_property
    def exact(self) -> Arrangement:
        """The contested experts, as fractions."""
        return Arrangement.of(*self.own)

    def start(self) -> Bool[np.ndarray, "contested"]:
        """The cell of the centre, or of a point close to it where experts tie at the centre."""
        inside = np.zeros(len(self.contested), np.bool_)
        if self.k in (0, len(self.contested)):
            inside[:] = self.k > 0
            return inside
        centre = [Fraction(value) for value in self.centre.tolist()]
        for attempt in range(9):
            # lengths below a thousandth of the scale, in directions without pattern
            angle = np.sin((attempt + 1.0) * (1.0 + np.arange(len(centre))) ** 1.5)
            size = self.ball.limits.scale * 2.0**-11 / math.sqrt(len(centre)) if attempt else 0.0
            step = [Fraction(value) for value in (size * angle).tolist()]
            point = [c + y for c, y in zip(centre, step, strict=True)]
            logits = self.exact.at(point)
            order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
            if logits[order[self.k - 1]] > logits[order[self.k]]:
                inside[order[: self.k]] = True
                return inside
        raise ValueError("degenerate: experts tie around the centre, not only at it")

    def settled(
        self,
        inside: Bool[np.ndarray, "contested"],
        exchanged: tuple[int, int] | None,
        is_open: bool,
    ) -> tuple[bool, float, float]:
        """Whether a cell or facet meets the ball, and its bracket, in exact arithmetic.

        ``is_open`` says that its relative interior is known to be whole.
        """
        expert_set = frozenset(np.flatnonzero(inside).tolist())
        centre = [Fraction(value) for value in self.centre.tolist()]
        nearest = exact_nearest(self.exact, expert_set, centre, exchanged)
        if nearest.point is None or nearest.squared is None:
            return False, math.inf, math.inf
        lower, upper = root_bracket(nearest.squared)
        radius = self.ball.limits.radius
        if math.isfinite(radius) and nearest.squared >= Fraction(radius) ** 2:
            return False, lower, upper
        if is_open:
            return True, lower, upper
        kind = inner(self.exact, expert_set, nearest.point, exchanged)
        if kind is Inner.SHARED:
            names = [int(self.contested[expert]) for expert in exchanged or ()]
            raise ValueError(f"degenerate: others tie wherever experts {names} do; walk instead")
        return kind is Inner.WHOLE, lower, upper

    def filtered(
        self,
        inside: Bool[np.ndarray, "cells experts"],
        pairs: Int64[np.ndarray, "cells 2"],
        threads: int = 1,
    ) -> tuple[Float64[np.ndarray, "cells 2"], int]:
        """Brackets of cells or facets, infinite above where not met; how many were settled."""
        bracket = np.empty((len(inside), 2))
        bracket[:] = self.ball.limits.radius, math.inf
        number = np.full(self.experts + 1, -2, np.int64)
        number[self.contested], number[-1] = np.arange(len(self.contested)), -1
        pairs = number[pairs]
        dropped = np.ones(self.experts, np.bool_)
        dropped[self.contested] = dropped[self.fixed] = False
        can = inside[:, self.fixed].all(axis=1) & ~inside[:, dropped].any(axis=1)
        rows = np.flatnonzero(can & (pairs != -2).all(axis=1))
        if not self.ball.limits.error and (self.ball.shift == self.ball.shift[:1]).all():
            bracket[rows] = 0.0  # all experts tie at the centre, which each closed set holds
            return bracket, 0
        is_all = len(rows) == len(inside) and len(self.contested) == self.experts
        reduced = inside if is_all else np.ascontiguousarray(inside[np.ix_(rows, self.contested)])
        distances = cell_distance(self.ball, reduced, pairs[rows], threads)
        bracket[rows, 0] = distances.lower
        bracket[rows, 1] = np.where(distances.state == MET, distances.upper, math.inf)
        left = np.flatnonzero(distances.state == OPEN).tolist()
        for n in left:
            pair = tuple(pairs[rows[n]].tolist())
            exchanged = (pair[0], pair[1]) if pair[0] >= 0 else None
            is_met, lower, upper = self.settled(reduced[n], exchanged, is_open=True)
            bracket[rows[n]] = lower, upper if is_met else math.inf
        return bracket, len(left)


#: Facets that there is room for at first.
_FACETS = 1 << 16


@dataclass(frozen=True, eq=False)
class MetBall:
    """Proved brackets of distances, infinite above where the open ball is not met."""

    cell_distance: Float64[np.ndarray, "cells 2"]
    facet_distance: Float64[np.ndarray, "facets 2"]
    num_exact: int

    @property
    def cells(self) -> Bool[np.ndarray, "cells"]:
        """Which cells meet the ball."""
        return self.cell_distance[:, 1] < math.inf

    @property
    def facets(self) -> Bool[np.ndarray, "facets"]:
        """Which facets meet it."""
        return self.facet_distance[:, 1] < math.inf


def cells_of_ball(
    problem: BallProblem, most: int, most_exact: float = math.inf, watch: WalkWatch | None = None
) -> Enumeration:
    """All strict cells that meet the ball |x - c| < R, and the one-swap facets that meet it.

    Each cell comes with a point no farther than its upper bracket; the two cells of a facet differ
    in one expert, the lower of which the first cell has. Every answer is proved, so that the list
    is complete where it ``is_whole``. Raises ValueError, with the word degenerate, where experts
    other than the exchanged ones tie on the whole of a facet inside the ball (equal experts,
    several pairs on one hyperplane), for cells may then be joined by other facets alone; ties in
    fewer dimensions are told apart exactly and do no harm.

    A point where many experts tie is the nearest one of most facets around it, each of which takes
    a millisecond or more in exact arithmetic: after ``most_exact`` of them raises TooManyTies.
    ``watch`` is told how many there were.
    """
    if not math.isfinite(problem.ball.limits.radius):
        raise ValueError(f"radius {problem.ball.limits.radius}; must be finite")
    cells = _GrowingCells(problem, most, most_exact, watch).run()
    # at the border of a region where equal experts tie for the last place a search is refused
    return replace(cells, tied=cells.expert_set[:0])


def filter_ball(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    whole: Enumeration,
    centre: Float64[np.ndarray, "dims"],
    radius: float,
) -> MetBall:
    """The cells and facets of an enumeration that meet the open ball, each answer proved.

    The distance of the closed set decides, as cells are open and facets have d - 1 dimensions.
    Where the cells cannot meet the ball for an expert that is surely above or below, the
    lower end of the bracket is the radius itself.
    """
    problem = BallProblem.of(weight, bias, whole.expert_set.shape[1], centre, radius)
    inside = chosen_mask(whole.expert_set, len(bias))
    no_pair = np.full((len(inside), 2), -1, np.int64)
    cells, cell_exact = problem.filtered(inside, no_pair)
    pairs = np.stack(whole.exchanged, axis=1).astype(np.int64)
    facets, facet_exact = problem.filtered(inside[whole.facets[:, 0]], pairs)
    return MetBall(cells, facets, cell_exact + facet_exact)


def facet_distances(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    cells: Enumeration,
    centre: Float64[np.ndarray, "dims"],
    threads: int = 1,
) -> Float64[np.ndarray, "facets 2"]:
    """Proved brackets of the distances of facets, as ``filter_ball`` takes them, of any length.

    Where vertices of the diagram are listed, only facets whose nearest point is none of them need a
    search.
    """
    problem = BallProblem.of(weight, bias, cells.expert_set.shape[1], centre, math.inf)
    bracket = nearest_vertices(weight, bias, cells, centre)
    left = np.flatnonzero(bracket[:, 1] == math.inf)
    inside = chosen_mask(cells.expert_set, len(bias))[cells.facets[left, 0]]
    pairs = np.stack(cells.exchanged, axis=1)[left].astype(np.int64)
    bracket[left] = problem.filtered(inside, pairs, threads)[0]
    return bracket


def _check(weight: np.ndarray, bias: np.ndarray, k: int, centre: np.ndarray, radius: float) -> None:
    if not 0 < k <= len(bias):
        raise ValueError(f"top-{k} of {len(bias)} experts; k must be from 1 to their number")
    if not radius > 0.0:
        raise ValueError(f"radius {radius}; must be positive")
    if not all(np.isfinite(values).all() for values in (weight, bias, centre)):
        raise ValueError("NaN or infinity among the numbers of the router or the centre")


class _GrowingCells:
    """Cells and facets that grow while the search goes on."""

    def __init__(
        self,
        problem: BallProblem,
        most: int,
        most_exact: float = math.inf,
        watch: WalkWatch | None = None,
    ) -> None:
        self._problem, self._most, self._most_exact = problem, most, most_exact
        self._watch = watch
        start = problem.start()
        self._inside = [start[None]]
        self._number = {np.packbits(start).tobytes(): 0}
        self._facets: list[Int64[np.ndarray, "facets 4"]] = []
        self._brackets: list[Float64[np.ndarray, "facets 2"]] = []
        self._num_exact = 0
        self._is_whole = True

    def run(self) -> Enumeration:
        """Crosses facets until no new cell appears."""
        frontier, first = self._inside[0], 0
        listed = np.empty((0, 3), np.int64)
        while len(frontier) and self._is_whole:
            facet, bracket = self._facets_of(frontier, listed)
            new, facets = self._entered(frontier, first, facet)
            # of a facet inside the frontier, which both cells find, the first finding is kept
            stop = first + len(frontier)
            is_kept = (facets[:, 1] >= stop) | (facets[:, 1] > facets[:, 0])
            is_kept &= facets[:, 1] >= 0
            self._facets.append(facets[is_kept])
            self._brackets.append(bracket[is_kept])
            self._inside.append(new)
            back = facets[facets[:, 1] >= stop][:, [1, 3, 2]] - [stop, 0, 0]
            listed = np.ascontiguousarray(back[np.argsort(back[:, 0], kind="stable")])
            frontier, first = new, stop
        return self._result()

    def _facets_of(
        self, frontier: Bool[np.ndarray, "cells contested"], listed: Int64[np.ndarray, "listed 3"]
    ) -> tuple[Int64[np.ndarray, "facets 3"], Float64[np.ndarray, "facets 2"]]:
        """Facets of the cells that are not listed yet: cell, out and into, and their brackets."""
        problem, facets, brackets = self._problem, [], []
        most = max(_FACETS, problem.k * (len(problem.contested) - problem.k))
        facet, state = np.empty((most, 3), np.int64), np.empty(most, np.uint8)
        bracket, first = np.empty((most, 2)), 0
        room = BallFacets(facet, state, bracket)
        cells = np.ascontiguousarray(frontier)
        while first < len(frontier):
            first, num = facet_distance_loop(
                problem.ball, problem.sure, problem.foot, cells, first, listed, room
            )
            for n in np.flatnonzero(state[:num] == OPEN).tolist():
                state[n], bracket[n] = self._settled(frontier, *facet[n].tolist())
            is_met = state[:num] == MET
            facets.append(facet[:num][is_met])
            brackets.append(bracket[:num][is_met])
        return np.concatenate(facets), np.concatenate(brackets)

    def _settled(
        self, frontier: Bool[np.ndarray, "cells contested"], cell: int, out: int, into: int
    ) -> tuple[int, tuple[float, float]]:
        if self._num_exact >= self._most_exact:
            raise TooManyTies(
                f"more than {self._num_exact:,} facets are left to exact arithmetic, as many "
                "experts tie, or nearly so, at one point of the ball"
            )
        self._num_exact += 1
        if self._watch is not None:
            self._watch.settles(self._num_exact)
        is_met, lower, upper = self._problem.settled(frontier[cell], (out, into), is_open=False)
        return MET if is_met else BEYOND, (lower, upper)

    def _entered(
        self,
        frontier: Bool[np.ndarray, "cells contested"],
        first: int,
        facet: Int64[np.ndarray, "facets 3"],
    ) -> tuple[Bool[np.ndarray, "new contested"], Int64[np.ndarray, "facets 4"]]:
        """Numbers the cells behind the facets; returns new cells, and cells and experts of each."""
        if not len(facet):
            return frontier[:0], np.empty((0, 4), np.int64)
        rows = np.arange(len(facet))
        behind = frontier[facet[:, 0]]
        behind[rows, facet[:, 1]] = False
        behind[rows, facet[:, 2]] = True
        packed = np.packbits(behind, axis=1)
        keys = packed.view(np.dtype((np.void, packed.shape[1])))[:, 0]
        _, places, kind = np.unique(keys, return_index=True, return_inverse=True)
        numbers, new = np.empty(len(places), np.int64), []
        for n in np.argsort(places).tolist():
            key = packed[places[n]].tobytes()
            number = self._number.get(key, -1)
            if number < 0 and len(self._number) < self._most:
                number = self._number[key] = len(self._number)
                new.append(behind[places[n]])
            elif number < 0:
                self._is_whole = False
            numbers[n] = number
        numbered = np.stack([first + facet[:, 0], numbers[kind], facet[:, 1], facet[:, 2]], axis=1)
        return np.array(new, np.bool_).reshape(len(new), frontier.shape[1]), numbered

    def _result(self) -> Enumeration:
        problem = self._problem
        inside = np.concatenate(self._inside)
        whole = np.zeros((len(inside), problem.experts), np.bool_)
        whole[:, problem.fixed] = True
        whole[:, problem.contested] = inside
        k = problem.k + len(problem.fixed)
        expert_set = np.nonzero(whole)[1].reshape(len(inside), k)
        order = np.lexsort(expert_set.T[::-1])
        bracket, step = self._distances(inside)
        facets = np.concatenate([np.empty((0, 4), np.int64), *self._facets])
        brackets = np.concatenate([np.empty((0, 2)), *self._brackets])
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        out, into = problem.contested[facets[:, 2]], problem.contested[facets[:, 3]]
        is_turned = (out > into)[:, None]
        cells = place[np.where(is_turned, facets[:, 1::-1], facets[:, :2])]
        by_cell = np.lexsort([cells[:, 1], cells[:, 0]])
        return Enumeration(
            expert_set=expert_set[order].astype(np.int16),
            witness=problem.centre + step[order],
            facets=cells[by_cell],
            road="search",
            cell_distance=bracket[order],
            facet_distance=brackets[by_cell],
            num_exact=self._num_exact,
            is_whole=self._is_whole,
        )

    def _distances(
        self, inside: Bool[np.ndarray, "cells contested"]
    ) -> tuple[Float64[np.ndarray, "cells 2"], Float64[np.ndarray, "cells dims"]]:
        """Brackets of the distances of cells, and steps to their nearest points."""
        problem = self._problem
        no_pair = np.full((len(inside), 2), -1, np.int64)
        limits = problem.ball.limits._replace(radius=math.inf)
        distances = cell_distance(problem.ball._replace(limits=limits), inside, no_pair)
        bracket, step = np.stack([distances.lower, distances.upper], axis=1), distances.step
        for n in np.flatnonzero(distances.state != MET).tolist():
            self._num_exact += 1
            expert_set = frozenset(np.flatnonzero(inside[n]).tolist())
            centre = [Fraction(value) for value in problem.centre.tolist()]
            exact = exact_nearest(problem.exact, expert_set, centre)
            assert exact.point is not None and exact.squared is not None, "a facet proved the cell"
            bracket[n] = root_bracket(exact.squared)
            step[n] = [float(x - c) for x, c in zip(exact.point, centre, strict=True)]
        return bracket, step
