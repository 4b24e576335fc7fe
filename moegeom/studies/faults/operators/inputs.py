"""Wrong router inputs: those of another layer, or normed twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.studies.faults.operator import Inputs, Operator, Proposal, Site, routed

#: Layers up and down whose inputs are tried.
_NEAR = 2


def _of_layers(site: Site) -> Iterator[Proposal]:
    if not site.has_inputs:
        return
    for apart in (*range(-_NEAR, 0), *range(1, _NEAR + 1)):
        number = site.number + apart
        if not 0 <= number < len(site.routers):
            continue
        other, gain = site.routers[number], site.router.gain
        if other.hidden_size != site.router.hidden_size:
            continue
        factors: dict[str, np.ndarray | None] = {"": None}
        if gain is not None and other.gain is not None and other.gain.all():
            factors["behind its own gain"] = (gain / other.gain).astype(np.float32)
        for words, factor in factors.items():
            text = f"input of the layer {abs(apart)} {'further on' if apart > 0 else 'before'}"
            name = f"input_of_layer{apart:+d}{'_own_gain' if words else ''}"
            yield from routed(
                site, name, f"{text} {words}".rstrip(), "inputs differ", site.router, bits=3.0,
                inputs=_from(number, factor),
            )  # fmt: skip


def _from(number: int, factor: np.ndarray | None) -> Inputs:
    def inputs(site: Site, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        others = site.values_at(number)(rows)
        assert others is not None
        return others if factor is None else others * factor

    return inputs


OF_LAYERS = Operator("input_of_layers", _of_layers)


def _normed(site: Site) -> Iterator[Proposal]:
    """The norm in front taken twice, gain and all."""
    gain = site.router.gain
    if not site.has_inputs or gain is None:
        return

    def inputs(there: Site, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        size = np.sqrt((values.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
        normed = np.divide(values, size, out=np.zeros_like(values), where=size > 0.0)
        return (normed * gain).astype(np.float32)

    text = "input normed twice"
    yield from routed(
        site, "normed_twice", text, "gain not folded", site.router, bits=1.0, inputs=inputs
    )


NORMED_TWICE = Operator("normed_twice", _normed)
