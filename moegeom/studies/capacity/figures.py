"""Figures of a capacity: how many expert sets and regions data of few dimensions can meet."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.core.text import number_of
from moegeom.document.chart import Axis, Chart, Guide, Panel, Polyline
from moegeom.geometry.capacity.hypersimplex import log10_count
from moegeom.studies.capacity.record import Capacity, LayerCapacity


def capacity_figures(found: Capacity) -> Iterator[Chart]:
    """Of the first kind of layer, where more than one dimension was asked for."""
    if found.layers and len(found.layers[0].at) > 1:
        yield _cells(found.layers[0])


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
