"""An enumeration as a document: what was read, a paragraph for every router and every answer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.core.text import number_of, percent, percent_of_all
from moegeom.document.excerpts import in_part
from moegeom.document.header import duration, header, size
from moegeom.document.model import Block, Document, Excerpt, Fact, Note, Title, View
from moegeom.document.study import study_record
from moegeom.document.summary import Summary
from moegeom.routing_cells.record import (
    Answer,
    Between,
    Cells,
    CutShort,
    Enumerations,
    RandomRouterCells,
    RouterCells,
    Visited,
)

#: Routers that a screen shows before the rest is counted.
_MOST_ROUTERS = 6

#: How the cells were found, by the road that was taken.
_ROADS = {
    "sweep": "swept from end to end in exact arithmetic",
    "walk": "{vertices} walked",
    "charts": "{vertices} walked on two affine charts",
    "exact walk": "walked in exact arithmetic",
    "one cell": "the choice is the same everywhere",
    "search": "searched from facet to facet by least distances, every answer proved",
    "walk and filter": "{vertices} walked, and each cell and facet tried",
    "circle": "all ties on the circle",
    "interval subdivision": "interval subdivision down to the pixel",
}


def document(found: Enumerations, view: View) -> Document:
    """What ``moegeom cells`` says."""
    routers = [[*_router(router)] for router in found.routers]
    shown = len(routers) if view.detail else _MOST_ROUTERS
    screens = [[title, in_part(facts, "line", view.detail, 1)] for title, *facts in routers[:shown]]
    return Document(
        "cells",
        found.name,
        [
            [*_header(found)],
            *screens,
            *([Excerpt([], router)] for router in routers[shown:]),
            [*_answers(found)],
            [*_ending(found, len(routers[shown:]))],
        ],
        lambda: study_record(found),
    )


def _header(found: Enumerations) -> Iterator[Block]:
    run = found.run
    if run is None:
        yield Title(found.name, "a bare matrix: logits W x + b, the k largest are chosen.")
        return
    summary = Summary(run, [{"router": router.router} for router in found.routers], [], [], [])
    yield from header(summary, "routers", "rule", "tokens", name=found.name)


def _router(router: RouterCells) -> Iterator[Block]:
    experts = number_of(router.num_experts, "expert")
    yield Title(router.router, f"{experts}, top-{router.top_k}")
    for label, text in _sentences(router):
        is_open = router.outcome == "unfinished" and label == "cells"
        yield Fact(label, text, "warning" if is_open else "strong")


def _answers(found: Enumerations) -> Iterator[Block]:
    for answer in found.answers:
        head, *rest = _answer_sentences(answer)
        yield Fact("CELL", head, "good") if answer.is_cell else Fact("NO CELL", head, "warning")
        yield from (Fact("", text) for text in rest)


def _ending(found: Enumerations, rest: int) -> Iterator[Block]:
    if rest:
        yield Excerpt([Note(f"and {number_of(rest, 'more router')}: --detail")], [])
    for router, why in found.left_out:
        yield Fact("left out", f"{router}: {why}.", "dim")
    files = ", ".join(found.files)
    if found.written is not None:
        yield Fact("written", f"{found.written}: {files}")
    elif files:
        yield Fact("written", files)


# ---------------------------------------------------------------------------------------- sentences


def _number(value: int) -> str:
    """With separators, or a power of ten where that would fill the line."""
    return f"{value:,}" if value < 10**12 else f"{value:.3e}"


def _sentences(router: RouterCells) -> Iterator[tuple[str, str]]:
    """Label and sentence of every fact about one router, in order."""
    yield "slice", _slice(router)
    yield "cells", _count(router)
    if router.num_equal:
        yield "ties", _ties(router)
    if router.random is not None:
        yield "random", _random(router.random)
    found = router.cells
    if found is not None and (found.num_facets or (found.num_components or 0) > 1):
        yield "facets", _facets(found)
    if found is not None:
        yield "proof", _proof(router, found)
    if router.num_checked is not None:
        yield "certify", _checked(router.num_checked)
    if router.num_tokens is not None and router.num_own is not None:
        yield "tokens", _tokens(router)
    if router.between is not None:
        yield "between", _between(router.between)
    if router.visited is not None:
        yield "visited", _visited(router.visited)


def _slice(router: RouterCells) -> str:
    said = f"{router.subspace}, {number_of(router.dims, 'dimension')}"
    if router.variance_share is not None:
        said += f" with {_percent(router.variance_share)} of the variance of the tokens"
    return said + (f"; {router.domain}" if router.domain else "")


def _count(router: RouterCells) -> str:
    sets = f"C({router.num_experts}, {router.top_k}) = {_number(router.num_possible)} "
    sets += "set" if router.num_possible == 1 else "sets"
    if router.outcome == "all subsets":
        return (
            f"all {sets}: the rows have rank E - 1 (certified modulo a prime), so every set is a "
            "cell and every pair a facet of it; not listed. A --subspace tells more."
        )
    if router.outcome == "unfinished":
        assert router.cut_short is not None
        return _cut_short(router, router.cut_short)
    assert router.cells is not None
    count = router.cells.num_cells
    if router.outcome == "pixels":
        return f"at least {count:,} of {sets} in the frame; smaller ones may lie between pixels"
    said = f"{count:,} of {sets}"
    if count == 0:
        return f"{said}: every place is a tie"
    if router.most_cells is not None and router.most_cells < router.num_possible:
        said += (
            f", of at most {_number(router.most_cells)} in {number_of(router.dims, 'dimension')}"
        )
    if router.cells.num_bounded is not None:
        said += f"; {router.cells.num_bounded:,} bounded"
    return said


#: Bytes that a walk takes at most for a vertex, its cells and facets included.
_VERTEX_BYTES = 200


def _cut_short(router: RouterCells, cut: CutShort) -> str:
    """What there was too much of, how much is allowed, and what to type."""
    said = f"not listed: more than the {cut.most:,} {cut.what} that --vertices allows"
    if cut.what == "cells":
        said += f" {router.domain}"
    expected = router.expected_vertices
    if expected is not None and math.isfinite(expected) and cut.what == "vertices":
        said += f"; a random router has about {_number(round(expected))}"
    fewer = "a slice of fewer dimensions (--subspace)"
    if cut.enough is None:
        return f"{said}. More are not kept: ask for {fewer}."
    if cut.what == "cells":
        return f"{said}. Try --vertices {cut.enough}, or tighter bounds."
    room = size(_VERTEX_BYTES * cut.enough)
    return f"{said}. Try --vertices {cut.enough} (up to {room} of memory), or {fewer}."


def _ties(router: RouterCells) -> str:
    """Where equal experts leave no cell: how many regions, where those were counted."""
    num_tied = None if router.cells is None else router.cells.num_tied
    equal = f"{router.num_equal:,} of its experts are equal to another one"
    if num_tied == 0:
        return f"{equal}, but nowhere here tie for the last place"
    if num_tied is None:
        said = f"{equal}: where they tie for the last place is no cell, which is not counted here"
    else:
        regions = number_of(num_tied, "region of the slice is", "regions of the slice are")
        said = f"{regions} in no cell: {equal}, and they tie there for the last place"
    if router.num_on_ties is not None and router.num_tokens and not router.domain:
        share = _percent(router.num_on_ties / router.num_tokens)
        said += f"; {number_of(router.num_on_ties, 'token is', 'tokens are')} drawn there ({share})"
    return f"{said}. With --tie-broken the lower number is ahead."


def _random(random: RandomRouterCells) -> str:
    spread = f" +- {random.sd:.1f}" if random.num_routers > 1 else ""
    draws = number_of(random.num_routers, "draw")
    return (
        f"random routers with the same row norms have {random.mean:,.1f}{spread} cells there "
        f"({draws}, standard deviation)"
    )


def _facets(found: Cells) -> str:
    pieces = found.num_components or 1
    if not found.num_facets:
        return f"none: no two of the {number_of(pieces, 'cell')} share one"
    said = f"{found.num_facets:,}"
    if found.degrees is not None:
        least, mean, most = found.degrees
        said += f"; a cell has {least} to {most}, {mean:.1f} on average"
    if pieces > 1:
        said += f"; no facet joins the {pieces:,} pieces that the cells fall into"
    if found.diameter is not None:
        at_least = "" if found.is_diameter_exact else "at least "
        facets = number_of(found.diameter, "facet")
        within = " within one piece" if pieces > 1 else ""
        said += f"; the farthest cells{within} are {at_least}{facets} apart"
    return said


def _proof(router: RouterCells, found: Cells) -> str:
    vertices = number_of(found.num_vertices, "vertex", "vertices")
    said = _ROADS[found.road].format(vertices=vertices)
    if found.num_exact:
        said += f", {found.num_exact:,} of the answers in exact arithmetic, the others in float64"
    elif found.gap is not None and math.isfinite(found.gap):
        said += f", all proved in float64 (safe by a factor of {found.gap:.1e} or more)"
    if found.proved_share is not None and found.num_open is not None:
        said += (
            f"; one set is proved for {_percent(found.proved_share)} of the area, "
            f"{number_of(found.num_open, 'pixel is', 'pixels are')} undecided, the rest "
            "is proved to be crossed by facets"
        )
    elif found.proved_share is not None:
        said += f"; {_percent(found.proved_share)} of the arcs proved"
    if found.num_rational:
        said += f"; {found.num_rational:,} too narrow for a float64 point, a rational one is given"
    return f"{said}; {duration(router.seconds)}"


def _checked(num_checked: int) -> str:
    """What --certify did: a point in each cell, and nothing of what is not listed."""
    if not num_checked:
        return "nothing was checked again: no cell is listed"
    return (
        f"{number_of(num_checked, 'cell has', 'cells have')} a point inside that was checked again "
        "in integers, by code that did not find it; that no cell is missing rests on the line above"
    )


def _tokens(router: RouterCells) -> str:
    assert router.num_tokens is not None
    assert router.num_own is not None
    share = router.num_own / router.num_tokens if router.num_tokens else 0.0
    said = (
        f"{router.num_own:,} of {router.num_tokens:,} ({_percent(share)}) choose what the slice "
        "chooses at the place where they are drawn"
    )
    if router.domain:
        said += ", counted on all of the slice"
    if router.num_cells_with_tokens is not None:
        holding = number_of(router.num_cells_with_tokens, "cell holds", "cells hold")
        said += f"; {holding} a drawn token"
        if router.domain:
            said += ", be it beyond those bounds"
    if router.left_out:
        said += f"; {router.left_out:,} are not finite and left out"
    return said


def _between(between: Between) -> str:
    return (
        f"{between.mean_crossings:.3g} facets on the straight way between two tokens, "
        f"{between.per_length:.3g} +- {between.per_length_se:.1g} per unit of length of the "
        f"router input ({number_of(between.num_segments, 'way')})"
    )


def _visited(visited: Visited) -> str:
    pieces = number_of(visited.num_components, "piece")
    part = "" if visited.is_whole else " (of the most visited ones)"
    return (
        f"{number_of(visited.num_expert_sets, 'set')} of experts by these tokens; "
        f"{number_of(visited.num_edges, 'pair differs', 'pairs differ')} in one expert, which "
        f"leaves {pieces}{part}; the largest holds "
        f"{_percent(visited.largest_share)} of the tokens"
    )


def _answer_sentences(answer: Answer) -> Iterator[str]:
    """What is said of a set of experts: whether it is a cell, and how that is proved."""
    numbers = ", ".join(map(str, answer.expert_set))
    several = len(answer.expert_set) > 1
    chosen = f"{answer.router}: expert{'s' if several else ''} {numbers}"
    are = "are chosen together" if several else "is chosen"
    where = f"on {answer.subspace}"
    checked = " Checked again in exact arithmetic." if answer.is_checked else ""
    took = f" ({duration(answer.seconds)})"
    if answer.is_cell:
        assert answer.margin is not None
        each = "each of them is ahead of all others" if several else "it is ahead of all others"
        ahead = f"{each} by {answer.margin:.3g} or more"
        if math.isinf(answer.margin):
            ahead = "there are no others"
        said = f"at the point of the certificate {ahead}"
        yield f"{chosen} {are} somewhere {where}: {said}.{checked}{took}"
        return
    yield f"{chosen} {are} nowhere {where}.{checked}{took}"
    if answer.weights is not None:
        inside, outside = (_mixture(part) for part in answer.weights)
        yield (
            f"proof: {inside} of the set mixes to the same row as {outside} outside it, whose bias "
            "is no smaller: they can never all be ahead."
        )


def _mixture(weights: tuple[tuple[int, float], ...]) -> str:
    return " + ".join(f"{weight:.3g} x {expert}" for expert, weight in weights)


def _percent(share: float) -> str:
    """Rounded down where rounding would say all of them."""
    text = percent(share, ".3g")
    return percent_of_all(share) if text == "100 %" and share < 1.0 else text
