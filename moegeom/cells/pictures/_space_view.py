"""Cells in space: a point for each, a line for each wall."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.cells.pictures._caption import count_text
from moegeom.cells.pictures._colours import INK, PALETTE, cell_colours
from moegeom.cells.pictures._legend import legend_of
from moegeom.cells.pictures._options import PictureOptions
from moegeom.cells.pictures._picture import SpaceCells
from moegeom.cells.pictures._space_page import new_space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Points farther from the middle than this many typical distances are drawn nearer.
_FAR = 6.0

#: Points and lines beyond this are drawn as pixels, also in SVG and PDF.
_MOST_MARKS = 20_000


def shown_places(picture: SpaceCells) -> tuple[Float64[np.ndarray, "cells 3"], bool]:
    """Where the cells are drawn, and whether that is where they are.

    Points within unbounded cells may lie anywhere: where some are more than 6 times as far from the
    middle as half of all, every distance r becomes r / (1 + r / 3 s), s being that of half of all.
    """
    if not len(picture.place):
        return picture.place, True
    middle = np.median(picture.place, axis=0)
    away = picture.place - middle
    radius = np.linalg.norm(away, axis=1)
    typical = float(np.median(radius))
    if typical == 0 or radius.max() <= _FAR * typical:
        return picture.place, True
    return middle + away / (1 + radius / (3 * typical))[:, None], False


def degrees(picture: SpaceCells) -> Int64[np.ndarray, "cells"]:
    """Walls of each cell."""
    return np.bincount(picture.walls.ravel(), minlength=len(picture.place)).astype(np.int64)


def weights(picture: SpaceCells) -> Float64[np.ndarray, "cells"]:
    """What makes a cell large: the tokens inside where they are known, else its walls."""
    inside = picture.tokens_inside
    if inside is not None and inside.any():
        return inside.astype(np.float64)
    return degrees(picture).astype(np.float64)


def space_title(picture: SpaceCells) -> str:
    """What the points, the lines and their distances are."""
    _, is_true = shown_places(picture)
    by_tokens = picture.tokens_inside is not None and bool(picture.tokens_inside.any())
    size = "tokens inside" if by_tokens else "walls"
    far = "" if is_true else "; far cells drawn nearer"
    cells, walls = count_text(len(picture.place)), count_text(len(picture.walls))
    return f"{cells} cells, sized by {size}, {walls} walls{far}"


def marker_areas(picture: SpaceCells, least: float, most: float) -> Float64[np.ndarray, "cells"]:
    """Areas of the points, in proportion to the weights above a least one."""
    weight = weights(picture)
    return least + (most - least) * weight / max(float(weight.max(initial=0.0)), 1e-9)


def _limits(place: Float64[np.ndarray, "cells 3"]) -> list[tuple[float, float]]:
    """Least and greatest coordinates with a margin; a unit around where all are equal."""
    limits = []
    for values in place.T.tolist():
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        margin = 0.04 * (high - low) or 0.5
        limits.append((low - margin, high + margin))
    return limits


def draw_space(picture: SpaceCells, options: PictureOptions) -> Figure:
    """A projection of the graph of cells."""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    colours = cell_colours(picture.coalitions, picture.walls)
    legend = legend_of(picture.coalitions, weights(picture), colours, PALETTE)
    title, names = space_title(picture), ("first", "second", "third")
    place, _ = shown_places(picture)
    figure, axes = new_space(picture, options, legend, title, names, _limits(place))
    is_many = len(picture.walls) + len(place) > _MOST_MARKS
    crowd = float(np.sqrt(max(len(picture.walls), 1)))
    lines = Line3DCollection(
        list(place[picture.walls]),
        colors=INK,
        linewidths=float(np.clip(6 / crowd, 0.08, 0.5)),
        alpha=float(np.clip(12 / crowd, 0.12, 0.6)),
        rasterized=is_many,
        zorder=1,
        gid="walls",
    )
    if len(picture.walls):
        axes.add_collection3d(lines)
    most = float(np.clip(900 / np.sqrt(max(len(place), 1)), 20, 90))
    axes.scatter(
        *place.T,
        s=marker_areas(picture, most / 15, most),
        c=[PALETTE[colour] for colour in colours],
        edgecolors=INK,
        linewidths=0.3,
        depthshade=False,
        alpha=1.0,
        rasterized=is_many,
        zorder=2,
        gid="cells",
    )
    for cell, letter in legend.letters.items():
        axes.text(*place[cell], letter, ha="center", va="center", weight="bold", zorder=3)
    return figure
