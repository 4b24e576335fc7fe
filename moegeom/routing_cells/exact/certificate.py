r"""Certificates of cells, a rational point or a proof of none, and float64 points of all cells.

In the lifted form x is in the cell of S where some t has :math:`z_i(x) > t > z_j(x)`, i in S and j
outside: E strict inequalities in d + 1 unknowns. Float64 only proposes. A point is proved by error
bounds or exactly; what HiGHS finds tight is what exact steps look at first, which end with a point
or with multipliers. Source: docs/theory.md G1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import lcm
from operator import mul

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16
from moegeom.routing_cells.exact.certificate_check import CellPoint, NoCell, check_certificate
from moegeom.routing_cells.exact.dictionary import equal_classes
from moegeom.routing_cells.exact.shortest_vector import Constraint, Over, shortest_vector

Point = tuple[Fraction, ...]

#: Coefficients of logits whose sum proves that there is no cell.
Multipliers = dict[int, Fraction]

_UNIT, _TINY = 2.0**-53, float(np.finfo(np.float64).tiny)


class ExactProblem:
    """One question about one cell, with its numbers."""

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray | None, expert_set: Sequence[int]
    ) -> None:
        experts = len(weight)
        self.weight: np.ndarray = np.ascontiguousarray(weight) + 0.0  # no -0.0: rows are compared
        self.bias: np.ndarray = np.zeros(experts) if bias is None else bias + 0.0
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise ValueError("weights or biases are not all finite")
        chosen = {int(i) for i in expert_set}
        if not chosen or len(chosen) != len(expert_set) or not chosen <= set(range(experts)):
            raise ValueError(f"the expert set is no set of experts below {experts}")
        self.mask: np.ndarray = np.zeros(experts, bool)
        self.mask[sorted(chosen)] = True
        self.sign: np.ndarray = np.where(self.mask, 1.0, -1.0)

    def equal_rows(self) -> Multipliers | None:
        """Multipliers of two equal rows that prove that there is no cell."""
        best: dict[bytes, int] = {}
        keys = [row.tobytes() for row in self.weight]
        for j in np.flatnonzero(~self.mask).tolist():
            if keys[j] not in best or self.bias[j] > self.bias[best[keys[j]]]:
                best[keys[j]] = j
        for i in np.flatnonzero(self.mask).tolist():
            j = best.get(keys[i])
            if j is not None and self.bias[i] <= self.bias[j]:
                return {i: Fraction(1), j: Fraction(-1)}
        return None

    def holds(self, point: Point) -> bool:
        """Whether the point proves the cell: by error bounds, exactly where they fail."""
        low, high = self._intervals(point)
        inside, outside = np.flatnonzero(self.mask).tolist(), np.flatnonzero(~self.mask).tolist()
        if not outside:
            return True
        if high[inside].min() <= low[outside].max():
            return False
        worst, best = low[inside].min(), high[outside].max()
        lowest = [self._value(i, point) for i in inside if not low[i] > best]
        highest = [self._value(j, point) for j in outside if not high[j] < worst]
        return not lowest or not highest or min(lowest) > max(highest)

    def _intervals(self, point: Point) -> tuple[np.ndarray, np.ndarray]:
        """Enclosures of all logits, infinite where float64 has no word for it."""
        try:
            x = np.array([float(value) for value in point])
        except OverflowError:
            return np.full(len(self.bias), -np.inf), np.full(len(self.bias), np.inf)
        used = np.flatnonzero(x)
        rows, x = self.weight[:, used], x[used]
        value, reach = rows @ x + self.bias, np.abs(rows) @ np.abs(x) + np.abs(self.bias)
        # roundings of x, of products, of sums and of the bound; and all that may underflow
        error = 1.01 * (len(point) + 8) * _UNIT * reach
        error += _TINY * (np.abs(self.weight).sum(axis=1) + len(point) + 2)
        low, high = value - error, value + error
        return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)

    def _value(self, expert: int, point: Point) -> Fraction:
        return exact_logit(self.weight[expert], self.bias[expert], point)

    def combined(self, coefficients: dict[int, Fraction]) -> tuple[Fraction, np.ndarray]:
        """The constant of a combination of logits, and the coordinates that it depends on."""
        terms = list(coefficients.items())
        total = sum((c * Fraction(self.bias[i]) for i, c in terms), Fraction(0))
        in_the_way = [
            m
            for m in range(self.weight.shape[1])
            if sum((c * Fraction(self.weight[i, m]) for i, c in terms), Fraction(0))
        ]
        return total, np.array(in_the_way, np.int64)

    def no_cell(self, multipliers: Multipliers) -> NoCell:
        """Weights that sum to 1 on either side."""
        own = {i: value for i, value in sorted(multipliers.items()) if value}
        sides = [[(i, abs(own[i])) for i in own if self.mask[i] == side] for side in (True, False)]
        totals = [sum(value for _, value in side) for side in sides]
        inside, outside = (
            tuple((expert, value / total) for expert, value in side)
            for side, total in zip(sides, totals, strict=True)
        )
        return NoCell(inside, outside)


def exact_logit(row: np.ndarray, offset: float, point: Sequence[Fraction]) -> Fraction:
    """The logit of a row at a point, in exact arithmetic."""
    terms = (Fraction(w) * x for w, x in zip(row.tolist(), point, strict=True) if x)
    return sum(terms, Fraction(offset))


def solve_strictly(rows: Sequence[Sequence[Fraction]]) -> tuple[Fraction, ...] | list[Fraction]:
    """u with r[0] + r[1:] u > 0 for all rows, or multipliers.

    Multipliers, >= 0, sum the rows up to a constant that is <= 0. The shortest
    (s, v) with s >= 1 and r[0] s + r[1:] v >= max |r| for all rows has u = v / s, with a wide
    margin; where there is none, the multipliers of Farkas are those of the rows.
    """
    # columns of one size: powers of two change no answer
    units = [_power(max(map(abs, column))) for column in zip(*rows, strict=True)]
    even = [[value / unit for value, unit in zip(row, units, strict=True)] for row in rows]
    scale = [lcm(*(value.denominator for value in row)) for row in even]
    whole = [[int(value * unit) for value in row] for row, unit in zip(even, scale, strict=True)]
    size = len(units)
    strict = dict(enumerate([*whole, [1, *[0] * (size - 1)]]))
    margin = {n: max(1, *map(abs, row)) for n, row in strict.items()}

    def worst(step: Over) -> Constraint | None:
        way, common = step
        share = {n: Fraction(sum(map(mul, r, way)), margin[n] * common) for n, r in strict.items()}
        least = min(share, key=share.__getitem__)
        return None if share[least] >= 1 else ((least, least), strict[least], -margin[least])

    shortest, names, weights = shortest_vector(size, worst, None)
    if shortest is not None:
        (lead, *rest), _ = shortest
        pairs = zip(rest, units[1:], strict=True)
        return tuple(Fraction(value, lead) * units[0] / unit for value, unit in pairs)
    multipliers = [Fraction(0)] * len(rows)
    for (n, _), value in zip(names, weights, strict=True):
        if n < len(rows):
            multipliers[n] = value * scale[n]
    return multipliers


def _power(value: Fraction) -> Fraction:
    """A power of two near a number; 1 for 0."""
    bits = value.numerator.bit_length() - value.denominator.bit_length()
    return Fraction(2) ** bits if value else Fraction(1)


# -------------------------------------------------------------------------------- certificates
#: Significant bits to which a proposed point is cut down while it still is a proof.
_BITS = (6, 12, 26, 53)


def cell_certificate(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    expert_set: Sequence[int],
    guess: Float64[np.ndarray, "dims"] | None = None,
) -> CellPoint | NoCell:
    """A point strictly inside the cell of an expert set, or a proof of none.

    The numbers are taken as they are, exact dyadic rationals; ``bias`` None is a central router.
    For rank E - 1 (whole routers) a linear system gives the point; else a linear program of E rows
    in d + 1 unknowns begins an exact one. ``guess`` is tried before, and taken where it proves the
    cell.

    Raises ValueError for numbers that are not finite or an expert set that is none.
    Oracle in tests: the certified instances of docs/theory.md G1, and ``check_certificate``.
    """
    problem = ExactProblem(weight, bias, expert_set)
    proof = _solve(problem, guess)
    return CellPoint(proof) if isinstance(proof, tuple) else problem.no_cell(proof)


def _solve(problem: ExactProblem, guess: np.ndarray | None) -> Point | Multipliers:
    """Tries proofs from the cheapest one to the one that always ends."""
    with np.errstate(all="ignore"):
        return (
            problem.equal_rows()
            or _checked(problem, [] if guess is None else [guess])
            or _checked(problem, _closed_form(problem))
            or _checked(problem, [np.zeros(problem.weight.shape[1])])
            or _program(problem)
        )


def _checked(problem: ExactProblem, proposals: Iterable[np.ndarray]) -> Point | None:
    """The first proposed point that is a proof, rounded to as few bits as possible."""
    for point in proposals:
        if np.isfinite(point).all():
            for bits in _BITS:
                cut = _rounded(point, bits)
                if problem.holds(cut):
                    return cut
    return None


def _closed_form(problem: ExactProblem) -> list[np.ndarray]:
    """Where W has rank E - 1, x with logits 1 and -1, but for a common shift."""
    experts, dims = problem.weight.shape
    if dims < experts - 1 or experts == 1:
        return []
    rows, free = problem.weight[1:] - problem.weight[0], problem.bias[1:] - problem.bias[0]
    row_scale = np.exp2(-np.frexp(np.abs(rows).max(axis=1))[1].astype(float))
    columns = _columns(rows * row_scale[:, None], experts - 1)
    square = rows[:, columns] * row_scale[:, None]
    # the margin is of the size of the biases
    target = (problem.sign[1:] - problem.sign[0]) * np.exp2(
        np.frexp(max(np.abs(free).max(), 1e-300))[1]
    )
    try:
        inverse = np.linalg.inv(square)
    except np.linalg.LinAlgError:
        return []
    x = np.zeros(dims)
    x[columns] = inverse @ ((target - free) * row_scale)
    return [x]


def _program(problem: ExactProblem) -> Point | Multipliers:
    """The exact answer from a proposal of HiGHS, with columns added until it holds in all."""
    columns = _columns(problem.weight - problem.weight.mean(axis=0), len(problem.weight) - 1)
    while True:
        point, support = _proposal(problem, columns)
        proof = _checked(problem, [point])
        if proof is None and len(support):
            proof = _exact_program(problem, columns, support)
        if proof is None or (isinstance(proof, tuple) and not problem.holds(proof)):
            proof = _exact_program(problem, columns)
        if isinstance(proof, tuple):
            assert problem.holds(proof), "an exact point is a proof"
            return proof
        total, in_the_way = problem.combined(proof)
        if not len(in_the_way):
            assert total <= 0, "exact multipliers are a proof"
            return proof
        columns = np.union1d(columns, in_the_way[: len(columns) + 1])


def _proposal(problem: ExactProblem, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The answer of HiGHS: a point of the widest margin, and experts.

    The experts are those that alone may be a proof: where there is room, none. The unknowns
    x, t and the margin are scaled to the size of the numbers.
    """
    from scipy.optimize import linprog

    weight, bias = problem.weight[:, columns], problem.bias
    weight, bias = weight - weight.mean(axis=0), bias - bias.mean()
    column_scale = np.abs(weight).max(axis=0, initial=0.0)
    column_scale = np.where(column_scale > 0, column_scale, 1.0)
    unit = float(np.abs(bias).max()) or 1.0
    lifted = np.column_stack([weight / column_scale, -np.ones(len(bias))])
    size, sign = len(columns), problem.sign
    matrix, right = -sign[:, None] * lifted, sign * bias / unit
    point, support = np.zeros(problem.weight.shape[1]), np.empty(0, np.int64)
    if not (np.isfinite(matrix).all() and np.isfinite(right).all()):
        return point, support
    solved = linprog(
        np.append(np.zeros(size + 1), -1.0),
        np.column_stack([matrix, np.ones(len(sign))]),
        right,
        bounds=[(None, None)] * (size + 1) + [(None, 1.0)],
        method="highs",
    )
    if solved.status == 0:
        point[columns] = solved.x[:size] * unit / column_scale
        tightness = -solved.ineqlin.marginals
        if -solved.fun < 1e-6:
            support = np.flatnonzero(tightness > 1e-9 * tightness.max())
    return point, support


