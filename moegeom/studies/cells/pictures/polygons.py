"""Areas, centres and strips of convex polygons, and whether a union of them is convex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from moegeom.studies.cells.pictures.records import Frame, PlaneCells

#: Share of the frame by which a convex region may miss its hull: rounding of the corners.
_ROUNDING = 1e-9


def frame_area(frame: Frame) -> float:
    """Width times height."""
    return (frame[1] - frame[0]) * (frame[3] - frame[2])


def area(polygon: Float64[np.ndarray, "corners 2"]) -> float:
    """Positive for corners that run counter-clockwise; 0 for fewer than three."""
    if len(polygon) < 3:
        return 0.0
    x, y = (polygon - polygon[0]).T
    return 0.5 * float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)))


def areas(picture: PlaneCells) -> Float64[np.ndarray, "cells"]:
    """The area of each cell within the frame."""
    return np.array([area(polygon) for polygon in picture.polygons], np.float64)


def centre(polygon: Float64[np.ndarray, "corners 2"]) -> Float64[np.ndarray, "2"]:
    """The centre of mass, within a convex polygon; the mean corner where there is no area."""
    whole = area(polygon)
    if whole <= 0:
        return polygon.mean(0)
    x, y = (polygon - polygon[0]).T
    turn = x * np.roll(y, -1) - y * np.roll(x, -1)
    sums = np.array([np.sum((v + np.roll(v, -1)) * turn) for v in (x, y)])
    return polygon[0] + sums / (6 * whole)


def room(polygon: Float64[np.ndarray, "corners 2"], point: Float64[np.ndarray, "2"]) -> float:
    """The distance from a point inside to the nearest edge; 0 for no polygon."""
    if len(polygon) < 3:
        return 0.0
    normal, offset = _edges(polygon)
    return float(np.min(offset - normal @ point))


def _edges(
    polygon: Float64[np.ndarray, "corners 2"],
) -> tuple[Float64[np.ndarray, "corners 2"], Float64[np.ndarray, "corners"]]:
    """Outward unit normals and offsets; edges without length are at infinity."""
    along = np.roll(polygon, -1, axis=0) - polygon
    length = np.hypot(along[:, 0], along[:, 1])
    normal = np.stack([along[:, 1], -along[:, 0]], 1) / np.where(length > 0, length, 1.0)[:, None]
    return normal, np.where(length > 0, np.sum(normal * polygon, 1), np.inf)


def eroded(
    polygon: Float64[np.ndarray, "corners 2"], frame: Frame, band: float
) -> Float64[np.ndarray, "rest 2"]:
    """The points of a cell at least ``band`` from its facets; the edge of the frame is no facet."""
    normal, offset = _edges(polygon)
    slack = 1e-9 * max(frame[1] - frame[0], frame[3] - frame[2])
    middle = (polygon + np.roll(polygon, -1, axis=0)) / 2
    is_frame = np.zeros(len(polygon), bool)
    for axis, limits in ((0, frame[:2]), (1, frame[2:])):
        is_straight = np.abs(normal[:, axis]) > 1 - 1e-12
        is_frame |= is_straight & (np.abs(middle[:, axis, None] - limits).min(1) <= slack)
    rest = polygon
    for n, c in zip(normal[~is_frame], offset[~is_frame] - band, strict=True):
        if np.isfinite(c) and len(rest):
            rest = _clipped(rest, n, float(c))
    return rest


def _clipped(
    polygon: Float64[np.ndarray, "corners 2"], normal: Float64[np.ndarray, "2"], offset: float
) -> Float64[np.ndarray, "rest 2"]:
    """The part with normal . x <= offset."""
    beyond = polygon @ normal - offset
    if (beyond <= 0).all():
        return polygon
    kept = []
    for i, side in enumerate(beyond):
        before = beyond[i - 1]
        if (side > 0) != (before > 0):
            kept.append(polygon[i - 1] + before / (before - side) * (polygon[i] - polygon[i - 1]))
        if side <= 0:
            kept.append(polygon[i])
    return np.array(kept, np.float64).reshape(-1, 2)


def hull(points: Float64[np.ndarray, "points 2"]) -> Float64[np.ndarray, "corners 2"]:
    """Corners of the convex hull, counter-clockwise [Andrew's chain]."""
    ordered = sorted(set(map(tuple, points.tolist())))
    if len(ordered) < 3:
        return np.array(ordered, np.float64).reshape(-1, 2)
    below, above = _chain(ordered), _chain(ordered[::-1])
    return np.array(below[:-1] + above[:-1], np.float64)


def _chain(ordered: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    chain: list[tuple[float, ...]] = []
    for point in ordered:
        while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
            chain.pop()
        chain.append(point)
    return chain


def _turn(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@dataclass(frozen=True, eq=False)
class Region:
    """Where an expert serves, within the frame: its cells, their area and the hull around them.

    ``pieces`` counts what hangs together through facets. The region is convex when it fills its
    hull, up to 1e-9 of the frame; ``is_convex`` is None where the expert serves nowhere.
    """

    is_served: Bool[np.ndarray, "cells"]
    share: float
    hull: Float64[np.ndarray, "corners 2"]
    is_convex: bool | None
    pieces: int


def region_of(picture: PlaneCells, expert: int) -> Region:
    """The region of an expert: the union of the cells whose expert set has it."""
    sizes = areas(picture)
    is_served = np.array([expert in c for c in picture.expert_sets], bool) & (sizes > 0)
    whole = frame_area(picture.frame)
    if not is_served.any():
        return Region(is_served, 0.0, np.zeros((0, 2)), None, 0)
    corners = hull(np.concatenate([picture.polygons[cell] for cell in np.flatnonzero(is_served)]))
    served = float(sizes[is_served].sum())
    is_convex = area(corners) - served <= _ROUNDING * whole
    return Region(is_served, served / whole, corners, is_convex, _pieces(picture, is_served))


def _pieces(picture: PlaneCells, is_served: Bool[np.ndarray, "cells"]) -> int:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    inner = picture.facet_cells[is_served[picture.facet_cells].all(1)]
    size = len(is_served)
    graph = coo_array((np.ones(len(inner)), (inner[:, 0], inner[:, 1])), (size, size))
    return int(connected_components(graph, directed=False)[0]) - int((~is_served).sum())
