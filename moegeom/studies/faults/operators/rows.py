"""Rows of another router: of the other checkpoint, of another layer, or none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.studies.faults.operator import Operator, Proposal, Site, routed


def _of_other(site: Site) -> Iterator[Proposal]:
    other, router = site.other, site.router
    if other is None:
        return
    if router.selection_bias is not None and not np.array_equal(router.weight, other.weight):
        rows = dataclasses.replace(router, weight=other.weight)
        text = "rows of the other checkpoint"
        yield from routed(site, "rows_of_other", text, "router stale", rows, bits=12.0)
    if router.gain is not None and other.gain is not None and other.gain.all():
        # what was made to read A's inputs behind its own gain, as it is stored
        raw = other.weight * (router.gain / other.gain)
        if not np.array_equal(raw, other.weight):
            stored = dataclasses.replace(router, weight=raw.astype(router.weight.dtype))
            text = "rows of the other checkpoint behind the gain of this one"
            yield from routed(
                site, "rows_behind_own_gain_of_other", text, "router stale", stored, bits=14.0
            )
    whole = dataclasses.replace(
        router,
        weight=other.weight,
        logit_bias=other.logit_bias,
        selection_bias=other.selection_bias,
    )
    text = "router of the other checkpoint"
    yield from routed(site, "router_of_other", text, "router stale", whole, bits=24.0)


OF_OTHER = Operator("rows_of_other", _of_other)


def _of_layers(site: Site) -> Iterator[Proposal]:
    """The router of another layer, whole or rows alone, behind this layer's gain."""
    bits = math.log2(max(len(site.routers), 2))
    for number, other in enumerate(site.routers):
        if number == site.number or other.weight.shape != site.router.weight.shape:
            continue
        apart = f"{number - site.number:+d}"
        text = f"router of layer {other.layer} for {site.router.layer}"
        whole = dataclasses.replace(
            site.router,
            weight=other.weight,
            selection_bias=other.selection_bias,
            logit_bias=other.logit_bias,
        )
        yield from routed(
            site, f"router_of_layer{apart}", text, "rows of another layer", whole, bits=bits
        )
        if site.router.selection_bias is not None or site.router.logit_bias is not None:
            rows = dataclasses.replace(site.router, weight=other.weight)
            text = f"rows of layer {other.layer} for {site.router.layer}, with biases of its own"
            yield from routed(
                site, f"rows_of_layer{apart}", text, "rows of another layer", rows, bits=bits
            )


OF_LAYERS = Operator("rows_of_layers", _of_layers)
