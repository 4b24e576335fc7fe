"""Cells of a plane on a page: all of them by expert set, or those of one expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moegeom.core.text import number_of
from moegeom.studies.cells.pictures._caption import percent_text
from moegeom.studies.cells.pictures._legend import (
    ACCENT,
    INK,
    PALE,
    PALETTE,
    Legend,
    LegendEntry,
    cell_colours,
    legend_of,
    shaded,
    token_entries,
    with_entries,
)
from moegeom.studies.cells.pictures._page import (
    SIZE,
    SMALL,
    Space,
    add_facets,
    add_polygons,
    add_tokens,
    frame_axes,
    frame_ratio,
    new_page,
    page_box,
)
from moegeom.studies.cells.pictures._picture import (
    Frame,
    PictureOptions,
    PlaneCells,
    requested_expert,
)
from moegeom.studies.cells.pictures._polygons import (
    Region,
    areas,
    centre,
    eroded,
    region_of,
    room,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Names of facets per square inch, and at most.
_NAMES_PER_INCH, _MOST_NAMES = 3.0, 40

_SERVED = "#f3c28b"


def draw_cells(picture: PlaneCells, options: PictureOptions) -> Figure:
    """Polygons by expert set, named facets, tokens, and the strip along the facets."""
    sizes = areas(picture)
    colours = cell_colours(picture.expert_sets, picture.facet_cells)
    legend = legend_of(picture.expert_sets, sizes, colours)
    legend = with_entries(legend, *_band_entry(options), *token_entries(picture))
    figure, axes = new_page(picture, options, legend, Space(frame_ratio(picture.frame)))
    fills = [PALETTE[colour] for colour in colours]
    if options.band:
        add_polygons(axes, picture.polygons, [shaded(fill) for fill in fills], "bands")
        inner = [eroded(p, picture.frame, options.band) for p in picture.polygons]
        add_polygons(axes, inner, fills, "cells")
    else:
        add_polygons(axes, picture.polygons, fills, "cells")
    add_facets(axes, picture.facet_ends, INK, _line_width(axes, picture), "facets")
    frame_axes(axes, picture.frame)
    add_tokens(axes, picture.tokens)
    letters = _add_letters(axes, picture, legend.letters)
    _add_names(axes, picture, letters)
    return figure


def draw_expert(picture: PlaneCells, options: PictureOptions) -> Figure:
    """Where one expert serves; the title says how much that is and whether it is convex."""
    expert = requested_expert(options, picture.caption.num_experts)
    region = region_of(picture, expert)
    entries = [LegendEntry(f"expert {expert} serves", _SERVED), LegendEntry("it does not", PALE)]
    legend = Legend("", (*entries, *token_entries(picture)), {})
    title = _region_text(region, expert)
    figure, axes = new_page(picture, options, legend, Space(frame_ratio(picture.frame)), title)
    served = region.is_served
    add_polygons(axes, picture.polygons, [_SERVED if own else PALE for own in served], "cells")
    is_border = served[picture.facet_cells].sum(1) == 1
    thin = _line_width(axes, picture)
    add_facets(axes, picture.facet_ends[~is_border], "#9a9a9a", thin * 0.8, "facets")
    add_facets(axes, picture.facet_ends[is_border], ACCENT, 1.2, "border")
    if region.is_convex is False:
        closed = np.concatenate([region.hull, region.hull[:1]])
        axes.plot(*closed.T, color=INK, linewidth=0.6, linestyle=(0, (3, 2)), gid="hull")
    frame_axes(axes, picture.frame)
    add_tokens(axes, picture.tokens)
    return figure


def _band_entry(options: PictureOptions) -> tuple[LegendEntry, ...]:
    if not options.band:
        return ()
    return (LegendEntry(f"within {options.band:g} of a facet", shaded(PALE)),)


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


def _line_width(axes: Axes, picture: PlaneCells) -> float:
    """Thinner lines the more facets there are, so that cells remain to be seen."""
    crowd = float(np.sqrt(max(len(picture.facet_ends), 1)) / page_box(axes)[0])
    return float(np.clip(0.035 / max(crowd, 1e-9), 0.08, 0.7))


def _to_page(axes: Axes, frame: Frame) -> tuple[Float64[np.ndarray, "2"], Float64[np.ndarray, "2"]]:
    """Origin and points per unit."""
    origin = np.array([frame[0], frame[2]], np.float64)
    return origin, np.array(page_box(axes)) / np.array(
        [frame[1] - frame[0], frame[3] - frame[2]], np.float64
    )


def _add_letters(
    axes: Axes, picture: PlaneCells, letters: dict[int, str]
) -> Float64[np.ndarray, "letters 2"]:
    """The letter of each named cell at its centre, where there is room; their places."""
    origin, scale = _to_page(axes, picture.frame)
    places = []
    for cell, letter in letters.items():
        polygon = (picture.polygons[cell] - origin) * scale
        middle = centre(polygon)
        if room(polygon, middle) < 0.55 * SIZE:
            continue
        places.append(middle)
        x, y = middle / scale + origin
        axes.text(
            x, y, letter, ha="center", va="center_baseline", weight="bold", size=SIZE, zorder=5
        )
    return np.array(places, np.float64).reshape(-1, 2)


def _add_names(axes: Axes, picture: PlaneCells, letters: Float64[np.ndarray, "letters 2"]) -> None:
    origin, scale = _to_page(axes, picture.frame)
    width, height = page_box(axes)
    ends = (picture.facet_ends - origin) * scale
    names = facet_names(
        ends,
        _towards(picture, ends, origin, scale),
        picture.facet_out,
        picture.facet_into,
        box_edges(width, height),
        np.concatenate([_around(letters), _marks(picture, origin, scale)]),
        SMALL - 0.5,
        min(_MOST_NAMES, int(_NAMES_PER_INCH * width * height / 72**2)),
    )
    for name in names:
        x, y = np.array([name.x, name.y]) / scale + origin
        axes.text(
            x,
            y,
            name.text,
            rotation=name.angle,
            rotation_mode="anchor",
            ha="center",
            va="center_baseline",
            size=SMALL - 0.5,
            zorder=4,
        )


def box_edges(width: float, height: float) -> Float64[np.ndarray, "4 2 2"]:
    """The four sides of the drawing, in points."""
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64)
    return np.stack([corners, np.roll(corners, -1, axis=0)], 1)


def _around(
    letters: Float64[np.ndarray, "letters 2"],
) -> Float64[np.ndarray, "points 2"]:
    """Points that cover a letter."""
    reach = 0.4 * SIZE
    steps = np.array([(x, y) for x in (-reach, 0, reach) for y in (-reach, 0, reach)])
    return (letters[:, None] + steps).reshape(-1, 2)


def _marks(
    picture: PlaneCells, origin: Float64[np.ndarray, "2"], scale: Float64[np.ndarray, "2"]
) -> Float64[np.ndarray, "marks 2"]:
    """Tokens that no name may cover: those in their own cell, and all where they are few."""
    if picture.tokens is None:
        return np.zeros((0, 2))
    place = picture.tokens.place
    kept = place if len(place) <= 300 else place[picture.tokens.is_own]
    return (kept - origin) * scale


def _towards(
    picture: PlaneCells,
    ends: Float64[np.ndarray, "facets 2 2"],
    origin: Float64[np.ndarray, "2"],
    scale: Float64[np.ndarray, "2"],
) -> Float64[np.ndarray, "facets 2"]:
    """From each facet away from its first cell."""
    centres = np.array(
        [p.mean(0) if len(p) else (np.nan, np.nan) for p in picture.polygons], np.float64
    ).reshape(-1, 2)
    away = ends.mean(1) - (centres[picture.facet_cells[:, 0]] - origin) * scale
    return np.nan_to_num(away)


#: Advance of a digit and of the bar, and the height of digits, in units of the size of type.
_DIGIT, _BAR, _HEIGHT = 0.636, 0.337, 0.73

#: Where on a facet a name is tried, as shares of its length.
_PLACES = (0.5, 0.35, 0.65, 0.22, 0.78)


@dataclass(frozen=True)
class FacetName:
    """Text across a facet: the bar lies on the facet, each expert on the side where it serves."""

    text: str
    x: float
    y: float
    angle: float


def facet_names(
    ends: Float64[np.ndarray, "facets 2 2"],
    towards: Float64[np.ndarray, "facets 2"],
    out: Int64[np.ndarray, "facets"],
    into: Int64[np.ndarray, "facets"],
    edges: Float64[np.ndarray, "edges 2 2"],
    kept_free: Float64[np.ndarray, "marks 2"],
    size: float,
    most: int,
) -> list[FacetName]:
    """At most so many names, longest facets first, that cross no other facet, name or mark.

    All lengths are in points of the page. ``towards`` points from the side of ``out`` to that of
    ``into``; a name is turned so that it is not upside down. No name crosses the ``edges`` or
    covers a point of ``kept_free``.
    """
    along = ends[:, 1] - ends[:, 0]
    length = np.hypot(along[:, 0], along[:, 1])
    names: list[FacetName] = []
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
            if _covers(kept_free, middle, across, half):
                continue
            angle = float(np.degrees(np.arctan2(across[1], across[0])))
            names.append(FacetName("|".join(pair), float(middle[0]), float(middle[1]), angle))
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
