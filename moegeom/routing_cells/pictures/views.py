"""Pictures of cells along a circle, by pixels, of a space and of a plane."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.files import refuse_unwritable
from moegeom.core.registry import unknown_name
from moegeom.core.shapes import Bool, Float64, Int64, Integer, UInt8
from moegeom.core.text import number_of
from moegeom.document import paper
from moegeom.document.chart import (
    INK,
    SIZE,
    SMALL,
    Axis,
    Discs,
    Key,
    Label,
    Picture,
    PicturePage,
    Pixels,
    Polygons,
    Segments,
)
from moegeom.document.colours import parsed
from moegeom.routing_cells.pictures.page import (
    PALE,
    PALETTE,
    CircleCells,
    Legend,
    PlaneCells,
    RasterCells,
    SlicePicture,
    SpaceCells,
    TokenMarks,
    cell_colours,
    expert_set_text,
    frame_axes,
    frame_page,
    legend_of,
    letter_labels,
    percent_text,
    picture_of,
    token_discs,
    token_keys,
)
from moegeom.routing_cells.plane.raster import PixelState
from moegeom.routing_cells.request import CellsRequest

# ------------------------------------------------------------------------------------------- circle
#: Inner and outer radius of the ring, where tokens and names lie, and what the axes show.
_RING, _OUTER, _TOKENS, _NAMES, _EDGE = 0.62, 0.86, (0.9, 1.06), 0.6, 1.08

#: Least distance of two names along the circle, and of an arc that has room for its letter.
_APART, _ROOM = 0.14, 0.12

#: Fraction of the golden section: places tokens of nearly the same angle apart.
_GOLDEN = 0.6180339887498949


def circle_picture(cells: CircleCells, request: CellsRequest) -> Picture:
    """A ring of arcs by expert set, facets with the experts they exchange, tokens outside."""
    sizes, number = cells.stop - cells.start, len(cells.start)
    arcs = np.arange(number)
    around = np.stack([arcs, np.roll(arcs, -1)], 1)[: number if number > 1 else 0]
    colours = cell_colours(cells.expert_sets, around)
    fills = [PALETTE[colour] for colour in colours]
    rings = [_arc(start, stop) for start, stop in zip(cells.start, cells.stop, strict=True)]
    shapes = [Polygons("arcs", rings, fills)]
    if number > 1:
        ends = np.stack([_on_circle(cells.stop, radius) for radius in (_RING, _OUTER)], 1)
        width = float(np.clip(60 / number, 0.1, 0.7))
        shapes += [Segments("facets", ends, width=width), *_facet_names(cells)]
    tokens = None
    if cells.token_angle is not None:
        angle = cells.token_angle
        spread = (np.arange(len(angle)) + 1) * _GOLDEN % 1.0
        radius = _TOKENS[0] + (_TOKENS[1] - _TOKENS[0]) * spread
        is_own = np.zeros(len(angle), bool) if cells.is_own is None else cells.is_own
        tokens = TokenMarks(_on_circle(angle, radius), is_own)
    keys = token_keys(None if cells.is_own is None else tokens, (-_EDGE, _EDGE, -_EDGE, _EDGE))
    legend = legend_of(cells.expert_sets, sizes, colours, *keys, what="arcs")
    middle = _on_circle((cells.start + cells.stop) / 2, (_RING + _OUTER) / 2)
    places = {arc: tuple(middle[arc].tolist()) for arc in legend.letters if sizes[arc] > _ROOM}
    shapes += [*token_discs(tokens), *letter_labels(legend.letters, places)]
    axis, page = Axis("", low=-_EDGE, high=_EDGE), PicturePage(request.width, 1.0, 4.0, 4.0, 4.0)
    return picture_of(cells, request, page, (axis, axis), shapes, legend)


def _on_circle(
    angle: Float64[np.ndarray, "angles"], radius: float | Float64[np.ndarray, "angles"]
) -> Float64[np.ndarray, "angles 2"]:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


def _arc(start: float, stop: float) -> Float64[np.ndarray, "corners 2"]:
    """A piece of the ring, a corner for each degree."""
    angle = np.linspace(start, stop, 2 + int(np.degrees(stop - start)))
    return np.concatenate([_on_circle(angle, _OUTER), _on_circle(angle[::-1], _RING)])


def facet_name(cells: CircleCells, arc: int) -> str:
    """``17|42`` at the end of an arc, experts that leave and that enter; empty for no change."""
    one = set(cells.expert_sets[arc])
    other = set(cells.expert_sets[(arc + 1) % len(cells.expert_sets)])
    out, into = (expert_set_text(tuple(sorted(own))) for own in (one - other, other - one))
    return f"{out}|{into}" if out or into else ""


def _facet_names(cells: CircleCells) -> list[Label]:
    """Names inside the ring, first at the facets between the widest arcs."""
    sizes, labels = cells.stop - cells.start, []
    taken: list[float] = []
    for arc in np.argsort(-np.minimum(sizes, np.roll(sizes, -1)), kind="stable").tolist():
        angle, name = float(cells.stop[arc] % (2 * np.pi)), facet_name(cells, arc)
        gaps = [abs(angle - other) for other in taken]
        is_close = any(min(gap, 2 * np.pi - gap) < _APART for gap in gaps)
        if is_close or not 0 < len(name) <= 16:
            continue
        taken.append(angle)
        place = (_NAMES * np.cos(angle), _NAMES * np.sin(angle))
        is_left = bool(np.cos(angle) < 0)
        turn, side = np.degrees(angle) + 180 * is_left, "left" if is_left else "right"
        labels.append(Label(name, place, float(turn), SMALL - 0.5, side=side))
    return labels


# ------------------------------------------------------------------------------------------- pixels
#: Runs of undecided pixels beyond this are grey without hatching.
_MOST_RUNS = 20_000

#: Pixels that are not decided, below the hatching, and those that a facet crosses.
_OPEN_GREY, _CROSSED_GREY = "#c8c8c8", "#3a3a3a"


def raster_picture(cells: RasterCells, request: CellsRequest) -> Picture:
    """Pixels by expert set; those that a facet crosses are dark, undecided ones hatched."""
    colours, page = raster_colours(cells), frame_page(cells.frame, request)
    is_open = cells.state == PixelState.OPEN
    decided = cells.label[(cells.label >= 0) & ~is_open]
    counts = np.bincount(decided, minlength=len(cells.expert_sets)).astype(np.float64)
    legend = legend_of(
        cells.expert_sets,
        counts,
        colours,
        Key(
            f"crossed by a facet ({(cells.state == PixelState.CROSSED).sum():,} pixels)",
            _CROSSED_GREY,
        ),
        Key(f"not decided ({is_open.sum():,} pixels)", _OPEN_GREY, hatch="////"),
        *token_keys(cells.tokens, cells.frame),
    )
    shapes: list = [Pixels("pixels", _pixels(cells, colours))]
    undecided = runs(is_open)
    if 0 < len(undecided) <= _MOST_RUNS:
        corners, nothing = list(_run_corners(cells, undecided)), ["none"] * len(undecided)
        shapes.append(Polygons("open", corners, nothing, INK, 0.0, "//////"))
    shapes += [*token_discs(cells.tokens), *_raster_letters(cells, page, legend.letters)]
    return picture_of(cells, request, page, frame_axes(cells.frame), shapes, legend)


def raster_colours(cells: RasterCells) -> Int64[np.ndarray, "expert_sets"]:
    """The place in the palette of each expert set; pixels side by side count as neighbours."""
    label = cells.label.astype(np.int64)
    sides = ((label[:, 1:], label[:, :-1]), (label[1:], label[:-1]), (label[:, 2:], label[:, :-2]))
    sides += ((label[2:], label[:-2]),)
    pairs = np.concatenate([np.stack([a.ravel(), b.ravel()], 1) for a, b in sides])
    pairs = pairs[(pairs >= 0).all(1) & (pairs[:, 0] != pairs[:, 1])]
    return cell_colours(cells.expert_sets, np.unique(pairs, axis=0).reshape(-1, 2))


def _pixels(
    cells: RasterCells, colours: Int64[np.ndarray, "expert_sets"]
) -> UInt8[np.ndarray, "height width 3"]:
    table = np.array([parsed(shade) for shade in [*(PALETTE[c] for c in colours), _OPEN_GREY]])
    image = table[np.where(cells.label >= 0, cells.label, len(colours))]
    image[cells.state == PixelState.CROSSED] = parsed(_CROSSED_GREY)
    image[cells.state == PixelState.OPEN] = parsed(_OPEN_GREY)
    return image.astype(np.uint8)


def runs(is_marked: Bool[np.ndarray, "height width"]) -> Int64[np.ndarray, "runs 3"]:
    """Row, first column and column after the last for each run of marked pixels."""
    padded = np.pad(is_marked, ((0, 0), (1, 1))).astype(np.int8)
    step = np.diff(padded, axis=1)
    rows, first = np.nonzero(step == 1)
    return np.stack([rows, first, np.nonzero(step == -1)[1]], 1).astype(np.int64)


def _run_corners(
    cells: RasterCells, undecided: Int64[np.ndarray, "runs 3"]
) -> Float64[np.ndarray, "runs 4 2"]:
    x0, x1, y0, y1 = cells.frame
    height, width = cells.state.shape
    row, *columns = undecided.T
    left, right = (x0 + column * (x1 - x0) / width for column in columns)
    low, high = (y0 + edge * (y1 - y0) / height for edge in (row, row + 1))
    corners = ((left, low), (right, low), (right, high), (left, high))
    return np.stack([np.stack(corner, 1) for corner in corners], 1)


def _raster_letters(cells: RasterCells, page: PicturePage, letters: dict[int, str]) -> list[Label]:
    """Each letter at the pixel deepest inside the expert set's pixels, where there is room."""
    from scipy.ndimage import distance_transform_edt

    x0, x1, y0, y1 = cells.frame
    height, width = cells.state.shape
    places = {}
    for label in letters:
        is_own = np.pad((cells.label == label) & (cells.state != PixelState.OPEN), 1)
        depth = np.asarray(distance_transform_edt(is_own))
        row, column = np.unravel_index(int(depth.argmax()), depth.shape)
        if float(depth[row, column]) * page.drawing[0] / width >= 0.55 * SIZE:
            x, y = (int(column) - 0.5) * (x1 - x0) / width, (int(row) - 0.5) * (y1 - y0) / height
            places[label] = (x0 + x, y0 + y)
    return list(letter_labels(letters, places))


