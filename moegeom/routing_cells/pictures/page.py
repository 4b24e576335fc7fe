"""Cells of a slice as a picture shows them, with what surrounds them: title, caption and legend."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int32, Int64, Integer, UInt8
from moegeom.core.text import number_of, percent
from moegeom.document.chart import INK, Axis, Discs, Key, Label, Picture, PicturePage, Shape
from moegeom.document.paper import cut
from moegeom.document.untrusted import printable
from moegeom.routing_cells.plane.polygons import Frame
from moegeom.routing_cells.plane.raster import PixelState
from moegeom.routing_cells.request import CellsRequest

#: Experts of a cell, by rising number.
ExpertSet = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SliceCaption:
    """Where a picture comes from, and how much of the tokens' routing it shows.

    ``subspace`` as in "pca:2 of 16384 tokens"; ``variance_share`` is the share of the tokens'
    variance within it, ``num_own`` how many tokens choose what the slice chooses at the place where
    they are drawn. What is unknown is None. ``is_certified`` says that every cell and facet is
    proved; ``remark`` is one sentence, or empty.
    """

    model: str
    router: str
    top_k: int
    num_experts: int
    subspace: str
    variance_share: float | None
    num_own: int | None
    num_tokens: int | None
    seed: int | None
    version: str
    is_certified: bool
    remark: str


@dataclass(frozen=True, eq=False)
class TokenMarks:
    """Tokens by their place in a plane.

    ``is_own`` where the token's own expert set, in all dimensions, is the plane's at that place.
    """

    place: Float64[np.ndarray, "tokens 2"]
    is_own: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class PlaneCells:
    """Cells of an affine router in a plane, as polygons.

    ``polygons`` are counter-clockwise and clipped to the frame, one per expert set; one outside the
    frame has no corner. Facets are segments within the frame: ``facet_out`` serves in the first of
    ``facet_cells`` and ``facet_into`` in the second.
    """

    caption: SliceCaption
    frame: Frame
    expert_sets: tuple[ExpertSet, ...]
    polygons: tuple[Float64[np.ndarray, "_ 2"], ...]
    facet_ends: Float64[np.ndarray, "facets 2 2"]
    facet_cells: Int64[np.ndarray, "facets 2"]
    facet_out: Integer[np.ndarray, "facets"]
    facet_into: Integer[np.ndarray, "facets"]
    tokens: TokenMarks | None = None


@dataclass(frozen=True, eq=False)
class RasterCells:
    """Cells of any router in a plane, by pixels; row 0 is the lowest, at y0.

    ``label`` is the place in ``expert_sets``, below 0 where none is known; ``state`` that of
    :class:`~moegeom.routing_cells.plane.raster.PixelState`.
    """

    caption: SliceCaption
    frame: Frame
    label: Int32[np.ndarray, "height width"]
    state: UInt8[np.ndarray, "height width"]
    expert_sets: tuple[ExpertSet, ...]
    tokens: TokenMarks | None = None


@dataclass(frozen=True, eq=False)
class SpaceCells:
    """Cells of a slice of three dimensions, by a point inside each, and which of them touch."""

    caption: SliceCaption
    place: Float64[np.ndarray, "cells 3"]
    expert_sets: tuple[ExpertSet, ...]
    facets: Int64[np.ndarray, "facets 2"]
    tokens_inside: Int64[np.ndarray, "cells"] | None = None


@dataclass(frozen=True, eq=False)
class CircleCells:
    """Cells along a circle: one arc per expert set in order, from ``start`` to ``stop`` in radians.

    An arc that passes the angle 0 stops beyond 2 pi.
    """

    caption: SliceCaption
    expert_sets: tuple[ExpertSet, ...]
    start: Float64[np.ndarray, "arcs"]
    stop: Float64[np.ndarray, "arcs"]
    token_angle: Float64[np.ndarray, "tokens"] | None = None
    is_own: Bool[np.ndarray, "tokens"] | None = None


SlicePicture = PlaneCells | RasterCells | SpaceCells | CircleCells


def expert_set_text(expert_set: ExpertSet) -> str:
    """``3 17 42``."""
    return " ".join(map(str, expert_set))


# ------------------------------------------------------------------------------------------ caption
def caption_text(picture: SlicePicture) -> str:
    """One paragraph: what is drawn, of which router, how true it is to the tokens, made by what."""
    caption = _bounded(picture.caption)
    experts = number_of(caption.num_experts, "expert")
    router = f"{experts} of {caption.model}, router {caption.router}"
    share, seed = caption.variance_share, caption.seed
    variance = "" if share is None else f" ({percent_text(share)} of the variance)"
    sentences = [
        f"Cells of the top {caption.top_k} of {router}, on {caption.subspace}{variance}.",
        f"{_content(picture)}.",
        _own(caption),
        f"{'' if seed is None else f'Seed {seed}; '}moegeom {caption.version}.",
    ]
    if caption.remark:
        sentences.insert(3, caption.remark.rstrip(".") + ".")
    return " ".join(sentence for sentence in sentences if sentence)


def _bounded(caption: SliceCaption) -> SliceCaption:
    """The caption with its texts on one line each and not too long: others named what is there."""
    most = {"model": 160, "router": 160, "subspace": 160, "remark": 600, "version": 40}
    text = printable(caption)
    return dataclasses.replace(text, **{n: cut(getattr(text, n), m) for n, m in most.items()})


def title_text(picture: SlicePicture) -> str:
    """``model, router: top 8 of 64``."""
    caption = _bounded(picture.caption)
    return f"{caption.model}, {caption.router}: top {caption.top_k} of {caption.num_experts}"


def percent_text(share: float) -> str:
    """Two significant digits; what is not all or nothing is not written as such."""
    if share in (0.0, 1.0):
        return percent(share, ".0f")
    if share < 0.0001:
        return "< 0.01 %"
    if share > 0.9999:
        return "> 99.99 %"
    return percent(share, ".2f" if share < 0.01 or share > 0.99 else ".1f")


def _content(picture: SlicePicture) -> str:
    match picture:
        case PlaneCells():
            seen = sum(len(polygon) > 2 for polygon in picture.polygons)
            facets = number_of(len(picture.facet_ends), "facet")
            counts = [f"{number_of(seen, 'cell')} and {facets} in the frame"]
        case SpaceCells():
            counts = [number_of(len(picture.place), "cell")]
            counts += [number_of(len(picture.facets), "facet")]
        case CircleCells():
            counts = [number_of(len(picture.start), "arc")]
        case RasterCells():
            open_share = (
                float((picture.state == PixelState.OPEN).mean()) if picture.state.size else 0.0
            )
            height, width = picture.state.shape
            counts = [number_of(len(picture.expert_sets), "expert set")]
            counts += [f"{width} x {height} pixels, {percent_text(open_share)} of them undecided"]
    proof = "every one proved" if picture.caption.is_certified else "not all of it proved"
    return f"{', '.join(counts)}; {proof}"


def _own(caption: SliceCaption) -> str:
    if caption.num_own is None or caption.num_tokens is None:
        return ""
    own, tokens = caption.num_own, caption.num_tokens
    share = own / tokens if tokens else 0.0
    return (
        f"{own:,} of {tokens:,} tokens ({percent_text(share)}) "
        f"{'lies' if own == 1 else 'lie'} in the cell they are drawn in."
    )


# ------------------------------------------------------------------------------------------- legend
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
def frame_page(frame: Frame, request: CellsRequest) -> PicturePage:
    """A page for the frame: as high as it is wide where the frame is, unless that is extreme."""
    ratio = np.clip((frame[3] - frame[2]) / (frame[1] - frame[0]), 0.35, 1.6)
    return PicturePage(request.width, float(ratio))


def frame_axes(frame: Frame) -> tuple[Axis, Axis]:
    """The coordinates of the plane."""
    x0, x1, y0, y1 = frame
    return Axis("first coordinate", low=x0, high=x1), Axis("second coordinate", low=y0, high=y1)


def picture_of(
    cells: SlicePicture,
    request: CellsRequest,
    page: PicturePage,
    axes: Sequence[Axis],
    shapes: Sequence[Shape],
    legend: Legend,
    subtitle: str = "",
) -> Picture:
    """The shapes on their page, with the title and the caption of the slice."""
    caption = caption_text(cells) if request.caption else ""
    title, keys = title_text(cells), legend.keys
    return Picture(page, title, subtitle, caption, axes, shapes, keys, legend.head, request.dpi)
