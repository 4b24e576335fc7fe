r"""Certificates of cells and facets: a rational point inside, or a proof that there is none.

In the lifted form x is in the cell of S where some t has :math:`z_i(x) > t > z_j(x)`, i in S and j
outside: E strict inequalities in d + 1 unknowns. Float64 only proposes. A point is proved by error
bounds or exactly; what HiGHS finds tight is where exact steps begin, which end with a point or with
multipliers. Source: docs/theory.md G1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.routing_cells.exact.certificate_check import CellPoint, FacetPoint, NoCell, NoFacet
from moegeom.routing_cells.exact.problem import (
    ExactProblem,
    Multipliers,
    Point,
    exact_logit,
    solve_strictly,
)

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
    """A point strictly inside the cell of an expert set, and the box, or a proof that there is
    none.

    The numbers are taken as they are, exact dyadic rationals; sides of the open box may be infinite
    and ``bias`` None is a central router. For rank E - 1 (whole routers) a linear system gives the
    point; else a linear program of E rows in d + 1 unknowns begins an exact one. ``guess`` is tried
    before, and taken where it proves the cell.

    Raises ValueError for numbers that are not finite, an empty box or an expert set that is none.
    Oracle in tests: the certified instances of docs/theory.md G1, and ``check_certificate``.
    """
    problem = ExactProblem(weight, bias, expert_set, None, lower, upper)
    found = _solve(problem, guess)
    return CellPoint(found) if isinstance(found, tuple) else problem.no_cell(found)


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
    found = carried or _solve(problem, guess)
    return FacetPoint(found) if isinstance(found, tuple) else problem.no_facet(found)


def _solve(problem: ExactProblem, guess: np.ndarray | None) -> Point | Multipliers:
    """From the cheapest proof to the one that always ends."""
    with np.errstate(all="ignore"):
        return (
            problem.equal_rows()
            or _checked(problem, [] if guess is None else [guess])
            or _checked(problem, _closed_form(problem))
            or _checked(problem, [_middle(problem)])
            or _program(problem)
        )


def _checked(problem: ExactProblem, proposals: Iterable[np.ndarray | Point]) -> Point | None:
    """The first proposed point that is one, in as few bits as it takes."""
    for point in proposals:
        if isinstance(point, np.ndarray) and not np.isfinite(point).all():
            continue
        cut = [point] if isinstance(point, tuple) else (_rounded(point, b) for b in _BITS)
        for some in cut:
            found = problem.on_facet(some)
            if found is not None and problem.holds(found):
                return found
    return None


def _middle(problem: ExactProblem) -> np.ndarray:
    """The middle of the box: for k = E, and for luck."""
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
    wanted = np.sign(problem.sign)
    if problem.swap is not None:
        wanted[list(problem.swap)] = 0.0
    # the margin is of the size of the biases
    wanted = (wanted[1:] - wanted[0]) * np.exp2(np.frexp(max(np.abs(free).max(), 1e-300))[1])
    try:
        inverse = np.linalg.inv(square)
    except np.linalg.LinAlgError:
        return
    x = np.zeros(dims)
    x[columns] = inverse @ ((wanted - free) * row_scale)
    yield x
    if not np.isfinite(x).all() or not np.isfinite(wanted).all():
        return
    exact, size = [Fraction(value) for value in x.tolist()], np.inf
    for _ in range(_CORRECTIONS):
        level = exact_logit(problem.weight[0], problem.bias[0], exact)
        left = [
            float(Fraction(goal) + level - exact_logit(row, offset, exact))
            for goal, row, offset in zip(
                wanted.tolist(), problem.weight[1:], problem.bias[1:], strict=True
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
    """HiGHS and then exact arithmetic, with more columns until the multipliers hold in all."""
    experts, dims = problem.weight.shape
    columns = np.arange(dims)
    if not problem.is_boxed:
        columns = _columns(problem.weight - problem.weight.mean(axis=0), experts - 1)
    if problem.swap is not None:
        ahead = problem.weight[problem.swap[0]] - problem.weight[problem.swap[1]]
        columns = np.union1d(columns, np.argmax(np.abs(ahead)))
    while True:
        point, multipliers, order, support = _proposal(problem, columns)
        found = _checked(problem, [point]) or _rounded_proof(problem, multipliers)
        if found is None and support:
            found = _exact_program(problem, columns, order[:support])
        if found is None or (isinstance(found, tuple) and not problem.holds(found)):
            found = _exact_program(problem, columns, order)
        if isinstance(found, tuple):
            assert problem.holds(found), "an exact point is a proof"
            return found
        total, in_the_way = problem.most(found)
        if not len(in_the_way):
            assert total <= 0, "exact multipliers are a proof"
            return found
        columns = np.union1d(columns, in_the_way[: len(columns) + 1])


def _proposal(
    problem: ExactProblem, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """What HiGHS says: a point with the widest margin, multipliers, and the rows by effective
    margin.

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
    found = -solved.ineqlin.marginals
    multipliers[:] = 0.0
    multipliers[strict] = sign * np.maximum(found[: len(strict)], 0.0)
    multipliers[tied] = solved.eqlin.marginals
    support = int((found > 1e-9 * found.max()).sum()) if -solved.fun < 1e-6 else 0
    return point, multipliers, np.lexsort([solved.slack, -found]), support


def _rounded_proof(problem: ExactProblem, multipliers: np.ndarray) -> Multipliers | None:
    """Multipliers of HiGHS as they are where a box without open ends leaves them room."""
    is_open = np.isinf(problem.lower).any() or np.isinf(problem.upper).any()
    if is_open or not np.isfinite(multipliers).all() or not multipliers.any():
        return None
    cut = np.rint(multipliers / np.abs(multipliers).max() * 2.0**40)
    found = {int(i): Fraction(cut[i]) for i in np.flatnonzero(cut)}
    over = sum(found.values(), Fraction(0))
    if problem.swap is not None:
        found[problem.swap[0]] = found.get(problem.swap[0], Fraction(0)) - over
        if not any(found.values()):
            return None
    elif len(problem.split(found)[0]) in (0, len(found)):
        return None
    else:
        chosen = sum((v for v in found.values() if v > 0), Fraction(0))
        found = {i: v if v > 0 else v * chosen / (chosen - over) for i, v in found.items()}
    return found if problem.most(found)[0] <= 0 else None


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
    found = solve_strictly(rows, len(tied))
    if isinstance(found, tuple):
        point = [Fraction(0)] * problem.weight.shape[1]
        for column, value in zip(columns.tolist(), found[:-1], strict=True):
            point[column] = value
        return tuple(point)
    multipliers = dict(zip(tied, found, strict=False))
    for r, value in zip(order.tolist(), found[len(tied) :], strict=True):
        if r < len(problem.strict) and value:
            expert = int(problem.strict[r])
            multipliers[expert] = int(problem.sign[expert]) * value
    return multipliers


def _rounded(point: np.ndarray, bits: int) -> Point:
    """So many bits below the largest coordinate; as it is for 53."""
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
