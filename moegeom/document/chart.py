"""What a figure shows: panels of marks over two axes, in words that need no legend of their own.

A figure is data. ``document/svg.py`` draws it on a page, ``document/paper.py`` into a file for a
paper; both give a meaning the same colour everywhere. A picture, of a plane or of space, is data
too: shapes in colours that it chooses itself, and a legend that says what they are. Only
``document/paper.py`` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moegeom.core.shapes import Float64, UInt8

#: What a mark is about; each meaning has one colour, on pages and on paper: tokens, random (the
#: random router), limit, other (what A is compared with), dim. Groups without a meaning of their
#: own, such as layers, are g0, g1, g2 ... and take colours in their order.
Role = str

#: How values become places or colours.
Scale = Literal["linear", "log2", "log10"]

Numbers = Sequence[float | None]


def percents(shares: Numbers) -> list[float | None]:
    """Shares in percent; None stays."""
    return [None if share is None else 100.0 * share for share in shares]


def padded(rows: Sequence[Numbers], width: int) -> list[list[float | None]]:
    """Rows of one length, as a heat map has them: None behind what a shorter one holds."""
    return [[*row, *[None] * (width - len(row))] for row in rows]


@dataclass(frozen=True)
class Axis:
    """``label`` in words, with the unit. ``names`` stand at 0, 1, 2 ... on an axis of things.

    ``links`` are the places of a page, ``#layer-3``, that the names lead to.
    """

    label: str
    scale: Scale = "linear"
    names: Sequence[str] = ()
    links: Sequence[str] = ()
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Polyline:
    """A curve; ``low`` and ``high`` bound its 95 % intervals. None leaves a gap."""

    text: str
    role: Role
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class Bars:
    """A bar for each name, from 0, upwards, or to the right where the y axis has the names.

    Several marks of one panel stand side by side where a name has several values. ``y`` are the
    values, whichever way the bars lie.
    """

    text: str
    role: Role
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class Guide:
    """A line across the panel at a value of the y axis; of the x axis where bars lie."""

    text: str
    role: Role
    at: float


@dataclass(frozen=True)
class Points:
    """Dots or crosses, one colour for each of ``names``; ``group`` says which each has.

    Without names they are in the colours of what else is in the panel, and have no legend.
    """

    x: Numbers
    y: Numbers
    group: Sequence[int]
    names: Sequence[str] = ()
    are_crosses: bool = False


@dataclass(frozen=True)
class Areas:
    """Shares that add up, one band above the other: a row of ``shares`` for each of ``names``."""

    x: Numbers
    shares: Sequence[Numbers]
    names: Sequence[str]


@dataclass(frozen=True)
class Heat:
    """A colour for each value, rows downwards; None is blank.

    Colours run from ``low`` to ``high``; with a ``middle`` they part there into two directions.
    ``cells`` are texts to write into them where there is room, ``ends`` what low, the middle if
    there is one, and high are called where they are no numbers.
    """

    values: Sequence[Numbers]
    text: str
    low: float
    high: float
    middle: float | None = None
    scale: Scale = "linear"
    cells: Sequence[Sequence[str]] = ()
    ends: Sequence[str] = ()


Mark = Polyline | Bars | Guide | Points | Areas | Heat


#: Bars that stand in a narrow panel with room to spare.
_FEW_BARS = 12


@dataclass(frozen=True)
class Panel:
    """Marks over one pair of axes."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    is_wide: bool = True

    @property
    def is_lying(self) -> bool:
        """Whether bars run to the right, which leaves room for long names."""
        return bool(self.y.names) and any(isinstance(mark, Bars) for mark in self.marks)

    @property
    def fills_page(self) -> bool:
        """Whether it takes the width of a page; a few bars that stand are read as well without."""
        has_few = len(self.x.names) <= _FEW_BARS and any(isinstance(m, Bars) for m in self.marks)
        return self.is_wide and (self.is_lying or not has_few)

    def slot(self, mark: Mark) -> tuple[int, int]:
        """Which of how many bars of a name this mark is: (0, 1) where a name has one at most."""
        bars = [each for each in self.marks if isinstance(each, Bars)]
        values = zip(*(each.y for each in bars), strict=True)
        if mark not in bars or all(sum(v is not None for v in each) < 2 for each in values):
            return 0, 1
        return bars.index(mark), len(bars)


