"""Lists that a screen cuts short where it has no room for them, with what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from moegeom.core.text import number_of
from moegeom.document.model import Block, Excerpt, Note

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
