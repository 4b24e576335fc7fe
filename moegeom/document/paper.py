"""A figure or a picture as a file for a paper: SVG, PDF or PNG, drawn by matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import write_whole
from moegeom.core.text import figure_text
from moegeom.document.chart import (
    INK,
    SIZE,
    SMALL,
    Areas,
    Axis,
    Bars,
    Chart,
    Discs,
    Guide,
    Heat,
    Label,
    Mark,
    Numbers,
    Panel,
    Picture,
    Pixels,
    Points,
    Polygons,
    Polyline,
    Segments,
)
from moegeom.document.colours import GROUPS, is_dark, of_role, ramp
from moegeom.document.svg import shades, tick_text
from moegeom.document.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Endings of files that can be drawn.
ENDINGS = (".svg", ".pdf", ".png")

#: Inches of a column of a paper, and of a panel in height.
_COLUMN, _HEIGHT = 3.3, 2.3

_STYLE: Any = {
    "svg.hashsalt": "moegeom",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


#: What no file of an equal figure may differ by, by the ending of its name.
_METADATA: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def refuse_undrawable(
    path: Path, hint: str = "--html FILE draws every figure on a page, and needs no library for it."
) -> None:
    """Raises before any work what would stop :func:`write_figure` or :func:`write_picture`.

    Raises
    ------
    UsageError
        For another ending than those of ENDINGS, and without matplotlib.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--plot {path}: expected a name that ends in {', '.join(ENDINGS)}.", hint)
    refuse_absent("matplotlib", "plots", "--plot")


def write_figure(figure: Chart, path: Path) -> None:
    """The figure with its caption; equal figures are equal bytes.

    Raises
    ------
    UsageError
        As :func:`refuse_undrawable`, and for a figure that lacks what it is drawn by.
    """
    refuse_undrawable(path)
    if not figure.panels:
        raise UsageError(f"There is nothing to draw of {figure.name!r}.", figure.alt)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    chart = printable(figure)
    across = 1 if any(panel.is_wide for panel in chart.panels) else min(3, len(chart.panels))
    down = math.ceil(len(chart.panels) / across)
    heights = [_height(panel) for panel in chart.panels[::across]]
    width = 2 * _COLUMN if across == 1 else _COLUMN * across
    # not the settings of a matplotlibrc in the working directory, which may have LaTeX run
    with plt.style.context(["default", _STYLE]):
        page, axes = plt.subplots(
            down,
            across,
            figsize=(width, sum(heights) + 0.9),
            squeeze=False,
            layout="constrained",
            height_ratios=heights,
        )
        for axis, panel in zip(axes.flat, chart.panels, strict=False):
            _panel(axis, panel)
        for axis in list(axes.flat)[len(chart.panels) :]:
            axis.set_visible(False)
        page.suptitle(chart.title, fontsize=10)
        caption = f"{chart.shows} It does not show: {chart.shows_not}"
        page.supxlabel(textwrap.fill(caption, int(18 * width)), fontsize=7, x=0.02, ha="left")
        _save(page, path, dpi=200)
        plt.close(page)


def _save(figure: Figure, path: Path, dpi: int) -> None:
    ending = path.suffix.lower()
    facts: Any = {"format": ending[1:], "metadata": _METADATA.get(ending), "dpi": dpi}
    write_whole(path, lambda file: figure.savefig(file, **facts))


def _height(panel: Panel) -> float:
    heat = next((mark for mark in panel.marks if isinstance(mark, Heat)), None)
    if panel.is_lying:
        bars = max(panel.slot(mark)[1] for mark in panel.marks)
        return len(panel.y.names) * (0.07 + 0.12 * bars) + 0.6
    if heat is None:
        return _HEIGHT
    if not panel.y.names:
        return 2 * _COLUMN if panel.is_wide else _COLUMN
    return max(0.16 * len(heat.values), 0.4) + 0.9


#: Names that a legend has within the bars of a panel.
_MOST_INSIDE = 4


