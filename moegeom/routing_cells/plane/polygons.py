"""Sides of cells, and what follows: polygons in a frame of the plane, the largest balls inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog, nnls

from moegeom.core.shapes import Float64, Int64
from moegeom.routing_cells.walk.enumeration import Enumeration

#: x0, x1, y0, y1 of the part of a plane that is drawn.
Frame = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Outlines:
    """Counter-clockwise corners of each cell in the frame; none of a cell that lies outside.

    ``facet_ends`` [facets, 2, 2] are the ends of each facet in the frame, nan for one that lies
    outside.
    """

    corners: tuple[Float64[np.ndarray, "_ 2"], ...]
    facet_ends: Float64[np.ndarray, "facets 2 2"]


def polygons(
    sides: Iterable[CellSides], facets: Int64[np.ndarray, "facets 2"], frame: Frame
) -> Outlines:
    """The frame (x0, x1, y0, y1) cut by the facets of each cell, and each facet cut by the others.

    ``facets`` are those of the whole diagram, ``sides`` those of each cell. Corners carry the
    rounding of their intersections, some units of 1e-16 of the frame over the sine of the angle.
    Oracle in tests: the cell of every point of a grid.
    """
    corners, ends = [], np.full((len(facets), 2, 2), np.nan)
    for cell, own in enumerate(sides):
        outline, label = cut_frame(own, frame)
        corners.append(outline)
        for n, facet in enumerate(label):
            if facet >= 0 and facets[facet, 0] == cell:
                ends[facet] = outline[n], outline[(n + 1) % len(outline)]
    return Outlines(tuple(corners), ends)


#: The label of a side that is no facet: of the frame, or of a region without a cell.
_NO_FACET = -1


@dataclass(frozen=True, eq=False)
class CellSides:
    """a x + c >= 0 for each side of a cell; ``facet`` is its number, -1 where no cell is beyond."""

    normal: Float64[np.ndarray, "sides dims"]
    offset: Float64[np.ndarray, "sides"]
    facet: Sequence[int]


def cell_sides(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    cells: Enumeration,
    equal: Sequence[Int64[np.ndarray, "_"]] = (),
) -> Iterator[CellSides]:
    """The half-spaces whose intersection each cell is: of its facets, and against ties.

    A facet is the hyperplane of the first expert that only its first cell has and the first that
    only its second has. Where ``equal`` experts tie for the last place is no cell, so no facet
    leads there: a cell holds all of a class, which stay ahead of every expert outside, or none,
    which stay behind every expert inside.
    """
    expert_set, facets, (out, into) = cells.expert_set, cells.facets, cells.exchanged
    normal, offset = weight[out] - weight[into], bias[out] - bias[into]
    sides: list[list[int]] = [[] for _ in expert_set]
    for number, (one, other) in enumerate(facets.tolist()):
        sides[one].append(number)
        sides[other].append(number)
    for cell, own in enumerate(sides):
        sign = np.where(facets[own, 0] == cell, 1.0, -1.0)
        chosen = expert_set[cell]
        outside = np.delete(np.arange(len(weight)), chosen)
        normals, offsets = [sign[:, None] * normal[own]], [sign * offset[own]]
        for one, *_ in equal:
            ahead, behind = ([one], outside) if one in chosen else (chosen, [one])
            normals.append(weight[ahead] - weight[behind])
            offsets.append(bias[ahead] - bias[behind])
        facet = [*own, *[_NO_FACET] * sum(map(len, offsets[1:]))]
        yield CellSides(np.concatenate(normals), np.concatenate(offsets), facet)


def cut_frame(sides: CellSides, frame: Frame) -> tuple[Float64[np.ndarray, "_ 2"], list[int]]:
    """Corners of the frame cut by the sides of a cell, and the facet that begins at each."""
    x0, x1, y0, y1 = frame
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    label = [_NO_FACET] * 4
    each = zip(sides.facet, sides.normal.tolist(), sides.offset.tolist(), strict=True)
    for facet, (a, b), c in each:
        values = [a * x + b * y + c for x, y in corners]
        outline: list[tuple[float, float]] = []
        named: list[int] = []
        for n, (point, value) in enumerate(zip(corners, values, strict=True)):
            following, after = corners[(n + 1) % len(corners)], values[(n + 1) % len(corners)]
            if value >= 0.0:
                outline.append(point)
                named.append(label[n])
            if (value < 0.0) != (after < 0.0):
                t = value / (value - after)
                outline.append(
                    (
                        point[0] + t * (following[0] - point[0]),
                        point[1] + t * (following[1] - point[1]),
                    )
                )
                # where the polygon is left the new side begins, where it is entered the old one
                named.append(facet if value >= 0.0 else label[n])
        corners, label = outline, named
        if not corners:
            break
    return np.array(corners, np.float64).reshape(-1, 2), label


#: Relative width of the bracket that counts as an answer.
_CLOSE = 1e-6

#: Programs that are solved, each in units of the radius that the one before found.
_ROUNDS = 12


def inradii(sides: Iterable[CellSides]) -> list[float]:
    r"""Radius of the largest ball in each cell, :math:`\max r: a_w x + c_w \ge r |a_w|`.

    Linear programs over the sides of the cell (scipy, HiGHS), each around the centre and in units
    of the radius that the one before found, for a solver with an absolute tolerance says nothing
    about what is far smaller or larger than 1. What is kept is the ball around the last centre,
    where the multipliers prove that none is larger by 1e-6; inf where a direction leaves all facets
    behind, which proves balls of any size; nan where neither is proved.
    Source: the Chebyshev centre; oracle in tests: distances of the centre to all pairs of experts,
    and the same cells in other units.
    """
    radii = []
    with np.errstate(all="ignore"):
        for own in sides:
            # of equal rows the one with the larger bias is ahead everywhere: that is no side
            is_side = own.normal.any(axis=1)
            normal, offset = own.normal[is_side], own.offset[is_side]
            length = np.linalg.norm(normal, axis=1)
            radii.append(_inradius(normal / length[:, None], offset / length))
    return radii


def _inradius(
    normal: Float64[np.ndarray, "facets dims"], offset: Float64[np.ndarray, "facets"]
) -> float:
    """The radius of one cell; ``normal`` are unit vectors that point inside."""
    if not (np.isfinite(normal).all() and np.isfinite(offset).all()):
        return float("nan")
    if not len(normal) or _is_wide(normal):
        return float("inf")
    centre = np.zeros(normal.shape[1])
    scale = float(np.abs(offset).max())
    for _ in range(_ROUNDS):
        if not 0.0 < scale < np.inf:
            break
        limits = (offset + normal @ centre) / scale
        # the centre of the ball, from the last centre on, and its radius: both in units of scale
        solved = _widest(-normal, limits, [(None, None)] * (len(centre) + 1))
        if solved is None:
            break
        (*step, radius), multipliers = solved.x, np.maximum(-solved.ineqlin.marginals, 0.0)
        centre = centre + np.array(step) * scale
        inner = float((offset + normal @ centre).min())
        outer = _upper(normal, offset + normal @ centre, multipliers)
        if inner > 0.0 and outer - inner <= _CLOSE * inner:
            return inner
        scale = max(radius * scale, inner) if max(radius * scale, inner) > 0.0 else scale * 2.0**-20
    return float("nan")


def _widest(rows: np.ndarray, limits: np.ndarray, bounds: list[tuple[Any, Any]]) -> Any:
    """The program of the largest r with rows x + r <= limits; None where it has no answer."""
    solved = linprog(
        np.append(np.zeros(rows.shape[1]), -1.0),
        np.column_stack([rows, np.ones(len(rows))]),
        limits,
        bounds=bounds,
        method="highs",
    )
    return solved if solved.status == 0 and np.isfinite(solved.x).all() else None


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
    bounds = [*[(-1.0, 1.0)] * normal.shape[1], (None, 1.0)]
    solved = _widest(-normal, np.zeros(len(normal)), bounds)
    if solved is None:
        return False
    direction = solved.x[:-1]
    return bool((normal @ direction).min() > 1e-12 * np.abs(direction).max(initial=0.0))
