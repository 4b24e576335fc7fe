r"""The point of a closed cell or facet nearest to a centre, in exact arithmetic.

.. math:: \min |x - c|^2 \quad\text{s.t.}\quad z_i(x) \ge z_j(x), \; i \in S, \; j \notin S

and :math:`z_{out} = z_{into}` on a facet: the dual active-set method of Goldfarb and Idnani (1983),
whose constraints are looked for only when they are violated. It settles what float64 leaves open.
Source: docs/theory.md G2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import product

from moegeom.studies.cells.exact.dictionary import Arrangement
from moegeom.studies.cells.exact.rank import rank

Vector = tuple[Fraction, ...]
Pair = tuple[int, int]

#: A constraint a . y + g >= 0, with a name.
Constraint = tuple[Pair, Vector, Fraction]


class Inner(Enum):
    """The relative interior of a cell or facet: whole; of too few dimensions; tied in more pairs.

    ``SHARED`` is a facet on which another pair ties everywhere, so that more than one expert is
    exchanged there.
    """

    WHOLE = "whole"
    THIN = "thin"
    SHARED = "shared"


@dataclass(frozen=True, eq=False)
class ExactNearest:
    """The nearest point, its squared distance, and the multipliers of the active pairs.

    Without a point nothing satisfies all constraints, and the multipliers are those of Farkas: the
    combination of the constraints that contradicts itself.
    """

    point: Vector | None
    squared: Fraction | None
    pairs: tuple[Pair, ...]
    multipliers: Vector


def exact_nearest(
    arrangement: Arrangement,
    expert_set: Set[int],
    centre: Sequence[Fraction],
    exchanged: Pair | None = None,
) -> ExactNearest:
    """The nearest point of the closed cell; with a pair (out, into), of their facet."""
    others = set(range(arrangement.num_experts)) - expert_set

    def constraint(pair: Pair) -> Constraint:
        rows, offsets = arrangement.weight, arrangement.bias
        slope = tuple(a - b for a, b in zip(rows[pair[0]], rows[pair[1]], strict=True))
        return pair, slope, _dot(slope, centre) + offsets[pair[0]] - offsets[pair[1]]

    def worst(step: Vector) -> Constraint | None:
        logits = _logits(arrangement, [c + y for c, y in zip(centre, step, strict=True)])
        if not others:
            return None
        out, into = min(expert_set, key=logits.__getitem__), max(others, key=logits.__getitem__)
        return constraint((out, into)) if logits[out] < logits[into] else None

    equation = None if exchanged is None else constraint(exchanged)
    found = _least(len(centre), worst, equation)
    if found.point is None:
        return found
    point = tuple(c + y for c, y in zip(centre, found.point, strict=True))
    return ExactNearest(point, found.squared, found.pairs, found.multipliers)


def inner(
    arrangement: Arrangement,
    expert_set: Set[int],
    point: Sequence[Fraction],
    exchanged: Pair | None = None,
) -> Inner:
    """What the relative interior is, from the constraints that are tight at a point of the set.

    A direction that leaves all of them towards the inside proves it whole; where there is none the
    multipliers of Farkas name pairs that tie in the whole set.
    """
    logits = _logits(arrangement, point)
    others = set(range(arrangement.num_experts)) - expert_set
    if not others:
        return Inner.WHOLE
    level = min(logits[i] for i in expert_set)
    if exchanged is None and level > max(logits[j] for j in others):
        return Inner.WHOLE
    tied = [i for i, value in enumerate(logits) if value == level]
    if rank([list(_slope(arrangement, (i, tied[0]))) for i in tied[1:]]) == len(tied) - 1:
        return Inner.WHOLE
    pairs = [
        pair
        for pair in product(sorted(expert_set), sorted(others))
        if pair != exchanged and pair[0] in tied and pair[1] in tied
    ]

    def worst(direction: Vector) -> Constraint | None:
        rates = {pair: _dot(_slope(arrangement, pair), direction) for pair in pairs}
        least = min(rates, key=rates.__getitem__, default=None)
        if least is None or rates[least] >= 1:
            return None
        return least, _slope(arrangement, least), Fraction(-1)

    across = None if exchanged is None else _slope(arrangement, exchanged)
    if across is not None and not any(across):
        return Inner.SHARED
    equation = None if across is None else (exchanged or (0, 0), across, Fraction(0))
    found = _least(arrangement.dimension, worst, equation)
    if found.point is not None:
        return Inner.WHOLE
    tight = [_slope(arrangement, p) for p in found.pairs if p != exchanged]
    if across is None or any(rank([list(across), list(slope)]) == 2 for slope in tight):
        return Inner.THIN
    return Inner.SHARED


def root_bracket(squared: Fraction) -> tuple[float, float]:
    """Floats on both sides of a square root, neighbours of each other or nearly so."""
    if squared == 0:
        return 0.0, 0.0
    # 2^(2 shift) s between 2^128 and 2^132 has a root of more than 64 bits
    size = squared.numerator.bit_length() - squared.denominator.bit_length()
    shift = (130 - size) // 2
    whole = math.isqrt(int(squared * Fraction(4) ** shift))
    try:
        value = float(Fraction(whole) / Fraction(2) ** shift)
    except OverflowError:
        return math.nextafter(math.inf, 0.0), math.inf
    return max(0.0, math.nextafter(value, 0.0)), math.nextafter(value, math.inf)


def _least(
    dims: int, worst: Callable[[Vector], Constraint | None], equation: Constraint | None
) -> ExactNearest:
    """The shortest vector that satisfies an equation and all constraints that ``worst`` names."""
    active = _Active(dims)
    if equation is not None:
        pair, slope, gap = equation
        length = _dot(slope, slope)
        if length == 0 and gap != 0:
            return ExactNearest(None, None, (pair,), (Fraction(-1 if gap > 0 else 1),))
        if length != 0:
            active.add(equation, -gap / length)
            active.num_equations = 1
    while (violated := worst(active.step())) is not None:
        farkas = active.enforce(violated)
        if farkas is not None:
            kept = [(p, value) for p, value in farkas if value != 0]
            return ExactNearest(None, None, tuple(p for p, _ in kept), tuple(v for _, v in kept))
    step = active.step()
    pairs = tuple(pair for pair, _, _ in active.constraints)
    return ExactNearest(step, _dot(step, step), pairs, tuple(active.multipliers))


class _Active:
    """Independent constraints that hold with equality, and their multipliers; y = sum of them."""

    def __init__(self, dims: int) -> None:
        self._dims = dims
        self.num_equations = 0
        self.constraints: list[Constraint] = []
        self.multipliers: list[Fraction] = []

    def add(self, constraint: Constraint, multiplier: Fraction) -> None:
        self.constraints.append(constraint)
        self.multipliers.append(multiplier)

    def step(self) -> Vector:
        total = [Fraction(0)] * self._dims
        for (_, slope, _), multiplier in zip(self.constraints, self.multipliers, strict=True):
            total = [t + multiplier * a for t, a in zip(total, slope, strict=True)]
        return tuple(total)

    def enforce(self, violated: Constraint) -> list[tuple[Pair, Fraction]] | None:
        """Makes a violated constraint active, others leaving; multipliers of Farkas if it cannot.

        The multiplier of the new one grows until the constraint holds, or until that of another
        one reaches 0: each full step lengthens y, so that no active set comes twice.
        """
        pair, slope, gap = violated
        own = Fraction(0)
        while True:
            share = self._share(slope)
            away = list(slope)
            for (_, other, _), part in zip(self.constraints, share, strict=True):
                away = [z - part * a for z, a in zip(away, other, strict=True)]
            gain = _dot(away, away)
            leaving = [
                (self.multipliers[m] / part, m)
                for m, part in enumerate(share)
                if m >= self.num_equations and part > 0
            ]
            least, which = min(leaving, default=(None, -1))
            full = None
            if gain != 0:
                step = [
                    y + own * a for y, a in zip(self.step(), slope, strict=True)
                ]  # the new one counts with the multiplier it has so far
                full = -(gap + _dot(slope, step)) / gain
            if least is None and full is None:
                names = [pair for pair, _, _ in self.constraints]
                return [*zip(names, [-part for part in share], strict=True), (pair, Fraction(1))]
            change = full if least is None or (full is not None and full <= least) else least
            assert change is not None, "one of the two is known"
            self.multipliers = [
                value - change * part for value, part in zip(self.multipliers, share, strict=True)
            ]
            own += change
            if change == full:
                self.add(violated, own)
                return None
            del self.constraints[which], self.multipliers[which]

    def _share(self, slope: Vector) -> list[Fraction]:
        """The multiples of the active slopes that come closest to a slope: normal equations."""
        slopes = [other for _, other, _ in self.constraints]
        rows = [[*(_dot(a, b) for b in slopes), _dot(a, slope)] for a in slopes]
        size = len(rows)
        for m in range(size):
            # a Gram matrix of independent rows is positive definite: every pivot is
            lead = rows[m][m]
            rows[m] = [value / lead for value in rows[m]]
            for r in range(size):
                factor = rows[r][m]
                if r != m and factor != 0:
                    rows[r] = [v - factor * o for v, o in zip(rows[r], rows[m], strict=True)]
        return [row[size] for row in rows]


def _logits(arrangement: Arrangement, point: Sequence[Fraction]) -> list[Fraction]:
    return [
        _dot(row, point) + offset
        for row, offset in zip(arrangement.weight, arrangement.bias, strict=True)
    ]


def _slope(arrangement: Arrangement, pair: Pair) -> Vector:
    one, other = arrangement.weight[pair[0]], arrangement.weight[pair[1]]
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _dot(one: Sequence[Fraction], other: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(one, other, strict=True)), Fraction(0))