def _panel(axis: Axes, panel: Panel) -> None:
    for mark in panel.marks:
        _DRAW[type(mark)](axis, mark, panel.is_lying, *panel.slot(mark))
    if panel.is_lying:
        axis.invert_yaxis()
    is_standing = any(isinstance(mark, Bars) for mark in panel.marks) and not panel.is_lying
    axis.set_title(panel.title, loc="left")
    _axis(axis, "x", panel.x, has_scale=not is_standing)
    _axis(axis, "y", panel.y, has_scale=True)
    names = [n for mark in panel.marks for n in _names(mark)]
    if len(names) > 1:
        # among many bars there is no free place
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        is_full = is_standing and len(names) > _MOST_INSIDE
        axis.legend(frameon=False, fontsize=7, **(beside if is_full else {}))


def _axis(axis: Axes, of: str, facts: Axis, has_scale: bool) -> None:
    getattr(axis, f"set_{of}label")(textwrap.fill(facts.label, 40))
    if facts.names:
        most = 24 if of == "x" else 40
        step = math.ceil(len(facts.names) / most)
        places = list(range(0, len(facts.names), step))
        longest = 32 if of == "x" else 44
        names = [facts.names[place] for place in places]
        names = [n if len(n) <= longest else f"{n[: longest - 1]}…" for n in names]
        is_long = max(map(len, names)) > 4
        turn = {"rotation": 35, "ha": "right"} if of == "x" and is_long else {}
        getattr(axis, f"set_{of}ticks")(places, names, fontsize=7, **turn)
    elif has_scale and facts.scale != "linear":
        base = 2 if facts.scale == "log2" else 10
        getattr(axis, f"set_{of}scale")("log", base=base)
        ticks = getattr(axis, f"{of}axis")
        ticks.set_major_formatter(lambda value, _: tick_text(value, facts.scale))
        ticks.set_minor_formatter(
            lambda value, _: tick_text(value, facts.scale) if _is_within_ten(ticks) else ""
        )
    if facts.low is not None or facts.high is not None:
        getattr(axis, f"set_{of}lim")(facts.low, facts.high)


def _is_within_ten(ticks: Any) -> bool:
    """Whether powers of ten alone may leave an axis without a number."""
    low, high = ticks.get_view_interval()
    return bool(high < 10.0 * low)


def _numbers(values: Numbers) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _line(axis: Axes, mark: Polyline, *_: int) -> None:
    colour = of_role(mark.role)
    marker = "o" if len(mark.x) <= 40 and mark.role != "random" else None
    x = _numbers(mark.x)
    axis.plot(x, _numbers(mark.y), color=colour, lw=1.2, label=mark.text, marker=marker, ms=2.5)
    if mark.low:
        axis.fill_between(x, _numbers(mark.low), _numbers(mark.high), color=colour, alpha=0.2, lw=0)


def _bars(axis: Axes, mark: Bars, is_lying: bool, number: int, of: int) -> None:
    values, width = _numbers(mark.y), 0.8 / of
    reach = None
    if mark.low:
        reach = np.abs(np.stack([values - _numbers(mark.low), _numbers(mark.high) - values]))
    places = np.arange(len(values)) + (number - (of - 1) / 2) * width
    looks: Any = {"color": of_role(mark.role), "label": mark.text, "ecolor": "#333"}
    looks["xerr" if is_lying else "yerr"] = reach
    (axis.barh if is_lying else axis.bar)(places, values, width, **looks)


def _rule(axis: Axes, mark: Guide, is_lying: bool, *_: int) -> None:
    line = axis.axvline if is_lying else axis.axhline
    line(mark.at, color=of_role(mark.role), lw=1, ls="--", label=mark.text)


def _points(axis: Axes, mark: Points, *_: int) -> None:
    x, y, group = _numbers(mark.x), _numbers(mark.y), np.array(mark.group)
    for number in sorted(set(mark.group)):
        is_in, above = group == number, 1.0 / (1 + number)
        label = mark.names[number] if 0 < len(mark.names) <= len(GROUPS) else None
        looks: Any = {"color": GROUPS[number % len(GROUPS)], "label": label}
        if mark.are_crosses:  # seen among dots of their own colour
            looks |= {"s": 12, "marker": "x", "lw": 1.2, "zorder": 3.0 + above}
            axis.scatter(x[is_in], y[is_in], **looks | {"s": 14, "color": "white", "lw": 2.4})
        else:
            looks |= {"s": 4, "alpha": 0.6, "lw": 0, "zorder": 2.0 + above}
        axis.scatter(x[is_in], y[is_in], **looks)


