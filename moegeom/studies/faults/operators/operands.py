"""What enters the product: rows of another router, the gain of the norm in front, the inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.engine.choice import group_masked
from moegeom.engine.flipping import engine_logits
from moegeom.geometry.set_code import set_distances
from moegeom.router.edits import SETS, RouterInModel, Subject, beside, edits_of
from moegeom.studies.faults.operator import AS_STORED, Inputs, Proposal, Site, operator, routed
from moegeom.studies.faults.operators.columns import are_at_issue
from moegeom.variants.emulated import emulate

#: Layers up and down whose inputs are tried.
_NEAR = 2


@operator
def edited_router(site: Site) -> Iterator[Proposal]:
    """Everything that can be done to a router: moegeom/router/edits.py has the list."""
    model = RouterInModel(site.router, site.number, site.routers, site.other)
    subjects: list[Subject] = [one for one in SETS if one != "columns" or are_at_issue(site)]
    for edit in edits_of(model, subjects):
        needs_inputs = edit.subject not in ("selection bias", "rule")
        router = edit.on_inputs_of(site.router)
        for one in routed(
            site,
            edit.name,
            edit.text,
            edit.cause,
            router,
            needs_inputs=needs_inputs,
            bits=edit.bits,
        ):
            # a gain and the order of columns are those of all experts
            is_of_all = edit.subject in ("gain", "columns")
            yield dataclasses.replace(one, of_all_only=is_of_all)


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


#: Quantiles of the size of coordinates beyond which inputs may be cut off, how many of them go on,
#: and tokens that choose these.
_CUTS, _GO_ON, _SEEN = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999), 2, 256


@operator
def inputs_clipped(site: Site) -> Iterator[Proposal]:
    """Coordinates cut off at one size, as by a static scale that is too small."""
    rows = np.flatnonzero(site.differs)
    if not site.has_inputs or not len(rows):
        return
    rows = rows[:: math.ceil(len(rows) / _SEEN)]
    values = site.values_at(site.number)(rows)
    assert values is not None
    plain = emulate(site.router, AS_STORED)
    cuts = dict(zip(_CUTS, np.quantile(np.abs(values).astype(np.float64), _CUTS), strict=True))
    met: dict[float, float] = {}
    for share, most in cuts.items():
        logits = engine_logits(plain, np.clip(values, -most, most).astype(np.float32))
        scores, _ = group_masked(site.router.rule, plain.compared(logits), site.kernels)
        met[share] = float(set_distances(scores, site.theirs[rows]).is_met.mean())
    for share in sorted(met, key=lambda share: -met[share])[:_GO_ON]:
        most = float(cuts[share])

        def inputs(
            there: Site, rows: np.ndarray, values: np.ndarray, most: float = most
        ) -> np.ndarray:
            return np.clip(values, -most, most)

        name, text = f"inputs_clipped_{share}", f"router inputs cut off at {most:.2g}"
        yield from routed(site, name, text, "inputs differ", site.router, bits=4.0, inputs=inputs)
