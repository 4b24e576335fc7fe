"""A point strictly inside each cell: in float64 where one is found, else in exact fractions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16
from moegeom.routing_cells.exact.certificate import (
    ExactProblem,
    Point,
    cell_certificate,
    exact_logit,
    solve_strictly,
)
from moegeom.routing_cells.exact.certificate_check import CellPoint, NoCell, check_certificate
from moegeom.routing_cells.exact.dictionary import Arrangement
from moegeom.routing_cells.exact.exact_nearest import exact_nearest

_UNIT, _TINY = 2.0**-53, float(np.finfo(np.float64).tiny)

#: Cells whose logits are looked at together.
_AT_ONCE = 4096

#: Shares of the way from the nearest point of a cell to a point inside that are tried.
_SHARES = tuple(Fraction(1, 2**n) for n in (1, 3, 6, 12, 24, 48))


@dataclass(frozen=True, eq=False)
class Witnesses:
    """``point`` lies strictly inside its cell and domain, nan where no float64 point was found;
    ``exact`` has a rational point for each of those.
    """

    point: Float64[np.ndarray, "cells dims"]
    exact: dict[int, CellPoint]


def strict_witnesses(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    proposed: Float64[np.ndarray, "cells dims"],
    radius: float = math.inf,
    half: float = math.inf,
    tie_broken: bool = False,
) -> Witnesses:
    r"""A point of each open cell, inside the open ball :math:`|x| < R` and the open box.

    Proposed points are kept where error bounds of float64 prove them, or exact arithmetic does. Of
    the others the certificate of the cell gives a rational point q; in a ball the point is on the
    way from the nearest point p of the cell to q, near enough to p. Where rounding it to float64
    leaves the cell, it stays rational. With ``tie_broken`` equal experts are told apart, the lower
    number ahead.

    Raises ValueError for an expert set that is no cell, or does not meet the ball or the box.
    Oracle in tests: logits in fractions.
    """
    point = proposed.copy()
    exact: dict[int, CellPoint] = {}
    for n in np.flatnonzero(~_surely(weight, bias, expert_set, proposed, radius, half)).tolist():
        cell = _Cell(weight, bias, expert_set[n].tolist(), radius, half, tie_broken)
        guess = proposed[n]
        if np.isfinite(guess).all() and cell.holds(tuple(map(Fraction, guess.tolist()))):
            continue
        point[n], rational = np.nan, None
        for rational in cell.points(guess):
            near = _as_floats(rational)
            if near is not None and cell.holds(tuple(map(Fraction, near))):
                point[n] = near
                break
        else:
            if rational is None:
                raise ValueError(f"no point of cell {cell.expert_set} in the domain")
            exact[n] = CellPoint(rational)
    return Witnesses(point, exact)


def check_witness(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Sequence[int],
    point: CellPoint,
    tie_broken: bool = False,
) -> None:
    """Raises ValueError unless a point proves its cell, checked in integers.

    Where ties are broken and the expert set has some of a class of equal experts, the lowest of
    them, those are above all others but their equals, and the rest of the expert set above them.
    """
    for experts, chosen in _parts(weight, bias, expert_set, tie_broken):
        if chosen:
            check_certificate(weight[experts], bias[experts], chosen, point)


def _surely(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    point: Float64[np.ndarray, "cells dims"],
    radius: float,
    half: float,
) -> Bool[np.ndarray, "cells"]:
    """Where float64 proves the points: logits less a bound of their rounding."""
    dims = weight.shape[1]
    is_sure = np.zeros(len(point), dtype=bool)
    sizes = np.abs(weight)
    for start in range(0, len(point), _AT_ONCE):
        x = point[start : start + _AT_ONCE]
        own = expert_set[start : start + _AT_ONCE].astype(np.int64)
        with np.errstate(all="ignore"):
            value = x @ weight.T + bias
            error = 2.0 * (dims + 4) * _UNIT * (np.abs(x) @ sizes.T + np.abs(bias))
            error += _TINY * (dims + 2)
            lower, upper = np.take_along_axis(value - error, own, axis=1), value + error
            np.put_along_axis(upper, own, -np.inf, axis=1)
            least, most = lower.min(axis=1), upper.max(axis=1)
            share = ((x / radius) ** 2).sum(axis=1)
            within = share < 1.0 - 2.0 * (dims + 8) * _UNIT
            within &= (np.abs(x) < half).all(axis=1)
            is_sure[start : start + _AT_ONCE] = (least > most) & within & np.isfinite(error).all(1)
    return is_sure


def _parts(
    weight: np.ndarray, bias: np.ndarray, expert_set: Sequence[int], tie_broken: bool
) -> list[tuple[list[int], list[int]]]:
    """Which experts to look at, and those of them that must be above the others.

    One part, or two where equal experts are on both sides and the lower numbers are chosen: one
    without those that are not chosen, one without those that are.
    """
    chosen, everyone = set(expert_set), range(len(bias))
    split: set[int] = set()
    if tie_broken:
        keys = [(row.tobytes(), offset) for row, offset in zip(weight + 0.0, bias, strict=True)]
        inside = {keys[i] for i in chosen}
        outside = {keys[j] for j in everyone if j not in chosen}
        shared = inside & outside
        split = {i for i in everyone if keys[i] in shared}
        lowest = all(i < j for i in split & chosen for j in split - chosen if keys[i] == keys[j])
        if not lowest:
            raise ValueError("of equal experts a higher number is chosen before a lower one")
    parts = []
    for left_out in [split - chosen, split & chosen] if split else [split]:
        experts = [i for i in everyone if i not in left_out]
        parts.append((experts, [n for n, i in enumerate(experts) if i in chosen]))
    return parts


class _Cell:
    """One cell in its domain, in exact arithmetic."""

    def __init__(
        self,
        weight: np.ndarray,
        bias: np.ndarray,
        expert_set: Sequence[int],
        radius: float,
        half: float,
        tie_broken: bool,
    ) -> None:
        self._weight, self._bias, self.expert_set = weight, bias, list(expert_set)
        self._radius, self._half = radius, half
        self._sides = None if math.isinf(half) else np.full(weight.shape[1], half)
        self._parts = _parts(weight, bias, expert_set, tie_broken)

    def holds(self, point: Point) -> bool:
        """Whether a point is strictly inside the cell, the ball and the box."""
        if math.isfinite(self._half) and not all(abs(x) < Fraction(self._half) for x in point):
            return False
        squared = sum((x * x for x in point), Fraction(0))
        if math.isfinite(self._radius) and squared >= Fraction(self._radius) ** 2:
            return False
        with np.errstate(all="ignore"):
            return all(
                ExactProblem(self._weight[e], self._bias[e], s, None, None, None).holds(point)
                for e, s in self._parts
                if s
            )

    def points(self, guess: np.ndarray) -> Iterator[Point]:
        """Points strictly inside, those first that a float64 point may be near."""
        inside = self._inside(guess)
        if self.holds(inside):
            yield inside
        if math.isinf(self._radius):
            return
        if not self._bias.any():  # a cone: every length will do
            yield self._shortened(inside)
            return
        centre = [Fraction(0)] * len(inside)
        arrangement = Arrangement.of(self._weight, self._bias)
        nearest = exact_nearest(arrangement, frozenset(self.expert_set), centre).point
        if nearest is None:
            return
        for share in _SHARES:
            on_way = tuple(p + share * (q - p) for p, q in zip(nearest, inside, strict=True))
            if self.holds(on_way):
                yield on_way
        yield from self._on_the_way(nearest, inside)

    def _on_the_way(self, nearest: Point, inside: Point) -> Iterator[Point]:
        """Beyond the shares that were tried: half the way that the ball leaves."""
        room = Fraction(self._radius) ** 2 - sum((p * p for p in nearest), Fraction(0))
        way = sum((abs(q - p) for p, q in zip(nearest, inside, strict=True)), Fraction(0))
        size = sum((abs(p) for p in nearest), Fraction(0))
        if room > 0 and way > 0:
            # |p + s w|^2 - |p|^2 <= 2 s |p| |w| + s^2 |w|^2
            share = min(Fraction(1, 2), room / (4 * way * (size + way)))
            halfway = tuple(p + share * (q - p) for p, q in zip(nearest, inside, strict=True))
            if self.holds(halfway):
                yield halfway

    def _shortened(self, point: Point) -> Point:
        """The same direction, times a power of two that takes it into the ball."""
        size = sum((abs(x) for x in point), Fraction(0))
        share = Fraction(1)
        while size * share >= Fraction(self._radius):
            share /= 2
        return tuple(share * x for x in point)

    def _inside(self, guess: np.ndarray) -> Point:
        """Any point of the cell and the box."""
        if len(self._parts) == 1:
            lower = None if self._sides is None else -self._sides
            proof = cell_certificate(
                self._weight,
                self._bias if self._bias.any() else None,
                self.expert_set,
                lower,
                self._sides,
                guess if np.isfinite(guess).all() else None,
            )
            if isinstance(proof, NoCell):
                raise ValueError(f"{self.expert_set} is no cell")
            return proof.point
        return self._program()

    def _program(self) -> Point:
        """The widest margin of a cell that splits equal experts: above them, and below."""
        rows: list[list[Fraction]] = []
        origin = (Fraction(0),) * self._weight.shape[1]
        chosen = set(self.expert_set)
        (some, _), (others, _) = self._parts
        split = next(i for i in some if i not in others)
        level = [exact_logit(self._weight[split], self._bias[split], origin)]
        level += [Fraction(w) for w in self._weight[split].tolist()]
        for i in (i for i in some if i in others):
            own = [Fraction(v) for v in (self._bias[i], *self._weight[i].tolist())]
            sign = 1 if i in chosen else -1
            rows.append([sign * (a - b) for a, b in zip(own, level, strict=True)])
        if math.isfinite(self._half):
            for m in range(len(origin)):
                for sign in (1, -1):
                    row = [Fraction(self._half), *origin]
                    row[1 + m] = Fraction(sign)
                    rows.append(row)
        solution = solve_strictly(rows, 0)
        if not isinstance(solution, tuple):
            raise ValueError(f"{self.expert_set} is no cell")
        return solution


def _as_floats(point: Point) -> list[float] | None:
    try:
        return [float(x) for x in point]
    except OverflowError:
        return None
