"""Cells of any router by pixels, with those that are not proved marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

from moegeom.studies.cells.pictures._legend import (
    INK,
    PALETTE,
    LegendEntry,
    cell_colours,
    legend_of,
    token_entries,
    with_entries,
)
from moegeom.studies.cells.pictures._page import (
    SIZE,
    Space,
    add_tokens,
    frame_axes,
    frame_ratio,
    new_page,
)
from moegeom.studies.cells.pictures._picture import CROSSED, OPEN, PictureOptions, RasterCells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Runs of undecided pixels beyond this are grey without hatching.
_MOST_RUNS = 20_000

#: Undecided pixels below the hatching, and those without a known expert set.
_OPEN_GREY = "#c8c8c8"

#: Pixels that a facet crosses.
_CROSSED_GREY = "#3a3a3a"


def draw_raster(picture: RasterCells, options: PictureOptions) -> Figure:
    """An image: colours by expert set, pixels that a facet crosses dark, undecided ones hatched."""
    colours = raster_colours(picture)
    legend = legend_of(picture.expert_sets, pixel_counts(picture), colours)
    crossed, undecided = ((picture.state == state).sum() for state in (CROSSED, OPEN))
    legend = with_entries(
        legend,
        LegendEntry(f"crossed by a facet ({crossed:,} pixels)", _CROSSED_GREY),
        LegendEntry(f"not decided ({undecided:,} pixels)", _OPEN_GREY, hatch="/"),
        *token_entries(picture),
    )
    figure, axes = new_page(picture, options, legend, Space(frame_ratio(picture.frame)))
    axes.imshow(
        pixels(picture, colours),
        origin="lower",
        extent=picture.frame,
        interpolation="nearest",
        aspect="auto",
        gid="pixels",
    )
    _add_open(axes, picture)
    frame_axes(axes, picture.frame)
    add_tokens(axes, picture.tokens)
    _add_letters(axes, picture, legend.letters)
    return figure


def pixel_counts(picture: RasterCells) -> Float64[np.ndarray, "expert_sets"]:
    """Pixels of each expert set, those that are not proved left out."""
    known = picture.label[(picture.label >= 0) & (picture.state != OPEN)]
    return np.bincount(known, minlength=len(picture.expert_sets)).astype(np.float64)


def raster_colours(picture: RasterCells) -> Int64[np.ndarray, "expert_sets"]:
    """The place in the palette of each expert set; pixels side by side count as neighbours."""
    label = picture.label.astype(np.int64)
    sides = ((label[:, 1:], label[:, :-1]), (label[1:], label[:-1]), (label[:, 2:], label[:, :-2]))
    sides += ((label[2:], label[:-2]),)
    pairs = np.concatenate([np.stack([a.ravel(), b.ravel()], 1) for a, b in sides])
    pairs = pairs[(pairs >= 0).all(1) & (pairs[:, 0] != pairs[:, 1])]
    return cell_colours(picture.expert_sets, np.unique(pairs, axis=0).reshape(-1, 2))


def pixels(
    picture: RasterCells, colours: Int64[np.ndarray, "expert_sets"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Red, green and blue of each pixel."""
    shades = [*(PALETTE[colour] for colour in colours), _OPEN_GREY]
    table = np.array([_bytes(shade) for shade in shades])
    image = table[np.where(picture.label >= 0, picture.label, len(colours))]
    image[picture.state == CROSSED] = _bytes(_CROSSED_GREY)
    image[picture.state == OPEN] = _bytes(_OPEN_GREY)
    return image.astype(np.uint8)


def _bytes(colour: str) -> list[int]:
    return list(bytes.fromhex(colour[1:]))


def runs(
    is_marked: Bool[np.ndarray, "height width"],
) -> Int64[np.ndarray, "runs 3"]:
    """Row, first column and column after the last for each run of marked pixels."""
    padded = np.pad(is_marked, ((0, 0), (1, 1))).astype(np.int8)
    step = np.diff(padded, axis=1)
    rows, first = np.nonzero(step == 1)
    return np.stack([rows, first, np.nonzero(step == -1)[1]], 1).astype(np.int64)


def _add_open(axes: Axes, picture: RasterCells) -> None:
    from matplotlib.collections import PolyCollection

    found = runs(picture.state == OPEN)
    if not 0 < len(found) <= _MOST_RUNS:
        return
    x0, x1, y0, y1 = picture.frame
    height, width = picture.state.shape
    left, right = (x0 + found[:, i] * (x1 - x0) / width for i in (1, 2))
    low, high = (y0 + (found[:, 0] + i) * (y1 - y0) / height for i in (0, 1))
    corners = np.stack(
        [np.stack(c, 1) for c in ((left, low), (right, low), (right, high), (left, high))], 1
    )
    hatched = PolyCollection(
        list(corners), facecolors="none", edgecolors=INK, linewidths=0, hatch="//////", gid="open"
    )
    axes.add_collection(hatched, autolim=False)


def _add_letters(axes: Axes, picture: RasterCells, letters: dict[int, str]) -> None:
    """Each letter at the pixel deepest inside the expert set's pixels."""
    from scipy.ndimage import distance_transform_edt

    x0, x1, y0, y1 = picture.frame
    height, width = picture.state.shape
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes of a page"
    points = figure.get_size_inches()[0] * 72 * axes.get_position().width / width
    for label, letter in letters.items():
        is_own = np.pad((picture.label == label) & (picture.state != OPEN), 1)
        depth = np.asarray(distance_transform_edt(is_own))
        row, column = np.unravel_index(int(depth.argmax()), depth.shape)
        if float(depth[row, column]) * points < 0.55 * SIZE:
            continue
        axes.text(
            x0 + (int(column) - 0.5) * (x1 - x0) / width,
            y0 + (int(row) - 0.5) * (y1 - y0) / height,
            letter,
            ha="center",
            va="center_baseline",
            weight="bold",
            size=SIZE,
            zorder=5,
        )
