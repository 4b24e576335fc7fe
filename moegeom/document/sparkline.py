"""Numbers as words of block characters: a series, a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"

#: A line across a bar.
MARK = "│"

#: For terminals that cannot show block characters.
ASCII: Mapping[int, int] = str.maketrans(BLOCKS + MARK, "_.-=+*#@|")


def sparkline(values: Sequence[float | None]) -> str:
    """One character for each value, from the least to the largest; a space where there is none.

    Equal values are shown in the middle, not as a fall or a rise.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return " " * len(values)
    low, span = min(numbers), max(numbers) - min(numbers)
    if span <= 1e-12 * max(abs(low), 1e-300):
        return "".join(" " if value is None else BLOCKS[3] for value in values)
    return "".join(
        " "
        if value is None
        else BLOCKS[min(int((value - low) / span * len(BLOCKS)), len(BLOCKS) - 1)]
        for value in values
    )


def bar(value: float, limit: float, fair: float = 1.0, size: int = 9) -> str:
    """A bar of ``size`` columns that ends at ``limit``, and one more that marks ``fair``.

    What is beyond the limit ends in ``>``; a value above 0 has one column at least.
    """
    filled = min(max(round(size * value / limit), value > 0.0), size)
    blocks = f"{BLOCKS[6] * filled:<{size}}"
    if value > limit:
        blocks = f"{blocks[:-1]}>"
    at = round(size * fair / limit)
    return blocks[:at] + MARK + blocks[at:]