def _exact_program(
    problem: ExactProblem, columns: np.ndarray, some: np.ndarray | None = None
) -> Point | Multipliers:
    """The exact answer with the other coordinates at 0, from all rows or some of them."""

    def logit(i: int) -> list[Fraction]:
        row = [problem.bias[i], *problem.weight[i, columns], -1.0]
        return [Fraction(value) for value in row]

    rows = [[int(sign) * value for value in logit(i)] for i, sign in enumerate(problem.sign)]
    order = range(len(rows)) if some is None else some.tolist()
    solution = solve_strictly([rows[r] for r in order])
    if isinstance(solution, tuple):
        point = [Fraction(0)] * problem.weight.shape[1]
        for column, value in zip(columns.tolist(), solution[:-1], strict=True):
            point[column] = value
        return tuple(point)
    return {i: int(problem.sign[i]) * v for i, v in zip(order, solution, strict=True) if v}


def _rounded(point: np.ndarray, bits: int) -> Point:
    """The point rounded to ``bits`` bits of its largest coordinate; unchanged for 53."""
    largest = np.abs(point).max(initial=0.0)
    if bits < 53 and largest > 2.0**-900:
        step = 2.0 ** (np.frexp(largest)[1] - bits)
        point = np.rint(point / step) * step
    return tuple(Fraction(value) for value in point.tolist())


