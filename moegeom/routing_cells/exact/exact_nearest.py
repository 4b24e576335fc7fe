r"""The point of a closed cell or facet nearest to a centre, in exact arithmetic.

.. math:: \min |x - c|^2 \quad\text{s.t.}\quad z_i(x) \ge z_j(x), \; i \in S, \; j \notin S

and :math:`z_{out} = z_{into}` on a facet: the dual active-set method of Goldfarb and Idnani (1983),
whose constraints are looked for only when they are violated. It settles what float64 leaves open.
Rows, biases and points are integers over common denominators; fractions are the multipliers alone.
Source: docs/theory.md G2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import product
from math import lcm
from operator import mul

from moegeom.routing_cells.exact.dictionary import Arrangement, rank, solved

Vector = tuple[Fraction, ...]
Pair = tuple[int, int]

#: A constraint a . y + g >= 0 in integers, with a name.
Constraint = tuple[Pair, Sequence[int], int]

#: A vector over one denominator > 0.
Over = tuple[Sequence[int], int]


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
    levels, (start, unit) = arrangement.integers, _over(centre)

    # y in units of 1 / unit, and slopes without their denominator
    def constraint(pair: Pair) -> Constraint:
        slope = levels.slope(*pair)
        lead = levels.bias[pair[0]] - levels.bias[pair[1]]
        return pair, slope, _dot(slope, start) + unit * lead

    def worst(step: Over) -> Constraint | None:
        if not others:
            return None
        logits = levels.at(*_moved(start, unit, step))
        out, into = min(expert_set, key=logits.__getitem__), max(others, key=logits.__getitem__)
        return constraint((out, into)) if logits[out] < logits[into] else None

    equation = None if exchanged is None else constraint(exchanged)
    step, pairs, multipliers = shortest_vector(len(centre), worst, equation)
    if step is None:
        return ExactNearest(None, None, pairs, multipliers)
    place, whole = _moved(start, unit, step)
    return ExactNearest(
        tuple(Fraction(value, whole) for value in place),
        Fraction(_dot(step[0], step[0]), whole * whole),
        pairs,
        tuple(value * levels.unit / unit for value in multipliers),
    )


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
    levels = arrangement.integers
    logits = levels.at(*_over(point))
    others = set(range(arrangement.num_experts)) - expert_set
    if not others:
        return Inner.WHOLE
    level = min(logits[i] for i in expert_set)
    if exchanged is None and level > max(logits[j] for j in others):
        return Inner.WHOLE
    tied = [i for i, value in enumerate(logits) if value == level]
    if _rank([levels.slope(i, tied[0]) for i in tied[1:]]) == len(tied) - 1:
        return Inner.WHOLE
    pairs = [
        pair
        for pair in product(sorted(expert_set), sorted(others))
        if pair != exchanged and pair[0] in tied and pair[1] in tied
    ]

    def worst(direction: Over) -> Constraint | None:
        rates = {pair: _dot(levels.slope(*pair), direction[0]) for pair in pairs}
        least = min(rates, key=rates.__getitem__, default=None)
        if least is None or rates[least] >= direction[1]:
            return None
        return least, levels.slope(*least), -1

    across = None if exchanged is None else levels.slope(*exchanged)
    if across is not None and not any(across):
        return Inner.SHARED
    equation = None if across is None else (exchanged or (0, 0), across, 0)
    shortest, active, _ = shortest_vector(arrangement.dimension, worst, equation)
    if shortest is not None:
        return Inner.WHOLE
    tight = [levels.slope(*p) for p in active if p != exchanged]
    if across is None or any(_rank([across, slope]) == 2 for slope in tight):
        return Inner.THIN
    return Inner.SHARED


def _rank(slopes: Sequence[Sequence[int]]) -> int:
    return rank([[Fraction(value) for value in slope] for slope in slopes])


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


def shortest_vector(
    dims: int, worst: Callable[[Over], Constraint | None], equation: Constraint | None
) -> tuple[Over | None, tuple[Pair, ...], Vector]:
    """The shortest vector that satisfies an equation and all constraints that ``worst`` names.

    Active pairs and multipliers too; without a vector those of Farkas.
    """
    active = _Active(dims)
    if equation is not None:
        pair, slope, gap = equation
        length = _dot(slope, slope)
        if length == 0 and gap != 0:
            return None, (pair,), (Fraction(-1 if gap > 0 else 1),)
        if length != 0:
            active.add(equation, Fraction(-gap, length))
            active.num_equations = 1
    while (violated := worst(active.step())) is not None:
        farkas = active.enforce(violated)
        if farkas is not None:
            weights = [(p, value) for p, value in farkas if value != 0]
            return None, tuple(p for p, _ in weights), tuple(v for _, v in weights)
    pairs = tuple(pair for pair, _, _ in active.constraints)
    return active.step(), pairs, tuple(active.multipliers)


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

    def step(self) -> Over:
        whole = lcm(*(value.denominator for value in self.multipliers))
        weights = [value.numerator * (whole // value.denominator) for value in self.multipliers]
        columns = zip(*(slope for _, slope, _ in self.constraints), strict=True)
        return [_dot(weights, column) for column in columns] or [0] * self._dims, whole

    def enforce(self, violated: Constraint) -> list[tuple[Pair, Fraction]] | None:
        """Makes a violated constraint active, others leaving; multipliers of Farkas if it cannot.

        The multiplier of the new one grows until the constraint holds, or until that of another
        one reaches 0: each full step lengthens y, so that no active set comes twice.
        """
        pair, slope, gap = violated
        length, own = _dot(slope, slope), Fraction(0)
        while True:
            onto = [_dot(slope, other) for _, other, _ in self.constraints]
            share, common = self._share(onto)
            # the squared length of what is left of the slope, times the denominator
            gain = common * length - _dot(share, onto)
            leaving = [
                (self.multipliers[m] * common / part, m)
                for m, part in enumerate(share)
                if m >= self.num_equations and part > 0
            ]
            least, which = min(leaving, default=(None, -1))
            full = None
            if gain != 0:
                step, whole = self.step()
                # the new one counts with the multiplier it has so far
                full = -(gap + Fraction(_dot(slope, step), whole) + own * length) * common / gain
            if least is None and full is None:
                names = [pair for pair, _, _ in self.constraints]
                weights = [Fraction(-part, common) for part in share]
                return [*zip(names, weights, strict=True), (pair, Fraction(1))]
            change = full if least is None or (full is not None and full <= least) else least
            assert change is not None, "one of the two is known"
            self.multipliers = [
                value - change * part / common
                for value, part in zip(self.multipliers, share, strict=True)
            ]
            own += change
            if change == full:
                self.add(violated, own)
                return None
            del self.constraints[which], self.multipliers[which]

    def _share(self, onto: Sequence[int]) -> Over:
        """The multiples of the active slopes that come closest to one with these products.

        Normal equations: the Gram matrix of independent rows has an inverse.
        """
        slopes = [other for _, other, _ in self.constraints]
        gram = [[*(_dot(a, b) for b in slopes), own] for a, own in zip(slopes, onto, strict=True)]
        share = solved(gram)
        assert share is not None, "active constraints are independent"
        return [value for (value,) in share[0]], share[1]


def _over(point: Sequence[Fraction]) -> Over:
    whole = lcm(*(value.denominator for value in point))
    return [value.numerator * (whole // value.denominator) for value in point], whole


def _moved(start: Sequence[int], unit: int, step: Over) -> Over:
    """The point that a step in units of 1 / unit leads to."""
    way, whole = step
    return [whole * c + y for c, y in zip(start, way, strict=True)], whole * unit


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(map(mul, one, other))
