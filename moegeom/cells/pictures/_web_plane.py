"""Pictures of a plane for a browser: cells, one expert, the tropical surface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.cells.pictures._colours import (
    ACCENT,
    INK,
    PALE,
    PALETTE,
    cell_colours,
    shaded,
)
from moegeom.cells.pictures._options import PictureOptions, asked_expert
from moegeom.cells.pictures._picture import PlaneCells
from moegeom.cells.pictures._plane_view import SERVED, region_text
from moegeom.cells.pictures._polygons import eroded, region_of
from moegeom.cells.pictures._tropical_view import heights
from moegeom.cells.pictures._web import (
    broken_lines,
    hover_text,
    plane_axes,
    space_axes,
    web_page,
)
from moegeom.cells.pictures._web_layers import (
    add_fill,
    add_middles,
    add_tokens,
    add_walls,
)

if TYPE_CHECKING:
    pass


def cells_page(picture: PlaneCells, options: PictureOptions) -> bytes:
    """Cells by colour, walls, tokens; the experts of a cell are told at its middle."""
    from plotly.graph_objects import Figure

    figure = Figure()
    colours = cell_colours(picture.coalitions, picture.wall_cells)
    inner: Sequence[Float64[np.ndarray, "_ 2"]] = picture.polygons
    if options.band:
        for colour, fill in enumerate(PALETTE):
            add_fill(figure, picture.polygons, colours == colour, shaded(fill, 0.3))
        inner = [eroded(p, picture.frame, options.band) for p in picture.polygons]
    for colour, fill in enumerate(PALETTE):
        add_fill(figure, inner, colours == colour, fill)
    add_walls(figure, picture, np.ones(len(picture.wall_ends), bool), INK, _line_width(picture))
    add_tokens(figure, picture)
    add_middles(figure, picture)
    plane_axes(figure, picture.frame)
    return web_page(picture, options, figure)


def _line_width(picture: PlaneCells) -> float:
    """Thinner lines the more walls there are."""
    return float(np.clip(30 / np.sqrt(max(len(picture.wall_ends), 1)), 0.15, 1.0))


def expert_page(picture: PlaneCells, options: PictureOptions) -> bytes:
    """Where one expert serves."""
    from plotly.graph_objects import Figure

    expert = asked_expert(options, picture.caption.num_experts)
    region = region_of(picture, expert)
    figure = Figure()
    add_fill(figure, picture.polygons, ~region.is_served, PALE)
    add_fill(figure, picture.polygons, region.is_served, SERVED)
    is_border = region.is_served[picture.wall_cells].sum(1) == 1
    add_walls(figure, picture, ~is_border, "#9a9a9a", _line_width(picture))
    add_walls(figure, picture, is_border, ACCENT, 2.5)
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

    colours = cell_colours(picture.coalitions, picture.wall_cells)
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
            text=hover_text([picture.coalitions[c] for c in shown]),
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
