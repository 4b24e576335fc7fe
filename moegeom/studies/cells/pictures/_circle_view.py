"""Cells along a circle, as a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.studies.cells.pictures._legend import (
    INK,
    PALETTE,
    cell_colours,
    legend_of,
    token_entries,
    with_entries,
)
from moegeom.studies.cells.pictures._page import SIZE, SMALL, Space, new_page
from moegeom.studies.cells.pictures._picture import CircleCells, PictureOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inner and outer radius of the ring, and where tokens and names lie.
INNER, OUTER, _TOKENS, _NAMES = 0.62, 0.86, (0.9, 1.06), 0.56

#: Least distance of two names along the circle, in radians.
_APART = 0.14

#: Fraction of the golden section: places tokens of nearly the same angle apart.
_GOLDEN = 0.6180339887498949


def arc_sizes(picture: CircleCells) -> Float64[np.ndarray, "arcs"]:
    """Angles in radians."""
    return picture.stop - picture.start


def arc_neighbours(picture: CircleCells) -> Int64[np.ndarray, "arcs 2"]:
    """Each arc and the next one around."""
    arcs = np.arange(len(picture.start))
    return np.stack([arcs, np.roll(arcs, -1)], 1) if len(arcs) > 1 else np.zeros((0, 2), np.int64)


def arc_colours(picture: CircleCells) -> Int64[np.ndarray, "arcs"]:
    """The place in the palette of each arc."""
    return cell_colours(picture.expert_sets, arc_neighbours(picture))


def facet_name(picture: CircleCells, arc: int) -> str:
    """``17|42`` at the end of an arc, experts that leave and that enter; empty for no change."""
    one = set(picture.expert_sets[arc])
    other = set(picture.expert_sets[(arc + 1) % len(picture.expert_sets)])
    out, into = sorted(one - other), sorted(other - one)
    return f"{' '.join(map(str, out))}|{' '.join(map(str, into))}" if out or into else ""


def token_radius(number: int) -> Float64[np.ndarray, "tokens"]:
    """Radii that spread tokens over a strip, always alike."""
    return _TOKENS[0] + (_TOKENS[1] - _TOKENS[0]) * ((np.arange(number) + 1) * _GOLDEN % 1.0)


def draw_circle(picture: CircleCells, options: PictureOptions) -> Figure:
    """Arcs by expert set, facets with the experts they exchange, tokens outside."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Wedge

    sizes, colours = arc_sizes(picture), arc_colours(picture)
    legend = legend_of(picture.expert_sets, sizes, colours, "arcs")
    legend = with_entries(legend, *token_entries(picture))
    space = Space(1.0, left=4.0, right=4.0, bottom=4.0)
    figure, axes = new_page(picture, options, legend, space)
    for arc, (start, stop) in enumerate(np.degrees(np.stack([picture.start, picture.stop], 1))):
        wedge = Wedge(
            (0, 0),
            OUTER,
            start,
            stop,
            width=OUTER - INNER,
            facecolor=PALETTE[colours[arc]],
            linewidth=0,
            gid=f"arc-{arc}",
        )
        axes.add_patch(wedge)
    if len(sizes) > 1:
        ray = np.stack([np.cos(picture.stop), np.sin(picture.stop)], 1)
        ends = np.stack([INNER * ray, OUTER * ray], 1)
        width = float(np.clip(60 / len(sizes), 0.1, 0.7))
        axes.add_collection(LineCollection(list(ends), colors=INK, linewidths=width, gid="facets"))
        _add_names(axes, picture)
    for arc, letter in legend.letters.items():
        if sizes[arc] > 0.12:
            middle, radius = (picture.start[arc] + picture.stop[arc]) / 2, (INNER + OUTER) / 2
            place = (radius * np.cos(middle), radius * np.sin(middle))
            axes.text(*place, letter, ha="center", va="center_baseline", weight="bold", size=SIZE)
    _add_tokens(axes, picture)
    axes.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08))
    axes.set_axis_off()
    return figure


def _add_names(axes: Axes, picture: CircleCells) -> None:
    """Names inside the ring, first at the facets between the widest arcs."""
    sizes = arc_sizes(picture)
    width = np.minimum(sizes, np.roll(sizes, -1))
    taken: list[float] = []
    for arc in np.argsort(-width, kind="stable").tolist():
        angle = float(picture.stop[arc] % (2 * np.pi))
        gaps = [abs(angle - other) for other in taken]
        if any(min(gap, 2 * np.pi - gap) < _APART for gap in gaps):
            continue
        name = facet_name(picture, arc)
        if not name or len(name) > 16:
            continue
        taken.append(angle)
        is_left = np.cos(angle) < 0
        axes.text(
            _NAMES * np.cos(angle) * 1.07,
            _NAMES * np.sin(angle) * 1.07,
            name,
            rotation=np.degrees(angle) + (180 if is_left else 0),
            rotation_mode="anchor",
            ha="left" if is_left else "right",
            va="center_baseline",
            size=SMALL - 0.5,
        )


def _add_tokens(axes: Axes, picture: CircleCells) -> None:
    if picture.token_angle is None:
        return
    angle, radius = picture.token_angle, token_radius(len(picture.token_angle))
    place = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    is_own = np.zeros(len(angle), bool) if picture.is_own is None else picture.is_own
    size = float(np.clip(400 / max(len(angle), 1), 0.8, 6.0))
    for name, kept, face in (("elsewhere", ~is_own, "none"), ("own", is_own, INK)):
        axes.scatter(
            *place[kept].T,
            s=size if name == "elsewhere" else max(size, 3.0),
            facecolors=face,
            edgecolors=INK,
            linewidths=0.35,
            rasterized=len(angle) > 3000,
            gid=f"tokens-{name}",
        )
