"""Figures as SVG for a page: no script, no font, nothing to load; colours are those of its style.

Coordinates have one decimal and everything stands in the order of the figure, so that equal figures
are equal bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np

from moegeom.core.text import figure_text
from moegeom.document.chart import (
    Areas,
    Axis,
    Bars,
    Guide,
    Heat,
    Mark,
    Panel,
    Points,
    Polyline,
    Scale,
)
from moegeom.document.colours import GROUPS, GROUPS_ON_BLACK, ROLES, is_dark, ramp

#: Pixels of a wide and of a narrow panel, of its plot in height, and around it.
_WIDE, _NARROW, _HEIGHT = 760.0, 372.0, 220.0
_TOP, _RIGHT, _BOTTOM, _LEFT = 24.0, 20.0, 40.0, 58.0

#: Pixels of a line of the legend, and of a character.
_LEGEND, _CHARACTER = 16.0, 5.9

#: Pixels of the key of a heat map, and characters of a name that are shown.
_KEY, _LONGEST_NAME = 26.0, 28

#: Characters of names that are left out here and there where they do not fit, not slanted.
_SHORT_NAME = 3

#: Characters of a name at the side of a wide panel.
_LONGEST_SIDE = 60

#: Pixels of a bar that lies, and between those of two names.
_BAR, _GAP = 13.0, 7.0

#: Rows of a heat map up to which they are tall, and pixels of the whole at most.
_FEW_ROWS, _TALLEST = 12, 720.0

#: Cells of a heat map up to which each is a shape of its own, with its value on hovering.
_MOST_SHAPES = 1500

#: Bars up to which each can be hovered over.
_MOST_BARS = 64

#: A cross of 7 pixels, from its upper left corner.
_CROSS = "M{x:.1f} {y:.1f}l7 7m0 -7l-7 7"

#: Digits as exponents.
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

STYLE = "\n".join(
    [
        "svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }",
        "svg text { fill: currentColor; } svg a text { text-decoration: underline; }",
        "svg .light text { fill: #fff; } svg .dark text { fill: #111; }",
        ".axis { stroke: currentColor; opacity: .35; }",
        ".grid { stroke: currentColor; opacity: .1; }",
        ".line { fill: none; stroke-width: 1.6; } .band { opacity: .18; stroke: none; }",
        ".whisker { stroke: currentColor; stroke-width: 1; opacity: .7; fill: none; }",
        ".whisker.many { opacity: .25; stroke-width: .6; }",
        ".rule { stroke-width: 1.3; stroke-dasharray: 5 3; }",
        ".pixels { image-rendering: pixelated; }",
        ".halo { fill: none; stroke: var(--page); stroke-width: 5; }",
        *(f".{n} {{ --c: {light}; }}" for n, (light, _) in ROLES.items()),
        *(f".g{i} {{ --c: {colour}; }}" for i, colour in enumerate(GROUPS)),
        ".s { stroke: var(--c); } .f { fill: var(--c); }",
        "@media screen and (prefers-color-scheme: dark) {",
        *(f".{n} {{ --c: {dark}; }}" for n, (_, dark) in ROLES.items()),
        *(f".g{i} {{ --c: {colour}; }}" for i, colour in enumerate(GROUPS_ON_BLACK)),
        "}",
    ]
)


def panel_svg(panel: Panel, alt: str) -> str:
    """One panel as an SVG element whose label is ``alt``."""
    width = _WIDE if panel.fills_page else _NARROW
    heat = next((mark for mark in panel.marks if isinstance(mark, Heat)), None)
    plot = _Plot.of(panel, width, heat)
    body = "".join(_axes(plot, panel))
    for mark in panel.marks:
        body += "".join(_DRAW[type(mark)](plot, mark, *panel.slot(mark)))
    body += "".join(_legend(plot, panel.marks, bool(panel.title)))
    size = f"{width:.0f} {plot.height + plot.top + plot.below:.0f}"
    title = f'<text x="{plot.left:.0f}" y="14" font-weight="600">{escape(panel.title)}</text>'
    title = title if panel.title else ""
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(alt)}">{title}{body}</svg>'


# --------------------------------------------------------------------------------------------- axes
@dataclass(frozen=True)
class _Ends:
    """What an axis runs over, in its own unit and as pixels."""

    low: float
    high: float
    scale: Scale
    start: float
    length: float

    @cached_property
    def _ends(self) -> tuple[float, float]:
        return _scaled(self.low, self.scale), _scaled(self.high, self.scale)

    def at(self, value: float) -> float:
        """The pixel of a value; ends of the axis for what lies beyond."""
        low, high = self._ends
        share = (_scaled(value, self.scale) - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * self.length


@dataclass(frozen=True)
class _Plot:
    x: _Ends
    y: _Ends
    left: float
    top: float
    width: float
    height: float
    below: float
    is_lying: bool
    names: Sequence[str]
    links: Sequence[str]

    @classmethod
    def of(cls, panel: Panel, width: float, heat: Heat | None) -> _Plot:
        longest = max((len(name) for name in panel.y.names), default=0)
        most = _LONGEST_SIDE if panel.fills_page else _LONGEST_NAME
        left = _LEFT + max(min(longest, most) - 4, 0) * 5.6
        inner = width - left - _RIGHT
        top = _TOP if panel.title else 8.0
        top += _LEGEND * len(_legend_lines(panel.marks, inner))
        name = min(max(map(len, panel.x.names), default=0), _LONGEST_NAME)
        slant = 3.8 * name if _is_slanted(panel.x.names, inner) else 0.0
        below = _BOTTOM + max(slant - 8.0, 0.0) + (_KEY if heat else 0.0)
        height = _HEIGHT
        if panel.is_lying:
            bars = [panel.slot(mark)[1] for mark in panel.marks if isinstance(mark, Bars)]
            height = len(panel.y.names) * (_BAR * max(bars) + _GAP)
        if heat is not None:
            rows, columns = len(heat.values), max(len(heat.values[0]) if heat.values else 1, 1)
            cell = min(inner / columns, 22.0)
            is_square = len(panel.y.names) == 0
            tallest = 22.0 if rows <= _FEW_ROWS else 15.0
            height = inner * rows / columns if is_square else max(min(cell, tallest), 13.0) * rows
            height = min(max(height, 24.0), _TALLEST)
        x = _ends(panel.x, panel.marks, "y" if panel.is_lying else "x", left, inner)
        y = _ends(panel.y, panel.marks, "y", top + height, -height)
        if panel.is_lying:
            y = _Ends(-0.5, len(panel.y.names) - 0.5, "linear", top, height)
        if heat is not None:  # rows run downwards
            y = _Ends(-0.5, len(heat.values) - 0.5, "linear", top, height)
            x = _Ends(
                -0.5, (len(heat.values[0]) if heat.values else 1) - 0.5, "linear", left, inner
            )
        names = panel.y.names if panel.is_lying else panel.x.names
        return cls(x, y, left, top, inner, height, below, panel.is_lying, names, panel.y.links)

    def bar(self, at: float, width: float, value: float) -> str:
        """A bar from 0 to a value, ``width`` pixels wide around the place ``at``."""
        ends = self.x if self.is_lying else self.y
        foot, end = ends.at(max(ends.low, 0.0)), ends.at(value)
        low, length, side = min(foot, end), abs(end - foot), at - width / 2
        if self.is_lying:
            return f"M{low:.1f} {side:.1f}h{length:.1f}v{width:.1f}h-{length:.1f}z"
        return f"M{side:.1f} {low:.1f}h{width:.1f}v{length:.1f}h-{width:.1f}z"

    def stroke(self, at: float, low: float, high: float) -> str:
        """A line along a bar, from one value to another."""
        if self.is_lying:
            return f"M{self.x.at(low):.1f} {at:.1f}H{self.x.at(high):.1f}"
        return f"M{at:.1f} {self.y.at(low):.1f}V{self.y.at(high):.1f}"


def _scaled(value: float, scale: Scale) -> float:
    if scale == "linear":
        return value
    return math.log2(value) if value > 0.0 else -1074.0


def _ends(axis: Axis, marks: Sequence[Mark], of: str, start: float, length: float) -> _Ends:
    if axis.names and of == "x":
        return _Ends(-0.5, len(axis.names) - 0.5, "linear", start, length)
    values = [v for mark in marks for v in _values(mark, of)]
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    if axis.scale != "linear":
        numbers = [v for v in numbers if v > 0.0]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if axis.scale == "linear" and of == "y":
        low = min(low, 0.0) if low < 0.35 * high or low < 0 else low - 0.1 * (high - low)
        high += 0.06 * (high - low)
    low = low if axis.low is None else axis.low
    high = high if axis.high is None else axis.high
    if high <= low:
        low, high = (low - 1.0, low + 1.0) if axis.scale == "linear" else (low / 2, low * 2)
    return _Ends(low, high, axis.scale, start, length)


def _values(mark: Mark, of: str) -> Iterator[float | None]:
    match mark:
        case Polyline():
            yield from mark.x if of == "x" else (*mark.y, *mark.low, *mark.high)
        case Bars() if of == "y":
            yield from (0.0, *mark.y, *mark.low, *mark.high)
        case Guide() if of == "y":
            yield mark.at
        case Points():
            yield from mark.x if of == "x" else mark.y
        case Areas():
            yield from mark.x if of == "x" else (0.0, 1.0)
        case _:
            return


def _ticks(ends: _Ends) -> list[float]:
    """Round numbers, about five of them; powers on an axis with a scale that holds two."""
    if ends.scale != "linear":
        base = 2.0 if ends.scale == "log2" else 10.0
        first = math.ceil(math.log(ends.low, base) - 1e-9)
        last = math.floor(math.log(ends.high, base) + 1e-9)
        step = max(1, -(-(last - first) // 6))
        if first < last:
            return [base**e for e in range(first, last + 1, step)]
    raw = (ends.high - ends.low) / 5.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * m >= raw * 0.999)
    first = math.ceil(ends.low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(ends.high / step + 1e-9) + 1)]


def tick_text(value: float, scale: Scale) -> str:
    """A value beside its tick; powers of two as such where they are small or large."""
    if scale == "log2" and not 0.01 < value < 2000.0:
        return f"2{str(round(math.log2(value))).translate(_RAISED)}"
    return figure_text(value)


def _is_slanted(names: Sequence[str], width: float) -> bool:
    longest = max(map(len, names), default=0)
    return longest > _SHORT_NAME and longest * 6.2 > width / len(names) and len(names) <= 48


def _shown_names(names: Sequence[str], room: float, size: float) -> Iterator[tuple[int, str]]:
    """Names that fit: every one, or every n-th."""
    step = max(1, math.ceil(size * len(names) / max(room, 1.0)))
    yield from ((i, names[i]) for i in range(0, len(names), step))


def _axes(plot: _Plot, panel: Panel) -> Iterator[str]:
    foot, right = plot.top + plot.height, plot.left + plot.width
    is_heat = any(isinstance(mark, Heat) for mark in panel.marks)
    slanted = _is_slanted(panel.x.names, plot.width)
    if panel.x.names:
        widest = 13.0 if slanted else 6.4 * max(map(len, panel.x.names)) + 6.0
        for i, name in _shown_names(panel.x.names, plot.width, widest):
            x, y = plot.x.at(i), foot + 14.0
            text = _text(x, y, name, "end" if slanted else "middle", -38 if slanted else 0)
            yield _linked(text, panel.x.links, i)
    elif not is_heat:
        for value in _ticks(plot.x):
            x = plot.x.at(value)
            yield f'<path class="grid" d="M{x:.1f} {plot.top:.1f}V{foot:.1f}"/>'
            yield _text(x, foot + 14, tick_text(value, plot.x.scale), "middle")
    if panel.y.names:
        for i, name in _shown_names(panel.y.names, plot.height, 12.0):
            most = _LONGEST_SIDE if panel.fills_page else _LONGEST_NAME
            text = _text(plot.left - 5, plot.y.at(i) + 4.0, name, "end", most=most)
            yield _linked(text, panel.y.links, i)
    elif not is_heat:
        for value in _ticks(plot.y):
            y = plot.y.at(value)
            yield f'<path class="grid" d="M{plot.left:.1f} {y:.1f}H{right:.1f}"/>'
            yield _text(plot.left - 5, y + 4, tick_text(value, plot.y.scale), "end")
    if not is_heat:
        line = f"M{plot.left:.1f} {plot.top:.1f}V{foot:.1f}H{right:.1f}"
        yield f'<path class="axis" fill="none" d="{line}"/>'
    low = foot + plot.below - (_KEY + 8.0 if is_heat else 8.0)
    yield _text(plot.left + plot.width / 2, low, panel.x.label, "middle", most=80)
    if panel.y.label:
        yield _text(12.0, plot.top + plot.height / 2, panel.y.label, "middle", -90, most=48)


def _text(
    x: float, y: float, text: str, anchor: str, turn: float = 0, most: int = _LONGEST_NAME
) -> str:
    """A text at a place, turned by degrees, and cut where it is a long name of somebody's."""
    label = escape(text if len(text) <= most else f"{text[: most - 1]}…")
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{label}</text>'


