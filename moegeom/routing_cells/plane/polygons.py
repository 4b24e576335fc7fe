"""Sides of cells, and their polygons in a frame of the plane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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
