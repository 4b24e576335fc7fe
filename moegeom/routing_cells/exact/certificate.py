r"""Certificates of cells and facets: a rational point inside, or a proof that there is none.

In the lifted form x is in the cell of S where some t has :math:`z_i(x) > t > z_j(x)`, i in S and j
outside: E strict inequalities in d + 1 unknowns. Float64 only proposes. A point is proved by error
bounds or exactly; what HiGHS finds tight is where exact steps begin, which end with a point or with
multipliers. Source: docs/theory.md G1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.routing_cells.exact.certificate_check import (
    CellPoint,
    FacetPoint,
    NoCell,
    NoFacet,
    Weights,
)

Point = tuple[Fraction, ...]

#: Coefficients of logits whose sum proves that there is no cell or facet.
Multipliers = dict[int, Fraction]

_UNIT, _TINY = 2.0**-53, float(np.finfo(np.float64).tiny)


class ExactProblem:
    """One question about one cell or facet, with its numbers and its open box."""

    def __init__(
        self,
        weight: np.ndarray,
        bias: np.ndarray | None,
        expert_set: Sequence[int],
        swap: tuple[int, int] | None,
        lower: np.ndarray | None,
        upper: np.ndarray | None,
    ) -> None:
        experts, dims = weight.shape
        self.weight = np.ascontiguousarray(weight) + 0.0  # no negative zeros: rows are compared
        self.bias = np.zeros(experts) if bias is None else bias + 0.0
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise ValueError("weights or biases are not all finite")
        chosen = {int(i) for i in expert_set}
        if not chosen or len(chosen) != len(expert_set) or not chosen <= set(range(experts)):
            raise ValueError(f"the expert set is no set of experts below {experts}")
        self.mask = np.zeros(experts, bool)
        self.mask[sorted(chosen)] = True
        others = set(range(experts)) - chosen
        if swap is not None and not (swap[0] in chosen and swap[1] in others):
            raise ValueError(f"{swap[0]} and {swap[1]} are no expert of the expert set and another")
        self.swap = swap
        self.is_boxed = lower is not None or upper is not None
        self.lower = np.full(dims, -np.inf) if lower is None else lower
        self.upper = np.full(dims, np.inf) if upper is None else upper
        if not (self.lower < self.upper).all():
            raise ValueError("the box has a lower end that is not below the upper one")
        self.sign = np.where(self.mask, 1.0, -1.0)
        with np.errstate(all="ignore"):
            self.strict = np.arange(experts) if swap is None else self._strict(swap)

    def _strict(self, swap: tuple[int, int]) -> np.ndarray:
        """Experts other than the pair and its proper mixtures."""
        out, into = swap
        rows = np.column_stack([self.weight, self.bias])
        ahead, own = rows[into] - rows[out], rows - rows[out]
        m = int(np.argmax(np.abs(ahead)))
        strict = np.ones(len(rows), bool)
        strict[[out, into]] = False
        if not ahead[m]:
            return np.flatnonzero(strict)
        # rounding leaves the differences within a few units of the numbers
        size = np.abs(rows) + np.abs(rows[out]) + np.abs(rows[into])
        off = np.abs(own * ahead[m] - own[:, [m]] * ahead)
        near = ~(off > 16 * _UNIT * size * size[:, [m]] + _TINY)
        between = [
            expert
            for expert in np.flatnonzero(strict & near.all(axis=1)).tolist()
            if _is_between(rows[expert], rows[out], rows[into], m)
        ]
        # two on different sides of the level would change places there as well
        if len(set(self.mask[between].tolist())) == 1:
            strict[between] = False
        return np.flatnonzero(strict)

    def carried(self, neighbour: NoCell) -> Multipliers | None:
        """The proof that a neighbouring cell is empty, where it also proves that the facet is.

        It is none where it needs an expert that is free to tie with the pair.
        """
        multipliers = dict(neighbour.inside) | {j: -value for j, value in neighbour.outside}
        pair, strict = set(self.swap or ()), set(self.strict.tolist())
        for expert, value in multipliers.items():
            if expert not in pair and (expert not in strict or (value > 0) != self.mask[expert]):
                return None
        if not any(multipliers.values()) or sum(multipliers.values()) != 0:
            return None
        total, in_the_way = self.most(multipliers)
        return multipliers if total <= 0 and not len(in_the_way) else None

    def equal_rows(self) -> Multipliers | None:
        """Multipliers of two equal rows that prove no cell, or no facet of that pair."""
        if self.swap is not None:
            out, into = self.swap
            if (self.weight[out] != self.weight[into]).any():
                return None
            sign = 1 if self.bias[out] <= self.bias[into] else -1
            return {out: Fraction(sign), into: Fraction(-sign)}
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

    def on_facet(self, point: Point) -> Point | None:
        """The point moved along one axis to where the pair ties; None where it never does."""
        if self.swap is None:
            return point
        out, into = self.swap
        ahead = self.weight[out] - self.weight[into]
        m = int(np.argmax(np.abs(ahead)))
        rate = Fraction(self.weight[out, m]) - Fraction(self.weight[into, m])
        if not rate:
            return None
        gap = exact_logit(self.weight[out], self.bias[out], point) - exact_logit(
            self.weight[into], self.bias[into], point
        )
        return (*point[:m], point[m] - gap / rate, *point[m + 1 :])

    def holds(self, point: Point) -> bool:
        """Whether the point proves the cell or facet: by error bounds, exactly where they fail."""
        sides = zip(point, self.lower.tolist(), self.upper.tolist(), strict=True)
        if self.is_boxed and not all(low < x < high for x, low, high in sides):
            return False
        low, high = self._intervals(point)
        inside = self.strict[self.mask[self.strict]].tolist()
        outside = self.strict[~self.mask[self.strict]].tolist()
        if self.swap is None:
            if not outside:
                return True
            if high[inside].min() <= low[outside].max():
                return False
            worst, best = low[inside].min(), high[outside].max()
            lowest = [self.value(i, point) for i in inside if not low[i] > best]
            highest = [self.value(j, point) for j in outside if not high[j] < worst]
            return not lowest or not highest or min(lowest) > max(highest)
        level = self.value(self.swap[0], point)
        if level != self.value(self.swap[1], point):
            return False
        low_level, high_level = min(low[list(self.swap)]), max(high[list(self.swap)])
        return all(low[i] > high_level or self.value(i, point) > level for i in inside) and all(
            high[j] < low_level or self.value(j, point) < level for j in outside
        )

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

    def value(self, expert: int, point: Point) -> Fraction:
        return exact_logit(self.weight[expert], self.bias[expert], point)

    def most(self, coefficients: dict[int, Fraction]) -> tuple[Fraction, np.ndarray]:
        """The maximum of a combination of logits in the box, and where it is unbounded."""
        terms = list(coefficients.items())
        total = sum((c * Fraction(self.bias[i]) for i, c in terms), Fraction(0))
        in_the_way = []
        for m in range(self.weight.shape[1]):
            value = sum((c * Fraction(self.weight[i, m]) for i, c in terms), Fraction(0))
            end = self.upper[m] if value > 0 else self.lower[m]
            if value and np.isfinite(end):
                total += value * Fraction(end)
            elif value:
                in_the_way.append(m)
        return total, np.array(in_the_way, np.int64)

    def split(self, multipliers: Multipliers) -> tuple[Multipliers, Multipliers]:
        """Chosen and other experts, but for the pair, with positive weights."""
        pair = self.swap or ()
        own = {i: abs(value) for i, value in sorted(multipliers.items()) if value and i not in pair}
        inside = {i: value for i, value in own.items() if self.mask[i]}
        return inside, {j: value for j, value in own.items() if not self.mask[j]}

    def no_cell(self, multipliers: Multipliers) -> NoCell:
        """Weights that sum to 1 on either side."""
        inside, outside = self.split(multipliers)
        return NoCell(
            _of_sum(inside, sum(inside.values())), _of_sum(outside, sum(outside.values()))
        )

    def no_facet(self, multipliers: Multipliers) -> NoFacet:
        """Weights that sum to 1 without those of the pair, or a pair alone with 1 and -1."""
        inside, outside = self.split(multipliers)
        out, into = (multipliers.get(expert, Fraction(0)) for expert in self.swap or ())
        total = sum([*inside.values(), *outside.values()]) or abs(out)
        weights = _of_sum(inside, total), _of_sum(outside, total)
        return NoFacet(*weights, (out / total, into / total))


def _of_sum(multipliers: Multipliers, total: Fraction | int) -> Weights:
    return tuple((expert, value / total) for expert, value in multipliers.items())


def exact_logit(row: np.ndarray, offset: float, point: Sequence[Fraction]) -> Fraction:
    """The logit of a row at a point, in exact arithmetic."""
    terms = (Fraction(w) * x for w, x in zip(row.tolist(), point, strict=True) if x)
    return sum(terms, Fraction(offset))


def _is_between(own: np.ndarray, one: np.ndarray, other: np.ndarray, m: int) -> bool:
    """Whether a row is a proper mixture of two that differ in coordinate m."""
    a, b, c = ([Fraction(value) for value in row.tolist()] for row in (one, other, own))
    share = (c[m] - a[m]) / (b[m] - a[m])
    mixed = (x + share * (y - x) for x, y in zip(a, b, strict=True))
    return 0 < share < 1 and all(x == y for x, y in zip(mixed, c, strict=True))


def solve_strictly(
    rows: Sequence[Sequence[Fraction]], fixed: int
) -> tuple[Fraction, ...] | list[Fraction]:
    """u with r[0] + r[1:] u > 0 for all rows, = 0 for the first ``fixed``, or multipliers of rows.

    Multipliers, >= 0 but for the fixed, sum the rows up to a constant that is <= 0. The linear
    program max s, r[0] + r[1:] u >= s, by criss-cross steps of least index, which always end, from
    the first rows that are independent; in integers over one denominator (Edmonds). Fixed rows must
    be independent. Source: Terlaky, "A convergent criss-cross method", 1985.
    """
    scale = [lcm(*(value.denominator for value in row)) for row in rows]
    table = _Table(
        [
            [*(int(value * unit) for value in row), 0 if r < fixed else -unit]
            for r, (row, unit) in enumerate(zip(rows, scale, strict=True))
        ],
        fixed,
    )
    ray = table.solve()
    margin = table.basic.index(table.margin) if table.margin in table.basic else None
    if ray is None and margin is not None and table.entries[margin, 0] <= 0:
        multipliers = [Fraction(0)] * len(rows)
        for column, label in enumerate(table.other):
            if 0 <= label < len(rows):
                value = Fraction(-table.entries[margin, column], table.common)
                multipliers[label] = value * scale[label]
        return multipliers
    return table.point(ray)


class _Table:
    """Rows in terms of as many unknowns: common * basic = entries @ (1, other).

    Labels are those of the rows, then of the unknowns; the last one is the margin, and that of the
    constant column is -1. The first ``fixed`` rows are 0 once they are in columns.
    """

    def __init__(self, entries: list[list[int]], fixed: int) -> None:
        self.entries, self.common = np.array(entries, object), 1
        self.num, width = self.entries.shape
        self._fixed, self.margin = fixed, self.num + width - 2
        self.basic = list(range(self.num))
        self.other = [-1, *range(self.num, self.num + width - 1)]

    def solve(self) -> int | None:
        """Pivots to the widest margin; returns the column in which it is unbounded, or None."""
        for row in range(self.num):
            free = [c for c, label in enumerate(self.other) if label >= self.num]
            column = next((c for c in free if self.entries[row, c]), None)
            if column is not None:
                self._pivot(row, column)
        if self.margin in self.other:
            return self.other.index(self.margin)
        while True:
            margin = self.entries[self.basic.index(self.margin)]
            rows = {label: r for r, label in enumerate(self.basic) if self._is_strict(label)}
            columns = {label: c for c, label in enumerate(self.other) if self._is_strict(label)}
            wrong = [label for label, r in rows.items() if self.entries[r, 0] < 0]
            wrong += [label for label, c in columns.items() if margin[c] > 0]
            if not wrong:
                return None
            first = min(wrong)
            if first in rows:
                row = rows[first]
                # the margin may fall as far as it likes: some column helps
                self._pivot(
                    row, columns[min(i for i, c in columns.items() if self.entries[row, c] > 0)]
                )
                continue
            column = columns[first]
            stops = [label for label, r in rows.items() if self.entries[r, column] < 0]
            if not stops:
                return column
            self._pivot(rows[min(stops)], column)

    def _is_strict(self, label: int) -> bool:
        return self._fixed <= label < self.num

    def _pivot(self, row: int, column: int) -> None:
        """The variable of the row and that of the column change places."""
        own, lead = self.entries[row].copy(), self.entries[row, column]
        rates = self.entries[:, column].copy()
        self.entries = (self.entries * lead - np.outer(rates, own)) // self.common
        self.entries[:, column] = rates
        self.entries[row] = -own
        self.entries[row, column] = self.common
        self.common = lead
        if lead < 0:
            self.entries, self.common = -self.entries, -lead
        self.basic[row], self.other[column] = self.other[column], self.basic[row]

    def point(self, ray: int | None) -> tuple[Fraction, ...]:
        """The unknowns but for the margin, as far along the ray as makes the margin win."""
        start = self.entries[:, 0]
        rate = 0 * start if ray is None else self.entries[:, ray]
        step = Fraction(0)
        if ray is not None:
            short = [-start[r] for r, label in enumerate(self.basic) if self._is_strict(label)]
            margin = Fraction(max([0, *short]), self.common) + 1
            if self.margin in self.basic:
                row = self.basic.index(self.margin)
                step = max(Fraction(0), (margin * self.common - start[row]) / rate[row])
            else:
                step = margin
        unknowns = dict.fromkeys(range(self.num, self.margin), Fraction(0))
        for row, label in enumerate(self.basic):
            if self.num <= label < self.margin:
                unknowns[label] = (start[row] + rate[row] * step) / Fraction(self.common)
        return tuple(unknowns.values())


# -------------------------------------------------------------------------------- certificates
#: Significant bits to which a proposed point is cut down while it still is a proof.
_BITS = (6, 12, 26, 53)

#: Corrections of a closed form by exact residuals.
_CORRECTIONS = 6


def cell_certificate(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    expert_set: Sequence[int],
    lower: Float64[np.ndarray, "dims"] | None = None,
    upper: Float64[np.ndarray, "dims"] | None = None,
    guess: Float64[np.ndarray, "dims"] | None = None,
) -> CellPoint | NoCell:
    """A point strictly inside the cell of an expert set and the box, or a proof of none.

    The numbers are taken as they are, exact dyadic rationals; sides of the open box may be infinite
    and ``bias`` None is a central router. For rank E - 1 (whole routers) a linear system gives the
    point; else a linear program of E rows in d + 1 unknowns begins an exact one. ``guess`` is tried
    before, and taken where it proves the cell.

    Raises ValueError for numbers that are not finite, an empty box or an expert set that is none.
    Oracle in tests: the certified instances of docs/theory.md G1, and ``check_certificate``.
    """
    problem = ExactProblem(weight, bias, expert_set, None, lower, upper)
    proof = _solve(problem, guess)
    return CellPoint(proof) if isinstance(proof, tuple) else problem.no_cell(proof)


def facet_certificate(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    expert_set: Sequence[int],
    out: int,
    into: int,
    lower: Float64[np.ndarray, "dims"] | None = None,
    upper: Float64[np.ndarray, "dims"] | None = None,
    guess: Float64[np.ndarray, "dims"] | None = None,
    neighbour: NoCell | None = None,
) -> FacetPoint | NoFacet:
    """A point where ``out`` and ``into`` tie, all others strictly apart, or a proof of none.

    It lies inside the facet between the cell of the expert set and the one with ``into`` in the
    place of ``out``. Experts that are proper mixtures of the two tie wherever they do, and are on
    their side next to the facet all the same: of these nothing is asked, unless they are on both
    sides, where more than one pair changes places. Equal rows share no facet. ``guess`` is tried
    before; ``neighbour`` is a proof that one of the two cells is none, from which that of the facet
    follows.

    Raises ValueError as ``cell_certificate``, and for an ``out`` outside or an ``into`` inside.
    """
    problem = ExactProblem(weight, bias, expert_set, (int(out), int(into)), lower, upper)
    carried = None if neighbour is None else problem.carried(neighbour)
    proof = carried or _solve(problem, guess)
    return FacetPoint(proof) if isinstance(proof, tuple) else problem.no_facet(proof)


def _solve(problem: ExactProblem, guess: np.ndarray | None) -> Point | Multipliers:
    """Tries proofs from the cheapest one to the one that always ends."""
    with np.errstate(all="ignore"):
        return (
            problem.equal_rows()
            or _checked(problem, [] if guess is None else [guess])
            or _checked(problem, _closed_form(problem))
            or _checked(problem, [_middle(problem)])
            or _program(problem)
        )


def _checked(problem: ExactProblem, proposals: Iterable[np.ndarray | Point]) -> Point | None:
    """The first proposed point that is a proof, rounded to as few bits as possible."""
    for point in proposals:
        if isinstance(point, np.ndarray) and not np.isfinite(point).all():
            continue
        cut = [point] if isinstance(point, tuple) else (_rounded(point, b) for b in _BITS)
        for some in cut:
            moved = problem.on_facet(some)
            if moved is not None and problem.holds(moved):
                return moved
    return None


def _middle(problem: ExactProblem) -> np.ndarray:
    """The middle of the box: a proof for k = E, and sometimes otherwise."""
    return (np.maximum(problem.lower, -1e6) + np.minimum(problem.upper, 1e6)) / 2


def _closed_form(problem: ExactProblem) -> Iterator[np.ndarray | Point]:
    """Where W has rank E - 1, x with logits 1, 0 (the pair) and -1, but for a common shift."""
    experts, dims = problem.weight.shape
    if problem.is_boxed or dims < experts - 1 or experts == 1:
        return
    rows, free = problem.weight[1:] - problem.weight[0], problem.bias[1:] - problem.bias[0]
    row_scale = np.exp2(-np.frexp(np.abs(rows).max(axis=1))[1].astype(float))
    columns = _columns(rows * row_scale[:, None], experts - 1)
    square = rows[:, columns] * row_scale[:, None]
    target = np.sign(problem.sign)
    if problem.swap is not None:
        target[list(problem.swap)] = 0.0
    # the margin is of the size of the biases
    target = (target[1:] - target[0]) * np.exp2(np.frexp(max(np.abs(free).max(), 1e-300))[1])
    try:
        inverse = np.linalg.inv(square)
    except np.linalg.LinAlgError:
        return
    x = np.zeros(dims)
    x[columns] = inverse @ ((target - free) * row_scale)
    yield x
    if not np.isfinite(x).all() or not np.isfinite(target).all():
        return
    exact, size = [Fraction(value) for value in x.tolist()], np.inf
    for _ in range(_CORRECTIONS):
        level = exact_logit(problem.weight[0], problem.bias[0], exact)
        left = [
            float(Fraction(goal) + level - exact_logit(row, offset, exact))
            for goal, row, offset in zip(
                target.tolist(), problem.weight[1:], problem.bias[1:], strict=True
            )
        ]
        step, before = inverse @ (np.array(left) * row_scale), size
        size = np.abs(left).max()
        if not np.isfinite(step).all() or not size < before / 2:
            return
        for column, value in zip(columns.tolist(), step.tolist(), strict=True):
            exact[column] += Fraction(value)
        yield tuple(exact)


def _program(problem: ExactProblem) -> Point | Multipliers:
    """The exact answer from a proposal of HiGHS, with columns added until it holds in all."""
    experts, dims = problem.weight.shape
    columns = np.arange(dims)
    if not problem.is_boxed:
        columns = _columns(problem.weight - problem.weight.mean(axis=0), experts - 1)
    if problem.swap is not None:
        ahead = problem.weight[problem.swap[0]] - problem.weight[problem.swap[1]]
        columns = np.union1d(columns, np.argmax(np.abs(ahead)))
    while True:
        point, multipliers, order, support = _proposal(problem, columns)
        proof = _checked(problem, [point]) or _rounded_proof(problem, multipliers)
        if proof is None and support:
            proof = _exact_program(problem, columns, order[:support])
        if proof is None or (isinstance(proof, tuple) and not problem.holds(proof)):
            proof = _exact_program(problem, columns, order)
        if isinstance(proof, tuple):
            assert problem.holds(proof), "an exact point is a proof"
            return proof
        total, in_the_way = problem.most(proof)
        if not len(in_the_way):
            assert total <= 0, "exact multipliers are a proof"
            return proof
        columns = np.union1d(columns, in_the_way[: len(columns) + 1])


def _proposal(
    problem: ExactProblem, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The answer of HiGHS: a point of the widest margin, multipliers, and rows, the tightest first.

    The number is that of the rows that alone may be a proof: where there is room, none.

    Rows are the strict experts, and then the lower and the upper sides of the box; the unknowns
    x, t and the margin are scaled to the size of the numbers.
    """
    from scipy.optimize import linprog

    weight, bias = problem.weight[:, columns], problem.bias
    weight, bias = weight - weight.mean(axis=0), bias - bias.mean()
    column_scale = _positive(np.abs(weight).max(axis=0, initial=0.0))
    unit = float(np.abs(bias).max()) or 1.0
    lifted = np.column_stack([weight / column_scale, -np.ones(len(bias))])
    size, strict = len(columns), problem.strict
    sign = problem.sign[strict]
    low, high = (side[columns] * column_scale / unit for side in (problem.lower, problem.upper))
    half = np.where(np.isfinite(high - low), (high - low) / 2, 1.0)
    axes, low_rows, high_rows = np.eye(size, size + 1), np.isfinite(low), np.isfinite(high)
    matrix = np.vstack([-sign[:, None] * lifted[strict], -axes[low_rows], axes[high_rows]])
    margin = np.concatenate([np.ones(len(strict)), half[low_rows], half[high_rows]])
    right = np.concatenate([sign * bias[strict] / unit, -low[low_rows], high[high_rows]])
    tied = [] if problem.swap is None else list(problem.swap)
    nothing = np.zeros(problem.weight.shape[1]), np.full(len(problem.sign), np.nan)
    if not all(np.isfinite(part).all() for part in (matrix, margin, right, bias / unit)):
        return *nothing, np.arange(len(right)), 0
    solved = linprog(
        np.append(np.zeros(size + 1), -1.0),
        np.column_stack([matrix, margin]),
        right,
        np.column_stack([lifted[tied], np.zeros(len(tied))]) if tied else None,
        -bias[tied] / unit if tied else None,
        bounds=[(None, None)] * (size + 1) + [(None, 1.0)],
        method="highs",
    )
    point, multipliers = nothing
    if solved.status != 0:
        return point, multipliers, np.arange(len(right)), 0
    point[columns] = solved.x[:size] * unit / column_scale
    tightness = -solved.ineqlin.marginals
    multipliers[:] = 0.0
    multipliers[strict] = sign * np.maximum(tightness[: len(strict)], 0.0)
    multipliers[tied] = solved.eqlin.marginals
    support = int((tightness > 1e-9 * tightness.max()).sum()) if -solved.fun < 1e-6 else 0
    return point, multipliers, np.lexsort([solved.slack, -tightness]), support