def _linked(text: str, links: Sequence[str], number: int) -> str:
    return f'<a href="{escape(links[number])}">{text}</a>' if links else text


# -------------------------------------------------------------------------------------------- marks
def _line(plot: _Plot, mark: Polyline, *_: int) -> Iterator[str]:
    for low, high in _runs(plot, mark):
        yield f'<path class="band f {mark.role}" d="M{"L".join((*low, *high[::-1]))}Z"/>'
    path, pen = [], "M"
    for x, y in zip(mark.x, mark.y, strict=True):
        if x is None or y is None or not _drawable(y, plot.y) or not _drawable(x, plot.x):
            pen = "M"
            continue
        path.append(f"{pen}{plot.x.at(x):.1f} {plot.y.at(y):.1f}")
        pen = "L"
    if len(path) == 1:
        x, y = path[0][1:].split()
        yield f'<circle class="f {mark.role}" cx="{x}" cy="{y}" r="3"/>'
    title = f"<title>{escape(mark.text)}</title>"
    yield f'<path class="line s {mark.role}" d="{"".join(path)}">{title}</path>'


def _drawable(value: float, ends: _Ends) -> bool:
    return math.isfinite(value) and (ends.scale == "linear" or value > 0.0)


def _runs(plot: _Plot, mark: Polyline) -> Iterator[tuple[list[str], list[str]]]:
    """Stretches in which the interval is known."""
    low: list[str] = []
    high: list[str] = []
    for x, below, above in zip(mark.x, mark.low, mark.high, strict=False):
        if x is None or below is None or above is None or not _drawable(above, plot.y):
            if len(low) > 1:
                yield low, high
            low, high = [], []
            continue
        low.append(f"{plot.x.at(x):.1f} {plot.y.at(below):.1f}")
        high.append(f"{plot.x.at(x):.1f} {plot.y.at(above):.1f}")
    if len(low) > 1:
        yield low, high


