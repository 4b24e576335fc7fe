"""Words of others in sentences of ours."""

from __future__ import annotations

from reprlib import Repr

#: Characters of what a file gives that a message shows.
MOST_QUOTED = 200

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_QUOTED
_SHORT.maxlist = _SHORT.maxtuple = 12


def quoted(found: object, most: int = MOST_QUOTED) -> str:
    """A value as Python writes it, in at most ``most`` characters; long texts lose their middle."""
    text = _SHORT.repr(found)
    return text if len(text) <= most else f"{text[: most - 3]}..."
