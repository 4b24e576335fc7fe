"""Words of others and numbers of things in sentences of ours."""

from __future__ import annotations

from reprlib import Repr
from typing import SupportsInt

#: Characters of what a file gives that a message shows.
MOST_QUOTED = 200

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_QUOTED
_SHORT.maxlist = _SHORT.maxtuple = 12


def quoted(found: object, most: int = MOST_QUOTED) -> str:
    """A value as Python writes it, in at most ``most`` characters; long texts lose their middle."""
    text = _SHORT.repr(found)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def number_of(count: SupportsInt, one: str, many: str = "") -> str:
    """``1 row`` or ``2,048 rows``; ``many`` where it is not ``one`` with an s: ``rows are``."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