def _bars(plot: _Plot, mark: Bars, number: int, of: int) -> Iterator[str]:
    along, room = (plot.y, plot.height) if plot.is_lying else (plot.x, plot.width)
    width = 0.78 * room / max(len(mark.y), 1) / of
    shift = (number - (of - 1) / 2) * width
    paths, whiskers = [], []
    for i, value in enumerate(mark.y):
        if value is None:
            continue
        at = along.at(i) + shift
        paths.append((i, plot.bar(at, width, value)))
        if mark.low and mark.low[i] is not None and mark.high[i] is not None:
            whiskers.append(plot.stroke(at, mark.low[i] or 0.0, mark.high[i] or 0.0))
    kind = f'class="f {mark.role}"'
    if len(paths) <= _MOST_BARS:
        for i, path in paths:
            name = plot.names[i] if plot.names else i
            label = escape(f"{name}: {mark.text} {figure_text(mark.y[i] or 0.0)}")
            yield f'<path {kind} d="{path}"><title>{label}</title></path>'
    else:
        yield f'<path {kind} d="{"".join(path for _, path in paths)}"/>'
    if whiskers:
        many = " many" if len(whiskers) > _MOST_BARS else ""
        yield f'<path class="whisker{many}" d="{"".join(whiskers)}"/>'


