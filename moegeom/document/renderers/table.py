"""A document as a terminal shows it: folded to the width, coloured, as long as a page at most.

What is longer is cut where the document says how: the longest excerpt by a step, and again.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from moegeom.document.model import (
    LABEL,
    Block,
    Command,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Headline,
    Look,
    Note,
    Problem,
    Table,
    Title,
    View,
)
from moegeom.document.render import Renderer

#: Columns that text is never narrower than, beside a name that fills the screen.
_LEAST = 20

#: Lines of a page: a screen is cut down to them, where it can be.
PAGE = 40

_STYLES: dict[Look, str] = {
    "plain": "",
    "strong": "bold",
    "dim": "dim",
    "good": "bold green",
    "warning": "yellow",
    "error": "bold red",
}

_SEVERITIES: dict[str, tuple[str, Look]] = {
    "error": ("ERROR", "error"),
    "warning": ("WARN ", "warning"),
    "note": ("NOTE ", "dim"),
}


def render(document: Document, view: View) -> str:
    """Text of at most ``view.width`` columns, but for commands, which stay whole.

    It has ``PAGE`` lines at most, where excerpts can be that short and ``view.detail`` is not set.
    """
    blocks = [
        _Steps(number, block, view.width, 0)
        for number, section in enumerate(document.sections)
        for block in section
    ]
    while not view.detail and _height(blocks) > PAGE:
        longer = [place for place, block in enumerate(blocks) if block.can_be_shorter]
        if not longer:
            break
        longest = max(longer, key=lambda place: (blocks[place].is_aside, blocks[place].height))
        blocks[longest] = dataclasses.replace(blocks[longest], step=blocks[longest].step + 1)
    lines: list[Text] = []
    for section in _sections(blocks):
        lines += [Text(), *section] if lines else section
    return _printed(lines, view)


@dataclass(frozen=True)
class _Steps:
    """A block of the section ``number``, ``step`` steps shorter than it could be."""

    number: int
    block: Block
    width: int
    step: int

    @property
    def can_be_shorter(self) -> bool:
        return isinstance(self.block, Excerpt) and self.step < len(self.block.shorter)

    @property
    def is_aside(self) -> bool:
        return isinstance(self.block, Excerpt) and self.block.is_aside

    @functools.cached_property
    def lines(self) -> list[Text]:
        if isinstance(self.block, Excerpt) and self.step:
            parts = self.block.shorter[self.step - 1]
            return [line for part in parts for line in _block(part, self.width)]
        return _block(self.block, self.width)

    @functools.cached_property
    def height(self) -> int:
        """Lines on the screen, which folds a command that is longer than it is wide."""
        return sum(max(1, math.ceil(len(line) / self.width)) for line in self.lines)


def _sections(blocks: Sequence[_Steps]) -> Iterator[list[Text]]:
    """Lines of each section that has some."""
    for _, section in itertools.groupby(blocks, key=lambda block: block.number):
        if lines := [line for block in section for line in block.lines]:
            yield lines


def _height(blocks: Sequence[_Steps]) -> int:
    """Lines on the screen, with those between sections."""
    return sum(block.height for block in blocks) + len([*_sections(blocks)]) - 1


def _printed(lines: Sequence[Text], view: View) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=view.width,
        force_terminal=view.colours,
        color_system="standard" if view.colours else None,
        highlight=False,
        force_jupyter=False,  # which shows lines and writes none
    )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    return stream.getvalue()


def _block(block: Block, width: int) -> list[Text]:
    match block:
        case Title(name, text):
            first, *later = map(Text, _wrapped(f"{name}  {text}", width, later=" " * LABEL) or [""])
            first.stylize("bold", 0, len(name))
            return [first, *later]
        case Fact():
            return _fact(block, width)
        case Problem():
            return _problem(block, width)
        case Table():
            return _table(block, width)
        case Note(text, look, indent):
            return [Text(part, style=_STYLES[look]) for part in _wrapped(text, width, " " * indent)]
        case Command(label, text):
            return [Text.assemble((f"   {label}", "dim"), text)]
        case Excerpt(screen=screen):
            return [line for part in screen for line in _block(part, width)]
        case Gallery() | Headline():
            return []


def _wrapped(text: str, width: int, indent: str = "", later: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns; a word that is longer stays whole."""
    return textwrap.wrap(
        text,
        max(width, len(indent) + _LEAST),
        initial_indent=indent,
        subsequent_indent=indent if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _hanging(head: str, text: str, width: int, look: Look) -> list[Text]:
    """``text`` beside ``head``, all further lines indented as far; the head has the look."""
    parts = _wrapped(text, width - len(head)) or [""]
    heads = [head, *(" " * len(head) for _ in parts[1:])]
    return [Text.assemble((h, _STYLES[look]), part) for h, part in zip(heads, parts, strict=True)]


def _fact(fact: Fact, width: int) -> list[Text]:
    lines = _hanging(f"{fact.label:<{fact.indent}}", fact.text, width, fact.look)
    if not fact.right:
        return lines
    room = width - len(lines[-1])
    if room < len(fact.right) + 2:
        return [*lines, Text(f"{fact.right:>{width}}")]
    lines[-1].append(f"{fact.right:>{room}}")
    return lines


def _problem(problem: Problem, width: int) -> list[Text]:
    """Severity, code, where, and the sentence that is read first; the rest below it."""
    finding = problem.finding
    word, look = _SEVERITIES[finding.severity]
    lines = _hanging(f"{word} {finding.code}  ", f"{problem.places}: {finding.title}", width, look)
    lines += map(Text, _wrapped(finding.detail, width, "   "))
    if finding.fix:
        lines += _hanging("   fix:  ", finding.fix, width, "dim")
    if finding.next_command:
        lines += _block(Command("next: ", finding.next_command), width)
    return lines


def _table(table: Table, width: int) -> list[Text]:
    columns = list(range(len(table.heads[-1])))
    lines = _aligned(table, columns, table.gap)
    if max(map(len, lines)) > width:
        lines = _aligned(table, columns, 2)
    while max(map(len, lines)) > width and table.drops:
        highest = max(table.drops[column] for column in columns)
        if highest == 0:
            break
        columns = [column for column in columns if table.drops[column] < highest]
        lines = _aligned(table, columns, 2)
    if max(map(len, lines)) > width and table.paragraphs:
        body = [
            line
            for label, text in table.paragraphs
            for line in _hanging(f"{label:<14}", text, width, "strong")
        ]
    else:
        if max(map(len, lines)) > width:
            table = _folded(table, columns, width)
            lines = _aligned(table, columns, 2)
        looks: list[Look] = [table.heads_look] * len(table.heads)
        looks.extend(table.row_looks)
        body = [
            Text(line, style=_STYLES[look]) for line, look in zip(lines, looks, strict=True) if line
        ]
    rest = _block(Note(table.rest, indent=table.indent), width) if table.rest else []
    return [*body, *rest]


def _folded(table: Table, columns: Sequence[int], width: int) -> Table:
    """The table with its first column folded so that all of it has ``width`` columns at most."""
    first, *others = columns
    lines = (*table.heads, *table.rows)
    taken = sum(2 + max(len(row[column]) for row in lines) for column in others)
    rows, looks = [], []
    for row, look in zip(table.rows, table.row_looks, strict=True):
        parts = _wrapped(row[first], width - table.indent - taken, later="     ") or [""]
        for number, part in enumerate(parts):
            cells = [*row] if number == 0 else [""] * len(row)
            cells[first] = part
            rows.append(cells)
            looks.append(look)
    return dataclasses.replace(table, rows=rows, looks=looks)


def _aligned(table: Table, columns: Sequence[int], gap: int) -> list[str]:
    """Lines of headings and rows, of these columns alone; a line may be empty."""
    heads = [[(row[column], 1) for column in columns] for row in table.heads]
    for row in heads[:-1]:  # a heading runs on over the empty ones to its right
        owner = 0
        for place in range(1, len(row)):
            if row[place][0]:
                owner = place
            else:
                row[owner] = (row[owner][0], row[owner][1] + 1)
                row[place] = ("", 0)
    cells = [[row[column] for column in columns] for row in table.rows]
    widths = [
        max(
            [len(row[place][0]) for row in heads if row[place][1] == 1]
            + [len(row[place]) for row in cells]
        )
        for place in range(len(columns))
    ]
    for row in heads:  # and makes the first of them wider where they are too narrow for it
        for place, (text, span) in enumerate(row):
            room = sum(widths[place : place + span]) + gap * (span - 1)
            widths[place] += max(0, len(text) - room) if span > 1 else 0

    def line(row: Sequence[tuple[str, int]]) -> str:
        parts = []
        for place, (text, span) in enumerate(row):
            if not span:
                continue
            room = sum(widths[place : place + span]) + gap * (span - 1)
            is_left = span > 1 or columns[place] in table.left
            parts.append(text.ljust(room) if is_left else text.rjust(room))
        return (" " * table.indent + (" " * gap).join(parts)).rstrip()

    return [*map(line, heads), *(line([(cell, 1) for cell in row]) for row in cells)]


RENDERER = Renderer("table", render)
