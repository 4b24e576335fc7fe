"""A ball and the experts that compete in it, the cell to begin with, and exact answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moegeom.cells.ball._cell_answer import MET, OPEN
from moegeom.cells.ball._cell_search import Ball, ball_around
from moegeom.cells.ball.cell_distance import cell_distance
from moegeom.cells.ball.nearest import arrangement_of, shifted
from moegeom.cells.exact.dictionary import Arrangement
from moegeom.cells.exact.exact_nearest import Inner, exact_nearest, inner, root_bracket

_UNIT = 2.0**-53


@dataclass(frozen=True, eq=False)
class Problem:
    """The experts that are neither surely chosen nor surely not, anywhere in the ball."""

    experts: int
    fixed: Int64[np.ndarray, "fixed"]
    kept: Int64[np.ndarray, "kept"]
    k: int
    ball: Ball
    sure: Bool[np.ndarray, "kept kept"]
    foot: Float64[np.ndarray, "kept kept"]
    exact: Arrangement
    centre: Float64[np.ndarray, "dims"]

    @staticmethod
    def of(
        weight: Float64[np.ndarray, "experts dims"],
        bias: Float64[np.ndarray, "experts"],
        k: int,
        centre: Float64[np.ndarray, "dims"],
        radius: float,
    ) -> Problem:
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
        fixed, kept = np.flatnonzero(is_fixed), np.flatnonzero(is_kept)
        feet = foot[np.isfinite(foot) & (foot > 0.0)]
        typical = float(np.median(feet)) if len(feet) else 1.0
        among = np.ix_(kept, kept)
        return Problem(
            len(bias),
            fixed,
            kept,
            k - len(fixed),
            ball_around(
                weight[kept],
                shift[kept],
                error[kept].max(initial=0.0),
                radius,
                min(radius, typical),
            ),
            np.ascontiguousarray(sure[among]),
            np.ascontiguousarray(foot[among]),
            arrangement_of(weight[kept], bias[kept]),
            centre,
        )

    def start(self) -> Bool[np.ndarray, "kept"]:
        """The cell of the centre; where experts tie there, that of a point close by in the ball."""
        inside = np.zeros(len(self.kept), np.bool_)
        if self.k in (0, len(self.kept)):
            inside[:] = self.k > 0
            return inside
        centre = [Fraction(value) for value in self.centre.tolist()]
        for attempt in range(9):
            # lengths below a thousandth of the scale, in directions without pattern
            angle = np.sin((attempt + 1.0) * (1.0 + np.arange(len(centre))) ** 1.5)
            size = self.ball.limits.scale * 2.0**-11 / math.sqrt(len(centre)) if attempt else 0.0
            step = [Fraction(value) for value in (size * angle).tolist()]
            point = [c + y for c, y in zip(centre, step, strict=True)]
            logits = [
                sum((w * x for w, x in zip(row, point, strict=True)), offset)
                for row, offset in zip(self.exact.weight, self.exact.bias, strict=True)
            ]
            order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
            if logits[order[self.k - 1]] > logits[order[self.k]]:
                inside[order[: self.k]] = True
                return inside
        raise ValueError("degenerate: experts tie around the centre, not only at it")

    def settled(
        self, inside: Bool[np.ndarray, "kept"], exchanged: tuple[int, int] | None, is_open: bool
    ) -> tuple[bool, float, float]:
        """Whether a cell or wall meets the ball, and its bracket, in exact arithmetic.

        ``is_open`` says that its relative interior is known to be whole.
        """
        coalition = frozenset(np.flatnonzero(inside).tolist())
        centre = [Fraction(value) for value in self.centre.tolist()]
        found = exact_nearest(self.exact, coalition, centre, exchanged)
        if found.point is None or found.squared is None:
            return False, math.inf, math.inf
        lower, upper = root_bracket(found.squared)
        radius = self.ball.limits.radius
        if math.isfinite(radius) and found.squared >= Fraction(radius) ** 2:
            return False, lower, upper
        if is_open:
            return True, lower, upper
        kind = inner(self.exact, coalition, found.point, exchanged)
        if kind is Inner.SHARED:
            names = [int(self.kept[expert]) for expert in exchanged or ()]
            raise ValueError(f"degenerate: others tie wherever experts {names} do; walk instead")
        return kind is Inner.WHOLE, lower, upper

    def filtered(
        self, inside: Bool[np.ndarray, "cells experts"], pairs: Int64[np.ndarray, "cells 2"]
    ) -> tuple[Float64[np.ndarray, "cells 2"], int]:
        """Brackets of given cells or walls, infinite above where not met; how many were settled."""
        bracket = np.empty((len(inside), 2))
        bracket[:] = self.ball.limits.radius, math.inf
        number = np.full(self.experts + 1, -2, np.int64)
        number[self.kept], number[-1] = np.arange(len(self.kept)), -1
        pairs = number[pairs]
        dropped = np.ones(self.experts, np.bool_)
        dropped[self.kept] = dropped[self.fixed] = False
        can = inside[:, self.fixed].all(axis=1) & ~inside[:, dropped].any(axis=1)
        rows = np.flatnonzero(can & (pairs != -2).all(axis=1))
        reduced = np.ascontiguousarray(inside[np.ix_(rows, self.kept)])
        found = cell_distance(self.ball, reduced, pairs[rows])
        bracket[rows, 0] = found.lower
        bracket[rows, 1] = np.where(found.state == MET, found.upper, math.inf)
        left = np.flatnonzero(found.state == OPEN).tolist()
        for n in left:
            pair = tuple(pairs[rows[n]].tolist())
            exchanged = (pair[0], pair[1]) if pair[0] >= 0 else None
            is_met, lower, upper = self.settled(reduced[n], exchanged, is_open=True)
            bracket[rows[n]] = lower, upper if is_met else math.inf
        return bracket, len(left)