@dataclass(frozen=True)
class Chart:
    """Panels with what they show, what they do not show, and the numbers behind them.

    ``alt`` says the figure to those who cannot see it, with its numbers. ``columns`` are the values
    as the tables hold them, by name: what is downloaded as CSV. Panels titled ``layer 3`` are of
    that layer; ``more`` are those of other layers, which a page folds away.
    """

    name: str
    title: str
    shows: str
    shows_not: str
    alt: str
    panels: Sequence[Panel]
    columns: Sequence[tuple[str, Sequence[str | int | float | None]]]
    more: Sequence[Panel] = ()


# ----------------------------------------------------------------------------------------- pictures
#: Points of the sizes of type of a picture.
SIZE, SMALL = 7.0, 6.0

#: Lines and texts of a picture.
INK = "#1a1a1a"


@dataclass(frozen=True, eq=False)
class Polygons:
    """Filled polygons, each in its colour; those of fewer than three corners are left out.

    ``name`` is that of their group in an SVG file. Edges are in the colour of the polygon, unless
    ``edge`` is another one; ``width`` is theirs, in points. ``hatch`` is a pattern over the colour.
    """

    name: str
    corners: Sequence[Float64[np.ndarray, "_ 2"]]
    colours: Sequence[str]
    edge: str = ""
    width: float = 0.15
    hatch: str = ""


@dataclass(frozen=True, eq=False)
class Segments:
    """Straight lines from one place to another."""

    name: str
    ends: Float64[np.ndarray, "segments 2 dims"]
    colour: str = INK
    width: float = 0.5
    opacity: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True, eq=False)
class Discs:
    """Discs with a rim in ink, of areas in points squared and colours for each or for all.

    The colour "none" leaves all of them hollow.
    """

    name: str
    places: Float64[np.ndarray, "discs dims"]
    areas: Float64[np.ndarray, "discs"] | float
    colours: Sequence[str] | str
    rim: float = 0.35
    opacity: float = 1.0


@dataclass(frozen=True, eq=False)
class Pixels:
    """Red, green and blue of pixels that fill the axes; row 0 is the lowest."""

    name: str
    colours: UInt8[np.ndarray, "height width 3"]


@dataclass(frozen=True)
class Label:
    """A text around a place, turned by degrees; ``side`` of it is at the place."""

    text: str
    place: tuple[float, ...]
    angle: float = 0.0
    size: float = SIZE
    is_bold: bool = False
    side: Literal["left", "center", "right"] = "center"


Shape = Polygons | Segments | Discs | Pixels | Label


@dataclass(frozen=True)
class Key:
    """A line of a legend: a box in a colour with a letter, or a disc, or neither."""

    text: str
    colour: str = ""
    letter: str = ""
    disc: str = ""
    hatch: str = ""


#: Points of a millimetre; from so many millimetres on the legend is beside the drawing, which
#: leaves it this share of the page.
_MM, _WIDE, _BESIDE = 72 / 25.4, 130.0, 0.25


@dataclass(frozen=True)
class PicturePage:
    """Points of a page for a drawing whose height is ``ratio`` times its width.

    ``millimetres`` is the width of the page; left, right and bottom is room around the drawing.
    """

    millimetres: float
    ratio: float
    left: float = 30.0
    right: float = 9.0
    bottom: float = 22.0

    @property
    def is_wide(self) -> bool:
        """Whether the legend stands beside the drawing, not below it."""
        return self.millimetres >= _WIDE

    @property
    def width(self) -> float:
        """Points of the page."""
        return self.millimetres * _MM

    @property
    def legend(self) -> float:
        """Points of the legend beside the drawing; 0 where it is below."""
        return _BESIDE * self.width if self.is_wide else 0.0

    @property
    def drawing(self) -> tuple[float, float]:
        """Width and height of the drawing."""
        width = self.width - self.left - self.right - self.legend
        return width, width * self.ratio


@dataclass(frozen=True, eq=False)
class Picture:
    """Shapes, the first below all others, with a title, a legend and a caption.

    Three ``axes`` make a drawing in space; axes without labels are not drawn.
    ``head`` stands above the ``keys`` of the legend. ``dpi`` counts where pixels do.
    """

    page: PicturePage
    title: str
    subtitle: str
    caption: str
    axes: Sequence[Axis]
    shapes: Sequence[Shape]
    keys: Sequence[Key]
    head: str = ""
    dpi: int = 300
