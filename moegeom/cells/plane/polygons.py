"""Cells in the plane as polygons inside a frame, and the pieces of their walls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int16, Int64

from moegeom.cells.graph.wall_graph import exchanged

Frame = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Polygons:
    """Counter-clockwise corners of each cell in the frame; none of a cell that lies outside.

    ``wall_ends`` [walls, 2, 2] are the ends of each wall in the frame, nan for one that lies
    outside.
    """

    corners: tuple[Float64[np.ndarray, "_ 2"], ...]
    wall_ends: Float64[np.ndarray, "walls 2 2"]


def polygons(
    weight: Float64[np.ndarray, "experts 2"],
    bias: Float64[np.ndarray, "experts"],
    coalition: Int16[np.ndarray, "cells k"],
    walls: Int64[np.ndarray, "walls 2"],
    frame: Frame,
) -> Polygons:
    """The frame (x0, x1, y0, y1) cut by the walls of each cell, and each wall cut by the others.

    ``walls`` are those of the whole diagram: a cell is the intersection of the half-planes of its
    own. Corners carry the rounding of their intersections, some units of 1e-16 of the frame over
    the sine of the angle. Oracle in tests: the cell of every point of a grid.
    """
    normal, offset = half_planes(weight, bias, coalition, walls)
    sides: list[list[int]] = [[] for _ in coalition]
    for number, (one, other) in enumerate(walls.tolist()):
        sides[one].append(number)
        sides[other].append(number)
    corners, ends = [], np.full((len(walls), 2, 2), np.nan)
    for cell, own in enumerate(sides):
        found, label = _cut(cell, own, walls, normal, offset, frame)
        corners.append(found)
        for n, wall in enumerate(label):
            if wall >= 0 and walls[wall, 0] == cell:
                ends[wall] = found[n], found[(n + 1) % len(found)]
    return Polygons(tuple(corners), ends)


def half_planes(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    coalition: Int16[np.ndarray, "cells k"],
    walls: Int64[np.ndarray, "walls 2"],
) -> tuple[Float64[np.ndarray, "walls dims"], Float64[np.ndarray, "walls"]]:
    """a and c of each wall: a x + c is positive in its first cell and negative in its second.

    The first expert that only the first cell has against the first that only the second has.
    """
    out, into = exchanged(coalition, walls)
    return weight[out] - weight[into], bias[out] - bias[into]


def _cut(
    cell: int,
    own: list[int],
    walls: Int64[np.ndarray, "walls 2"],
    normal: Float64[np.ndarray, "walls 2"],
    offset: Float64[np.ndarray, "walls"],
    frame: Frame,
) -> tuple[Float64[np.ndarray, "_ 2"], list[int]]:
    """Corners of one cell, and the wall that begins at each; -1 for a side of the frame."""
    x0, x1, y0, y1 = frame
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    label = [-1] * 4
    for wall in own:
        sign = 1.0 if walls[wall, 0] == cell else -1.0
        a, b, c = sign * normal[wall, 0], sign * normal[wall, 1], sign * offset[wall]
        values = [a * x + b * y + c for x, y in corners]
        kept: list[tuple[float, float]] = []
        named: list[int] = []
        for n, (point, value) in enumerate(zip(corners, values, strict=True)):
            following, after = corners[(n + 1) % len(corners)], values[(n + 1) % len(corners)]
            if value >= 0.0:
                kept.append(point)
                named.append(label[n])
            if (value < 0.0) != (after < 0.0):
                t = value / (value - after)
                kept.append(
                    (
                        point[0] + t * (following[0] - point[0]),
                        point[1] + t * (following[1] - point[1]),
                    )
                )
                # where the polygon is left the new side begins, where it is entered the old one
                named.append(wall if value >= 0.0 else label[n])
        corners, label = kept, named
        if not corners:
            break
    return np.array(corners, np.float64).reshape(-1, 2), label
