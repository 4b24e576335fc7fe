"""Cells on a line: the top-k set from left to right, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

Piece = tuple[frozenset[int], Fraction | None, Fraction | None]


def sweep(slope: Sequence[Fraction], offset: Sequence[Fraction], k: int) -> Iterator[Piece]:
    """Top-k sets of ``slope * x + offset`` from left to right, with the interval of each.

    Ends are None where there are none. Of equal lines the lower number wins, so that their cells
    are tie-broken; no interval is empty. From one break to the next by Newton steps on the lower
    envelope of the chosen lines against the upper one of the others. For 0 < k < E.
    """
    lines = range(len(slope))
    start: Fraction | None = None
    while True:
        order = sorted(lines, key=lambda i: _key(i, start, slope, offset))
        chosen, others = order[:k], order[k:]
        stop = _next_break(chosen, others, slope, offset)
        yield frozenset(chosen), start, stop
        if stop is None:
            return
        start = stop


def _key(
    i: int, at: Fraction | None, slope: Sequence[Fraction], offset: Sequence[Fraction]
) -> tuple[Fraction, Fraction, int]:
    """Descending values just right of ``at``; far to the left where that is None."""
    if at is None:
        return slope[i], -offset[i], i
    return -(slope[i] * at + offset[i]), -slope[i], i


def _next_break(
    chosen: Sequence[int],
    others: Sequence[int],
    slope: Sequence[Fraction],
    offset: Sequence[Fraction],
) -> Fraction | None:
    """Where one of the others first overtakes a chosen line; None where none ever does."""
    out = min(chosen, key=lambda i: (slope[i], offset[i]))
    into = max(others, key=lambda j: (slope[j], offset[j]))
    found = None
    while slope[into] > slope[out]:
        at = (offset[out] - offset[into]) / (slope[into] - slope[out])
        if found is not None and at >= found:
            break
        found = at
        values = [rate * at + value for rate, value in zip(slope, offset, strict=True)]
        out = min(chosen, key=lambda i: (values[i], slope[i]))
        into = max(others, key=lambda j: (values[j], slope[j]))
        if values[out] >= values[into]:
            break
    return found
