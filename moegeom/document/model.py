"""What a report says: titles, facts, tables, notes. How it looks is the business of renderers.

A study returns its own record; its ``document.py`` tells it in these blocks, and knows nothing of
widths, colours, escapes or formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moegeom.core.finding import Finding, Verdict
from moegeom.document.chart import Chart

Look = Literal["plain", "strong", "dim", "good", "warning", "error"]

#: Columns of the label in front of a fact.
LABEL = 9


@dataclass(frozen=True)
class Title:
    """Whose report this is, and in a sentence what that is."""

    name: str
    text: str = ""


@dataclass(frozen=True)
class Fact:
    """A sentence beside a label of ``indent`` columns; ``right`` stands at the right end.

    An empty label goes on with the fact before.
    """

    label: str
    text: str
    look: Look = "strong"
    right: str = ""
    indent: int = LABEL


@dataclass(frozen=True)
class Problem:
    """A finding, and the routers it is about as people call them."""

    finding: Finding
    places: str


@dataclass(frozen=True)
class Table:
    """Cells as text, one look for each row.

    ``heads`` are one line of headings or more. In all but the last, a heading runs on over the
    empty cells to its right; where its own neighbour is not empty, it is that of one column.
    Columns ``left`` are set flush left, ``gap`` apart where there is room and else 2. Where the
    screen is too narrow, columns go in the order of ``drops``, the highest first and equal ones
    together; those with 0 stay, as all do where ``drops`` is empty. If that is not enough,
    ``paragraphs``, label and sentence for each row, stand for the table. ``rest`` is a line below.
    ``anchors`` are names of rows that figures of the same page lead to.
    """

    heads: Sequence[Sequence[str]]
    rows: Sequence[Sequence[str]]
    looks: Sequence[Look] = ()
    left: Sequence[int] = (0,)
    drops: Sequence[int] = ()
    gap: int = 2
    indent: int = 0
    heads_look: Look = "dim"
    paragraphs: Sequence[tuple[str, str]] = ()
    rest: str = ""
    anchors: Sequence[str] = ()

    @property
    def row_looks(self) -> Sequence[Look]:
        """One for each row: plain where nothing else is said."""
        return self.looks or ("plain",) * len(self.rows)


@dataclass(frozen=True)
class Note:
    """A paragraph without a label."""

    text: str
    look: Look = "dim"
    indent: int = 0


@dataclass(frozen=True)
class Command:
    """Something to type: a line of its own that is never folded."""

    label: str
    text: str


@dataclass(frozen=True)
class Excerpt:
    """What a screen shows of something, and the whole, which a page has room for.

    With a ``summary``, a page folds the whole away behind it. ``shorter`` stands for ``screen``,
    one step after the other, as long as a screen does not fit: each says what it leaves out. The
    longest excerpt is made shorter first, those with ``is_aside`` before all others.
    """

    screen: Sequence[Block]
    page: Sequence[Block]
    summary: str = ""
    shorter: Sequence[Sequence[Block]] = ()
    is_aside: bool = False


@dataclass(frozen=True)
class Headline:
    """The numbers that matter, at most three, beside the verdict of a page: each with what it is
    and its look. A screen has them in its facts and tables.
    """

    numbers: Sequence[tuple[str, str, Look]]

    @classmethod
    def of_classes(cls, good: int, bad: int, unjudged: int, what: str, worst: Look) -> Headline:
        """How many of ``what`` are judged and fine, judged and not, and not judged."""
        return cls(
            [
                (f"{good:,}", f"{what} fine", "good" if good else "plain"),
                (f"{bad:,}", f"{what} not fine", worst if bad else "plain"),
                (f"{unjudged:,}", f"{what} not judged", "warning" if unjudged else "plain"),
            ]
        )


@dataclass(frozen=True, eq=False)
class Gallery:
    """Figures, which a page draws and a screen leaves out; ``figures`` makes them when asked."""

    figures: Callable[[], Sequence[Chart]]


Block = Title | Fact | Problem | Table | Note | Command | Excerpt | Headline | Gallery


@dataclass(frozen=True)
class Judged:
    """The verdict of a gate and the facts of its run, for renderers that pass verdicts on."""

    verdict: Verdict
    run: Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """Sections of blocks; an empty line stands between two that are not empty.

    ``kind`` is the command, ``name`` what the report is about, ``record`` the same as data.
    """

    kind: str
    name: str
    sections: Sequence[Sequence[Block]]
    record: Callable[[], Mapping[str, Any]]
    judged: Judged | None = field(default=None)

    def figures(self) -> list[Chart]:
        """Every figure of its page, in the order of the page."""
        blocks = [block for section in self.sections for block in section]
        return [f for block in blocks if isinstance(block, Gallery) for f in block.figures()]


@dataclass(frozen=True)
class View:
    """How to show: columns of the screen, colours, whether all is said however long that is, and
    whether the output can show no more than ASCII.
    """

    width: int = 100
    colours: bool = False
    detail: bool = False
    is_ascii: bool = False