def _rounded_proof(problem: ExactProblem, multipliers: np.ndarray) -> Multipliers | None:
    """Rounded multipliers of HiGHS, where they are a proof in a box without open ends."""
    is_open = np.isinf(problem.lower).any() or np.isinf(problem.upper).any()
    if is_open or not np.isfinite(multipliers).all() or not multipliers.any():
        return None
    cut = np.rint(multipliers / np.abs(multipliers).max() * 2.0**40)
    rounded = {int(i): Fraction(cut[i]) for i in np.flatnonzero(cut)}
    over = sum(rounded.values(), Fraction(0))
    if problem.swap is not None:
        rounded[problem.swap[0]] = rounded.get(problem.swap[0], Fraction(0)) - over
        if not any(rounded.values()):
            return None
    elif len(problem.split(rounded)[0]) in (0, len(rounded)):
        return None
    else:
        chosen = sum((v for v in rounded.values() if v > 0), Fraction(0))
        rounded = {i: v if v > 0 else v * chosen / (chosen - over) for i, v in rounded.items()}
    return rounded if problem.most(rounded)[0] <= 0 else None


def _exact_program(
    problem: ExactProblem, columns: np.ndarray, order: np.ndarray
) -> Point | Multipliers:
    """The exact answer with the other coordinates at 0, from the rows that are tight first."""

    def logit(i: int) -> list[Fraction]:
        row = [problem.bias[i], *problem.weight[i, columns], -1.0]
        return [Fraction(value) for value in row]

    def side(m: int, end: float, sign: int) -> list[Fraction]:
        row = [Fraction(0)] * (len(columns) + 2)
        row[0], row[1 + m] = -sign * Fraction(end), Fraction(sign)
        return row

    tied = [] if problem.swap is None else list(problem.swap)
    rows = [[int(problem.sign[i]) * value for value in logit(i)] for i in problem.strict.tolist()]
    for ends, sign in ((problem.lower[columns], 1), (problem.upper[columns], -1)):
        rows += [side(m, ends[m], sign) for m in np.flatnonzero(np.isfinite(ends)).tolist()]
    rows = [*map(logit, tied), *(rows[r] for r in order)]
    solution = solve_strictly(rows, len(tied))
    if isinstance(solution, tuple):
        point = [Fraction(0)] * problem.weight.shape[1]
        for column, value in zip(columns.tolist(), solution[:-1], strict=True):
            point[column] = value
        return tuple(point)
    multipliers = dict(zip(tied, solution, strict=False))
    for r, value in zip(order.tolist(), solution[len(tied) :], strict=True):
        if r < len(problem.strict) and value:
            expert = int(problem.strict[r])
            multipliers[expert] = int(problem.sign[expert]) * value
    return multipliers


def _rounded(point: np.ndarray, bits: int) -> Point:
    """The point rounded to ``bits`` bits of its largest coordinate; unchanged for 53."""
    largest = np.abs(point).max(initial=0.0)
    if bits < 53 and largest > 2.0**-900:
        step = 2.0 ** (np.frexp(largest)[1] - bits)
        point = np.rint(point / step) * step
    return tuple(Fraction(value) for value in point.tolist())


def _positive(size: np.ndarray) -> np.ndarray:
    return np.where(size > 0, size, 1.0)


def _columns(rows: np.ndarray, most: int) -> np.ndarray:
    """At most so many columns that carry most of the rows: pivots of a QR factorization."""
    from scipy.linalg import qr

    if rows.shape[1] <= most or not np.isfinite(rows).all():
        return np.arange(rows.shape[1])
    longest = np.argsort(-np.abs(rows).sum(axis=0), kind="stable")[: 4 * most]
    *_, pivots = qr(rows[:, longest], mode="r", pivoting=True)
    return np.sort(longest[pivots[:most]])
