"""Cells of a plane: all by expert set, those of one expert, the surface of the largest logits."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float64

from moegeom.core.text import number_of
from moegeom.document.chart import (
    INK,
    SIZE,
    SMALL,
    Axis,
    Key,
    Label,
    Page,
    Picture,
    Polygons,
    Segments,
)
from moegeom.studies.cells.pictures.caption import percent_text
from moegeom.studies.cells.pictures.facet_names import facet_names
from moegeom.studies.cells.pictures.legend import (
    PALE,
    PALETTE,
    Legend,
    cell_colours,
    frame_axes,
    frame_page,
    legend_of,
    letter_labels,
    picture_of,
    shaded,
    token_discs,
    token_keys,
)
from moegeom.studies.cells.pictures.polygons import Region, areas, centre, eroded, region_of, room
from moegeom.studies.cells.pictures.records import PictureOptions, PlaneCells

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
    page = Page(options.width, 0.78, left=0.0, right=8.0, bottom=2.0)
    return picture_of(cells, options, page, axes, shapes, legend, subtitle)


# --------------------------------------------------------------------------- names and letters
def _line_width(cells: PlaneCells, page: Page) -> float:
    """Thinner lines the more facets there are, so that cells remain to be seen."""
    crowd = float(np.sqrt(max(len(cells.facet_ends), 1)) / page.drawing[0])
    return float(np.clip(0.035 / max(crowd, 1e-9), 0.08, 0.7))


def _to_page(
    cells: PlaneCells, page: Page
) -> tuple[Float64[np.ndarray, "2"], Float64[np.ndarray, "2"]]:
    """Origin and points per unit."""
    x0, x1, y0, y1 = cells.frame
    return np.array([x0, y0], np.float64), np.array(page.drawing) / np.array([x1 - x0, y1 - y0])


def _letters(cells: PlaneCells, page: Page, letters: dict[int, str]) -> list[Label]:
    """The letter of each named cell at its centre, where there is room."""
    origin, scale = _to_page(cells, page)
    places = {}
    for cell in letters:
        polygon = (cells.polygons[cell] - origin) * scale
        middle = centre(polygon)
        if room(polygon, middle) >= 0.55 * SIZE:
            places[cell] = tuple((middle / scale + origin).tolist())
    return list(letter_labels(letters, places))


def _names(cells: PlaneCells, page: Page, letters: list[Label]) -> list[Label]:
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
