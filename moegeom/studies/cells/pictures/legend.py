"""Colours of cells, by their expert sets, which of these a picture names, and its page."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.document.chart import INK, Axis, Discs, Key, Label, Page, Picture, Shape
from moegeom.studies.cells.pictures.caption import caption_text, percent_text, title_text
from moegeom.studies.cells.pictures.records import (
    ExpertSet,
    Frame,
    PictureOptions,
    SlicePicture,
    TokenMarks,
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

#: Where a cell is not of interest.
PALE = "#eeeeee"


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
class Legend:
    """``letters`` by cell; ``head`` names the experts that all named expert sets have."""

    head: str
    keys: tuple[Key, ...]
    letters: dict[int, str]


def legend_of(
    expert_sets: Sequence[ExpertSet],
    sizes: Float64[np.ndarray, "cells"],
    colours: Int64[np.ndarray, "cells"],
    *more: Key,
    what: str = "cells",
) -> Legend:
    """The largest expert sets with letters, the rest as a count and a share, then ``more`` keys."""
    seen = np.flatnonzero(sizes > 0)
    order = seen[np.argsort(-sizes[seen], kind="stable")]
    named, rest = order[: len(LETTERS)].tolist(), order[len(LETTERS) :]
    shared = shared_experts([expert_sets[cell] for cell in named])
    keys = []
    for letter, cell in zip(LETTERS, named, strict=False):
        own = tuple(expert for expert in expert_sets[cell] if expert not in shared)
        text = expert_set_text(own) or "no other"
        keys.append(Key(text, PALETTE[int(colours[cell])], letter))
    if len(rest):
        share = percent_text(float(sizes[rest].sum() / sizes.sum()))
        keys.append(Key(f"{len(rest):,} more {what}, {share}"))
    head = f"{expert_set_text(tuple(sorted(shared)))} and:" if shared else ""
    return Legend(head, (*keys, *more), dict(zip(named, LETTERS, strict=False)))


def shared_experts(expert_sets: Sequence[ExpertSet]) -> frozenset[int]:
    """Experts of all of several expert sets; none for a single one."""
    if len(expert_sets) < 2:
        return frozenset()
    return functools.reduce(frozenset.__and__, map(frozenset, expert_sets))


def letter_labels(
    letters: Mapping[int, str], places: Mapping[int, tuple[float, ...]]
) -> Iterator[Label]:
    """The letter of each cell that has a place for it."""
    for cell, place in places.items():
        yield Label(letters[cell], place, is_bold=True)


def token_discs(tokens: TokenMarks | None) -> Iterator[Discs]:
    """Discs that are filled only where the token's own expert set is that of the place."""
    if tokens is None:
        return
    number = len(tokens.place)
    area = float(np.clip(200 / max(number, 1), 1.2, 9.0))
    pale = 0.7 if number > 300 else 1.0
    for name, is_drawn, colour, size, rim, opacity in (
        ("tokens-elsewhere", ~tokens.is_own, "none", area, 0.35, pale),
        ("tokens-own", tokens.is_own, INK, max(2 * area, 5.0), 0.5, 1.0),
    ):
        yield Discs(name, tokens.place[is_drawn], size, colour, rim, opacity)


def token_keys(tokens: TokenMarks | None, frame: Frame) -> tuple[Key, ...]:
    """What filled and hollow discs are, and how many of them the frame holds."""
    if tokens is None:
        return ()
    x0, x1, y0, y1 = frame
    x, y = tokens.place.T
    is_own = tokens.is_own[(x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)]
    own = int(is_own.sum())
    return (
        Key(f"token in its own cell ({own:,})", disc=INK),
        Key(f"token of another cell ({len(is_own) - own:,})", disc="none"),
    )


# -------------------------------------------------------------------------------------------- pages
def frame_page(frame: Frame, options: PictureOptions) -> Page:
    """A page for the frame: as high as it is wide where the frame is, unless that is extreme."""
    ratio = np.clip((frame[3] - frame[2]) / (frame[1] - frame[0]), 0.35, 1.6)
    return Page(options.width, float(ratio))


def frame_axes(frame: Frame) -> tuple[Axis, Axis]:
    """The coordinates of the plane."""
    x0, x1, y0, y1 = frame
    return Axis("first coordinate", low=x0, high=x1), Axis("second coordinate", low=y0, high=y1)


def picture_of(
    cells: SlicePicture,
    options: PictureOptions,
    page: Page,
    axes: Sequence[Axis],
    shapes: Sequence[Shape],
    legend: Legend,
    subtitle: str = "",
) -> Picture:
    """The shapes on their page, with the title and the caption of the slice."""
    caption = caption_text(cells) if options.with_caption else ""
    title, keys = title_text(cells), legend.keys
    return Picture(page, title, subtitle, caption, axes, shapes, keys, legend.head, options.dpi)
