"""What a router of this size could do, as a document: sets, what data can hold of them, weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import number_of, percent
from moegeom.document.chart import Axis, Chart, Guide, Panel, Polyline
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Excerpt, Fact, Gallery, Note, Table, Title, View
from moegeom.document.rule_words import rule_facts
from moegeom.document.study import Column, page, table_of
from moegeom.document.summary import Summary
from moegeom.geometry.capacity import log10_count
from moegeom.research.capacity.record import AtDimension, Capacity, LayerCapacity

#: Whole numbers up to here are printed in full; 10^x above.
_IN_FULL = 10**7

#: Kinds of layers that a screen shows before the rest is counted.
_MOST_LAYERS = 2

_NOT_SHOWN = "Not shown: splits on other dimensions, counts of weights: --detail"


def document(report: Capacity, view: View) -> Document:
    """What ``moegeom research capacity`` says."""
    layers = [_layer(layer, report, view) for layer in report.layers]
    most = len(layers) if view.detail else _MOST_LAYERS
    rest = layers[most:]
    return page(
        "research capacity",
        report.name,
        view,
        [*_header(report)],
        *(section for layer in layers[:most] for section in layer),
        *([Excerpt([], section)] for layer in rest for section in layer),
        [Gallery(lambda: [*capacity_figures(report)])],
        notes=_ending(report, len(rest)),
        record=lambda: _record(report),
    )


def _header(report: Capacity) -> Iterator[Block]:
    if report.run is None:
        yield Title(report.name, "what a layer of this size could do at most, from numbers alone.")
        return
    rows = [{"router": router["name"]} for router in report.run["routers"]]
    yield from header(Summary(report.run, rows, [], [], []), "routers", "rule", "tokens")


# ------------------------------------------------------------------------------------------- layers


def _layer(layer: LayerCapacity, report: Capacity, view: View) -> Sequence[Sequence[Block]]:
    """Sections on one kind of layer."""
    middle = layer.at[len(layer.at) // 2].dims
    whole = [(s, g) for s in layer.splits if s.split > 1 for g in s.gains]
    brief = [(s, g) for s, g in whole if view.detail or g.dims == middle]
    splits = Excerpt([table_of(_SPLIT, brief, left=())], [table_of(_SPLIT, whole, left=())])
    parameters = _parameters(layer)
    return [
        [*_results(layer), *_facts(layer)],
        [table_of(_data_columns(layer), layer.at, left=())],
        [splits] if whole else [],
        [Excerpt([parameters] if view.detail else [], [parameters])],
        [Excerpt([] if view.detail else [Note(_NOT_SHOWN)], [])],
    ]


def _results(layer: LayerCapacity) -> Iterator[Block]:
    """What holds first, then what is published and cannot hold."""
    yield Fact("RESULT", _reach(layer), "strong")
    if wrong := [at for at in layer.at if at.exceeds]:
        worst = max(wrong, key=_excess)
        several = ", ".join(f"{at.dims:,}" for at in wrong)
        listed = "all the dimensions listed" if len(wrong) == len(layer.at) else f"d = {several}"
        yield Fact(
            "",
            f"The published count of regions, C(E, k) Phi(k N, d), is impossible on {listed}: on "
            f"{number_of(worst.dims, 'dimension')} by a factor of "
            f"{_power(10.0 ** _excess(worst))} or more.",
            "warning",
        )


def _excess(at: AtDimension) -> float:
    assert at.regions is not None
    return min(log10_count(at.published.top_k) - log10_count(at.regions), 300.0)


def _reach(layer: LayerCapacity) -> str:
    sizes = layer.sizes
    sets = f"C({sizes.num_experts:,}, {sizes.top_k:,}) = {_count(layer.num_sets)}"
    text = f"{sets} expert {'set' if layer.num_sets == 1 else 'sets'}"
    under = [at for at in layer.at if at.most_cells < layer.num_sets]
    if not under:
        return f"{text}; no bound forbids any of them on the dimensions listed."
    last = under[-1]
    share = percent(_share(last.most_cells, layer.num_sets))
    return (
        f"{text}. Data on {number_of(last.dims, 'dimension')} reach {_count(last.most_cells)} of "
        f"them at most ({share}); from {layer.free_from:,} on the bound forbids none."
    )


def _share(count: int, of: int) -> float:
    return 10.0 ** (log10_count(count) - log10_count(of))


def _facts(layer: LayerCapacity) -> Iterator[Block]:
    sizes, parameters = layer.sizes, layer.parameters
    if layer.routers:
        yield Fact("layers", layer.routers)
    kind = "gated (3 matrices each)" if sizes.is_gated else "two matrices each"
    shared = f", {sizes.shared_width:,} shared neurons" if sizes.shared_width else ""
    width = f"; width by {layer.width_origin}" if layer.width_origin else ""
    yield Fact(
        "sizes",
        f"{number_of(sizes.num_experts, 'expert')} of width {sizes.width:,}, {kind}, top-"
        f"{sizes.top_k:,}{shared}; inputs of {sizes.hidden:,}{width}",
    )
    if layer.dims_origin:
        yield Fact("data", f"{layer.dims_origin}, rounded up below")
    several = "vertex (set)" if layer.num_sets == 1 else "vertices (sets)"
    yield Fact(
        "polytope",
        f"{_count(layer.num_sets)} {several}, {_count(layer.num_edges)} edges (pairs of cells with "
        f"a facet in common, at most), {number_of(layer.num_facets, 'facet')}",
    )
    yield Fact(
        "weights",
        f"{parameters.active:,} a token of {parameters.total:,} in a layer; "
        f"{2 * layer.expert_macs:,} FLOP a token in experts",
    )
    if not layer.is_linear:
        yield Fact(
            "note",
            "the selection rule is not linear (a bias behind a score, or groups, which allow fewer "
            "sets): the counts are those of a linear router of this size.",
            "warning",
        )


def _data_columns(layer: LayerCapacity) -> tuple[Column, ...]:
    """Of what data of some dimensions can meet."""

    def share(at: AtDimension) -> str:
        return percent(_share(at.most_cells, layer.num_sets))

    return (
        ("", "dims", 0, lambda at: f"{at.dims:,}"),
        ("cells of a router", "at most", 0, lambda at: _count(at.most_cells)),
        ("", "of all", 0, share),
        ("", "random", 2, lambda at: _power(at.expected_cells)),
        ("regions with neurons", "at most", 0, lambda at: _count(at.regions, "not computed")),
        ("", "published", 0, lambda at: _count(at.published.top_k)),
        ("", "too many by", 1, lambda at: _power(10.0 ** _excess(at)) if at.exceeds else ""),
    )


#: Of experts that are cut, and of what that gains on some dimensions.
_SPLIT: tuple[Column, ...] = (
    ("each expert in", "parts", 0, lambda of: f"{of[0].split}"),
    ("", "experts", 0, lambda of: f"{of[0].num_experts:,}"),
    ("", "top-k", 0, lambda of: f"{of[0].top_k:,}"),
    ("", "width", 0, lambda of: f"{of[0].width:,}"),
    ("", "dims", 0, lambda of: f"{of[1].dims:,}"),
    ("log10 of the gain in", "sets", 0, lambda of: f"{of[0].sets:+.2f}"),
    ("", "published", 0, lambda of: f"{of[1].published:+.2f}"),
    ("", "cells", 0, lambda of: f"{of[1].cells:+.2f}"),
    ("", "regions", 0, lambda of: "" if of[1].regions is None else f"{of[1].regions:+.2f}"),
)


def _parameters(layer: LayerCapacity) -> Table:
    published = vars(layer.published_parameters).items()
    counts = {f"published, {name.replace('_', '-')}": value for name, value in published}
    return Table(
        [("parameters", "a token", "in all")],
        [
            (name, f"{one.active:,}", f"{one.total:,}")
            for name, one in {"this layer": layer.parameters, **counts}.items()
        ],
    )


# -------------------------------------------------------------------------------------------- notes


def _ending(report: Capacity, rest: int) -> Iterator[str]:
    if rest:
        yield f"and {number_of(rest, 'more kind')} of layers: --detail"
    gated = any(layer.sizes.is_gated for layer in report.layers)
    pattern = "signs of the gate pre-activations" if gated else "neurons that are on"
    yield (
        "Cells: expert sets that inputs of an affine set of so many dimensions reach; regions: "
        f"with the {pattern}. 'At most' is proved; curved data may meet more. 'random': the mean "
        "of Gaussian rows and biases."
    )
    yield (
        "Sets, cells and regions count what is possible, not what training uses, and a gain in "
        "them is no gain in quality."
    )
    yield from (f"left out {router}: {why}." for router, why in report.left_out)
    if report.run is not None:
        yield from skipped(Summary(report.run, [], [], [], []))


def _count(count: int | None, unknown: str = "") -> str:
    """``4,426,165``, or ``10^9.65`` from 10 million on."""
    if count is None:
        return unknown
    return f"{count:,}" if count < _IN_FULL else f"10^{log10_count(count):.2f}"


def _power(value: float | None) -> str:
    if value is None:
        return ""
    if value >= _IN_FULL:
        return f"10^{math.log10(value):.2f}" if math.isfinite(value) else "over 10^308"
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


#: Counts of a layer that may have hundreds of digits, of which JSON has the logarithms.
_COUNTS = ("num_sets", "num_edges", "num_facets")


def _at_record(at: AtDimension) -> Mapping[str, Any]:
    return {
        "dims": at.dims,
        "most_cells_log10": log10_count(at.most_cells),
        "expected_cells": at.expected_cells,
        "regions_log10": None if at.regions is None else log10_count(at.regions),
        "published_log10": {n: log10_count(count) for n, count in vars(at.published).items()},
    }


def _record(report: Capacity) -> Mapping[str, Any]:
    return {
        "name": report.name,
        "layers": [
            {
                "router": layer.routers or None,
                **dataclasses.asdict(layer.sizes),
                "is_linear": layer.is_linear,
                "width_origin": layer.width_origin,
                "dims_origin": layer.dims_origin,
                **{f"{name}_log10": log10_count(getattr(layer, name)) for name in _COUNTS},
                "free_from": layer.free_from,
                "at": [_at_record(at) for at in layer.at],
                "splits": [dataclasses.asdict(split) for split in layer.splits],
                "parameters": dataclasses.asdict(layer.parameters),
                "published_parameters": dataclasses.asdict(layer.published_parameters),
                "expert_macs": layer.expert_macs,
            }
            for layer in report.layers
        ],
        "left_out": report.left_out,
        **({} if report.run is None else rule_facts(report.run)),
        "run": report.run,
    }


# ------------------------------------------------------------------------------------------ figures
def capacity_figures(report: Capacity) -> Iterator[Chart]:
    """Of the first kind of layer, where more than one dimension was asked for."""
    layer = next(iter(report.layers), None)
    if layer is None or len(layer.at) < 2:
        return
    dims = [at.dims for at in layer.at]
    sets = log10_count(layer.num_sets)
    most = [log10_count(at.most_cells) for at in layer.at]
    random = [math.log10(at.expected_cells) if at.expected_cells else None for at in layer.at]
    regions = [None if at.regions is None else log10_count(at.regions) for at in layer.at]
    published = [log10_count(at.published.top_k) for at in layer.at]
    excess = [None if r is None else p - r for p, r in zip(published, regions, strict=True)]
    cells = [
        Polyline("at most, any router", "tokens", dims, most),
        Polyline("Gaussian rows, on average", "random", dims, random),
        Guide("expert sets there are", "limit", sets),
    ]
    patterns = [
        Polyline("published over what can be", "other", dims, excess),
        Guide("as many as can be", "limit", 0.0),
    ]
    least = layer.at[0]
    kind = "sign patterns of gates" if layer.sizes.is_gated else "regions"
    x = Axis("dimensions of the data", "log2")
    yield Chart(
        "cells",
        "What data of few dimensions can meet",
        "Expert sets that an affine set of so many dimensions meets; and by what factor the "
        f"published number of {kind} is more than any layer of these sizes can have.",
        "Which of them tokens do meet; curved data may meet more.",
        f"On {number_of(least.dims, 'dimension')} at most 10^{most[0]:.2f} of 10^{sets:.2f} expert "
        f"sets; every set is possible from {number_of(layer.free_from, 'dimension')} on.",
        [
            Panel("expert sets", x, Axis("log10 of their number"), cells),
            Panel(f"{kind} published", x, Axis("log10 of the factor"), patterns),
        ],
        [
            ("dims", dims),
            ("most_cells_log10", most),
            ("expected_cells_log10", random),
            ("regions_log10", regions),
            ("published_log10", published),
            ("num_sets_log10", [sets for _ in dims]),
        ],
    )
