"""Which coalitions a picture names, and what its legend says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moegeom.cells.pictures._caption import count_text, percent_text
from moegeom.cells.pictures._colours import DOMAIN_INKS
from moegeom.cells.pictures._picture import (
    CircleCells,
    Coalition,
    PlaneCells,
    RasterCells,
    SlicePicture,
    SpaceCells,
    TokenMarks,
    coalition_text,
)

#: Coalitions that are named; their letters.
LETTERS = "ABCDEFGHIJKL"


@dataclass(frozen=True)
class Entry:
    """One line: a box in a colour with a letter, or a mark of a token in an ink, or nothing."""

    text: str
    colour: str = ""
    letter: str = ""
    mark: str = ""
    ink: str = ""
    hatch: str = ""


@dataclass(frozen=True)
class Legend:
    """``letters`` by cell; ``head`` names the experts that all named coalitions have."""

    head: str
    entries: tuple[Entry, ...]
    letters: dict[int, str]


def legend_of(
    coalitions: Sequence[Coalition],
    sizes: Float64[np.ndarray, "cells"],
    colours: Int64[np.ndarray, "cells"],
    palette: Sequence[str],
    what: str = "cells",
) -> Legend:
    """The largest coalitions with letters, the rest as a count and a share."""
    seen = np.flatnonzero(sizes > 0)
    order = seen[np.argsort(-sizes[seen], kind="stable")]
    named, rest = order[: len(LETTERS)].tolist(), order[len(LETTERS) :]
    shared = shared_experts([coalitions[cell] for cell in named])
    entries = []
    for letter, cell in zip(LETTERS, named, strict=False):
        own = tuple(expert for expert in coalitions[cell] if expert not in shared)
        text = coalition_text(own) or "no other"
        entries.append(Entry(text, palette[int(colours[cell])], letter))
    if len(rest):
        share = percent_text(float(sizes[rest].sum() / sizes.sum()))
        entries.append(Entry(f"{count_text(len(rest))} more {what}, {share}"))
    head = f"{coalition_text(tuple(sorted(shared)))} and:" if shared else ""
    return Legend(
        head,
        tuple(entries),
        dict(zip(named, LETTERS, strict=False)),
    )


def shared_experts(coalitions: Sequence[Coalition]) -> frozenset[int]:
    """Experts of all of several coalitions; none for a single one."""
    if len(coalitions) < 2:
        return frozenset()
    return functools.reduce(frozenset.__and__, map(frozenset, coalitions))


def with_entries(legend: Legend, *more: Entry) -> Legend:
    """The legend with lines at its end."""
    return dataclasses.replace(legend, entries=(*legend.entries, *more))


def token_entries(picture: SlicePicture) -> tuple[Entry, ...]:
    """What filled and hollow marks are and how many are drawn; domains, where there are several."""
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
            return (*_counts(tokens.is_own[is_drawn]), *_domains(tokens))


def _counts(is_own: Bool[np.ndarray, "tokens"]) -> tuple[Entry, ...]:
    own = int(is_own.sum())
    return (
        Entry(f"token in its own cell ({count_text(own)})", mark="own"),
        Entry(f"token of another cell ({count_text(len(is_own) - own)})", mark="else"),
    )


def _domains(tokens: TokenMarks) -> tuple[Entry, ...]:
    numbers = [] if tokens.label is None else np.unique(tokens.label).tolist()
    if not 1 < len(numbers) <= len(DOMAIN_INKS):
        return ()
    inks = {number: DOMAIN_INKS[number % len(DOMAIN_INKS)] for number in numbers}
    return tuple(Entry(f"domain {n}", mark="domain", ink=ink) for n, ink in inks.items())
