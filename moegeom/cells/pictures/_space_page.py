"""Axes in space on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moegeom.cells.pictures._legend import Legend
from moegeom.cells.pictures._options import PictureOptions
from moegeom.cells.pictures._page import Space, new_page
from moegeom.cells.pictures._picture import SlicePicture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_space(
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
