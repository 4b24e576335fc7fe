r"""Cells without end: the cone of directions in which a cell goes on for ever.

The recession cone of the closure of a cell is

.. math:: R_S = \{v : w_i v \ge w_j v, i \in S, j \notin S\}

whatever the biases are. It is 0 where the cell is bounded. It has an interior where the central
router, the same rows without biases, has S as a cell too: far away biases do not matter. For rows
in general position these are all: as many cells are unbounded as the central router has. Only
others, such as three rows on a line, have cells that are unbounded but thin: strips, of which one
sees nothing from far away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float64, Int16, Integer, UInt8

from moegeom.studies.cells.exact.dictionary import Arrangement
from moegeom.studies.cells.exact.exact_cells import exact_cells, sweep
from moegeom.studies.cells.exact.exact_walk import ExpertSet, Point, exact_walk
from moegeom.studies.cells.exact.rank import independent_columns, rank

#: What is known of a cell: it is bounded, unbounded with a cone of less than d dimensions, or
#: unbounded with one of all d, which is a cell of the central router.
BOUNDED, THIN, WIDE = 0, 1, 2


@dataclass(frozen=True)
class RecessionCone:
    """Directions in which a cell has no end: non-negative sums of ``rays``, and of ``lines``.

    ``lines``, of both signs, are directions along which no difference of logits changes.
    ``dimension`` is 0 for a bounded cell, and that of the space for one of the central router.
    """

    rays: tuple[Point, ...]
    lines: tuple[Point, ...]
    dimension: int


def recession_cones(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    k: int,
) -> dict[ExpertSet, RecessionCone]:
    """The recession cone of every cell, with exact rational generators; for small instances.

    Its rays are the unbounded edges of the diagram around the cell, which ties broken by the bias
    do not turn. Raises ValueError for k outside 1..E. Source: Rockafellar, Convex Analysis, section
    8; oracle in tests: linear programs, and the cells of the central router.
    """
    cells = exact_cells(weight, bias, k).cells
    rows = [[Fraction(float(value)) for value in row] for row in weight]
    offsets = [Fraction(0)] * len(rows) if bias is None else [Fraction(float(b)) for b in bias]
    kept, dims = independent_columns(rows), weight.shape[1]
    inner = [[row[column] for column in kept] for row in rows]
    lines = tuple(_still(rows, kept))
    if k == len(rows):
        axes = tuple(tuple(Fraction(int(m == n)) for n in range(dims)) for m in range(dims))
        return {cell: RecessionCone((), axes, dims) for cell in cells}
    rays = _rays(inner, offsets, k) if kept else {}
    found = {}
    for cell in cells:
        own = sorted(rays.get(cell, ()))
        spread = [[_at(ray, kept, column) for column in range(dims)] for ray in own]
        size = rank([list(ray) for ray in own])
        found[cell] = RecessionCone(tuple(map(tuple, spread)), lines, size + len(lines))
    return found


def _at(ray: Sequence[Fraction], kept: Sequence[int], column: int) -> Fraction:
    return ray[kept.index(column)] if column in kept else Fraction(0)


def _rays(
    rows: list[list[Fraction]], offsets: list[Fraction], k: int
) -> dict[ExpertSet, set[Point]]:
    """Generators for rows of full rank, the largest coordinate of each being 1 or -1."""
    found: dict[ExpertSet, set[Point]] = {}
    if len(rows[0]) == 1:
        for chosen, start, stop in sweep([row[0] for row in rows], offsets, k):
            ends = [(Fraction(-1),)] * (start is None) + [(Fraction(1),)] * (stop is None)
            found.setdefault(chosen, set()).update(ends)
        return found
    for chosen, hull in exact_walk(Arrangement(rows, offsets), k).cells.items():
        for ray in hull.rays:
            largest = max(abs(value) for value in ray)
            found.setdefault(chosen, set()).add(tuple(value / largest for value in ray))
    return found


def _still(rows: list[list[Fraction]], kept: list[int]) -> list[Point]:
    """A basis of the directions in which all logits change alike."""
    differences = [[a - b for a, b in zip(row, rows[0], strict=True)] for row in rows[1:]]
    own = [[row[column] for column in kept] for row in differences]
    found = []
    for column in range(len(rows[0])):
        if column in kept:
            continue
        shares = _solution(own, [-row[column] for row in differences])
        direction = [Fraction(int(m == column)) for m in range(len(rows[0]))]
        for place, share in zip(kept, shares, strict=True):
            direction[place] = share
        found.append(tuple(direction))
    return found


def _solution(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    """x of a system with independent columns that has a solution."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(matrix[0]) if matrix else 0
    for column in range(size):
        pivot = next(r for r in range(column, len(rows)) if rows[r][column] != 0)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        lead = rows[column][column]
        rows[column] = [value / lead for value in rows[column]]
        for r, row in enumerate(rows):
            if r != column and row[column] != 0:
                factor = row[column]
                rows[r] = [v - factor * o for v, o in zip(row, rows[column], strict=True)]
    return [rows[column][-1] for column in range(size)]


