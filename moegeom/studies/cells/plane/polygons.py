"""Cells in the plane as polygons inside a frame, and the pieces of their facets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int16, Int64

from moegeom.studies.cells.graph.facet_graph import swaps

Frame = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Polygons:
    """Counter-clockwise corners of each cell in the frame; none of a cell that lies outside.

    ``facet_ends`` [facets, 2, 2] are the ends of each facet in the frame, nan for one that lies
    outside.
    """

    corners: tuple[Float64[np.ndarray, "_ 2"], ...]
    facet_ends: Float64[np.ndarray, "facets 2 2"]


def polygons(
    weight: Float64[np.ndarray, "experts 2"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    facets: Int64[np.ndarray, "facets 2"],
    frame: Frame,
) -> Polygons:
    """The frame (x0, x1, y0, y1) cut by the facets of each cell, and each facet cut by the others.

    ``facets`` are those of the whole diagram: a cell is the intersection of the half-planes of its
    own. Corners carry the rounding of their intersections, some units of 1e-16 of the frame over
    the sine of the angle. Oracle in tests: the cell of every point of a grid.
    """
    normal, offset = half_planes(weight, bias, expert_set, facets)
    sides: list[list[int]] = [[] for _ in expert_set]
    for number, (one, other) in enumerate(facets.tolist()):
        sides[one].append(number)
        sides[other].append(number)
    corners, ends = [], np.full((len(facets), 2, 2), np.nan)
    for cell, own in enumerate(sides):
        found, label = _cut(cell, own, facets, normal, offset, frame)
        corners.append(found)
        for n, facet in enumerate(label):
            if facet >= 0 and facets[facet, 0] == cell:
                ends[facet] = found[n], found[(n + 1) % len(found)]
    return Polygons(tuple(corners), ends)


def half_planes(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Int16[np.ndarray, "cells k"],
    facets: Int64[np.ndarray, "facets 2"],
) -> tuple[Float64[np.ndarray, "facets dims"], Float64[np.ndarray, "facets"]]:
    """a and c of each facet: a x + c is positive in its first cell and negative in its second.

    The first expert that only the first cell has against the first that only the second has.
    """
    out, into = swaps(expert_set, facets).first
    return weight[out] - weight[into], bias[out] - bias[into]


def _cut(
    cell: int,
    own: list[int],
    facets: Int64[np.ndarray, "facets 2"],
    normal: Float64[np.ndarray, "facets 2"],
    offset: Float64[np.ndarray, "facets"],
    frame: Frame,
) -> tuple[Float64[np.ndarray, "_ 2"], list[int]]:
    """Corners of one cell, and the facet that begins at each; -1 for a side of the frame."""
    x0, x1, y0, y1 = frame
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    label = [-1] * 4
    for facet in own:
        sign = 1.0 if facets[facet, 0] == cell else -1.0
        a, b, c = sign * normal[facet, 0], sign * normal[facet, 1], sign * offset[facet]
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
                named.append(facet if value >= 0.0 else label[n])
        corners, label = kept, named
        if not corners:
            break
    return np.array(corners, np.float64).reshape(-1, 2), label
