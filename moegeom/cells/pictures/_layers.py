"""What pictures of a plane are made of, on a page: cells, walls, tokens, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from moegeom.cells.pictures._colours import (
    DOMAIN_INKS,
    INK,
)
from moegeom.cells.pictures._picture import Frame, TokenMarks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Tokens beyond this are drawn as pixels, also in SVG and PDF.
_MOST_MARKS = 3000


def frame_ratio(frame: Frame) -> float:
    """Height by width of the drawing: that of the frame where it is not extreme."""
    return float(np.clip((frame[3] - frame[2]) / (frame[1] - frame[0]), 0.35, 1.6))


def add_polygons(
    axes: Axes,
    polygons: Sequence[Float64[np.ndarray, "_ 2"]],
    colours: Sequence[str],
    name: str,
) -> None:
    """Filled polygons as one group; those without area are left out."""
    from matplotlib.collections import PolyCollection

    shown = [(p, c) for p, c in zip(polygons, colours, strict=True) if len(p) > 2]
    kept = PolyCollection(
        [p for p, _ in shown],
        facecolors=[c for _, c in shown],
        edgecolors=[c for _, c in shown],
        linewidths=0.15,
        gid=name,
        zorder=1,
    )
    axes.add_collection(kept, autolim=False)


def add_walls(
    axes: Axes, ends: Float64[np.ndarray, "walls 2 2"], colour: str, width: float, name: str
) -> None:
    from matplotlib.collections import LineCollection

    lines = LineCollection(
        list(ends), colors=colour, linewidths=width, gid=name, zorder=2, capstyle="round"
    )
    axes.add_collection(lines, autolim=False)


def page_box(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes in points."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes of a page"
    width, height = figure.get_size_inches() * 72
    place = axes.get_position()
    return float(place.width * width), float(place.height * height)


def frame_axes(axes: Axes, frame: Frame) -> None:
    """Limits, few ticks and labels."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlim=frame[:2], ylim=frame[2:])
    for axis, name in ((axes.xaxis, "first"), (axes.yaxis, "second")):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_label_text(f"{name} coordinate")
        axis.labelpad = 1.5
        axis.set_tick_params(pad=1.5)


def add_tokens(axes: Axes, tokens: TokenMarks | None) -> None:
    """Marks by domain, filled only where the token's own coalition is that of the place."""
    if tokens is None:
        return
    inks = np.array(DOMAIN_INKS)
    label = np.zeros(len(tokens.place), np.int64) if tokens.label is None else tokens.label
    colours = inks[label % len(inks)]
    number = len(tokens.place)
    size = float(np.clip(200 / max(number, 1), 1.2, 9.0))
    for name, kept in (("tokens-elsewhere", ~tokens.is_own), ("tokens-own", tokens.is_own)):
        axes.scatter(
            *tokens.place[kept].T,
            s=size if name == "tokens-elsewhere" else max(2 * size, 5.0),
            facecolors="none" if name == "tokens-elsewhere" else list(colours[kept]),
            edgecolors=list(colours[kept]) if kept.any() else INK,
            linewidths=0.35 if name == "tokens-elsewhere" else 0.5,
            alpha=0.7 if name == "tokens-elsewhere" and number > 300 else 1.0,
            rasterized=number > _MOST_MARKS,
            zorder=3,
            gid=name,
        )