def cone_kinds(
    expert_set: Integer[np.ndarray, "cells k"],
    is_bounded: Bool[np.ndarray, "cells"],
    central: Integer[np.ndarray, "central_cells k"],
) -> UInt8[np.ndarray, "cells"]:
    """BOUNDED, THIN or WIDE for each cell of an affine router, by the cells of the central one.

    Rows are sorted experts. As certain as what it is given: a cell is WIDE exactly where it is a
    cell of the central router. Experts with equal rows must have been told apart there by their
    bias, the larger ahead (``bias_order``). Oracle in tests: dimensions of the exact cones.
    """
    both = np.concatenate([central, expert_set]).astype(np.int64)
    _, number = np.unique(both, axis=0, return_inverse=True)
    number = number.reshape(-1)
    is_central = np.isin(number[len(central) :], number[: len(central)])
    return np.where(is_central, WIDE, np.where(is_bounded, BOUNDED, THIN)).astype(np.uint8)


def bias_order(bias: Float64[np.ndarray, "experts"]) -> Integer[np.ndarray, "experts"]:
    """Experts by falling bias, equal ones by number.

    The central router of the rows in this order, ties broken, has all wide cells of the affine one:
    its expert r is the expert ``bias_order(bias)[r]``.
    """
    return np.argsort(-bias, kind="stable")


@dataclass(frozen=True, eq=False)
class Generators:
    """Rays of cells: the cell, the d experts that tie along the ray, and its unit direction.

    The experts and the cell are proved as far as the walk is; the direction is a float64 solution
    of the ties among them.
    """

    expert_set: Int16[np.ndarray, "rays k"]
    tied: Int16[np.ndarray, "rays dims"]
    direction: Float64[np.ndarray, "rays dims"]


def ray_generators(
    on: Int16[np.ndarray, "vertices on"],
    above: Bool[np.ndarray, "vertices experts"],
    rays: Bool[np.ndarray, "vertices edges"],
    weight: Float64[np.ndarray, "experts dims"],
    k: int,
) -> Generators:
    """Generators of the recession cones of all unbounded cells of a whole walk.

    ``rays`` marks edges without end, as in :func:`moegeom.studies.cells.exact.collected.collected`:
    one row for each of them and each cell around it. Oracle in tests: ``recession_cones``.
    """
    dims = weight.shape[1]
    expert_sets: list[list[int]] = []
    tied: list[list[int]] = []
    directions: list[np.ndarray] = []
    for vertex, edge in np.argwhere(rays).tolist():
        column, upwards = divmod(edge, 2)
        experts = on[vertex].tolist()
        over = np.flatnonzero(above[vertex]).tolist()
        rest = [expert for expert in experts if expert != experts[column]]
        if upwards:
            over.append(experts[column])
        away = np.linalg.inv(np.column_stack([weight[experts], -np.ones(dims + 1)]))[:-1, column]
        away = (away if upwards else -away) / np.linalg.norm(away)
        for some in combinations(rest, k - len(over)):
            expert_sets.append(sorted([*over, *some]))
            tied.append(rest)
            directions.append(away)
    return Generators(
        np.array(expert_sets, np.int16).reshape(-1, k),
        np.array(tied, np.int16).reshape(-1, dims),
        np.array(directions).reshape(-1, dims),
    )
