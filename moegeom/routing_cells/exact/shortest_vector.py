"""The shortest vector that satisfies constraints, in exact arithmetic.

The dual active-set method of Goldfarb and Idnani (1983), whose constraints are looked for only when
they are violated. Constraints are integers; fractions are the multipliers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import lcm
from operator import mul

from moegeom.routing_cells.exact.dictionary import solved

Vector = tuple[Fraction, ...]
Pair = tuple[int, int]

#: A constraint a . y + g >= 0 in integers, with a name.
Constraint = tuple[Pair, Sequence[int], int]

#: A vector over one denominator > 0.
Over = tuple[Sequence[int], int]


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


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(map(mul, one, other))
