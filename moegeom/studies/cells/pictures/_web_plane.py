"""Pictures for a browser: cells of a plane, its pixels, the graph in space, the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.text import number_of
from moegeom.studies.cells.pictures._circle_view import (
    INNER,
    OUTER,
    arc_colours,
    arc_sizes,
    token_radius,
)
from moegeom.studies.cells.pictures._legend import (
    ACCENT,
    FAINT,
    INK,
    PALE,
    PALETTE,
    cell_colours,
    shaded,
    token_entries,
)
from moegeom.studies.cells.pictures._picture import (
    OPEN,
    CircleCells,
    PictureOptions,
    PlaneCells,
    RasterCells,
    SpaceCells,
    requested_expert,
)
from moegeom.studies.cells.pictures._plane_view import SERVED, region_text
from moegeom.studies.cells.pictures._polygons import eroded, region_of
from moegeom.studies.cells.pictures._raster_view import pixels, raster_colours
from moegeom.studies.cells.pictures._space_view import (
    degrees,
    heights,
    marker_areas,
    shown_places,
    space_title,
)
from moegeom.studies.cells.pictures._web import (
    add_facets,
    add_fill,
    add_middles,
    add_tokens,
    broken_lines,
    hover_text,
    plane_axes,
    space_axes,
    web_page,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def cells_page(picture: PlaneCells, options: PictureOptions) -> bytes:
    """Cells by colour, facets, tokens; the experts of a cell are told at its middle."""
    from plotly.graph_objects import Figure

    figure = Figure()
    colours = cell_colours(picture.expert_sets, picture.facet_cells)
    inner: Sequence[Float64[np.ndarray, "_ 2"]] = picture.polygons
    if options.band:
        for colour, fill in enumerate(PALETTE):
            add_fill(figure, picture.polygons, colours == colour, shaded(fill, 0.3))
        inner = [eroded(p, picture.frame, options.band) for p in picture.polygons]
    for colour, fill in enumerate(PALETTE):
        add_fill(figure, inner, colours == colour, fill)
    add_facets(figure, picture, np.ones(len(picture.facet_ends), bool), INK, _line_width(picture))
    add_tokens(figure, picture)
    add_middles(figure, picture)
    plane_axes(figure, picture.frame)
    return web_page(picture, options, figure)


def _line_width(picture: PlaneCells) -> float:
    """Thinner lines the more facets there are."""
    return float(np.clip(30 / np.sqrt(max(len(picture.facet_ends), 1)), 0.15, 1.0))


def expert_page(picture: PlaneCells, options: PictureOptions) -> bytes:
    """Where one expert serves."""
    from plotly.graph_objects import Figure

    expert = requested_expert(options, picture.caption.num_experts)
    region = region_of(picture, expert)
    figure = Figure()
    add_fill(figure, picture.polygons, ~region.is_served, PALE)
    add_fill(figure, picture.polygons, region.is_served, SERVED)
    is_border = region.is_served[picture.facet_cells].sum(1) == 1
    add_facets(figure, picture, ~is_border, "#9a9a9a", _line_width(picture))
    add_facets(figure, picture, is_border, ACCENT, 2.5)
    if region.is_convex is False:
        closed = np.concatenate([region.hull, region.hull[:1]])
        figure.add_scatter(
            x=closed[:, 0],
            y=closed[:, 1],
            mode="lines",
            line={"color": INK, "width": 1, "dash": "dash"},
            hoverinfo="skip",
            name="convex hull",
        )
    add_tokens(figure, picture)
    add_middles(figure, picture)
    plane_axes(figure, picture.frame)
    return web_page(picture, options, figure, region_text(region, expert))


def tropical_page(picture: PlaneCells, options: PictureOptions) -> bytes:
    """The surface of the sum of the k largest logits, to be turned."""
    from plotly.graph_objects import Figure

    colours = cell_colours(picture.expert_sets, picture.facet_cells)
    shown = [cell for cell, polygon in enumerate(picture.polygons) if len(polygon) > 2]
    lifted = [np.column_stack([picture.polygons[c], heights(picture, c)]) for c in shown]
    corners = np.concatenate([np.zeros((0, 3)), *lifted])
    starts = np.cumsum([0, *map(len, lifted)])
    fans = [_fan(int(start), len(part)) for start, part in zip(starts, lifted, strict=False)]
    triangles = np.concatenate([np.zeros((0, 3), np.int64), *fans])
    faces = [PALETTE[colours[c]] for c, fan in zip(shown, fans, strict=True) for _ in fan]
    figure = Figure()
    figure.add_mesh3d(
        **dict(zip("xyz", corners.T, strict=True)),
        **dict(zip("ijk", triangles.T, strict=True)),
        facecolor=faces,
        flatshading=True,
        lighting={"ambient": 1.0, "diffuse": 0.0, "specular": 0.0},
        hoverinfo="skip",
    )
    edges = broken_lines([np.concatenate([part, part[:1]]) for part in lifted])
    if len(edges):
        figure.add_scatter3d(
            **dict(zip("xyz", edges.T, strict=True)),
            mode="lines",
            line={"color": INK, "width": 1.5},
            hoverinfo="skip",
            showlegend=False,
        )
        middles = np.array([part.mean(0) for part in lifted])
        figure.add_scatter3d(
            **dict(zip("xyz", middles.T, strict=True)),
            mode="markers",
            marker={"size": 6, "opacity": 0.0},
            text=hover_text([picture.expert_sets[c] for c in shown]),
            hovertemplate="%{text}<br>sum %{z:.5g}<extra></extra>",
            showlegend=False,
        )
    space_axes(figure, ("first", "second", "sum of logits"), (1.0, 1.0, 0.8))
    subtitle = f"sum of the {picture.caption.top_k} largest logits"
    return web_page(picture, options, figure, subtitle)


def _fan(start: int, corners: int) -> Int64[np.ndarray, "triangles 3"]:
    """Triangles of a convex polygon whose corners are numbered from ``start``."""
    inner = start + 1 + np.arange(corners - 2)
    return np.stack([np.full(corners - 2, start), inner, inner + 1], 1).astype(np.int64)


#: Pixels beyond this tell the number of their expert set and not its experts.
_MOST_TOLD = 65_536

_STATES = ("one expert set, proved", "crossed by a facet", "not decided")


def raster_page(picture: RasterCells, options: PictureOptions) -> bytes:
    """The image; a pixel tells its expert set and whether it is proved."""
    from plotly.graph_objects import Figure

    image = pixels(picture, raster_colours(picture)).astype(np.int64)
    packed = (image[..., 0] << 16) + (image[..., 1] << 8) + image[..., 2]
    shades, shade = np.unique(packed, return_inverse=True)
    steps = len(shades)
    scale = []
    for number, value in enumerate(shades.tolist()):
        scale += [[number / steps, f"#{value:06x}"], [(number + 1) / steps, f"#{value:06x}"]]
    x0, x1, y0, y1 = picture.frame
    height, width = picture.label.shape
    figure = Figure()
    figure.add_heatmap(
        z=shade.reshape(picture.label.shape).astype(np.uint8),
        zmin=-0.5,
        zmax=steps - 0.5,
        colorscale=scale,
        showscale=False,
        x0=x0 + (x1 - x0) / width / 2,
        dx=(x1 - x0) / width,
        y0=y0 + (y1 - y0) / height / 2,
        dy=(y1 - y0) / height,
        **_told(picture),
    )
    _add_open(figure, picture)
    add_tokens(figure, picture)
    plane_axes(figure, picture.frame)
    return web_page(picture, options, figure)


def _add_open(figure: Figure, picture: RasterCells) -> None:
    """A cross on each undecided pixel."""
    rows, columns = np.nonzero(picture.state == OPEN)
    if not 0 < len(rows) <= 40_000:
        return
    x0, x1, y0, y1 = picture.frame
    height, width = picture.state.shape
    marks = figure.add_scattergl if len(rows) > 2000 else figure.add_scatter
    marks(
        x=x0 + (columns + 0.5) * (x1 - x0) / width,
        y=y0 + (rows + 0.5) * (y1 - y0) / height,
        mode="markers",
        marker={"symbol": "x-thin", "size": 4, "line": {"color": INK, "width": 0.7}},
        hoverinfo="skip",
        name=f"not decided ({number_of(len(rows), 'pixel')})",
    )


def _told(picture: RasterCells) -> dict[str, Any]:
    if picture.label.size > _MOST_TOLD:
        return {"customdata": picture.label, "hovertemplate": "cell %{customdata}<extra></extra>"}
    names = np.array([*hover_text(picture.expert_sets), "not known"], dtype=object)
    states = np.array(_STATES, dtype=object)
    known = names[np.where(picture.label >= 0, picture.label, len(names) - 1)]
    text = known + "<br>" + states[np.minimum(picture.state, OPEN)]
    return {"text": text.tolist(), "hovertemplate": "%{text}<extra></extra>"}


def space_page(picture: SpaceCells, options: PictureOptions) -> bytes:
    """Points and lines to be turned; a point tells its experts, facets and tokens."""
    from plotly.graph_objects import Figure

    place, _ = shown_places(picture)
    figure = Figure()
    lines = broken_lines(list(place[picture.facets]))
    if len(lines):
        figure.add_scatter3d(
            **dict(zip("xyz", lines.T, strict=True)),
            mode="lines",
            line={"color": FAINT, "width": 1},
            hoverinfo="skip",
            name="facets",
        )
    facets = degrees(picture).tolist()
    inside = picture.tokens_inside
    tokens = (
        [""] * len(place)
        if inside is None
        else [f", {number_of(n, 'token')}" for n in inside.tolist()]
    )
    told = zip(hover_text(picture.expert_sets), facets, tokens, strict=True)
    figure.add_scatter3d(
        **dict(zip("xyz", place.T, strict=True)),
        mode="markers",
        marker={
            "size": np.sqrt(marker_areas(picture, 16.0, 200.0)),
            "color": [PALETTE[c] for c in cell_colours(picture.expert_sets, picture.facets)],
            "line": {"color": INK, "width": 0.5},
            "opacity": 1.0,
        },
        text=[f"{text}<br>{number_of(degree, 'facet')}{count}" for text, degree, count in told],
        hovertemplate="%{text}<extra></extra>",
        name="cells",
    )
    space_axes(figure, ("first", "second", "third"), (1.0, 1.0, 1.0))
    return web_page(picture, options, figure, space_title(picture))


def circle_page(picture: CircleCells, options: PictureOptions) -> bytes:
    """The ring; an arc tells its experts and its length."""
    from plotly.graph_objects import Figure

    sizes = np.degrees(arc_sizes(picture))
    figure = Figure()
    figure.add_barpolar(
        r=np.full(len(sizes), OUTER - INNER),
        base=np.full(len(sizes), INNER),
        theta=np.degrees(picture.start) + sizes / 2,
        width=sizes,
        marker={
            "color": [PALETTE[colour] for colour in arc_colours(picture)],
            "line": {"color": INK, "width": 0.5},
        },
        text=hover_text(picture.expert_sets),
        customdata=sizes,
        hovertemplate="%{text}<br>%{customdata:.4g} degrees<extra></extra>",
        showlegend=False,
    )
    if picture.token_angle is not None:
        angle, number = np.degrees(picture.token_angle), len(picture.token_angle)
        is_own = np.zeros(number, bool) if picture.is_own is None else picture.is_own
        names = {entry.mark: entry.text for entry in token_entries(picture)}
        add = figure.add_scatterpolargl if number > 2000 else figure.add_scatterpolar
        for mark, kept in (("else", ~is_own), ("own", is_own)):
            add(
                r=token_radius(number)[kept],
                theta=angle[kept],
                mode="markers",
                marker={
                    "size": 5,
                    "color": INK,
                    "symbol": "circle" if mark == "own" else "circle-open",
                },
                hoverinfo="skip",
                name=names.get(mark, "token"),
            )
    figure.update_layout(
        polar={
            "radialaxis": {"visible": False, "range": [0, 1.08]},
            "angularaxis": {"showgrid": False, "ticks": "", "thetaunit": "degrees"},
        }
    )
    return web_page(picture, options, figure)