# -------------------------------------------------------------------------------------------- space
#: Points farther from the middle than this many typical distances are drawn nearer.
_FAR = 6.0


def space_picture(cells: SpaceCells, request: CellsRequest) -> Picture:
    """Cells as discs, sized by their tokens or facets, and facets as lines between them."""
    colours = cell_colours(cells.expert_sets, cells.facets)
    (place, is_true), number = near_places(cells), len(cells.place)
    sizes = np.bincount(cells.facets.ravel(), minlength=number).astype(np.float64)
    by_tokens = cells.tokens_inside is not None and bool(cells.tokens_inside.any())
    if by_tokens:
        sizes = np.asarray(cells.tokens_inside, np.float64)
    legend = legend_of(cells.expert_sets, sizes, colours)
    crowd = float(np.sqrt(max(len(cells.facets), 1)))
    most = float(np.clip(900 / np.sqrt(max(number, 1)), 20, 90))
    areas = most / 15 + most * 14 / 15 * sizes / max(float(sizes.max(initial=0.0)), 1e-9)
    width, opacity = float(np.clip(6 / crowd, 0.08, 0.5)), float(np.clip(12 / crowd, 0.12, 0.6))
    places = {cell: tuple(place[cell].tolist()) for cell in legend.letters}
    shapes = [
        Segments("facets", place[cells.facets], width=width, opacity=opacity),
        Discs("cells", place, areas, [PALETTE[colour] for colour in colours], rim=0.3),
        *letter_labels(legend.letters, places),
    ]
    axes = []
    for name, values in zip(("first", "second", "third"), place.T, strict=True):
        low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
        if number:
            low, high = float(values.min()), float(values.max())
        margin = 0.04 * (high - low) or 0.5
        axes.append(Axis(name, low=low - margin, high=high + margin))
    far = "" if is_true else "; far cells drawn nearer"
    subtitle = (
        f"{number_of(number, 'cell')}, sized by {'tokens inside' if by_tokens else 'facets'}, "
        f"{number_of(len(cells.facets), 'facet')}{far}"
    )
    page = PicturePage(request.width, 0.78, left=0.0, right=8.0, bottom=2.0)
    return picture_of(cells, request, page, axes, shapes, legend, subtitle)


