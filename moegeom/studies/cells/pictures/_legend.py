"""Colours of cells, by their expert sets, and which of these a picture names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moegeom.studies.cells.pictures._caption import percent_text
from moegeom.studies.cells.pictures._picture import (
    CircleCells,
    ExpertSet,
    PlaneCells,
    RasterCells,
    SlicePicture,
    SpaceCells,
    expert_set_text,
)

#: Light colours, any two of them apart in OKLab also as red-blind and green-blind people see them.
PALETTE = (
    "#98afba",
    "#fad779",
    "#feb4f7",
    "#ce8545",
    "#b97fc6",
    "#8aeebb",
    "#aabf64",
    "#49af7e",
    "#b3a7fb",
    "#f6af97",
    "#ebdff4",
    "#43d5dc",
    "#dbfbbb",
    "#709de7",
)

#: Steps that visit all colours: without a factor in common with their number.
_STEPS = (1, 3, 5, 9, 11, 13)

INK = "#1a1a1a"
FAINT = "#8c8c8c"
PALE = "#eeeeee"
ACCENT = "#d55e00"


def preferred(expert_set: ExpertSet) -> list[int]:
    """All colours in the order in which the expert set would have them: from its digest alone."""
    digest = hashlib.blake2b(",".join(map(str, expert_set)).encode(), digest_size=4).digest()
    start, step = digest[0] + 256 * digest[1], _STEPS[digest[2] % len(_STEPS)]
    return [(start + step * i) % len(PALETTE) for i in range(len(PALETTE))]


def cell_colours(
    expert_sets: Sequence[ExpertSet], facets: Int64[np.ndarray, "facets 2"]
) -> Int64[np.ndarray, "cells"]:
    """The place in the palette for each cell: the first in its own order that no neighbour has.

    Of two neighbours the expert set that is smaller as a tuple chooses first, so that the numbers
    of the cells do not matter. Beyond as many neighbours as there are colours, the first choice.
    """
    neighbours: list[list[int]] = [[] for _ in expert_sets]
    for one, other in facets.tolist():
        neighbours[one].append(other)
        neighbours[other].append(one)
    chosen = np.full(len(expert_sets), -1, np.int64)
    for cell in sorted(range(len(expert_sets)), key=lambda cell: expert_sets[cell]):
        taken = {int(chosen[other]) for other in neighbours[cell]}
        order = preferred(expert_sets[cell])
        chosen[cell] = next((colour for colour in order if colour not in taken), order[0])
    return chosen


def shaded(colour: str) -> str:
    """The colour with three tenths of ink mixed in."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(INK[1:]), strict=True)
    return "#" + "".join(f"{round(0.7 * value + 0.3 * ink):02x}" for value, ink in pairs)


#: Expert sets that are named; their letters.
LETTERS = "ABCDEFGHIJKL"


@dataclass(frozen=True)
class LegendEntry:
    """One line: a box in a colour with a letter, or a mark of a token, or nothing."""

    text: str
    colour: str = ""
    letter: str = ""
    mark: str = ""
    hatch: str = ""


@dataclass(frozen=True)
class Legend:
    """``letters`` by cell; ``head`` names the experts that all named expert sets have."""

    head: str
    entries: tuple[LegendEntry, ...]
    letters: dict[int, str]


def legend_of(
    expert_sets: Sequence[ExpertSet],
    sizes: Float64[np.ndarray, "cells"],
    colours: Int64[np.ndarray, "cells"],
    what: str = "cells",
) -> Legend:
    """The largest expert sets with letters, the rest as a count and a share."""
    seen = np.flatnonzero(sizes > 0)
    order = seen[np.argsort(-sizes[seen], kind="stable")]
    named, rest = order[: len(LETTERS)].tolist(), order[len(LETTERS) :]
    shared = shared_experts([expert_sets[cell] for cell in named])
    entries = []
    for letter, cell in zip(LETTERS, named, strict=False):
        own = tuple(expert for expert in expert_sets[cell] if expert not in shared)
        text = expert_set_text(own) or "no other"
        entries.append(LegendEntry(text, PALETTE[int(colours[cell])], letter))
    if len(rest):
        share = percent_text(float(sizes[rest].sum() / sizes.sum()))
        entries.append(LegendEntry(f"{len(rest):,} more {what}, {share}"))
    head = f"{expert_set_text(tuple(sorted(shared)))} and:" if shared else ""
    return Legend(
        head,
        tuple(entries),
        dict(zip(named, LETTERS, strict=False)),
    )


def shared_experts(expert_sets: Sequence[ExpertSet]) -> frozenset[int]:
    """Experts of all of several expert sets; none for a single one."""
    if len(expert_sets) < 2:
        return frozenset()
    return functools.reduce(frozenset.__and__, map(frozenset, expert_sets))


def with_entries(legend: Legend, *more: LegendEntry) -> Legend:
    """The legend with lines at its end."""
    return dataclasses.replace(legend, entries=(*legend.entries, *more))


def token_entries(picture: SlicePicture) -> tuple[LegendEntry, ...]:
    """What filled and hollow marks are and how many are drawn."""
    match picture:
        case SpaceCells():
            return ()
        case CircleCells():
            if picture.token_angle is None or picture.is_own is None:
                return ()
            return _counts(picture.is_own)
        case PlaneCells() | RasterCells():
            if picture.tokens is None:
                return ()
            tokens, (x0, x1, y0, y1) = picture.tokens, picture.frame
            x, y = tokens.place.T
            is_drawn = (x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)
            return _counts(tokens.is_own[is_drawn])


def _counts(is_own: Bool[np.ndarray, "tokens"]) -> tuple[LegendEntry, ...]:
    own = int(is_own.sum())
    return (
        LegendEntry(f"token in its own cell ({own:,})", mark="own"),
        LegendEntry(f"token of another cell ({len(is_own) - own:,})", mark="else"),
    )
