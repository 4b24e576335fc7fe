"""Regions as a document: what share of the changes between tokens is routing, then the plane."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from moegeom.core.text import number_of, percent
from moegeom.document.excerpts import in_part, worst_rows
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Excerpt, Fact, Note, Table, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.summary import Summary
from moegeom.studies.regions.record import Regions, RouterRegions

_WAYS = (
    ("", "", "", "changes on a way, mean +- error of", "", "", "all", "per unit", ""),
    ("layer", "way", "ways", "router", "neurons", "routing", "neurons", "of length", "+-"),
)

_WAYS_DROPS = (0, 0, 3, 0, 0, 0, 2, 0, 1)

_PLANES = (
    ("", "", "regions", "", "", "at most", "published as attained", ""),
    ("layer", "cells", "here", "random experts", "before", "possible", "top-1", "top-k"),
)

_PLANES_DROPS = (0, 0, 0, 0, 0, 0, 1, 1)


def document(found: Regions, view: View) -> Document:
    """What ``moegeom regions`` says."""
    summary = _summary(found)
    shown, *fewer = worst_rows(found.routers, lambda one: one.ways[0].regions, view)
    notes = [*map(Note, (*_notes(found), *skipped(summary)))]
    if found.written:
        notes.append(Note(f"Counts written to {found.written}."))
    return Document(
        "regions",
        found.run["checkpoint"]["name"],
        [
            [*_verdict(found)],
            [*header(summary, "routers", "rule", "tokens")],
            [_table(partial(_ways, summary), shown, fewer, found.routers)],
            [_table(partial(_planes, summary), shown, fewer, found.routers)],
            [in_part(notes, "note", view.detail, is_aside=True)],
        ],
        lambda: _record(found),
    )


def _summary(found: Regions) -> Summary:
    names = [*(one.router for one in found.routers), *(name for name, _ in found.left_out)]
    return Summary(found.run, [{"router": name} for name in names], [], [], [])


def _table(
    make: Callable[[Sequence[RouterRegions]], Table],
    shown: Sequence[RouterRegions],
    fewer: Sequence[Sequence[RouterRegions]],
    every: Sequence[RouterRegions],
) -> Excerpt:
    return Excerpt([make(shown)], [make(every)], shorter=[[make(rows)] for rows in fewer])


def _verdict(found: Regions) -> Iterator[Block]:
    ways = [one.ways[0] for one in found.routers]
    routed = float(np.mean([way.router_changes for way in ways]))
    neurons = float(np.mean([way.neuron_changes for way in ways]))
    total = routed + neurons
    share = f": routing is {percent(routed / total)} of the changes" if total else ""
    yield Fact(
        "RESULT",
        f"Between two tokens the experts change {routed:.3g} times and their neurons "
        f"{neurons:.3g} times{share}.",
        "strong",
    )
    every = float(np.mean([way.all_neurons for way in ways]))
    yield Fact(
        "",
        f"Straight ways between random pairs of tokens, mean of {_layers(len(found.routers))}; the "
        f"neurons of all experts would change {every:.3g} times.",
    )
    kinds = sorted({one.counted for one in found.routers})
    yield Fact("counted", f"{' and '.join(kinds)}; attention and norms are outside.")
    for reason in dict.fromkeys(why for _, why in found.left_out):
        places = _summary(found).places([name for name, why in found.left_out if why == reason])
        yield Fact("", f"{places}: not looked at: {reason}.", "warning")


def _layers(number: int) -> str:
    return number_of(number, "layer")


def _ways(summary: Summary, routers: Sequence[RouterRegions]) -> Table:
    rows = [
        (
            summary.place(one.router),
            f"{way.way}{ending}",
            f"{way.num_segments:,}",
            f"{way.router_changes:.3g} +- {way.router_changes_se:.1g}",
            f"{way.neuron_changes:.4g} +- {way.neuron_changes_se:.1g}",
            "" if math.isnan(way.routing_share) else percent(way.routing_share),
            f"{way.all_neurons:.4g}",
            f"{way.per_length:.3g}",
            f"{way.per_length_se:.1g}",
        )
        for one in routers
        for counted, ending in ((one, ""), (one.before, ", before"))
        if counted is not None
        for way in counted.ways
    ]
    return Table(_WAYS, rows, left=(0, 1), drops=_WAYS_DROPS)


def _planes(summary: Summary, routers: Sequence[RouterRegions]) -> Table:
    rows = []
    for one in routers:
        plane, before = one.plane, one.before
        spread = f" +- {np.std(plane.random, ddof=1):,.0f}" if len(plane.random) > 1 else ""
        rows.append(
            (
                summary.place(one.router),
                f"{len(plane.of_cell):,}",
                f"{plane.regions:,}",
                f"{np.mean(plane.random):,.0f}{spread}" if plane.random else "",
                "" if before is None else f"{before.plane.regions:,}",
                f"{plane.bound:,}",
                f"{plane.top_1:,}",
                f"{plane.top_k:,}",
            )
        )
    return Table(_PLANES, rows, drops=_PLANES_DROPS)


def _notes(found: Regions) -> Iterator[str]:
    plane = found.routers[0].plane
    yield (
        f"Plane: {plane.subspace}, in a frame with nearly all tokens; exact for the numbers "
        "rounded to it. 'possible' is proved for any router and experts of this size on a whole "
        "plane."
    )
    yield (
        "'random experts' have the same row lengths and biases and random directions, behind the "
        f"same router: {number_of(len(plane.random), 'draw')}, standard deviation, seed "
        f"{found.seed}."
    )
    yield (
        "A change is where a line of the gate's pre-activation, or of two logits, is crossed; how "
        "much the output changes there is not looked at. Shared experts are not counted."
    )


def _record(found: Regions) -> Mapping[str, Any]:
    return {
        "routers": [dataclasses.asdict(one) for one in found.routers],
        "left_out": found.left_out,
        "against": found.against,
        "seed": found.seed,
        "written": found.written,
        **rule_facts(found.run),
        "run": found.run,
    }
