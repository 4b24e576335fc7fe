"""An enumeration as a document: the input, and a paragraph for each router and each answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from moegeom.core.text import number_of, percent, percent_of_all
from moegeom.document.chart import Axis, Bars, Chart, Panel, Polyline
from moegeom.document.excerpts import in_part
from moegeom.document.header import duration, header, size
from moegeom.document.model import Block, Document, Excerpt, Fact, Gallery, Note, Title, View
from moegeom.document.place import place
from moegeom.document.study import study_record
from moegeom.document.summary import Summary
from moegeom.routing_cells.facet_graph import Visited
from moegeom.routing_cells.record import (
    Answer,
    Between,
    Cells,
    CutShort,
    Enumerations,
    RandomRouterCells,
    RouterCells,
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
    "circle": "all ties on the circle",
    "interval subdivision": "interval subdivision down to the pixel",
}


def document(enumerations: Enumerations, view: View) -> Document:
    """What ``moegeom research cells`` says."""
    routers = [[*_router(router)] for router in enumerations.routers]
    most = len(routers) if view.detail else _MOST_ROUTERS
    screens = [[title, in_part(facts, "line", view.detail, 1)] for title, *facts in routers[:most]]
    return Document(
        "research cells",
        enumerations.name,
        [
            [*_header(enumerations)],
            [Gallery(lambda: [*cells_figures(enumerations)])],
            *screens,
            *([Excerpt([], router)] for router in routers[most:]),
            [*_answers(enumerations)],
            [*_ending(enumerations, len(routers[most:]))],
        ],
        lambda: study_record(enumerations),
    )


def _header(enumerations: Enumerations) -> Iterator[Block]:
    run = enumerations.run
    if run is None:
        yield Title(enumerations.name, "a bare matrix: logits W x + b, the k largest are chosen.")
        return
    summary = Summary(run, [], [], [], [])
    yield from header(summary, "routers", "rule", "tokens", name=enumerations.name)


def _router(router: RouterCells) -> Iterator[Block]:
    experts = number_of(router.num_experts, "expert")
    yield Title(router.router, f"{experts}, top-{router.top_k}")
    for label, text in _sentences(router):
        is_open = router.outcome == "unfinished" and label == "cells"
        yield Fact(label, text, "warning" if is_open else "strong")


def _answers(enumerations: Enumerations) -> Iterator[Block]:
    for answer in enumerations.answers:
        head, *rest = _answer_sentences(answer)
        yield Fact("CELL", head, "good") if answer.is_cell else Fact("NO CELL", head, "warning")
        yield from (Fact("", text) for text in rest)


def _ending(enumerations: Enumerations, rest: int) -> Iterator[Block]:
    if rest:
        yield Excerpt([Note(f"and {number_of(rest, 'more router')}: --detail")], [])
    for router, why in enumerations.left_out:
        yield Fact("left out", f"{router}: {why}.", "dim")
    files = ", ".join(enumerations.files)
    if enumerations.written is not None:
        yield Fact("written", f"{enumerations.written}: {files}")
    elif files:
        yield Fact("written", files)


# ---------------------------------------------------------------------------------------- sentences


def _number(value: int) -> str:
    """The number with separators, or as a power of ten from 10^12 on."""
    return f"{value:,}" if value < 10**12 else f"{value:.3e}"


def _sentences(router: RouterCells) -> Iterator[tuple[str, str]]:
    """Label and sentence of every fact about one router, in order."""
    yield "slice", _slice(router)
    yield "cells", _count(router)
    if router.num_equal:
        yield "ties", _ties(router)
    if router.random is not None:
        yield "random", _random(router.random)
    cells = router.cells
    if cells is not None and (cells.num_facets or (cells.num_components or 0) > 1):
        yield "facets", _facets(cells)
    if cells is not None:
        yield "proof", _proof(router, cells)
    if router.num_checked is not None:
        yield "certify", _checked(router.num_checked)
    if router.num_tokens is not None and router.num_own is not None:
        yield "tokens", _tokens(router, router.num_tokens, router.num_own)
    if router.between is not None:
        yield "between", _between(router.between)
    if router.visited is not None:
        yield "visited", _visited(router.visited)


def _slice(router: RouterCells) -> str:
    text = f"{router.subspace}, {number_of(router.dims, 'dimension')}"
    if router.variance_share is not None:
        text += f" with {_percent(router.variance_share)} of the variance of the tokens"
    return text + (f"; {router.domain}" if router.domain else "")


def _count(router: RouterCells) -> str:
    sets = f"C({router.num_experts}, {router.top_k}) = {_number(router.num_possible)} "
    sets += "set" if router.num_possible == 1 else "sets"
    if router.outcome == "all subsets":
        return (
            f"all {sets} are reachable, and any two that differ in one expert share a facet "
            "(proved); not listed. For a list or a picture: --subspace "
            f"{'random' if router.visited is None else 'pca'}:3"
        )
    if router.cut_short is not None:
        return _cut_short(router, router.cut_short)
    assert router.cells is not None
    count = router.cells.num_cells
    if router.outcome == "pixels":
        return f"at least {count:,} of {sets} in the frame; smaller ones may lie between pixels"
    text = f"{count:,} of {sets}"
    if count == 0:
        return f"{text}: every place is a tie"
    if router.most_cells is not None and router.most_cells < router.num_possible:
        text += (
            f", of at most {_number(router.most_cells)} in {number_of(router.dims, 'dimension')}"
        )
    if router.cells.num_bounded is not None:
        text += f"; {router.cells.num_bounded:,} bounded"
    return text


#: Bytes that a walk takes at most for a vertex, its cells and facets included.
_VERTEX_BYTES = 200


def _cut_short(router: RouterCells, cut: CutShort) -> str:
    """Which limit ended the search, and what to type instead."""
    text = f"not listed: more than the {cut.most:,} vertices that --vertices allows"
    expected = router.expected_vertices
    if expected is not None and math.isfinite(expected):
        text += f"; a random router has about {_number(round(expected))}"
    fewer = "a slice of fewer dimensions (--subspace)"
    if cut.enough is None:
        return f"{text}. More are not kept: ask for {fewer}."
    room = size(_VERTEX_BYTES * cut.enough)
    return f"{text}. Try --vertices {cut.enough} (up to {room} of memory), or {fewer}."


def _ties(router: RouterCells) -> str:
    """How many regions equal experts keep from being cells, if those were counted."""
    num_tied = None if router.cells is None else router.cells.num_tied
    equal = f"{router.num_equal:,} of its experts are equal to another one"
    if num_tied == 0:
        return f"{equal}, but nowhere here tie for the last place"
    if num_tied is None:
        text = f"{equal}: where they tie for the last place is no cell, which is not counted here"
    else:
        regions = number_of(num_tied, "region of the slice is", "regions of the slice are")
        text = f"{regions} in no cell: {equal}, and they tie there for the last place"
    if router.num_on_ties is not None and router.num_tokens and not router.domain:
        share = _percent(router.num_on_ties / router.num_tokens)
        text += f"; {number_of(router.num_on_ties, 'token is', 'tokens are')} drawn there ({share})"
    return f"{text}. With --tie-broken the lower number is ahead."


def _random(random: RandomRouterCells) -> str:
    spread = f" +- {random.sd:.1f}" if random.num_routers > 1 else ""
    draws = number_of(random.num_routers, "draw")
    return (
        f"random routers with the same row norms have {random.mean:,.1f}{spread} cells there "
        f"({draws}, standard deviation)"
    )


def _facets(cells: Cells) -> str:
    pieces = cells.num_components or 1
    if not cells.num_facets:
        return f"none: no two of the {number_of(pieces, 'cell')} share one"
    text = f"{cells.num_facets:,}"
    if cells.degrees is not None:
        least, mean, most = cells.degrees
        text += f"; a cell has {least} to {most}, {mean:.1f} on average"
    if pieces > 1:
        text += f"; no facet joins the {pieces:,} pieces that the cells fall into"
    if cells.diameter is not None:
        at_least = "" if cells.is_diameter_exact else "at least "
        facets = number_of(cells.diameter, "facet")
        within = " within one piece" if pieces > 1 else ""
        text += f"; the farthest cells{within} are {at_least}{facets} apart"
    return text


def _proof(router: RouterCells, cells: Cells) -> str:
    vertices = number_of(cells.num_vertices, "vertex", "vertices")
    text = _ROADS[cells.road].format(vertices=vertices)
    if cells.num_exact:
        text += f", {cells.num_exact:,} of the answers in exact arithmetic, the others in float64"
    elif cells.gap is not None and math.isfinite(cells.gap):
        text += f", all proved in float64 (safe by a factor of {cells.gap:.1e} or more)"
    if cells.num_concurrent:
        points = number_of(cells.num_concurrent, "point")
        text += f"; at {points} more experts tie than in general position"
    elif cells.num_concurrent == 0:
        text += "; ties as in general position"
    if cells.num_parallel:
        text += f", {cells.num_parallel:,} boundaries parallel to others"
    if cells.proved_share is not None and cells.num_open is not None:
        text += (
            f"; one set is proved for {_percent(cells.proved_share)} of the area, "
            f"{number_of(cells.num_open, 'pixel is', 'pixels are')} undecided, the rest "
            "is proved to be crossed by facets"
        )
    elif cells.proved_share is not None:
        text += f"; {_percent(cells.proved_share)} of the arcs proved"
    if cells.num_rational:
        text += f"; {cells.num_rational:,} too narrow for a float64 point, a rational one is given"
    return f"{text}; {duration(router.seconds)}"


def _checked(num_checked: int) -> str:
    """What --certify checked: a point in each listed cell, not that the list is complete."""
    if not num_checked:
        return "nothing was checked again: no cell is listed"
    return (
        f"a point inside of {number_of(num_checked, 'cell')} was checked again in integers, by "
        "other code; that no cell is missing rests on the line above"
    )


def _tokens(router: RouterCells, num_tokens: int, num_own: int) -> str:
    share = num_own / num_tokens if num_tokens else 0.0
    text = (
        f"{num_own:,} of {num_tokens:,} ({_percent(share)}) choose what the slice chooses where "
        "they are drawn"
    )
    if router.domain:
        text += ", counted on all of the slice"
    if router.num_cells_with_tokens is not None:
        holding = number_of(router.num_cells_with_tokens, "cell holds", "cells hold")
        text += f"; {holding} a drawn token"
        if router.domain:
            text += ", be it beyond those bounds"
    if router.left_out:
        text += f"; {router.left_out:,} are not finite and left out"
    return text


def _between(between: Between) -> str:
    return (
        f"{between.mean_crossings:.3g} facets on the straight way between two tokens, "
        f"{between.per_length:.3g} +- {between.per_length_se:.1g} per unit of length "
        f"({number_of(between.num_segments, 'way')})"
    )


def _visited(visited: Visited) -> str:
    sets = f"{number_of(visited.num_expert_sets, 'expert set')} used by these tokens"
    swaps = number_of(visited.num_edges, "single-expert swap")
    if visited.num_components == 1 < visited.num_expert_sets and visited.is_whole:
        return f"{sets}, all connected by {swaps}"
    part = "" if visited.is_whole else " of the most visited ones"
    pieces = number_of(visited.num_components, "piece")
    return (
        f"{sets}, in {pieces}{part} by {swaps}; the largest has "
        f"{_percent(visited.largest_share)} of the tokens"
    )


def _answer_sentences(answer: Answer) -> Iterator[str]:
    """The sentences about a set of experts: whether it is a cell, and the proof."""
    numbers = ", ".join(map(str, answer.expert_set))
    several = len(answer.expert_set) > 1
    chosen = f"{answer.router}: expert{'s' if several else ''} {numbers}"
    are = "are chosen together" if several else "is chosen"
    where = f"on {answer.subspace}"
    checked = " Checked again in exact arithmetic." if answer.is_checked else ""
    took = f" ({duration(answer.seconds)})"
    if answer.margin is not None:
        each = "each of them is ahead of all others" if several else "it is ahead of all others"
        ahead = f"{each} by {answer.margin:.3g} or more"
        if math.isinf(answer.margin):
            ahead = "there are no others"
        text = f"at the point of the certificate {ahead}"
        yield f"{chosen} {are} somewhere {where}: {text}.{checked}{took}"
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
    """The share in percent; less than all is never rounded to 100 %."""
    text = percent(share, ".3g")
    return percent_of_all(share) if text == "100 %" and share < 1.0 else text


# ------------------------------------------------------------------------------------------ figures
#: Routers that are drawn; the numbers behind the figure are of all.
_MOST_DRAWN = 16

#: Routers with a curve: as many as have a colour of their own.
_MOST_LINES = 7


def _reached(router: RouterCells) -> int | None:
    """Expert sets that the slice meets, where they were counted."""
    if router.outcome == "all subsets":
        return router.num_possible
    return None if router.cells is None else router.cells.num_cells


#: Counts of expert sets: words, colour, and the number of a router.
_COUNTS: Mapping[str, tuple[str, str, Callable[[RouterCells], float | None]]] = {
    "num_possible": ("expert sets there are", "dim", lambda one: one.num_possible),
    "most_cells": ("at most on such a slice", "limit", lambda one: one.most_cells),
    "num_cells": ("reached on the slice", "g1", _reached),
    "random": ("random router, mean", "random", lambda one: one.random and one.random.mean),
    "visited": (
        "used by the tokens",
        "tokens",
        lambda one: one.visited and one.visited.num_expert_sets,
    ),
}


def cells_figures(enumerations: Enumerations) -> Iterator[Chart]:
    """How many expert sets can be, are reached and are used; nothing for a question about a set."""
    routers = enumerations.routers
    if not routers:
        return
    names = [place(one.router, [other.router for other in routers]) for one in routers]
    counts = {name: [count(one) for one in routers] for name, (*_, count) in _COUNTS.items()}
    first = slice(_MOST_DRAWN)
    marks = [
        Bars(text, role, [math.log10(n) if n else None for n in counts[name][first]])
        for name, (text, role, _) in _COUNTS.items()
        if any(counts[name])
    ]
    x, y = Axis("log10 of their number", low=0.0), Axis("", names=names[first])
    panels = [Panel("expert sets", x, y, marks, is_wide=False)]
    visits = [(name, one.visited) for name, one in zip(names, routers, strict=True) if one.visited]
    if visits:
        lines = [
            Polyline(
                f"layer {name}",
                f"g{number}",
                [min(2**n, visited.num_expert_sets) for n in range(len(visited.shares))],
                [100.0 * share for share in visited.shares],
            )
            for number, (name, visited) in enumerate(visits[:_MOST_LINES])
        ]
        x, y = Axis("expert sets, the most used first", "log2"), Axis("of the tokens, %", low=0.0)
        panels.append(Panel("tokens in the most used", x, y, lines, is_wide=False))
    most = max(range(len(routers)), key=lambda n: counts["visited"][n] or 0)
    used, reached = counts["visited"][most], counts["num_cells"][most]
    parts = [f"of {_number(routers[most].num_possible)} expert sets there are"]
    parts += [] if reached is None else [f"the slice meets {reached:,.0f}"]
    parts += [] if used is None else [f"the tokens use {used:,.0f}"]
    yield Chart(
        "cells",
        "Expert sets that can be reached, and those that are used",
        "How many expert sets there are, how many of them such a slice meets at most with any "
        "router of this size, how many this slice meets, and how many the tokens use; then the "
        f"share of the tokens in the 1, 2, 4 ... that they use most. Of {_MOST_DRAWN} routers, and "
        f"curves of {_MOST_LINES}, at most.",
        "What a slice leaves out: tokens lie around it, not in it.",
        f"{routers[most].router}: {', '.join(parts)}.",
        panels,
        [("router", [one.router for one in routers]), *counts.items()],
    )