def _areas(axis: Axes, mark: Areas, *_: int) -> None:
    colours = [GROUPS[number % len(GROUPS)] for number in range(len(mark.names))]
    labels = mark.names if len(mark.names) <= len(GROUPS) else ()
    shares = [_numbers(share) for share in mark.shares]
    axis.stackplot(_numbers(mark.x), shares, colors=colours, labels=labels, lw=0.3, edgecolor="w")


def _heat(axis: Axes, mark: Heat, *_: int) -> None:
    from matplotlib import colors

    values = np.array([_numbers(row) for row in mark.values])
    colours = colors.ListedColormap(np.array(ramp(mark.middle is not None)) / 255.0)
    norm = _norm(mark)
    image = axis.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    ends = [mark.low, mark.high] if mark.middle is None else [mark.low, mark.middle, mark.high]
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.9, pad=0.02)
    labels = mark.ends or [figure_text(end) for end in ends]
    bar.set_ticks(ends, labels=labels, minor=False)
    bar.set_ticks([], minor=True)
    bar.set_label(textwrap.fill(mark.text, 22), fontsize=7)
    if mark.cells and values.size <= 400:
        places, coloured = shades(mark), ramp(mark.middle is not None)
        for i, row in enumerate(mark.cells):
            for j, cell in enumerate(row):
                place = places[i][j]
                ink = "white" if place and is_dark(coloured[place - 1]) else "black"
                axis.text(j, i, cell, ha="center", va="center", fontsize=6, color=ink)


def _norm(mark: Heat) -> Any:
    from matplotlib import colors

    if mark.scale != "linear":
        return colors.LogNorm(mark.low, mark.high, clip=True)
    if mark.middle is None:
        return colors.Normalize(mark.low, mark.high)
    return colors.TwoSlopeNorm(mark.middle, mark.low, mark.high)


_DRAW: dict[type, Callable[..., None]] = {
    Polyline: _line,
    Bars: _bars,
    Guide: _rule,
    Points: _points,
    Areas: _areas,
    Heat: _heat,
}


def _names(mark: Mark) -> Sequence[str]:
    match mark:
        case Polyline() | Bars() | Guide():
            return (mark.text,)
        case Points() | Areas() if len(mark.names) <= len(GROUPS):
            return mark.names
        case _:
            return ()


# ----------------------------------------------------------------------------------------- pictures
_PICTURE_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
    "axes.spines.top": True,
    "axes.spines.right": True,
    "axes.linewidth": 0.5,
    "axes.labelsize": SMALL,
    "axes.edgecolor": "#8c8c8c",
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "hatch.linewidth": 0.4,
}

#: Points of a line of the legend and of its box, between box and text, and of a line of a caption.
_LINE, _BOX, _EDGE, _CAPTION = 9.0, 7.0, 3.0, 8.5

#: Discs and segments beyond which they are drawn as pixels, also in SVG and PDF.
_MOST_DISCS, _MOST_SEGMENTS = 2000, 20_000


