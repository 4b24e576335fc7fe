"""What a router of this size could do, as a document: sets, what data can hold of them, costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import number_of, percent
from moegeom.document.chart import Axis, Chart, Guide, Panel, Polyline
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Excerpt, Fact, Gallery, Note, Table, Title, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.summary import Summary
from moegeom.geometry.capacity import log10_count
from moegeom.research.capacity.record import (
    AtDimension,
    Capacity,
    LayerCapacity,
    SplitExperts,
    SplitGain,
)
from moegeom.research.capacity.study import rows_of

#: Whole numbers up to here are printed in full; 10^x above.
_IN_FULL = 10**7

#: Kinds of layers that a screen shows before the rest is counted.
_MOST_LAYERS = 2

_ON_DATA = (
    ("", "cells of a router", "", "", "regions with neurons", "", ""),
    ("dims", "at most", "of all", "random", "at most", "published", "too many by"),
)

_SPLIT = (
    ("each expert in", "", "", "", "", "log10 of the gain in", "", "", ""),
    ("parts", "experts", "top-k", "width", "dims", "sets", "published", "cells", "regions"),
)

_NOT_SHOWN = "Not shown: splits on other dimensions, costs of routers, counts of weights: --detail"

_ROUTERS = ("router", "MACs a token", "FLOP", "times experts'", "published")


def document(report: Capacity, view: View) -> Document:
    """What ``moegeom research capacity`` says."""
    layers = [_layer(layer, report, view) for layer in report.layers]
    most = len(layers) if view.detail else _MOST_LAYERS
    rest = layers[most:]
    return Document(
        "capacity",
        report.name,
        [
            [*_header(report)],
            *(section for layer in layers[:most] for section in layer),
            *([Excerpt([], section)] for layer in rest for section in layer),
            [Gallery(lambda: [*capacity_figures(report)])],
            [in_part([*_ending(report, len(rest))], "note", view.detail, is_aside=True)],
        ],
        lambda: _record(report),
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
    splits = [[_split_cells(s, g) for g in s.gains] for s in layer.splits if s.split > 1]
    whole = [row for rows in splits for row in rows]
    brief = [row for row in whole if view.detail or row[4] == f"{middle:,}"]
    rest = [] if view.detail else [Note(_NOT_SHOWN)]
    costs = [*_cost_blocks(layer, report)]
    splits_shown = Excerpt([_split_table(brief)], [_split_table(whole)])
    at = [_dims_cells(layer, at) for at in layer.at]
    data = Table(_ON_DATA, at, left=(), drops=(0, 0, 0, 2, 0, 0, 1))
    return [
        [*_results(layer), *_facts(layer)],
        [data],
        [splits_shown] if whole else [],
        *([Excerpt([one] if view.detail else [], [one])] for one in costs),
        [Excerpt(rest, [])],
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
            f"Published as attained and impossible on {listed}: C(E, k) Phi(k N, d) regions. On "
            f"{number_of(worst.dims, 'dimension')} it is too many by a factor of "
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
    text = (
        f"{number_of(sizes.num_experts, 'expert')} of width {sizes.width:,}, {kind}, top-"
        f"{sizes.top_k:,}{shared}; inputs of {sizes.hidden:,}"
    )
    yield Fact("sizes", f"{text}; width by {layer.width_origin}" if layer.width_origin else text)
    if layer.dims_origin:
        yield Fact("data", f"{layer.dims_origin}, rounded up below")
    several = "vertex (set)" if layer.num_sets == 1 else "vertices (sets)"
    vertices = f"{_count(layer.num_sets)} {several}"
    yield Fact(
        "polytope",
        f"{vertices}, {_count(layer.num_edges)} edges (pairs of cells with a facet in common, at "
        f"most), {number_of(layer.num_facets, 'facet')}",
    )
    yield Fact(
        "weights",
        f"{parameters.active:,} a token of {parameters.total:,} in a layer; "
        f"{_flop(layer.expert_macs)} in experts",
    )
    if not layer.is_linear:
        yield Fact(
            "note",
            "the selection rule is not linear (a bias behind a score, or groups, which allow fewer "
            "sets): the counts are those of a linear router of this size.",
            "warning",
        )


def _flop(macs: int) -> str:
    return f"{2 * macs:,} FLOP a token"


def _dims_cells(layer: LayerCapacity, at: AtDimension) -> tuple[str, ...]:
    regions = "not computed" if at.regions is None else _count(at.regions)
    return (
        f"{at.dims:,}",
        _count(at.most_cells),
        percent(_share(at.most_cells, layer.num_sets)),
        "" if at.expected_cells is None else _power(at.expected_cells),
        regions,
        _count(at.published.top_k),
        _power(10.0 ** _excess(at)) if at.exceeds else "",
    )


def _split_table(rows: Sequence[Sequence[str]]) -> Table:
    return Table(_SPLIT, rows, left=(), drops=(0, 0, 0, 0, 0, 0, 0, 0, 0))


def _split_cells(split: SplitExperts, gain: SplitGain) -> tuple[str, ...]:
    return (
        f"{split.split}",
        f"{split.num_experts:,}",
        f"{split.top_k:,}",
        f"{split.width:,}",
        f"{gain.dims:,}",
        f"{split.sets:+.2f}",
        f"{gain.published:+.2f}",
        f"{gain.cells:+.2f}",
        "" if gain.regions is None else f"{gain.regions:+.2f}",
    )


def _cost_blocks(layer: LayerCapacity, report: Capacity) -> Iterator[Block]:
    printed = vars(layer.published_macs)
    rows = [
        (
            name,
            f"{macs:,}",
            f"{2 * macs:,}",
            f"{macs / layer.expert_macs:.3g}" if layer.expert_macs else "",
            f"{printed[name]:,}" if name in printed else "",
        )
        for name, macs in vars(layer.macs).items()
    ]
    yield Table([_ROUTERS], rows)
    yield Note(f"Routers with a projection compare vectors of {report.router_dim:,}.")
    yield _parameter_table(layer)


def _parameter_table(layer: LayerCapacity) -> Table:
    counts = {"this layer": layer.parameters}
    counts |= {
        f"published, {name.replace('_', '-')}": value
        for name, value in vars(layer.published_parameters).items()
    }
    rows = [(name, f"{one.active:,}", f"{one.total:,}") for name, one in counts.items()]
    return Table([("parameters", "a token", "in all")], rows)


# -------------------------------------------------------------------------------------------- notes


def _ending(report: Capacity, rest: int) -> Iterator[Block]:
    if rest:
        yield Note(f"and {number_of(rest, 'more kind')} of layers: --detail")
    gated = any(layer.sizes.is_gated for layer in report.layers)
    pattern = "signs of the gate pre-activations" if gated else "neurons that are on"
    yield Note(
        "Cells: expert sets that inputs of an affine set of so many dimensions reach; regions: "
        f"with the {pattern}. 'At most' is proved; curved data may meet more. 'random': the mean "
        "of Gaussian rows and biases."
    )
    yield Note(
        "Sets, cells and regions count what is possible, not what training uses, and a gain in "
        "them is no gain in quality."
    )
    for router, why in report.left_out:
        yield Note(f"left out {router}: {why}.")
    if report.run is not None:
        yield from map(Note, skipped(Summary(report.run, [], [], [], [])))
    if report.written:
        yield Note(f"Table written to {report.written}.")


def _count(count: int) -> str:
    """``4,426,165``, or ``10^9.65`` from 10 million on."""
    return f"{count:,}" if count < _IN_FULL else f"10^{log10_count(count):.2f}"


def _power(value: float) -> str:
    if value >= _IN_FULL:
        return f"10^{math.log10(value):.2f}" if math.isfinite(value) else "over 10^308"
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


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
                "rows": rows_of(layer),
            }
            for layer in report.layers
        ],
        "router_dim": report.router_dim,
        "left_out": report.left_out,
        "written": report.written,
        **({} if report.run is None else rule_facts(report.run)),
        "run": report.run,
    }


# ------------------------------------------------------------------------------------------ figures
def capacity_figures(report: Capacity) -> Iterator[Chart]:
    """Of the first kind of layer, where more than one dimension was asked for."""
    if report.layers and len(report.layers[0].at) > 1:
        yield _cells(report.layers[0])


def _cells(layer: LayerCapacity) -> Chart:
    dims = [at.dims for at in layer.at]
    sets = log10_count(layer.num_sets)
    most = [log10_count(at.most_cells) for at in layer.at]
    random = [math.log10(at.expected_cells) if at.expected_cells else None for at in layer.at]
    regions = [None if at.regions is None else log10_count(at.regions) for at in layer.at]
    published = [log10_count(at.published.top_k) for at in layer.at]
    cells = [
        Polyline("at most, any router", "tokens", dims, most),
        Polyline("Gaussian rows, on average", "random", dims, random),
        Guide("expert sets there are", "limit", sets),
    ]
    excess = [
        None if most_of is None else p - most_of
        for p, most_of in zip(published, regions, strict=True)
    ]
    patterns = [
        Polyline("published over what can be", "other", dims, excess),
        Guide("as many as can be", "limit", 0.0),
    ]
    least = layer.at[0]
    kind = "sign patterns of gates" if layer.sizes.is_gated else "regions"
    x = Axis("dimensions of the data", "log2")
    return Chart(
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
