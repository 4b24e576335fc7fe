"""Lists that a screen cuts short where it has no room for them, with what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from moegeom.core.text import number_of
from moegeom.document.model import Block, Excerpt, Note, Table, View

T = TypeVar("T")

#: Entries of a list that a screen without room shows at most.
MOST = 12


def in_part(
    blocks: Sequence[Block],
    what: str,
    detail: bool,
    least: int = 0,
    indent: int = 0,
    page: Sequence[Block] | None = None,
    is_aside: bool = False,
) -> Excerpt:
    """All of the blocks; or the first of them, ``least`` or more, and how many ``what`` more.

    With ``detail`` a screen shows all in any case. A page shows ``page``, or all. What ``is_aside``
    is cut before anything else.
    """
    steps = () if detail else range(min(len(blocks) - 1, MOST), least - 1, -1)
    shorter = [[*blocks[:n], not_shown(len(blocks) - n, what, indent)] for n in steps]
    return Excerpt(blocks, blocks if page is None else page, shorter=shorter, is_aside=is_aside)


def not_shown(number: int, what: str, indent: int = 0) -> Note:
    """``Not shown: 2 more notes: --detail``."""
    return Note(f"Not shown: {number_of(number, f'more {what}')}: --detail", indent=indent)


#: Rows of a table that a screen shows before the rest is counted; where it has no room, the least.
_MOST_LINES, _LEAST_LINES = 12, 3


def worst_rows(rows: Sequence[T], badness: Callable[[T], float], view: View) -> Iterator[list[T]]:
    """The rows that get a line on a screen, in their own order, and ever fewer: the worst stay."""
    if view.detail:
        yield list(rows)
        return
    worst = sorted(range(len(rows)), key=lambda place: -badness(rows[place]))
    most = min(len(rows), _MOST_LINES)
    for number in range(most, min(most, _LEAST_LINES) - 1, -1):
        yield [rows[place] for place in sorted(worst[:number])]


def worst_excerpt(
    rows: Sequence[T],
    badness: Callable[[T], float],
    view: View,
    table: Callable[[Sequence[T]], Table],
    *also: Block,
) -> Excerpt:
    """A table of the worst rows on a screen; on a page of all, with what is there ``also``."""
    worst, *fewer = worst_rows(rows, badness, view)
    return Excerpt([table(worst)], [table(rows), *also], shorter=[[table(few)] for few in fewer])
