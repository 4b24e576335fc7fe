"""What enters the product: rows of another router, the gain of the norm in front, the inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.router import Router
from moegeom.studies.faults.operator import Inputs, Proposal, Site, beside, operator, routed

#: Layers up and down whose inputs are tried.
_NEAR = 2


def _with_rows_of(other: Router, router: Router) -> Router:
    """Rows and biases of the one, behind the gain of the other."""
    parts = {name: getattr(other, name) for name in ("weight", "logit_bias", "selection_bias")}
    return dataclasses.replace(router, **parts)


@operator
def rows_of_other(site: Site) -> Iterator[Proposal]:
    """Rows of the other checkpoint, with its biases or those of this one."""
    other, router, cause = site.other, site.router, "router stale"
    if other is None:
        return
    if router.selection_bias is not None and not np.array_equal(router.weight, other.weight):
        rows = dataclasses.replace(router, weight=other.weight)
        text = "rows of the other checkpoint"
        yield from routed(site, "rows_of_other", text, cause, rows, bits=12.0)
    if router.gain is not None and other.gain is not None and other.gain.all():
        # what was made to read A's inputs behind its own gain, as it is stored
        raw = other.weight * (router.gain / other.gain)
        if not np.array_equal(raw, other.weight):
            stored = dataclasses.replace(router, weight=raw.astype(router.weight.dtype))
            name = "rows_behind_own_gain_of_other"
            text = "rows of the other checkpoint behind the gain of this one"
            yield from routed(site, name, text, cause, stored, bits=14.0)
    text, whole = "router of the other checkpoint", _with_rows_of(other, router)
    yield from routed(site, "router_of_other", text, cause, whole, bits=24.0)


@operator
def rows_of_layers(site: Site) -> Iterator[Proposal]:
    """The router of another layer, whole or rows alone, behind this layer's gain."""
    router, cause = site.router, "rows of another layer"
    bits = math.log2(max(len(site.routers), 2))
    for number, other in enumerate(site.routers):
        if number == site.number or other.weight.shape != router.weight.shape:
            continue
        name = f"of_layer{number - site.number:+d}"
        text = f"of layer {other.layer} for {router.layer}"
        whole = _with_rows_of(other, router)
        yield from routed(site, f"router_{name}", f"router {text}", cause, whole, bits=bits)
        if router.selection_bias is not None or router.logit_bias is not None:
            rows = dataclasses.replace(router, weight=other.weight)
            text = f"rows {text}, with biases of its own"
            yield from routed(site, f"rows_{name}", text, cause, rows, bits=bits)


@operator
def gains(site: Site) -> Iterator[Proposal]:
    """The gain of the norm left out, applied twice, one too much, or of another router."""
    router, gain = site.router, site.router.gain
    if gain is None:
        return
    own = gain.astype(np.float64)
    others: list[tuple[str, str, np.ndarray, float]] = [
        ("gain_missing", "norm gain left out", np.ones_like(own), 0.0),
        ("gain_twice", "norm gain applied twice", own, 0.0),
        ("gain_and_one", "norm gain taken as 1 + g", 1.0 + own, 1.0),
        ("gain_less_one", "norm gain taken as g - 1", own - 1.0, 1.0),
    ]
    if site.other is not None and site.other.gain is not None:
        others.append(("gain_of_other", "norm gain of the other checkpoint", site.other.gain, 0.0))
    bits = math.log2(max(len(site.routers), 2))
    for number, other in enumerate(site.routers):
        if number != site.number and other.gain is not None and other.gain.shape == own.shape:
            text = f"norm gain of layer {other.layer} for {router.layer}"
            others.append((f"gain_of_layer{number - site.number:+d}", text, other.gain, bits))
    for name, text, other_gain, cost in others:
        with np.errstate(divide="ignore", invalid="ignore"):  # a gain of 0 cannot be taken back
            factor = own if name == "gain_twice" else other_gain.astype(np.float64) / own
        if (factor == 1.0).all() or not np.isfinite(factor).all():
            continue
        rows = (router.weight.astype(np.float64) * factor).astype(router.weight.dtype)
        edited = dataclasses.replace(router, weight=rows)
        for one in routed(site, name, text, "gain not folded", edited, bits=cost):
            yield dataclasses.replace(one, of_all_only=True)  # a gain is that of all experts


@operator
def input_of_layers(site: Site) -> Iterator[Proposal]:
    """Inputs of a layer near by, as they are and behind the gain of this one."""
    if not site.has_inputs:
        return
    router, gain, bits = site.router, site.router.gain, 3.0
    for apart in (*range(-_NEAR, 0), *range(1, _NEAR + 1)):
        number = site.number + apart
        if not 0 <= number < len(site.routers):
            continue
        other = site.routers[number]
        if other.hidden_size != router.hidden_size:
            continue
        name, text = f"input_of_layer{apart:+d}", f"input of {beside(apart)}"
        inputs = _inputs_of(number, None)
        yield from routed(site, name, text, "inputs differ", router, bits=bits, inputs=inputs)
        if gain is not None and other.gain is not None and other.gain.all():
            name, text = f"{name}_own_gain", f"{text} behind its own gain"
            inputs = _inputs_of(number, (gain / other.gain).astype(np.float32))
            yield from routed(site, name, text, "inputs differ", router, bits=bits, inputs=inputs)


def _inputs_of(number: int, factor: np.ndarray | None) -> Inputs:
    def inputs(site: Site, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        others = site.values_at(number)(rows)
        assert others is not None
        return others if factor is None else others * factor

    return inputs


@operator
def normed_twice(site: Site) -> Iterator[Proposal]:
    """The norm in front taken twice, gain and all."""
    gain, cause = site.router.gain, "gain not folded"
    if not site.has_inputs or gain is None:
        return

    def inputs(there: Site, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        size = np.sqrt((values.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
        normed = np.divide(values, size, out=np.zeros_like(values), where=size > 0.0)
        return (normed * gain).astype(np.float32)

    text = "input normed twice"
    yield from routed(site, "normed_twice", text, cause, site.router, bits=1.0, inputs=inputs)