def near_places(cells: SpaceCells) -> tuple[Float64[np.ndarray, "cells 3"], bool]:
    """Where the cells are drawn, and whether that is where they are.

    Points within unbounded cells may lie anywhere: where some are more than 6 times as far from the
    middle as half of all, every distance r becomes r / (1 + r / 3 s), s being that of half of all.
    """
    if not len(cells.place):
        return cells.place, True
    middle = np.median(cells.place, axis=0)
    away = cells.place - middle
    radius = np.linalg.norm(away, axis=1)
    typical = float(np.median(radius))
    if typical == 0 or radius.max() <= _FAR * typical:
        return cells.place, True
    return middle + away / (1 + radius / (3 * typical))[:, None], False


# ------------------------------------------------------------------------------------------- plane
#: Names of facets per square inch, and at most.
_NAMES_PER_INCH, _MOST_NAMES = 3.0, 40

#: Where an expert serves, the border of that region, and facets that are none.
_SERVED, _BORDER, _INNER = "#f3c28b", "#d55e00", "#9a9a9a"


def plane_picture(cells: PlaneCells, request: CellsRequest) -> Picture:
    """Polygons by expert set, named facets, and tokens."""
    page = frame_page(cells.frame, request)
    colours = cell_colours(cells.expert_sets, cells.facet_cells)
    fills = [PALETTE[colour] for colour in colours]
    keys = token_keys(cells.tokens, cells.frame)
    legend = legend_of(cells.expert_sets, areas(cells), colours, *keys)
    letters = _letters(cells, page, legend.letters)
    shapes = [
        Polygons("cells", cells.polygons, fills),
        Segments("facets", cells.facet_ends, width=_line_width(cells, page)),
        *token_discs(cells.tokens),
        *_names(cells, page, letters),
        *letters,
    ]
    return picture_of(cells, request, page, frame_axes(cells.frame), shapes, legend)