def write_picture(picture: Picture, path: Path) -> None:
    """The picture with its legend and caption; equal pictures are equal bytes.

    Raises
    ------
    UsageError
        As :func:`refuse_undrawable`.
    """
    refuse_undrawable(path)
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE | _PICTURE_STYLE]):
        page, (across, along) = picture.page, picture.page.drawing
        titles = [_fitted(_in_font(picture.title), page.width - 8, SIZE)]
        titles += _wrapped(picture.subtitle, page.width - 8)
        lines = _wrapped(picture.caption, page.width - 8)
        texts = [_in_font(key.text) for key in picture.keys]
        widest = _BOX + _EDGE + max((_width(text, SMALL) for text in texts), default=0.0) + 8
        columns = 1 if page.is_wide else max(1, int((page.width - 8) // widest))
        legend = _LINE * (-(-len(texts) // columns) + bool(picture.head))
        top, foot = 6 + _LINE * len(titles), _CAPTION * len(lines) + (4 if lines else 0)
        drawing = max(along + page.bottom, legend) if page.is_wide else along + page.bottom
        height = top + drawing + (0 if page.is_wide else legend + 2) + foot
        figure = Figure(figsize=(page.width / 72, height / 72))
        foot_of_drawing = height - top - along
        sheet: Any = figure.add_axes((0, 0, 1, 1), xlim=(0, page.width), ylim=(0, height))
        sheet.set_axis_off()
        box = (page.left / page.width, foot_of_drawing / height)
        _draw(figure, picture, (*box, across / page.width, along / height))
        for number, line in enumerate(titles):
            size = SMALL if number else SIZE
            sheet.text(4, height - 9 - number * _LINE, line, size=size, color=INK)
        for number, line in enumerate(lines):
            sheet.text(4, foot - 8 - number * _CAPTION, line, size=SMALL, color=INK)
        if page.is_wide:
            corner, right = (page.width - page.legend + 6, height - top), page.width
        else:
            corner, right = (4.0, foot_of_drawing - page.bottom), page.width - 4
        _legend(sheet, picture, texts, corner, right, columns)
        _save(figure, path, picture.dpi)


def _draw(figure: Figure, picture: Picture, box: tuple[float, float, float, float]) -> None:
    """The axes and what they hold, in order."""
    from matplotlib.ticker import MaxNLocator

    is_space = len(picture.axes) == 3
    axes: Any = figure.add_axes(box, projection="3d" if is_space else None)
    if is_space:
        axes.computed_zorder = False
        axes.grid(visible=False)
        axes.view_init(elev=24, azim=-58)
        axes.set_box_aspect((1, 1, 0.85), zoom=1.1)
    for name, facts in zip("xyz", picture.axes, strict=False):
        axis = getattr(axes, f"{name}axis")
        axes.set(**{f"{name}lim": (facts.low, facts.high)})
        axis.set_major_locator(MaxNLocator(4, prune="both") if is_space else MaxNLocator(5))
        axis.set_label_text(facts.label)
        axis.labelpad = -8 if is_space else 1.5
        axis.set_tick_params(pad=-3 if is_space else 1.5)
        if is_space:
            axis.set_pane_color((1.0, 1.0, 1.0, 0.0))
            axis.line.set_linewidth(0.4)
        elif not facts.label:
            axes.set_axis_off()
    for order, shape in enumerate(picture.shapes):
        _SHAPES[type(shape)](axes, shape, is_space, order + 1)


def _legend(
    sheet: Any,
    picture: Picture,
    texts: Sequence[str],
    corner: tuple[float, float],
    right: float,
    columns: int,
) -> None:
    from matplotlib.patches import Rectangle

    (left, top), down = corner, -(-len(texts) // columns)
    step, looks = (right - left) / columns, {"size": SMALL, "color": INK}
    if picture.head:
        sheet.text(left, top - _BOX, _fitted(_in_font(picture.head), right - left, SMALL), **looks)
        top -= _LINE
    for number, (key, text) in enumerate(zip(picture.keys, texts, strict=True)):
        x, y = left + number // down * step, top - number % down * _LINE - _BOX
        if key.colour:
            colours: Any = {"facecolor": key.colour, "edgecolor": INK, "hatch": key.hatch}
            sheet.add_patch(Rectangle((x, y - 1.2), _BOX, _BOX, linewidth=0, **colours))
        if key.letter:
            sheet.text(x + _BOX / 2, y, key.letter, ha="center", weight="bold", **looks)
        if key.disc:
            rim = {"markerfacecolor": key.disc, "markeredgecolor": INK, "markeredgewidth": 0.6}
            sheet.plot(x + _BOX / 2, y + 2.1, marker="o", markersize=3.5, **rim)
        start = x + _BOX + _EDGE if key.colour or key.disc else x
        sheet.text(start, y, _fitted(text, x + step - start - 2, SMALL), **looks)


def _filled(axes: Any, shape: Polygons, _: bool, order: int) -> None:
    from matplotlib.collections import PolyCollection

    pairs = zip(shape.corners, shape.colours, strict=True)
    pairs = [(corners, colour) for corners, colour in pairs if len(corners) > 2]
    corners, colours = [each for each, _ in pairs], [colour for _, colour in pairs]
    looks: Any = {
        "facecolors": colours,
        "edgecolors": shape.edge or colours,
        "linewidths": shape.width,
        "hatch": shape.hatch or None,
        "gid": shape.name,
        "zorder": order,
    }
    axes.add_collection(PolyCollection(corners, **looks), autolim=False)


def _segments(axes: Any, shape: Segments, is_space: bool, order: int) -> None:
    from matplotlib.collections import LineCollection
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    looks: Any = {
        "colors": shape.colour,
        "linewidths": shape.width,
        "alpha": shape.opacity,
        "linestyles": (0, (3, 2)) if shape.is_dashed else "solid",
        "capstyle": "butt" if shape.is_dashed else "round",
        "rasterized": len(shape.ends) > _MOST_SEGMENTS,
        "gid": shape.name,
        "zorder": order,
    }
    if is_space and len(shape.ends):
        axes.add_collection3d(Line3DCollection(list(shape.ends), **looks))
    elif not is_space:
        axes.add_collection(LineCollection(list(shape.ends), **looks), autolim=False)


def _discs(axes: Any, shape: Discs, is_space: bool, order: int) -> None:
    looks: Any = {
        "s": shape.areas,
        "facecolors": shape.colours,
        "edgecolors": INK,
        "linewidths": shape.rim,
        "alpha": shape.opacity,
        "rasterized": len(shape.places) > _MOST_DISCS,
        "gid": shape.name,
        "zorder": order,
    }
    axes.scatter(*shape.places.T, **looks, **({"depthshade": False} if is_space else {}))


def _pixels(axes: Any, shape: Pixels, _: bool, order: int) -> None:
    looks: Any = {"origin": "lower", "interpolation": "nearest", "aspect": "auto"}
    extent = (*axes.get_xlim(), *axes.get_ylim())
    axes.imshow(shape.colours, extent=extent, gid=shape.name, zorder=order, **looks)


def _label(axes: Any, shape: Label, is_space: bool, order: int) -> None:
    turn: Any = {} if is_space else {"rotation": shape.angle, "rotation_mode": "anchor"}
    axes.text(
        *shape.place,
        shape.text,
        ha=shape.side,
        va="center" if is_space else "center_baseline",
        weight="bold" if shape.is_bold else "normal",
        size=shape.size,
        zorder=order,
        **turn,
    )


_SHAPES: dict[type, Callable[..., None]] = {
    Polygons: _filled,
    Segments: _segments,
    Discs: _discs,
    Pixels: _pixels,
    Label: _label,
}


def _font() -> Any:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans"))


def _in_font(text: str) -> str:
    r"""The same text; characters that the font lacks or that no line can hold as ``\u4e2d``."""
    font = _font()
    escaped = (
        c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode("ascii")
        for c in printable(text)
    )
    return "".join(escaped)


def _width(text: str, size: float) -> float:
    """Points of a text in the font."""
    font = _font()
    font.set_size(size, 72)
    font.set_text(text, 0.0)
    return font.get_width_height()[0] / 64


def _fitted(text: str, width: float, size: float) -> str:
    """The text, or its beginning and end with an ellipsis between, in at most ``width`` points."""
    most = len(text)
    while most > 1 and (points := _width(cut(text, most), size)) > width:
        most = min(most - 1, int(most * width / points))
    return cut(text, most)


def cut(text: str, most: int) -> str:
    """The text, or so many of its characters, two thirds from its beginning, and an ellipsis."""
    if len(text) <= most:
        return text
    tail = most // 3
    return text[: most - tail].rstrip() + "\u2026" + text[len(text) - tail :].lstrip()


def _wrapped(text: str, width: float) -> list[str]:
    """Lines of at most ``width`` points at the size of a caption; none of an empty text."""
    each = _width(line := _in_font(text), SMALL) / max(len(line), 1)
    return textwrap.wrap(line, max(20, int(0.97 * width / max(each, 1e-9))))
