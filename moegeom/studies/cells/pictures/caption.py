"""The title of a picture and the sentence or two below it."""

from __future__ import annotations

import dataclasses

from moegeom.core.text import number_of, percent
from moegeom.document.paper import cut
from moegeom.document.untrusted import printable
from moegeom.studies.cells.pictures.records import (
    OPEN,
    CircleCells,
    PlaneCells,
    RasterCells,
    SliceCaption,
    SlicePicture,
    SpaceCells,
)


def caption_text(picture: SlicePicture) -> str:
    """One paragraph: what is drawn, of which router, how true it is to the tokens, made by what."""
    caption = _bounded(picture.caption)
    experts = number_of(caption.num_experts, "expert")
    router = f"{experts} of {caption.model}, router {caption.router}"
    sentences = [
        f"Cells of the top {caption.top_k} of {router}, on {caption.subspace}"
        + _variance(picture)
        + ".",
        f"{_content(picture)}.",
        _own(picture),
        _seed(picture) + f"moegeom {caption.version}.",
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


def _variance(picture: SlicePicture) -> str:
    share = picture.caption.variance_share
    return "" if share is None else f" ({percent_text(share)} of the variance)"


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
            open_share = float((picture.state == OPEN).mean()) if picture.state.size else 0.0
            height, width = picture.state.shape
            counts = [number_of(len(picture.expert_sets), "expert set")]
            counts += [f"{width} x {height} pixels, {percent_text(open_share)} of them undecided"]
    proof = "every one proved" if picture.caption.is_certified else "not all of it proved"
    return f"{', '.join(counts)}; {proof}"


def own_counts(picture: SlicePicture) -> tuple[int, int] | None:
    """Tokens that lie in the cell they are drawn in, and all; None where that is unknown."""
    caption = picture.caption
    if caption.own_cell_share is not None and caption.num_tokens is not None:
        return round(caption.own_cell_share * caption.num_tokens), caption.num_tokens
    is_own = None
    if isinstance(picture, CircleCells):
        is_own = picture.is_own
    elif not isinstance(picture, SpaceCells) and picture.tokens is not None:
        is_own = picture.tokens.is_own
    return None if is_own is None else (int(is_own.sum()), len(is_own))


def _own(picture: SlicePicture) -> str:
    counts = own_counts(picture)
    if counts is None:
        return ""
    own, tokens = counts
    share = own / tokens if tokens else 0.0
    return (
        f"{own:,} of {tokens:,} tokens ({percent_text(share)}) "
        f"{'lies' if own == 1 else 'lie'} in the cell they are drawn in."
    )


def _seed(picture: SlicePicture) -> str:
    return "" if picture.caption.seed is None else f"Seed {picture.caption.seed}; "
