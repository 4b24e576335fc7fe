"""What gates and sinks of attention tell the checks: their shapes, and which values they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moegeom.core.errors import CheckpointError, RouterError
from moegeom.document.header import size
from moegeom.engine.session import Session
from moegeom.router.attention.tensors import (
    AttentionTensors,
    HeadShapeError,
    attention_layers,
    recognise_attention,
)


def attention_facts(opened: Session, announce: Callable[[str], None]) -> list[dict[str, Any]]:
    """One entry for each gate and each row of sinks; empty where none is known.

    ``refused`` says why a tensor cannot be used by the heads (``is_shape``: for its shape), the
    others are numbers of heads: with values that are not finite, and whose gate rows and biases are
    all zero. ``announce`` is told how much is read before it is.
    """
    family = recognise_attention(opened.store.config)
    if family is None:
        return []
    chosen = {router.layer for router in opened.chosen}
    layers = attention_layers(opened.store, family, None if opened.terms.layers is None else chosen)
    announce(f"reads {size(sum(map(_gate_bytes, layers)))} of gates and sinks of attention")
    found = []
    for layer in layers:
        if layer.gate is not None:
            found.append(_fact(layer, layer.gate.name, _gate))
        if layer.sinks is not None:
            found.append(_fact(layer, layer.sinks, _sinks))
    return found


def _gate_bytes(layer: AttentionTensors) -> int:
    try:
        return layer.gate_bytes
    except (CheckpointError, RouterError):
        return 0


def _fact(
    layer: AttentionTensors, tensor: str, look: Callable[[AttentionTensors], dict[str, Any]]
) -> dict[str, Any]:
    fact: dict[str, Any] = {"layer": layer.name, "tensor": layer.start + tensor, "refused": ""}
    try:
        return fact | {"num_heads": layer.num_heads} | look(layer)
    except (CheckpointError, RouterError) as error:
        is_shape = isinstance(error, HeadShapeError)
        return fact | {"refused": error.message.rstrip("."), "is_shape": is_shape}


def _gate(layer: AttentionTensors) -> dict[str, Any]:
    gate = layer.read_gate()
    parts = np.concatenate([gate.rows, gate.bias[:, :, None]], axis=2)
    return {
        "not_finite": _heads(~np.isfinite(parts).all(axis=(1, 2))),
        "zero": _heads((parts == 0.0).all(axis=(1, 2))),
    }


def _sinks(layer: AttentionTensors) -> dict[str, Any]:
    """A logit of minus infinity is a head without a sink, and zero is one like others."""
    sinks = layer.read_sinks()
    return {"not_finite": _heads(np.any(np.isnan(sinks) | np.isposinf(sinks), axis=1)), "zero": []}


def _heads(mask: Any) -> list[int]:
    return np.flatnonzero(mask).tolist()