def expert_picture(cells: PlaneCells, request: CellsRequest) -> Picture:
    """Where one expert serves; the subtitle says how much that is and whether it is convex."""
    expert, page = _expert_of(request, cells.caption.num_experts), frame_page(cells.frame, request)
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
    return picture_of(cells, request, page, axes, shapes, legend, subtitle)


def _expert_of(request: CellsRequest, num_experts: int) -> int:
    """The expert of the view "expert". Raises UsageError where it is none of these."""
    _, expert = request.parsed_view
    if expert is None or not 0 <= expert < num_experts:
        which = "no expert" if expert is None else f"expert {expert}"
        raise UsageError(
            f"The view 'expert' was asked for with {which} of {num_experts}.",
            f"Name one: expert = 0 to {num_experts - 1}.",
        )
    return expert


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
        others = np.delete(barriers, facet, axis=0)
        for share in _PLACES:
            middle = ends[facet, 0] + share * along[facet] + across * (second - first) / 2
            is_beyond = length[facet] * min(share, 1 - share) < half[1]
            if is_beyond or _meets(others, middle, across, half):
                continue
            if (np.abs(_inner(free, middle, across)) <= half).all(-1).any():  # it covers a mark
                continue
            angle = float(np.degrees(np.arctan2(across[1], across[0])))
            place = (float(middle[0]), float(middle[1]))
            names.append(Label("|".join(pair), place, angle, size))
            barriers = np.concatenate([barriers, _corners(middle, across, half)])
            break
    return names


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
    x0, x1, y0, y1 = picture.frame
    whole = (x1 - x0) * (y1 - y0)
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


_View = Callable[[Any, CellsRequest], Picture]

#: What each kind of picture shows, by view.
_VIEWS: Mapping[type, Mapping[str, _View]] = {
    PlaneCells: {"cells": plane_picture, "expert": expert_picture},
    RasterCells: {"cells": raster_picture},
    SpaceCells: {"cells": space_picture},
    CircleCells: {"cells": circle_picture},
}

_HINT = f"Known: {', '.join(paper.ENDINGS)}. --html FILE writes the tables as a page."


def write_picture(cells: SlicePicture, request: CellsRequest) -> None:
    """Writes the picture whole or not at all; equal input gives equal bytes.

    Raises UsageError for a view that this kind of picture has not.
    """
    views, (view, _) = _VIEWS[type(cells)], request.parsed_view
    if view not in views:
        raise unknown_name(f"view of {type(cells).__name__}", view, views)
    assert request.plot is not None
    paper.write_picture(views[view](cells, request), request.plot)


#: Widths of one and of two columns in most journals, and of the narrowest and the widest page, in
#: millimetres.
_ONE_COLUMN, _TWO_COLUMNS, _WIDTHS = 89.0, 183.0, (60.0, 600.0)


def check_picture(request: CellsRequest) -> None:
    """Raises UsageError for an ending, a view or a value that no picture has.

    And for a file that could not be written: before the picture is computed, not after it.
    """
    (view, _), width, dpi = request.parsed_view, request.width, request.dpi
    if not _WIDTHS[0] <= width <= _WIDTHS[1]:
        raise UsageError(
            f"A picture of {width:g} mm was asked for, {_WIDTHS[0]:g} to {_WIDTHS[1]:g} "
            "mm are possible.",
            f"One column is {_ONE_COLUMN:g} mm, two are {_TWO_COLUMNS:g} mm.",
        )
    if not 30 <= dpi <= 2400:
        raise UsageError(
            f"A picture of {dpi} dots per inch was asked for, 30 to 2400 are possible.",
            "Journals want 300 for photographs, 600 to 1200 for lines; SVG and PDF need none.",
        )
    assert request.plot is not None
    paper.refuse_undrawable(request.plot, _HINT)
    refuse_unwritable(request.plot)
    views = sorted({name for views in _VIEWS.values() for name in views})
    if view not in views:
        raise unknown_name("view of a picture", view, views)
