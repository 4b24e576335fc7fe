"""Regions as a document: what share of the changes between tokens is routing, then the plane."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from moegeom.core.text import number_of, percent
from moegeom.document.excerpts import worst_excerpt
from moegeom.document.model import Block, Document, Fact, Table, View
from moegeom.document.study import left_out_facts, study_page, study_summary
from moegeom.document.summary import Summary
from moegeom.research.regions.record import Regions, RouterRegions

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


def document(report: Regions, view: View) -> Document:
    """What ``moegeom research regions`` says."""
    planes = [one for one in report.routers if one.plane is not None]
    tables = [(report.routers, _ways), *([(planes, _planes)] if planes else [])]
    return study_page(
        report,
        "research regions",
        view,
        *(
            [worst_excerpt(some, _changes, view, partial(table, study_summary(report)))]
            for some, table in tables
        ),
        verdict=_verdict(report),
        notes=_notes(report),
    )


def _changes(one: RouterRegions) -> float:
    return one.ways[0].regions


def _verdict(report: Regions) -> Iterator[Block]:
    ways = [one.ways[0] for one in report.routers]
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
        "Straight ways between random pairs of tokens, mean of "
        f"{number_of(len(report.routers), 'layer')}; the neurons of all experts would change "
        f"{every:.3g} times.",
    )
    kinds = sorted({one.counted for one in report.routers})
    yield Fact("counted", f"{' and '.join(kinds)}; attention and norms are outside.")
    yield from left_out_facts(report)


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
        assert plane is not None
        is_some = plane.regions_se != 0.0
        deviation = np.std(plane.random, ddof=1) if len(plane.random) > 1 else 0.0
        spread = f" +- {plane.total(round(deviation)):,}" if deviation else ""
        rows.append(
            (
                summary.place(one.router),
                f"{plane.num_cells:,}",
                f"{plane.regions:,}" + (f" +- {plane.regions_se:,.0f}" if is_some else ""),
                f"{plane.total(round(np.mean(plane.random))):,}{spread}" if plane.random else "",
                "" if before is None or before.plane is None else f"{before.plane.regions:,}",
                f"{plane.bound:,}",
                f"{plane.top_1:,}",
                f"{plane.top_k:,}",
            )
        )
    return Table(_PLANES, rows, drops=_PLANES_DROPS)


def _notes(report: Regions) -> Iterator[str]:
    if unknown := max(way.unknown_share for one in report.routers for way in one.ways):
        yield (
            f"Unknown: of up to {percent(unknown)} of the ways it is not proved that every change "
            "of experts was seen."
        )
    if places := [one.router for one in report.routers if one.plane is None]:
        yield (
            f"No plane in {study_summary(report).places(places)}: cells of curved or grouped rules "
            "are no polygons."
        )
    if few := [one for one in report.routers if one.num_counted < one.width]:
        yield (
            f"{few[0].num_counted:,} of the {few[0].width:,} neurons of an expert are counted, in "
            f"runs drawn at random, seed {report.seed}; the errors hold that."
        )
    yield from _of_planes(report)
    yield (
        "A change is where a line of the gate's pre-activation, or of two logits, is crossed; how "
        "much the output changes there is not looked at. Shared experts are not counted."
    )
    if report.written:
        yield f"Counts written to {report.written}."


def _of_planes(report: Regions) -> Iterator[str]:
    plane = next((one.plane for one in report.routers if one.plane is not None), None)
    if plane is None:
        return
    if len(plane.of_cell) < plane.num_cells:
        yield (
            f"Regions were counted in {number_of(len(plane.of_cell), 'cell')}, drawn at random; "
            "those of all follow with the standard error beside them."
        )
    yield (
        f"Plane: {plane.subspace}, in a frame with nearly all tokens; exact for the numbers "
        "rounded to it. 'possible' is proved for any router and experts of this size on a whole "
        "plane."
    )
    yield (
        "'random experts' have the same row lengths and biases and random directions, behind the "
        f"same router: {number_of(len(plane.random), 'draw')}, standard deviation, seed "
        f"{report.seed}."
    )
