"""The sum of the k largest logits over a plane: a convex surface, flat over each cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from moegeom.cells.pictures._colours import INK, PALETTE, cell_colours
from moegeom.cells.pictures._legend import legend_of
from moegeom.cells.pictures._options import PictureOptions
from moegeom.cells.pictures._picture import PlaneCells
from moegeom.cells.pictures._polygons import areas
from moegeom.cells.pictures._space_page import new_space

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def heights(picture: PlaneCells, cell: int) -> Float64[np.ndarray, "corners"]:
    """The sum of the k largest logits at the corners of a cell."""
    return picture.polygons[cell] @ picture.gradient[cell] + picture.offset[cell]


def draw_tropical(picture: PlaneCells, options: PictureOptions) -> Figure:
    """The surface above its cells."""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    colours = cell_colours(picture.coalitions, picture.wall_cells)
    legend = legend_of(picture.coalitions, areas(picture), colours, PALETTE)
    title = f"sum of the {picture.caption.top_k} largest logits over its cells"
    shown = [cell for cell, polygon in enumerate(picture.polygons) if len(polygon) > 2]
    lifted = [np.column_stack([picture.polygons[c], heights(picture, c)]) for c in shown]
    low = min((float(p[:, 2].min()) for p in lifted), default=0.0)
    high = max((float(p[:, 2].max()) for p in lifted), default=1.0)
    floor = low - 0.45 * max(high - low, 1e-12)
    lifted = _alike(lifted)
    names = ("first", "second", "sum of logits")
    limits = (picture.frame[:2], picture.frame[2:], (floor, max(high, floor + 1e-9)))
    figure, axes = new_space(picture, options, legend, title, names, limits)
    if not lifted:
        return figure
    below = [np.column_stack([p[:, :2], np.full(len(p), floor)]) for p in lifted]
    fills = [PALETTE[colours[c]] for c in shown]
    width = float(np.clip(6 / np.sqrt(max(len(shown), 1)), 0.05, 0.4))
    for polygons, name, order in ((below, "floor", 1), (lifted, "surface", 2)):
        faces = Poly3DCollection(
            polygons, facecolors=fills, edgecolors=INK, linewidths=width, gid=name, zorder=order
        )
        axes.add_collection3d(faces)
    return figure


def _alike(
    polygons: list[Float64[np.ndarray, "_ 3"]],
) -> list[Float64[np.ndarray, "corners 3"]]:
    """The same polygons with equally many corners: the last one is repeated.

    Of unequal ones matplotlib fills the rest with whatever was in memory.
    """
    most = max(map(len, polygons), default=0)
    return [np.concatenate([p, np.repeat(p[-1:], most - len(p), axis=0)]) for p in polygons]
