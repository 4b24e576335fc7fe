"""Pictures in space: cells as points with their facets, and the surface of the largest logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.text import number_of
from moegeom.studies.cells.pictures._legend import INK, PALETTE, Legend, cell_colours, legend_of
from moegeom.studies.cells.pictures._page import Space, new_page
from moegeom.studies.cells.pictures._picture import (
    PictureOptions,
    PlaneCells,
    SlicePicture,
    SpaceCells,
)
from moegeom.studies.cells.pictures._polygons import areas

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _new_space(
    picture: SlicePicture,
    options: PictureOptions,
    legend: Legend,
    title: str,
    names: tuple[str, str, str],
    limits: Sequence[tuple[float, float]],
) -> tuple[Figure, Any]:
    """A page with plain axes in space, whose layers are drawn in the order of their zorder."""
    from matplotlib.ticker import MaxNLocator

    # Annotations of matplotlib know little of axes in space.
    axes: Any
    space = Space(0.78, left=0.0, right=8.0, bottom=2.0)
    figure, axes = new_page(picture, options, legend, space, title, "3d")
    axes.computed_zorder = False
    axes.set(**dict(zip(("xlim", "ylim", "zlim"), limits, strict=True)))
    for axis, name in zip((axes.xaxis, axes.yaxis, axes.zaxis), names, strict=True):
        axis.set_major_locator(MaxNLocator(4, prune="both"))
        axis.set_label_text(name)
        axis.labelpad = -8
        axis.set_tick_params(pad=-3)
        axis.set_pane_color((1.0, 1.0, 1.0, 0.0))
        axis.line.set_linewidth(0.4)
    axes.grid(visible=False)
    axes.view_init(elev=24, azim=-58)
    axes.set_box_aspect((1, 1, 0.85), zoom=1.1)
    return figure, axes


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


def _degrees(picture: SpaceCells) -> Int64[np.ndarray, "cells"]:
    """Facets of each cell."""
    return np.bincount(picture.facets.ravel(), minlength=len(picture.place)).astype(np.int64)


def _weights(picture: SpaceCells) -> Float64[np.ndarray, "cells"]:
    """What makes a cell large: the tokens inside where they are known, else its facets."""
    inside = picture.tokens_inside
    if inside is not None and inside.any():
        return inside.astype(np.float64)
    return _degrees(picture).astype(np.float64)


def _space_title(picture: SpaceCells) -> str:
    """What the points, the lines and their distances are."""
    _, is_true = shown_places(picture)
    by_tokens = picture.tokens_inside is not None and bool(picture.tokens_inside.any())
    size = "tokens inside" if by_tokens else "facets"
    far = "" if is_true else "; far cells drawn nearer"
    cells, facets = number_of(len(picture.place), "cell"), number_of(len(picture.facets), "facet")
    return f"{cells}, sized by {size}, {facets}{far}"


def _marker_areas(picture: SpaceCells, least: float, most: float) -> Float64[np.ndarray, "cells"]:
    """Areas of the points, in proportion to the weights above a least one."""
    weight = _weights(picture)
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

    colours = cell_colours(picture.expert_sets, picture.facets)
    legend = legend_of(picture.expert_sets, _weights(picture), colours)
    title, names = _space_title(picture), ("first", "second", "third")
    place, _ = shown_places(picture)
    figure, axes = _new_space(picture, options, legend, title, names, _limits(place))
    is_many = len(picture.facets) + len(place) > _MOST_MARKS
    crowd = float(np.sqrt(max(len(picture.facets), 1)))
    lines = Line3DCollection(
        list(place[picture.facets]),
        colors=INK,
        linewidths=float(np.clip(6 / crowd, 0.08, 0.5)),
        alpha=float(np.clip(12 / crowd, 0.12, 0.6)),
        rasterized=is_many,
        zorder=1,
        gid="facets",
    )
    if len(picture.facets):
        axes.add_collection3d(lines)
    most = float(np.clip(900 / np.sqrt(max(len(place), 1)), 20, 90))
    axes.scatter(
        *place.T,
        s=_marker_areas(picture, most / 15, most),
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


def draw_tropical(picture: PlaneCells, options: PictureOptions) -> Figure:
    """The surface above its cells."""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    colours = cell_colours(picture.expert_sets, picture.facet_cells)
    legend = legend_of(picture.expert_sets, areas(picture), colours)
    title = f"sum of the {picture.caption.top_k} largest logits over its cells"
    shown = [cell for cell, polygon in enumerate(picture.polygons) if len(polygon) > 2]
    lifted = [
        np.column_stack([p := picture.polygons[c], p @ picture.gradient[c] + picture.offset[c]])
        for c in shown
    ]
    low = min((float(p[:, 2].min()) for p in lifted), default=0.0)
    high = max((float(p[:, 2].max()) for p in lifted), default=1.0)
    floor = low - 0.45 * max(high - low, 1e-12)
    lifted = _alike(lifted)
    names = ("first", "second", "sum of logits")
    limits = (picture.frame[:2], picture.frame[2:], (floor, max(high, floor + 1e-9)))
    figure, axes = _new_space(picture, options, legend, title, names, limits)
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
