"""The graph of cells in space, and the ring, for a browser."""

from __future__ import annotations

import numpy as np

from moegeom.cells.pictures._circle_view import (
    INNER,
    OUTER,
    arc_colours,
    arc_sizes,
    token_radius,
)
from moegeom.cells.pictures._colours import FAINT, INK, PALETTE, cell_colours
from moegeom.cells.pictures._legend import token_entries
from moegeom.cells.pictures._options import PictureOptions
from moegeom.cells.pictures._picture import CircleCells, SpaceCells
from moegeom.cells.pictures._space_view import (
    degrees,
    marker_areas,
    shown_places,
    space_title,
)
from moegeom.cells.pictures._web import broken_lines, hover_text, space_axes, web_page
from moegeom.core.text import number_of


def space_page(picture: SpaceCells, options: PictureOptions) -> bytes:
    """Points and lines to be turned; a point tells its experts, walls and tokens."""
    from plotly.graph_objects import Figure

    place, _ = shown_places(picture)
    figure = Figure()
    lines = broken_lines(list(place[picture.walls]))
    if len(lines):
        figure.add_scatter3d(
            **dict(zip("xyz", lines.T, strict=True)),
            mode="lines",
            line={"color": FAINT, "width": 1},
            hoverinfo="skip",
            name="walls",
        )
    walls = degrees(picture).tolist()
    inside = picture.tokens_inside
    tokens = (
        [""] * len(place)
        if inside is None
        else [f", {number_of(n, 'token')}" for n in inside.tolist()]
    )
    told = zip(hover_text(picture.coalitions), walls, tokens, strict=True)
    figure.add_scatter3d(
        **dict(zip("xyz", place.T, strict=True)),
        mode="markers",
        marker={
            "size": np.sqrt(marker_areas(picture, 16.0, 200.0)),
            "color": [PALETTE[c] for c in cell_colours(picture.coalitions, picture.walls)],
            "line": {"color": INK, "width": 0.5},
            "opacity": 1.0,
        },
        text=[f"{text}<br>{number_of(degree, 'wall')}{count}" for text, degree, count in told],
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
        text=hover_text(picture.coalitions),
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
