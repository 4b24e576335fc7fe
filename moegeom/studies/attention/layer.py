"""One attention layer: what its heads write for what they read, its gate rows and its sinks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float64

from moegeom.core.errors import RouterError
from moegeom.geometry.gram import (
    cosines,
    gram_score,
    random_gram_score,
    random_gram_score_sd,
)
from moegeom.geometry.value_output import (
    alike_heads,
    dead_heads,
    product_spectra,
    spectrum_rank,
)
from moegeom.router.attention.tensors import LARGEST, AttentionTensors, GateRows
from moegeom.studies.attention.record import AttentionLayer, Gating, Head


def attention_layer(tensors: AttentionTensors) -> AttentionLayer:
    """Its figures; matrices are read one kind after the other.

    Raises
    ------
    RouterError
        When shapes contradict each other, or values are not finite.
    """
    family, number = tensors.family, tensors.num_heads
    shared = tensors.num_value_heads
    heads = [Head(h, h * shared // number if shared else None) for h in range(number)]
    alike: list[tuple[int, int, float]] = []
    if tensors.value is not None:
        heads, alike = _of_products(tensors, heads)
    gating: Gating = "none"
    grams: dict[str, float | None] = dict.fromkeys(("gram", "gram_random", "gram_random_sd"))
    if tensors.gate is not None:
        gate = tensors.read_gate()
        _refuse_not_finite(tensors, "gates", gate.rows, gate.bias)
        gating = "one a head" if gate.rows.shape[1] == 1 and tensors.width > 1 else "one a channel"
        heads, grams = _of_gate(gate, heads)
    if tensors.sinks is not None:
        heads = _of_sinks(tensors, heads)
    has_gate = tensors.gate is not None and family.gate is not None
    return AttentionLayer(
        layer=tensors.name,
        num_heads=number,
        num_value_heads=shared,
        width=tensors.width if tensors.output is not None else 0,
        hidden=tensors.hidden,
        gating=gating,
        position=family.gate.position if has_gate and family.gate else "",
        function=family.gate.function if has_gate and family.gate else "",
        reads=family.gate.reads if has_gate and family.gate else "",
        gram=grams["gram"],
        gram_random=grams["gram_random"],
        gram_random_sd=grams["gram_random_sd"],
        alike=tuple(alike),
        has_sinks=tensors.sinks is not None,
        sink_is_projection=_is_projection(tensors),
        num_bytes=tensors.num_bytes,
        heads=tuple(heads),
    )


def _is_projection(tensors: AttentionTensors) -> bool:
    sink = tensors.family.sink
    return tensors.sinks is not None and sink is not None and sink.is_projection


def _refuse_not_finite(tensors: AttentionTensors, what: str, *found: np.ndarray) -> None:
    if not all(float(np.abs(values).max(initial=0.0)) <= LARGEST for values in found):
        raise RouterError(
            f"{tensors.store.label}: {what} of layer {tensors.name} hold values that are not "
            "finite, or beyond 1e70."
        )


def _of_sinks(tensors: AttentionTensors, heads: list[Head]) -> list[Head]:
    """A logit of minus infinity is that of a head without a sink."""
    sinks = tensors.read_sinks()
    is_none = np.isneginf(sinks[:, 0]) & (not _is_projection(tensors))
    _refuse_not_finite(tensors, "sinks", sinks[~is_none])
    given = np.linalg.norm(sinks, axis=1) if _is_projection(tensors) else sinks[:, 0]
    return [
        dataclasses.replace(head, sink=None if none else float(sink))
        for head, none, sink in zip(heads, is_none, given, strict=True)
    ]


def _of_products(
    tensors: AttentionTensors, heads: list[Head]
) -> tuple[list[Head], list[tuple[int, int, float]]]:
    matrices = tensors.read_heads()
    spectra = product_spectra(matrices.values, matrices.outputs)
    norms = np.linalg.norm(spectra, axis=1)
    found = []
    for head, spectrum, norm, dead in zip(heads, spectra, norms, dead_heads(norms), strict=True):
        rank, effective = spectrum_rank(spectrum)
        known: dict[str, Any] = {
            "rank": rank,
            "effective_rank": effective,
            "product_norm": float(norm),
            "is_dead": bool(dead),
        }
        found.append(dataclasses.replace(head, **known))
    return found, alike_heads(matrices.values, matrices.outputs)


def _of_gate(gate: GateRows, heads: list[Head]) -> tuple[list[Head], dict[str, float | None]]:
    _, channels, width = gate.rows.shape
    own = [_score(rows) if channels > 1 else None for rows in gate.rows]
    found = [
        dataclasses.replace(
            head,
            gate_norm=float(np.sqrt((rows**2).sum(axis=1).mean())),
            gate_bias=float(bias.mean()),
            gate_gram=score,
        )
        for head, rows, bias, score in zip(heads, gate.rows, gate.bias, own, strict=True)
    ]
    if channels == 1:
        score = _score(gate.rows[:, 0])
    else:
        known = [one for one in own if one is not None]
        score = float(np.mean(known)) if known else None
    number = channels if channels > 1 else len(heads)
    if number < 2:
        return found, {"gram": None, "gram_random": None, "gram_random_sd": None}
    return found, {
        "gram": score,
        "gram_random": random_gram_score(number, width, False),
        "gram_random_sd": random_gram_score_sd(number, width, False),
    }


def _score(rows: Float64[np.ndarray, "rows width"]) -> float | None:
    """Of rows as they are: a vector that is added to all of them changes a gate."""
    found = gram_score(cosines(rows @ rows.T))
    return None if np.isnan(found) else found
