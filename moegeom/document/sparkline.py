"""A series of numbers as a word of block characters."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"

#: For terminals that cannot show block characters.
ASCII = "_.-=+*#@"


def sparkline(values: Sequence[float | None]) -> str:
    """One character for each value, from the least to the largest; a space where there is none.

    Equal values are shown in the middle, not as a fall or a rise.
    """
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    low, span = min(known), max(known) - min(known)
    if span <= 1e-12 * max(abs(low), 1e-300):
        return "".join(" " if value is None else BLOCKS[3] for value in values)
    return "".join(
        " "
        if value is None
        else BLOCKS[min(int((value - low) / span * len(BLOCKS)), len(BLOCKS) - 1)]
        for value in values
    )