def _columns(rows: np.ndarray, most: int) -> np.ndarray:
    """At most so many columns that carry most of the rows: pivots of a QR factorization."""
    from scipy.linalg import qr

    if rows.shape[1] <= most or not np.isfinite(rows).all():
        return np.arange(rows.shape[1])
    longest = np.argsort(-np.abs(rows).sum(axis=0), kind="stable")[: 4 * most]
    *_, pivots = qr(rows[:, longest], mode="r", pivoting=True)
    return np.sort(longest[pivots[:most]])


# ----------------------------------------------------------------------------------- witnesses
#: Cells whose logits are looked at together.
_AT_ONCE = 4096


def strict_witnesses(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    proposed: Float64[np.ndarray, "cells dims"],
    tie_broken: bool = False,
) -> tuple[Float64[np.ndarray, "cells dims"], dict[int, CellPoint]]:
    """A point of each open cell.

    Proposed points are kept where error bounds of float64 prove them, or exact arithmetic does. Of
    the others the certificate of the cell gives a rational point. Where rounding it to float64
    leaves the cell, it stays rational. With ``tie_broken`` equal experts are told apart, the lower
    number ahead. Returns the points, nan where no float64 point was found, and a rational one for
    each of those.

    Raises ValueError for an expert set that is no cell.
    Oracle in tests: logits in fractions.
    """
    point = proposed.copy()
    exact: dict[int, CellPoint] = {}
    for n in np.flatnonzero(~_surely(weight, bias, expert_set, proposed)).tolist():
        cell = _Cell(weight, bias, expert_set[n].tolist(), tie_broken)
        guess = proposed[n]
        if np.isfinite(guess).all() and cell.holds(tuple(map(Fraction, guess.tolist()))):
            continue
        rational = cell.inside(guess)
        near = _as_floats(rational)
        if near is not None and cell.holds(tuple(map(Fraction, near))):
            point[n] = near
        else:
            point[n], exact[n] = np.nan, CellPoint(rational)
    return point, exact


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
            is_sure[start : start + _AT_ONCE] = (least > most) & np.isfinite(error).all(1)
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
        keys = equal_classes(weight, bias).tolist()
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
    """One cell, in exact arithmetic."""

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray, expert_set: Sequence[int], tie_broken: bool
    ) -> None:
        self._weight, self._bias, self.expert_set = weight, bias, list(expert_set)
        self._parts = _parts(weight, bias, expert_set, tie_broken)

    def holds(self, point: Point) -> bool:
        """Whether a point is strictly inside the cell."""
        with np.errstate(all="ignore"):
            return all(
                ExactProblem(self._weight[e], self._bias[e], s).holds(point)
                for e, s in self._parts
                if s
            )

    def inside(self, guess: np.ndarray) -> Point:
        """A point of the cell, that a float64 point may be near."""
        if len(self._parts) == 1:
            proof = cell_certificate(
                self._weight,
                self._bias if self._bias.any() else None,
                self.expert_set,
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
        solution = solve_strictly(rows)
        if not isinstance(solution, tuple):
            raise ValueError(f"{self.expert_set} is no cell")
        return solution


def _as_floats(point: Point) -> list[float] | None:
    try:
        return [float(x) for x in point]
    except OverflowError:
        return None
