"""A page of a journal: drawings with their axes, the legend, the caption; and its bytes."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from moegeom.studies.cells.pictures._caption import (
    caption_text,
    drawable,
    shortened,
    text_width,
    title_text,
)
from moegeom.studies.cells.pictures._legend import (
    FAINT,
    INK,
    Legend,
    LegendEntry,
)
from moegeom.studies.cells.pictures._picture import Frame, PictureOptions, SlicePicture, TokenMarks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Points of an inch, and of a millimetre.
_INCH, _MM = 72.0, 72 / 25.4

#: Sizes of type in points.
SIZE, SMALL = 7.0, 6.0

#: From here on the legend is beside the drawing, in millimetres.
_WIDE = 130.0

_LINE, _BOX, _EDGE = 9.0, 7.0, 3.0

#: Equal input gives equal bytes, text stays text, and no name is read as a formula.
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "moegeom",
    "pdf.fonttype": 42,
    "axes.linewidth": 0.5,
    "axes.labelsize": SMALL,
    "axes.edgecolor": FAINT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "hatch.linewidth": 0.4,
}

_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}


@contextmanager
def page_style() -> Iterator[None]:
    """Drawing within it does not depend on the settings of whoever calls."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


@dataclass(frozen=True)
class Space:
    """Room around the axes in points, and their height by width."""

    ratio: float = 1.0
    left: float = 30.0
    right: float = 9.0
    bottom: float = 22.0


def new_page(
    picture: SlicePicture,
    options: PictureOptions,
    legend: Legend,
    space: Space,
    title: str = "",
    projection: str | None = None,
) -> tuple[Figure, Axes]:
    """Empty axes of the right size; title, legend and caption are drawn.

    ``title`` is what comes below the name of the router.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = options.width * _MM
    is_wide = options.width >= _WIDE and bool(legend.entries)
    beside = min(_legend_width(legend) + 14, 0.45 * width) if is_wide else 0.0
    columns = 1 if is_wide else max(1, int((width - 8) // (_legend_width(legend) + 8)))
    rows = -(-len(legend.entries) // columns) + bool(legend.head)
    lines = _wrapped(drawable(caption_text(picture)), width - 8) if options.with_caption else []
    titles = [shortened(drawable(title_text(picture)), width - 8, SIZE)]
    titles += _wrapped(title, width - 8) if title else []
    top = 6 + _LINE * len(titles)
    across = width - space.left - space.right - beside
    along = across * space.ratio
    if is_wide:
        along = max(along, rows * _LINE)
    under = 0.0 if is_wide else rows * _LINE + 2
    below = len(lines) * 8.5 + (4 if lines else 0)
    height = top + along + space.bottom + under + below
    figure = Figure(figsize=(width / _INCH, height / _INCH))
    FigureCanvasAgg(figure)
    box = (space.left, height - top - along, across, along)
    axes = figure.add_axes(
        (box[0] / width, box[1] / height, box[2] / width, box[3] / height), projection=projection
    )
    corner = (width - beside + 6, height - top) if is_wide else (4.0, box[1] - space.bottom)
    _draw_legend(figure, legend, corner, columns, width if is_wide else width - 4)
    write = _writer(figure)
    for number, line in enumerate(titles):
        write(4, height - 9 - number * _LINE, line, SMALL if number else SIZE)
    for number, line in enumerate(lines):
        write(4, below - 8 - number * 8.5, line, SMALL)
    return figure, axes


def _writer(figure: Figure) -> Any:
    width, height = figure.get_size_inches() * _INCH

    def write(x: float, y: float, text: str, size: float, **how: Any) -> None:
        figure.text(x / width, y / height, text, fontsize=size, **{"color": INK, **how})

    return write


def _legend_width(legend: Legend) -> float:
    texts = [entry.text for entry in legend.entries]
    return _BOX + _EDGE + max((text_width(text, SMALL) for text in texts), default=0.0)


def _draw_legend(
    figure: Figure, legend: Legend, corner: tuple[float, float], columns: int, right: float
) -> None:
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches() * _INCH
    write = _writer(figure)
    left, top = corner
    if legend.head:
        write(left, top - _BOX, shortened(legend.head, right - left, SMALL), SMALL)
        top -= _LINE
    down = -(-len(legend.entries) // columns)
    step = (right - left) / columns
    for number, entry in enumerate(legend.entries):
        x, y = left + number // down * step, top - (number % down) * _LINE - _BOX
        if entry.colour:
            size = (_BOX / width, _BOX / height)
            place = (x / width, (y - 1.2) / height)
            figure.add_artist(
                Rectangle(
                    place,
                    *size,
                    facecolor=entry.colour,
                    edgecolor=INK,
                    hatch=4 * entry.hatch,
                    linewidth=0,
                )
            )
        if entry.letter:
            write(x + _BOX / 2, y, entry.letter, SMALL, ha="center", weight="bold")
        if entry.mark:
            _draw_mark(figure, entry, (x + _BOX / 2) / width, (y + 2.1) / height)
        is_plain = not (entry.colour or entry.mark)
        start = x if is_plain else x + _BOX + _EDGE
        write(start, y, shortened(entry.text, x + step - start - 2, SMALL), SMALL)


def _draw_mark(figure: Figure, entry: LegendEntry, x: float, y: float) -> None:
    from matplotlib.lines import Line2D

    figure.add_artist(
        Line2D(
            [x],
            [y],
            marker="o",
            markersize=3.5,
            markerfacecolor=INK if entry.mark == "own" else "none",
            markeredgecolor=INK,
            markeredgewidth=0.6,
            linestyle="none",
        )
    )


def _wrapped(text: str, width: float) -> list[str]:
    """Lines of at most ``width`` points at the size of a caption."""
    each = text_width(text, SMALL) / max(len(text), 1)
    return textwrap.wrap(text, max(20, int(0.97 * width / max(each, 1e-9))))


def page_bytes(figure: Figure, form: str, options: PictureOptions) -> bytes:
    """The page as "svg", "pdf" or "png"."""
    held = io.BytesIO()
    figure.savefig(held, format=form, dpi=options.dpi, metadata=_METADATA[form])
    return held.getvalue()


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


def add_facets(
    axes: Axes, ends: Float64[np.ndarray, "facets 2 2"], colour: str, width: float, name: str
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
    """Marks, filled only where the token's own expert set is that of the place."""
    if tokens is None:
        return
    number = len(tokens.place)
    size = float(np.clip(200 / max(number, 1), 1.2, 9.0))
    for name, kept in (("tokens-elsewhere", ~tokens.is_own), ("tokens-own", tokens.is_own)):
        axes.scatter(
            *tokens.place[kept].T,
            s=size if name == "tokens-elsewhere" else max(2 * size, 5.0),
            facecolors="none" if name == "tokens-elsewhere" else INK,
            edgecolors=INK,
            linewidths=0.35 if name == "tokens-elsewhere" else 0.5,
            alpha=0.7 if name == "tokens-elsewhere" and number > 300 else 1.0,
            rasterized=number > _MOST_MARKS,
            zorder=3,
            gid=name,
        )