def _rule(plot: _Plot, mark: Guide, *_: int) -> Iterator[str]:
    if not _drawable(mark.at, plot.x if plot.is_lying else plot.y):
        return
    if plot.is_lying:
        along = f"M{plot.x.at(mark.at):.1f} {plot.top:.1f}v{plot.height:.1f}"
    else:
        along = f"M{plot.left:.1f} {plot.y.at(mark.at):.1f}h{plot.width:.1f}"
    title = f"<title>{escape(mark.text)}</title>"
    yield f'<path class="rule s {mark.role}" fill="none" d="{along}">{title}</path>'


def _points(plot: _Plot, mark: Points, *_: int) -> Iterator[str]:
    for number in sorted(set(mark.group), reverse=True):  # the first on top
        dots = [
            _CROSS.format(x=plot.x.at(x) - 3.5, y=plot.y.at(y) - 3.5)
            if mark.are_crosses
            else f"M{plot.x.at(x):.1f} {plot.y.at(y):.1f}h0"
            for x, y, group in zip(mark.x, mark.y, mark.group, strict=True)
            if group == number and x is not None and y is not None
        ]
        kind = f"s g{number % len(GROUPS)}"
        style = 'stroke-width="4" stroke-linecap="round" stroke-opacity=".65"'
        if mark.are_crosses:  # seen among dots of their own colour
            yield f'<path class="halo" d="{"".join(dots)}"/>'
            style = 'fill="none" stroke-width="2.2"'
        yield f'<path class="{kind}" {style} d="{"".join(dots)}"/>'


