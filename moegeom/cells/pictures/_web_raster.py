"""Pixels of a plane for a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moegeom.cells.pictures._colours import (
    INK,
)
from moegeom.cells.pictures._options import PictureOptions
from moegeom.cells.pictures._picture import OPEN, RasterCells
from moegeom.cells.pictures._raster_view import pixels, raster_colours
from moegeom.cells.pictures._web import (
    hover_text,
    plane_axes,
    web_page,
)
from moegeom.cells.pictures._web_layers import add_tokens
from moegeom.core.text import number_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: Pixels beyond this tell the number of their coalition and not its experts.
_MOST_TOLD = 65_536

_STATES = ("one coalition, proved", "crossed by a wall", "not decided")


def raster_page(picture: RasterCells, options: PictureOptions) -> bytes:
    """The image; a pixel tells its coalition and whether it is proved."""
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
    names = np.array([*hover_text(picture.coalitions), "not known"], dtype=object)
    states = np.array(_STATES, dtype=object)
    known = names[np.where(picture.label >= 0, picture.label, len(names) - 1)]
    text = known + "<br>" + states[np.minimum(picture.state, OPEN)]
    return {"text": text.tolist(), "hovertemplate": "%{text}<extra></extra>"}
