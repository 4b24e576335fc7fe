"""Cells of a plane: all by expert set, those of one expert, the surface of the largest logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Integer
from moegeom.core.text import number_of
from moegeom.document.chart import (
    INK,
    SIZE,
    SMALL,
    Axis,
    Key,
    Label,
    Picture,
    PicturePage,
    Polygons,
    Segments,
)
from moegeom.routing_cells.pictures.page import (
    PALE,
    PALETTE,
    Legend,
    cell_colours,
    frame_axes,
    frame_page,
    legend_of,
    letter_labels,
    percent_text,
    picture_of,
    shaded,
    token_discs,
    token_keys,
)
from moegeom.routing_cells.pictures.records import Frame, PictureOptions, PlaneCells

#: Names of facets per square inch, and at most.
_NAMES_PER_INCH, _MOST_NAMES = 3.0, 40

#: Where an expert serves, the border of that region, and facets that are none.
_SERVED, _BORDER, _INNER = "#f3c28b", "#d55e00", "#9a9a9a"


def plane_picture(cells: PlaneCells, options: PictureOptions) -> Picture:
    """Polygons by expert set, named facets, tokens, and the strip along the facets."""
    page = frame_page(cells.frame, options)
    colours = cell_colours(cells.expert_sets, cells.facet_cells)
    fills = [PALETTE[colour] for colour in colours]
    keys, polygons = (
        token_keys(cells.tokens, cells.frame),
        [Polygons("cells", cells.polygons, fills)],
    )
    if options.band:
        inner = [eroded(polygon, cells.frame, options.band) for polygon in cells.polygons]
        strips = Polygons("bands", cells.polygons, [shaded(fill) for fill in fills])
        polygons = [strips, Polygons("cells", inner, fills)]
        keys = (Key(f"within {options.band:g} of a facet", shaded(PALE)), *keys)
    legend = legend_of(cells.expert_sets, areas(cells), colours, *keys)
    letters = _letters(cells, page, legend.letters)
    shapes = [
        *polygons,
        Segments("facets", cells.facet_ends, width=_line_width(cells, page)),
        *token_discs(cells.tokens),
        *_names(cells, page, letters),
        *letters,
    ]
    return picture_of(cells, options, page, frame_axes(cells.frame), shapes, legend)


def expert_picture(cells: PlaneCells, options: PictureOptions) -> Picture:
    """Where one expert serves; the subtitle says how much that is and whether it is convex."""
    expert, page = options.expert_of(cells.caption.num_experts), frame_page(cells.frame, options)
    region = region_of(cells, expert)
    served, ends, thin = region.is_served, cells.facet_ends, _line_width(cells, page)
    is_border = served[cells.facet_cells].sum(1) == 1
    shapes = [
        Polygons("cells", cells.polygons, [_SERVED if own else PALE for own in served]),
        Segments("facets", ends[~is_border], _INNER, 0.8 * thin),
        Segments("border", ends[is_border], _BORDER, 1.2),
    ]
    if region.is_convex is False:
        around = np.stack([region.hull, np.roll(region.hull, -1, axis=0)], 1)
        shapes.append(Segments("hull", around, width=0.6, is_dashed=True))
    keys = (Key(f"expert {expert} serves", _SERVED), Key("it does not", PALE))
    legend = Legend("", (*keys, *token_keys(cells.tokens, cells.frame)), {})
    shapes += token_discs(cells.tokens)
    axes, subtitle = frame_axes(cells.frame), _region_text(region, expert)
    return picture_of(cells, options, page, axes, shapes, legend, subtitle)


def _region_text(region: Region, expert: int) -> str:
    """``expert 17 serves in 12 cells, 23 % of the frame, a convex region``."""
    if region.is_convex is None:
        return f"expert {expert} serves in no cell of the frame"
    shape = "a convex region" if region.is_convex else "not a convex region"
    if region.pieces > 1:
        shape += f", in {number_of(region.pieces, 'piece')}"
    return (
        f"expert {expert} serves in {number_of(region.is_served.sum(), 'cell')}, "
        f"{percent_text(min(region.share, 1.0))} of the frame, {shape}"
    )


def tropical_picture(cells: PlaneCells, options: PictureOptions) -> Picture:
    """The surface of the sum of the k largest logits, above its cells."""
    colours = cell_colours(cells.expert_sets, cells.facet_cells)
    rows = [row for row, polygon in enumerate(cells.polygons) if len(polygon) > 2]
    lifted = [
        np.column_stack([p := cells.polygons[row], p @ cells.gradient[row] + cells.offset[row]])
        for row in rows
    ]
    low = min((float(corners[:, 2].min()) for corners in lifted), default=0.0)
    high = max((float(corners[:, 2].max()) for corners in lifted), default=1.0)
    floor = low - 0.45 * max(high - low, 1e-12)
    below = [np.column_stack([p[:, :2], np.full(len(p), floor)]) for p in lifted]
    fills = [PALETTE[colours[row]] for row in rows]
    width = float(np.clip(6 / np.sqrt(max(len(rows), 1)), 0.05, 0.4))
    x0, x1, y0, y1 = cells.frame
    axes = (
        Axis("first", low=x0, high=x1),
        Axis("second", low=y0, high=y1),
        Axis("sum of logits", low=floor, high=max(high, floor + 1e-9)),
    )
    shapes = [
        Polygons("floor", below, fills, INK, width),
        Polygons("surface", lifted, fills, INK, width),
    ]
    legend = legend_of(cells.expert_sets, areas(cells), colours)
    subtitle = f"sum of the {cells.caption.top_k} largest logits over its cells"
    page = PicturePage(options.width, 0.78, left=0.0, right=8.0, bottom=2.0)
    return picture_of(cells, options, page, axes, shapes, legend, subtitle)


# --------------------------------------------------------------------------- names and letters
def _line_width(cells: PlaneCells, page: PicturePage) -> float:
    """Thinner lines the more facets there are, so that cells remain to be seen."""
    crowd = float(np.sqrt(max(len(cells.facet_ends), 1)) / page.drawing[0])
    return float(np.clip(0.035 / max(crowd, 1e-9), 0.08, 0.7))


def _to_page(
    cells: PlaneCells, page: PicturePage
) -> tuple[Float64[np.ndarray, "2"], Float64[np.ndarray, "2"]]:
    """Origin and points per unit."""
    x0, x1, y0, y1 = cells.frame
    return np.array([x0, y0], np.float64), np.array(page.drawing) / np.array([x1 - x0, y1 - y0])


def _letters(cells: PlaneCells, page: PicturePage, letters: dict[int, str]) -> list[Label]:
    """The letter of each named cell at its centre, where there is room."""
    origin, scale = _to_page(cells, page)
    places = {}
    for cell in letters:
        polygon = (cells.polygons[cell] - origin) * scale
        middle = centre(polygon)
        if room(polygon, middle) >= 0.55 * SIZE:
            places[cell] = tuple((middle / scale + origin).tolist())
    return list(letter_labels(letters, places))


def _names(cells: PlaneCells, page: PicturePage, letters: list[Label]) -> list[Label]:
    """Names of facets that cross no other facet, letter or token."""
    (origin, scale), (width, height) = _to_page(cells, page), page.drawing
    ends = (cells.facet_ends - origin) * scale
    # from each facet away from its first cell
    centres = [p.mean(0) if len(p) else np.full(2, np.nan) for p in cells.polygons]
    first = np.array(centres, np.float64).reshape(-1, 2)[cells.facet_cells[:, 0]]
    towards = np.nan_to_num(ends.mean(1) - (first - origin) * scale)
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64)
    places = np.array([label.place for label in letters], np.float64).reshape(-1, 1, 2)
    reach = 0.4 * SIZE / scale
    around = places + [(x, y) for x in (-reach[0], 0, reach[0]) for y in (-reach[1], 0, reach[1])]
    free = [around.reshape(-1, 2)]
    if cells.tokens is not None:  # those in their own cell, and all where they are few
        tokens = cells.tokens
        free.append(tokens.place if len(tokens.place) <= 300 else tokens.place[tokens.is_own])
    names = facet_names(
        ends,
        towards,
        cells.facet_out,
        cells.facet_into,
        np.stack([corners, np.roll(corners, -1, axis=0)], 1),
        (np.concatenate(free) - origin) * scale,
        SMALL - 0.5,
        min(_MOST_NAMES, int(_NAMES_PER_INCH * width * height / 72**2)),
    )
    return [
        dataclasses.replace(name, place=tuple((np.array(name.place) / scale + origin).tolist()))
        for name in names
    ]


# ------------------------------------------------------------------------------------ facet names
#: Advance of a digit and of the bar, and the height of digits, in units of the size of type.
_DIGIT, _BAR, _HEIGHT = 0.636, 0.337, 0.73

#: Where on a facet a name is tried, as shares of its length.
_PLACES = (0.5, 0.35, 0.65, 0.22, 0.78)


def facet_names(
    ends: Float64[np.ndarray, "facets 2 2"],
    towards: Float64[np.ndarray, "facets 2"],
    out: Integer[np.ndarray, "facets"],
    into: Integer[np.ndarray, "facets"],
    edges: Float64[np.ndarray, "edges 2 2"],
    free: Float64[np.ndarray, "marks 2"],
    size: float,
    most: int,
) -> list[Label]:
    """At most so many names ``17|42``, longest facets first, that cross no facet, name or mark.

    The bar lies on the facet, each expert on the side where it serves. All lengths are in points of
    the page. ``towards`` points from the side of ``out`` to that of ``into``; a name is turned so
    that it is not upside down. No name crosses the ``edges`` or covers a point of ``free``.
    """
    along = ends[:, 1] - ends[:, 0]
    length = np.hypot(along[:, 0], along[:, 1])
    names: list[Label] = []
    barriers = np.concatenate([ends, edges])
    for facet in np.argsort(-length, kind="stable")[: 8 * most].tolist():
        if len(names) == most or length[facet] < 2 * _HEIGHT * size:
            break
        across = np.array([along[facet, 1], -along[facet, 0]]) / length[facet]
        across = across if across @ towards[facet] >= 0 else -across
        pair = (str(out[facet]), str(into[facet]))
        if across[0] < -1e-9 or (abs(across[0]) <= 1e-9 and across[1] < 0):
            across, pair = -across, pair[::-1]
        first, second = (_DIGIT * size * len(number) for number in pair)
        half = np.array([(first + second + _BAR * size) / 2, _HEIGHT * size / 2]) + 0.25 * size
        is_near = _near(barriers, ends[facet], 2 * float(half.sum()))
        is_near[facet] = False
        near = barriers[is_near]
        for share in _PLACES:
            middle = ends[facet, 0] + share * along[facet] + across * (second - first) / 2
            is_beyond = length[facet] * min(share, 1 - share) < half[1]
            if is_beyond or _meets(near, middle, across, half):
                continue
            if _covers(free, middle, across, half):
                continue
            angle = float(np.degrees(np.arctan2(across[1], across[0])))
            place = (float(middle[0]), float(middle[1]))
            names.append(Label("|".join(pair), place, angle, size))
            barriers = np.concatenate([barriers, _corners(middle, across, half)])
            break
    return names


def _near(
    segments: Float64[np.ndarray, "all 2 2"], facet: Float64[np.ndarray, "2 2"], reach: float
) -> Bool[np.ndarray, "all"]:
    """Segments whose box comes within ``reach`` of that of a facet."""
    low, high = facet.min(0) - reach, facet.max(0) + reach
    one, other = segments[:, 0], segments[:, 1]
    return ((np.maximum(one, other) >= low) & (np.minimum(one, other) <= high)).all(1)


def _inner(
    points: Float64[np.ndarray, "*any 2"],
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
) -> Float64[np.ndarray, "*any 2"]:
    """Coordinates along and across a text."""
    x, y = points[..., 0] - middle[0], points[..., 1] - middle[1]
    return np.stack([across[0] * x + across[1] * y, across[0] * y - across[1] * x], -1)


def _corners(
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
    half: Float64[np.ndarray, "2"],
) -> Float64[np.ndarray, "4 2 2"]:
    """The four sides of the box around a text."""
    other = np.array([-across[1], across[0]])
    signs = ((1, 1), (-1, 1), (-1, -1), (1, -1))
    corners = np.array([middle + s * half[0] * across + t * half[1] * other for s, t in signs])
    return np.stack([corners, np.roll(corners, -1, axis=0)], 1)


def _covers(
    points: Float64[np.ndarray, "marks 2"],
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
    half: Float64[np.ndarray, "2"],
) -> bool:
    return bool((np.abs(_inner(points, middle, across)) <= half).all(-1).any())


def _meets(
    segments: Float64[np.ndarray, "facets 2 2"],
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
    half: Float64[np.ndarray, "2"],
) -> bool:
    """Whether a segment meets the box: the shares of it within both strips overlap."""
    inner = _inner(segments, middle, across)
    start, step = inner[:, 0], inner[:, 1] - inner[:, 0]
    is_level = step == 0
    safe = np.where(is_level, 1.0, step)
    one, other = (-half - start) / safe, (half - start) / safe
    is_outside: Bool[np.ndarray, "facets"] = (is_level & (np.abs(start) > half)).any(1)
    enter = np.where(is_level, -np.inf, np.minimum(one, other)).max(1)
    leave = np.where(is_level, np.inf, np.maximum(one, other)).min(1)
    return bool((~is_outside & (np.maximum(enter, 0) <= np.minimum(leave, 1))).any())


# --------------------------------------------------------------------------------------- polygons
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
    """Corners of the convex hull, counter-clockwise; none of points that span no area."""
    from scipy.spatial import ConvexHull, QhullError

    try:
        return points[ConvexHull(points).vertices]
    except QhullError:  # on a line, but for rounding
        return points[:0]


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
