"""Cells along a circle, of any router by pixels, and of a space as a graph."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64, UInt8
from moegeom.core.text import number_of
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
    PALETTE,
    cell_colours,
    frame_axes,
    frame_page,
    legend_of,
    letter_labels,
    picture_of,
    token_discs,
    token_keys,
)
from moegeom.routing_cells.pictures.records import (
    CircleCells,
    PictureOptions,
    RasterCells,
    SpaceCells,
    TokenMarks,
    expert_set_text,
)
from moegeom.routing_cells.plane.raster_frame import PixelState

# ------------------------------------------------------------------------------------------- circle
#: Inner and outer radius of the ring, where tokens and names lie, and what the axes show.
_INNER, _OUTER, _TOKENS, _NAMES, _EDGE = 0.62, 0.86, (0.9, 1.06), 0.6, 1.08

#: Least distance of two names along the circle, and of an arc that has room for its letter.
_APART, _ROOM = 0.14, 0.12

#: Fraction of the golden section: places tokens of nearly the same angle apart.
_GOLDEN = 0.6180339887498949


def circle_picture(cells: CircleCells, options: PictureOptions) -> Picture:
    """A ring of arcs by expert set, facets with the experts they exchange, tokens outside."""
    sizes, number = cells.stop - cells.start, len(cells.start)
    arcs = np.arange(number)
    around = np.stack([arcs, np.roll(arcs, -1)], 1)[: number if number > 1 else 0]
    colours = cell_colours(cells.expert_sets, around)
    fills = [PALETTE[colour] for colour in colours]
    rings = [_arc(start, stop) for start, stop in zip(cells.start, cells.stop, strict=True)]
    shapes = [Polygons("arcs", rings, fills)]
    if number > 1:
        ends = np.stack([_on_circle(cells.stop, radius) for radius in (_INNER, _OUTER)], 1)
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
    middle = _on_circle((cells.start + cells.stop) / 2, (_INNER + _OUTER) / 2)
    places = {arc: tuple(middle[arc].tolist()) for arc in legend.letters if sizes[arc] > _ROOM}
    shapes += [*token_discs(tokens), *letter_labels(legend.letters, places)]
    axis, page = Axis("", low=-_EDGE, high=_EDGE), PicturePage(options.width, 1.0, 4.0, 4.0, 4.0)
    return picture_of(cells, options, page, (axis, axis), shapes, legend)


def _on_circle(
    angle: Float64[np.ndarray, "angles"], radius: float | Float64[np.ndarray, "angles"]
) -> Float64[np.ndarray, "angles 2"]:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


def _arc(start: float, stop: float) -> Float64[np.ndarray, "corners 2"]:
    """A piece of the ring, a corner for each degree."""
    angle = np.linspace(start, stop, 2 + int(np.degrees(stop - start)))
    return np.concatenate([_on_circle(angle, _OUTER), _on_circle(angle[::-1], _INNER)])


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


def raster_picture(cells: RasterCells, options: PictureOptions) -> Picture:
    """Pixels by expert set; those that a facet crosses are dark, undecided ones hatched."""
    colours, page = raster_colours(cells), frame_page(cells.frame, options)
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
        corners, nothing = list(_corners(cells, undecided)), ["none"] * len(undecided)
        shapes.append(Polygons("open", corners, nothing, INK, 0.0, "//////"))
    shapes += [*token_discs(cells.tokens), *_raster_letters(cells, page, legend.letters)]
    return picture_of(cells, options, page, frame_axes(cells.frame), shapes, legend)


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


def _corners(
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


def space_picture(cells: SpaceCells, options: PictureOptions) -> Picture:
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
    page = PicturePage(options.width, 0.78, left=0.0, right=8.0, bottom=2.0)
    return picture_of(cells, options, page, axes, shapes, legend, subtitle)


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