def _areas(plot: _Plot, mark: Areas, *_: int) -> Iterator[str]:
    below = np.zeros(len(mark.x))
    for number, shares in enumerate(mark.shares):
        above = below + np.array([share or 0.0 for share in shares])
        xs = [plot.x.at(x or 0.0) for x in mark.x]
        up = [f"{x:.1f} {plot.y.at(y):.1f}" for x, y in zip(xs, above.tolist(), strict=True)]
        down = [f"{x:.1f} {plot.y.at(y):.1f}" for x, y in zip(xs, below.tolist(), strict=True)]
        title = f"<title>{escape(mark.names[number])}</title>"
        kind = f"f g{number % len(GROUPS)}"
        shade = 0.55 + 0.4 * (number // len(GROUPS) % 2)
        path = "L".join((*up, *down[::-1]))
        yield f'<path class="{kind}" fill-opacity="{shade:.2f}" d="M{path}Z">{title}</path>'
        below = above


def _heat(plot: _Plot, mark: Heat, *_: int) -> Iterator[str]:
    places = shades(mark)
    rows, columns = len(places), len(places[0]) if places else 0
    colours = ramp(mark.middle is not None)
    height, width = plot.height / max(rows, 1), plot.width / max(columns, 1)
    paper = f'x="{plot.left:.1f}" y="{plot.top:.1f}" width="{plot.width:.1f}"'
    links = f'data-links="{escape(" ".join(plot.links))}" ' if plot.links else ""
    # what is blank, dark or light
    yield f'<rect {links}fill="#fff" {paper} height="{plot.height:.1f}"/>'
    if rows * columns > _MOST_SHAPES:
        source = b64encode(png(places, colours)).decode()
        yield (
            f'<image class="pixels" {paper} height="{plot.height:.1f}" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{source}"/>'
        )
    else:
        for i, row in enumerate(places):
            for j, place in enumerate(row):
                if not place:
                    continue
                x, y = plot.left + j * width, plot.top + i * height
                r, g, b = colours[place - 1]
                label = mark.cells[i][j] if mark.cells else figure_text(mark.values[i][j] or 0.0)
                cell = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
                yield f'<rect {cell} fill="rgb({r},{g},{b})"><title>{escape(label)}</title></rect>'
                if mark.cells and 6.2 * len(label) < width and height > 11.0:
                    ink = "light" if is_dark((r, g, b)) else "dark"
                    text = _text(x + width / 2, y + height / 2 + 4, label, "middle")
                    yield f'<g class="{ink}">{text}</g>'
    yield from _key(plot, mark)


def _key(plot: _Plot, mark: Heat) -> Iterator[str]:
    """The bar of colours below a heat map, with the values of its ends."""
    colours, steps, length = ramp(mark.middle is not None), 32, 128.0
    y, left = plot.top + plot.height + plot.below - _KEY, plot.left + 60.0
    for i in range(steps):
        r, g, b = colours[round(i * 254 / (steps - 1))]
        place = (
            f'x="{left + i * length / steps:.1f}" y="{y:.1f}" width="{length / steps + 0.3:.1f}"'
        )
        yield f'<rect {place} height="9" fill="rgb({r},{g},{b})"/>'
    ends = mark.ends or (figure_text(mark.low), figure_text(mark.high))
    yield _text(left - 4.0, y + 9.0, ends[0], "end")
    yield _text(left + length + 4.0, y + 9.0, ends[-1], "start")
    yield _text(left, y + 22.0, mark.text, "start", most=60)


_DRAW: dict[type, Callable[..., Iterator[str]]] = {
    Polyline: _line,
    Bars: _bars,
    Guide: _rule,
    Points: _points,
    Areas: _areas,
    Heat: _heat,
}


def _legend_lines(marks: Sequence[Mark], width: float) -> list[list[tuple[str, str]]]:
    """Marks by colour and name, as many to a line as fit; none for a single one."""
    entries = [entry for mark in marks for entry in _entries(mark)]
    lines: list[list[tuple[str, str]]] = []
    room = 0.0
    for kind, text in entries if len(entries) > 1 else ():
        needed = _CHARACTER * len(text) + 30.0
        if needed > room:
            lines.append([])
            room = width
        lines[-1].append((kind, text))
        room -= needed
    return lines


def _legend(plot: _Plot, marks: Sequence[Mark], has_title: bool) -> Iterator[str]:
    y = (_TOP if has_title else 8.0) + 4.0
    for line in _legend_lines(marks, plot.width):
        x = plot.left
        for kind, text in line:
            yield f'<rect class="f {kind}" x="{x:.1f}" y="{y - 8:.1f}" width="9" height="9"/>'
            yield f'<text x="{x + 13:.1f}" y="{y:.1f}">{escape(text)}</text>'
            x += _CHARACTER * len(text) + 30.0
        y += _LEGEND


def _entries(mark: Mark) -> Iterator[tuple[str, str]]:
    match mark:
        case Polyline() | Bars() | Guide():
            yield mark.role, mark.text
        case Points() if len(mark.names) <= len(GROUPS):
            yield from ((f"g{number}", name) for number, name in enumerate(mark.names))
        case _:
            return


# ------------------------------------------------------------------------------------------ colours
def shades(mark: Heat) -> list[list[int]]:
    """1 to 255 for each value from low to high, 0 for none; a middle lies at 128."""

    def scaled(values: object) -> np.ndarray:
        numbers = np.array(values, np.float64)
        if mark.scale == "linear":
            return numbers
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(numbers)

    values = scaled([[np.nan if v is None else v for v in row] for row in mark.values])
    low, high = float(scaled(mark.low)), float(scaled(mark.high))
    stops = [low, high] if mark.middle is None else [low, float(scaled(mark.middle)), high]
    share = np.interp(np.nan_to_num(values, nan=low), stops, np.linspace(0.0, 1.0, len(stops)))
    return np.where(np.isnan(values), 0, 1 + np.rint(254 * share)).astype(int).tolist()


def png(places: Sequence[Sequence[int]], colours: Sequence[tuple[int, int, int]]) -> bytes:
    """A picture of one byte for each pixel, of at most 256 colours; 0 is transparent."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = np.array(places, np.uint8)
    lines = np.pad(rows, ((0, 0), (1, 0))).tobytes()  # each begins with the filter "none"
    size = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 3, 0, 0, 0)
    palette = bytes([0, 0, 0]) + b"".join(map(bytes, colours))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", size),
            chunk(b"PLTE", palette),
            chunk(b"tRNS", b"\x00"),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        ]
    )
