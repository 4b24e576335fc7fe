"""A figure as a file for a paper: SVG, PDF or PNG, drawn by matplotlib from the same data."""

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
    Areas,
    Axis,
    Bars,
    Chart,
    Guide,
    Heat,
    Mark,
    Numbers,
    Panel,
    Points,
    Polyline,
)
from moegeom.document.colours import GROUPS, is_dark, of_role, ramp
from moegeom.document.svg import shades, tick_text
from moegeom.document.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def refuse_undrawable(path: Path) -> None:
    """Raises before any work what would stop :func:`write_figure`.

    Raises
    ------
    UsageError
        For another ending than those of ENDINGS, and without matplotlib.
    """
    if path.suffix not in ENDINGS:
        raise UsageError(
            f"--plot {path}: expected a name that ends in {', '.join(ENDINGS)}.",
            "--html FILE draws every figure on a page, and needs no library for it.",
        )
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

    shown = printable(figure)
    across = 1 if any(panel.is_wide for panel in shown.panels) else min(3, len(shown.panels))
    down = math.ceil(len(shown.panels) / across)
    heights = [_height(panel) for panel in shown.panels[::across]]
    width = 2 * _COLUMN if across == 1 else _COLUMN * across
    # not the settings of a matplotlibrc in the working directory, which may have LaTeX run
    with plt.style.context(["default", _STYLE]):
        drawn, axes = plt.subplots(
            down,
            across,
            figsize=(width, sum(heights) + 0.9),
            squeeze=False,
            layout="constrained",
            height_ratios=heights,
        )
        for axis, panel in zip(axes.flat, shown.panels, strict=False):
            _panel(axis, panel)
        for axis in list(axes.flat)[len(shown.panels) :]:
            axis.set_visible(False)
        drawn.suptitle(shown.title, fontsize=10)
        caption = f"{shown.shows} It does not show: {shown.shows_not}"
        drawn.supxlabel(textwrap.fill(caption, int(18 * width)), fontsize=7, x=0.02, ha="left")
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        facts = {"format": path.suffix[1:], "metadata": metadata, "dpi": 200}
        write_whole(path, lambda file: drawn.savefig(file, **facts))
        plt.close(drawn)


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
        if panel.is_lying and isinstance(mark, Bars | Guide):
            _LYING[type(mark)](axis, mark, *panel.slot(mark))
        else:
            _DRAW[type(mark)](axis, mark, *panel.slot(mark))
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


def _placed(mark: Bars, number: int, of: int) -> tuple[np.ndarray, float, Any]:
    """Where each bar stands, how wide it is, and how far its interval reaches down and up."""
    y, width = _numbers(mark.y), 0.8 / of
    ends = np.abs(np.stack([y - _numbers(mark.low), _numbers(mark.high) - y])) if mark.low else None
    return np.arange(len(y)) + (number - (of - 1) / 2) * width, width, ends


def _bars(axis: Axes, mark: Bars, *slot: int) -> None:
    x, width, ends = _placed(mark, *slot)
    looks: Any = {"color": of_role(mark.role), "label": mark.text, "ecolor": "#333"}
    axis.bar(x, _numbers(mark.y), width, yerr=ends, **looks)


def _lying_bars(axis: Axes, mark: Bars, *slot: int) -> None:
    y, width, ends = _placed(mark, *slot)
    looks: Any = {"color": of_role(mark.role), "label": mark.text, "ecolor": "#333"}
    axis.barh(y, _numbers(mark.y), width, xerr=ends, **looks)


def _rule(axis: Axes, mark: Guide, *_: int) -> None:
    axis.axhline(mark.at, color=of_role(mark.role), lw=1, ls="--", label=mark.text)


def _lying_rule(axis: Axes, mark: Guide, *_: int) -> None:
    axis.axvline(mark.at, color=of_role(mark.role), lw=1, ls="--", label=mark.text)


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
    shown = axis.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    ends = [mark.low, mark.high] if mark.middle is None else [mark.low, mark.middle, mark.high]
    bar = axis.figure.colorbar(shown, ax=axis, shrink=0.9, pad=0.02)
    said = mark.ends or [figure_text(end) for end in ends]
    bar.set_ticks(ends, labels=said, minor=False)
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

#: What is drawn otherwise where bars lie.
_LYING: dict[type, Callable[..., None]] = {Bars: _lying_bars, Guide: _lying_rule}


def _names(mark: Mark) -> Sequence[str]:
    match mark:
        case Polyline() | Bars() | Guide():
            return (mark.text,)
        case Points() | Areas() if len(mark.names) <= len(GROUPS):
            return mark.names
        case _:
            return ()
