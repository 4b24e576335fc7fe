"""Segments of straight lines: where the choice of any rule changes, between proved pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.router import Rule
from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.kernels.cpu.segments import segment_loop
from moegeom.routing_cells.plane.raster import (
    CHUNK,
    FLOOR,
    UNIT,
    Enclosure,
    certain_choice,
    compared_ranges,
)

#: Pieces shorter than this are looked at by :func:`certain_choice` where more than this share of
#: them is not proved, as the last ones are: the loop knows neither duels of groups nor fills.
_FINE, _MANY = 2.0**-7, 0.7

#: Pieces that a segment begins with, and how often one that is not proved is halved.
_PIECES, _HALVINGS = 8, 18


@dataclass(frozen=True, eq=False)
class BracketedChanges:
    """Changes of the chosen set on each segment, each between two points with different sets.

    ``at`` are the places of the changes of all segments in a row, from ``first[s]`` to
    ``first[s + 1]``. ``is_unknown`` where a piece was left, with one set at both of its ends, of
    which it is not proved that no other set is chosen in between.
    """

    is_unknown: Bool[np.ndarray, "segments"]
    first: Int64[np.ndarray, "segments+1"]
    at: Float64[np.ndarray, "changes"]


def bracketed_changes(
    logits_a: Float64[np.ndarray, "segments experts"],
    logits_b: Float64[np.ndarray, "segments experts"],
    rule: Rule,
    bias: Float64[np.ndarray, "experts"] | None,
) -> BracketedChanges:
    """Where the choice of any rule at (1 - t) a + t b changes for t from 0 to 1.

    Pieces are halved until one set is proved for each by :func:`certain_choice`; what is left at
    2^-21 of the segment holds a change where the sets beside it differ. Two changes within one such
    piece count as one. Oracle in tests: the rule at many points.
    """
    slope, segments = logits_b - logits_a, len(logits_a)
    size = np.maximum(np.abs(logits_a), np.abs(logits_b))
    segment = np.repeat(np.arange(segments), _PIECES)
    low = np.tile(np.arange(_PIECES) / _PIECES, segments)
    width, proved = 1.0 / _PIECES, []
    step, loop = max(CHUNK // logits_a.shape[1], 1), segment_loop(rule, bias, logits_a.shape[1])

    def enclosed(of: np.ndarray, at: np.ndarray, half: float) -> tuple[np.ndarray, np.ndarray]:
        logits = Enclosure(
            logits_a[of] + at[:, None] * slope[of],
            slope[of],
            np.zeros((len(of), slope.shape[1])),
            16.0 * UNIT * size[of] + FLOOR,
            np.column_stack([np.full(len(of), half), np.zeros(len(of))]),
        )
        is_one, chosen = certain_choice(compared_ranges(logits, rule, bias), rule)
        return is_one, chosen[is_one]

    for halving in range(_HALVINGS + 1):
        at, left, some = low + 0.5 * width, np.ones(len(segment), bool), []
        if loop is not None:
            is_one, chosen = loop(logits_a, slope, size, segment, at, 0.5 * width)
            left &= ~is_one
            proved.append((segment[is_one], at[is_one], np.full(len(chosen), width), chosen))
        rest = np.flatnonzero(left)
        is_open = width < _FINE and len(rest) > _MANY * len(segment)
        if loop is None or halving == _HALVINGS or is_open:
            some = [rest[start : start + step] for start in range(0, len(rest), step)]
        for rows in some:
            is_one, chosen = enclosed(segment[rows], at[rows], 0.5 * width)
            hits = rows[is_one]
            left[hits] = False
            proved.append((segment[hits], at[hits], np.full(len(hits), width), chosen))
        width *= 0.5
        segment = np.repeat(segment[left], 2)
        low = np.repeat(low[left], 2) + np.tile([0.0, width], int(left.sum()))
        if not len(segment):
            break
    of, at, widths, sets = (np.concatenate(part) for part in zip(*proved, strict=True))
    order = np.lexsort((at, of))
    of, at, widths, sets = of[order], at[order], widths[order], sets[order]
    follows = of[1:] == of[:-1]
    differs = (sets[1:] != sets[:-1]).any(axis=1)
    end, begin = at[:-1] + 0.5 * widths[:-1], at[1:] - 0.5 * widths[1:]
    change = np.flatnonzero(follows & differs)
    first = np.zeros(segments + 1, np.int64)
    np.cumsum(np.bincount(of[change], minlength=segments), out=first[1:])
    is_unknown = np.ones(segments, bool)
    is_unknown[of] = False  # of a segment without a proved piece nothing is known
    is_unknown[of[:-1][follows & ~differs & (begin - end > 1e-12)]] = True
    return BracketedChanges(is_unknown, first, 0.5 * (end + begin)[change])
