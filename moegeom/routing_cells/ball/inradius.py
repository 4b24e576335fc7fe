"""The largest ball inside a cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog, nnls

from moegeom.core.shapes import Float64, Int16, Int64
from moegeom.routing_cells.plane.polygons import cell_sides

#: Relative width of the bracket that counts as an answer.
_CLOSE = 1e-6

#: Programs that are solved, each in units of the radius that the one before found.
_ROUNDS = 12


def inradii(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    facets: Int64[np.ndarray, "facets 2"],
    equal: Sequence[Int64[np.ndarray, "_"]] = (),
) -> Float64[np.ndarray, "cells"]:
    r"""Radius of the largest ball in each cell, :math:`\max r: a_w x + c_w \ge r |a_w|`.

    Linear programs over the sides of the cell (scipy, HiGHS), each around the centre and in units
    of the radius that the one before found, for a solver with an absolute tolerance says nothing
    about what is far smaller or larger than 1. What is kept is the ball around the last centre,
    where the multipliers prove that none is larger by 1e-6; inf where a direction leaves all facets
    behind, which proves balls of any size; nan where neither is proved.
    Source: the Chebyshev centre; oracle in tests: distances of the centre to all pairs of experts,
    and the same cells in other units.
    """
    found = np.full(len(expert_set), np.inf)
    with np.errstate(all="ignore"):
        for cell, sides in enumerate(cell_sides(weight, bias, expert_set, facets, equal)):
            # of equal rows the one with the larger bias is ahead everywhere: that is no side
            is_side = sides.normal.any(axis=1)
            if is_side.any():
                normal = sides.normal[is_side]
                length = np.linalg.norm(normal, axis=1)
                found[cell] = _inradius(normal / length[:, None], sides.offset[is_side] / length)
    return found


def _inradius(
    normal: Float64[np.ndarray, "facets dims"], offset: Float64[np.ndarray, "facets"]
) -> float:
    """The radius of one cell; ``normal`` are unit vectors that point inside."""
    if not (np.isfinite(normal).all() and np.isfinite(offset).all()):
        return float("nan")
    if _is_wide(normal):
        return float("inf")
    centre = np.zeros(normal.shape[1])
    scale = float(np.abs(offset).max())
    for _ in range(_ROUNDS):
        if not 0.0 < scale < np.inf:
            break
        limits = (offset + normal @ centre) / scale
        # the centre of the ball, from the last centre on, and its radius: both in units of scale
        solved = _solve(-normal, limits)
        if solved is None:
            break
        step, radius, multipliers = solved
        centre = centre + step * scale
        inner = float((offset + normal @ centre).min())
        outer = _upper(normal, offset + normal @ centre, multipliers)
        if inner > 0.0 and outer - inner <= _CLOSE * inner:
            return inner
        scale = max(radius * scale, inner) if max(radius * scale, inner) > 0.0 else scale * 2.0**-20
    return float("nan")


def _solve(
    rows: Float64[np.ndarray, "facets dims"], limits: Float64[np.ndarray, "facets"]
) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Centre, radius and multipliers of the program; None where the solver has no answer."""
    dims = rows.shape[1]
    solved = linprog(
        np.append(np.zeros(dims), -1.0),
        np.column_stack([rows, np.ones(len(rows))]),
        limits,
        bounds=[(None, None)] * (dims + 1),
        method="highs",
    )
    if solved.status != 0 or not np.isfinite(solved.x).all():
        return None
    return solved.x[:-1], float(solved.x[-1]), np.maximum(-solved.ineqlin.marginals, 0.0)


def _upper(
    normal: Float64[np.ndarray, "facets dims"],
    height: Float64[np.ndarray, "facets"],
    multipliers: Float64[np.ndarray, "facets"],
) -> float:
    r"""What multipliers prove: :math:`r \le \sum \lambda_w h_w` where they sum to 1 and cancel.

    On the few facets of the solver's multipliers they are found anew, to rounding.
    """
    active = np.flatnonzero(multipliers > 1e-9 * multipliers.max(initial=0.0))
    if not len(active):
        return float("inf")
    system = np.vstack([normal[active].T, np.ones(len(active))])
    target = np.append(np.zeros(normal.shape[1]), 1.0)
    exact, left = nnls(system, target)
    return float(exact @ height[active]) if left <= 1e-12 else float("inf")


def _is_wide(normal: Float64[np.ndarray, "facets dims"]) -> bool:
    """Whether some direction goes away from all facets: then balls of any size fit."""
    dims = normal.shape[1]
    solved = linprog(
        np.append(np.zeros(dims), -1.0),
        np.column_stack([-normal, np.ones(len(normal))]),
        np.zeros(len(normal)),
        bounds=[(-1.0, 1.0)] * dims + [(None, 1.0)],
        method="highs",
    )
    if solved.status != 0:
        return False
    direction = solved.x[:-1]
    return bool((normal @ direction).min() > 1e-12 * np.abs(direction).max(initial=0.0))
