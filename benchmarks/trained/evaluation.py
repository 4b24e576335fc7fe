"""What a trained model does on text it has not read: loss, and figures of its routers.

The figures are moegeom's own functions on recorded router inputs and choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.trained.model import ByteModel, MoE, next_byte_loss
from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.gram import (
    cosines,
    effective_rows,
    gram_score,
    random_gram_score,
    random_gram_score_sd,
)
from moegeom.geometry.load import expert_set_entropy_nats, max_vio
from moegeom.geometry.selection import routing_weights, softmax, top_k
from moegeom.geometry.space import input_pull
from moegeom.variants.emulated import arithmetic, emulate

if TYPE_CHECKING:
    from benchmarks.trained.methods import Method
    from benchmarks.trained.settings import Settings
    from benchmarks.trained.text import HeldOut
    from moegeom.trainable.router import Routed

#: Tokens whose jump is computed, and sequences that go through the model at a time.
JUMP_TOKENS, AT_ONCE = 512, 16

#: The arithmetic whose flips are counted.
ARITHMETIC = "bf16-logits"

Figures = dict[str, float]


@torch.no_grad()
def evaluate(model: ByteModel, held_out: HeldOut, method: Method, settings: Settings) -> Figures:
    """Bits per byte on both texts, and router figures on the first, means over its layers."""
    model.eval()
    figures = {"bits_attacked": _bits(model, held_out.attacked)}
    with recorded(model) as layers:
        figures["bits"] = _bits(model, held_out.tokens)
    model.train()
    by_layer = {number: layer.figures(method, settings) for number, layer in layers.items()}
    for name in sorted({name for found in by_layer.values() for name in found}):
        figures[name] = float(np.mean([found[name] for found in by_layer.values()]))
    mean_chosen = {n: found["experts_per_token"] for n, found in by_layer.items()}
    figures["active_width"] = float(
        np.mean([layer.mlp.width(mean_chosen.get(n, 0.0)) for n, layer in enumerate(model.layers)])
    )
    return figures


def _bits(model: ByteModel, tokens: Tensor) -> float:
    """Mean cross-entropy of the next byte in bits; parts have equal numbers of bytes."""
    losses = [next_byte_loss(model(part)[0], part) for part in tokens.split(AT_ONCE)]
    sizes = [len(part) for part in tokens.split(AT_ONCE)]
    return float(np.average([loss.item() for loss in losses], weights=sizes)) / math.log(2.0)


class RecordedLayer:
    """Router inputs [tokens, hidden] of one block, what it made of them, and the gain before it."""

    def __init__(self, block: MoE, gain: Tensor) -> None:
        self.block, self.gain = block, gain.detach().numpy().astype(np.float64)
        self.inputs: list[Tensor] = []
        self.routed: list[Routed] = []

    def figures(self, method: Method, settings: Settings) -> Figures:
        """Those that the method has: one without rows has no Gram score, and so on."""
        chosen = join([routed.chosen for routed in self.routed])
        found = choice_figures(chosen, settings.experts)
        logits = torch.cat([routed.logits for routed in self.routed]).numpy()
        found["input_pull"] = input_pull(logits.astype(np.float64))
        rows = method.rows(self.block.router) if method.rows else None
        if rows is not None:
            found["gram_z"] = gram_z(rows, self.gain, method.is_affine)
        if method.is_affine and rows is not None:
            inputs = torch.cat(self.inputs).numpy()
            router = affine_router(rows, method.bias(self.block.router), settings)
            found["flipped_share"] = flipped_share(router, inputs)
            if method.jumps:
                found["jump_over_output"] = jump_over_output(router, inputs, self.block)
        return found


@contextmanager
def recorded(model: ByteModel) -> Iterator[dict[int, RecordedLayer]]:
    """While open, every call of a routed block is kept, by the number of its layer."""
    found, handles = {}, []
    for number, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            kept = RecordedLayer(layer.mlp, layer.post_attention_layernorm.weight)
            found[number] = kept

            def keep(_: nn.Module, args: tuple, output: tuple, kept: RecordedLayer = kept) -> None:
                kept.inputs.append(args[0].detach().flatten(0, -2).clone())
                kept.routed.append(output[1])

            handles.append(layer.mlp.register_forward_hook(keep))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def join(parts: list[Tensor]) -> np.ndarray:
    """Choices in one array, with as many slots as the widest; -1 fills what is empty."""
    known = [part.numpy() for part in parts]
    widest = max(part.shape[1] for part in known)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, widest - part.shape[1])), constant_values=-1) for part in known]
    )


# ------------------------------------------------------------------------------------------ figures
def choice_figures(chosen: np.ndarray, experts: int) -> Figures:
    """Load, experts per token and the number of sets in use, exp of their entropy."""
    counts = np.bincount(chosen[chosen >= 0], minlength=experts).astype(np.int64)
    member = np.zeros((len(chosen), experts + 1), dtype=bool)
    np.put_along_axis(member, np.where(chosen < 0, experts, chosen), True, axis=1)
    _, sets = np.unique(np.packbits(member[:, :experts], axis=1), axis=0, return_counts=True)
    return {
        "experts_per_token": float((chosen >= 0).sum(axis=1).mean()),
        "max_vio": float(max_vio(counts)),
        "effective_sets": math.exp(expert_set_entropy_nats(sets.astype(np.int64))),
    }


def gram_z(rows: np.ndarray, gain: np.ndarray, is_affine: bool) -> float:
    """Gram score of the rows, in standard deviations from that of random ones.

    Of an affine rule they are the effective rows, centred: what all have in common chooses nothing.
    Cosines know no gain, and a vector common to all rows counts.
    """
    size, width = rows.shape
    gram = effective_rows(rows, gain).gram if is_affine else rows @ rows.T
    chance = random_gram_score(size, width, is_affine)
    return (gram_score(cosines(gram)) - chance) / random_gram_score_sd(size, width, is_affine)


def affine_router(rows: np.ndarray, bias: np.ndarray | None, settings: Settings) -> Router:
    """The record of a router that takes the largest of ``W y + b``."""
    weights = Weights("scores", renormalise=settings.renormalise)
    rule = Rule(settings.top_k, "softmax", weights, has_logit_bias=bias is not None)
    origin = Provenance("", (), "", "F32")
    weight = rows.astype(np.float32)
    return Router("text/0", "text", 0, weight, rule, origin, logit_bias=bias)


def flipped_share(router: Router, inputs: np.ndarray) -> float:
    """Share of tokens that choose another set when inputs, rows and logits are rounded."""
    emulated = emulate(router, arithmetic(ARITHMETIC))
    k = router.rule.top_k
    exact = top_k(_logits(router, inputs), k)
    logits = emulated.inputs(inputs).astype(np.float64) @ emulated.columns
    if emulated.logit_bias is not None:
        logits += emulated.logit_bias
    rounded = top_k(emulated.compared(logits), k)
    differs = (np.sort(exact, axis=1) != np.sort(rounded, axis=1)).any(axis=1)
    return float(differs.mean())


def jump_over_output(router: Router, inputs: np.ndarray, block: MoE) -> float:
    r"""Median over tokens of the jump at the nearest boundary over the length of the output.

    At the nearest point of the boundary experts i and j tie; the routed output jumps by
    :math:`g \|E_i - E_j\|` there, g the routing weight of either. Source: S0 7.1.
    """
    at = inputs[:: max(1, len(inputs) // JUMP_TOKENS)].astype(np.float64)
    rows, token = router.weight.astype(np.float64), np.arange(len(at))
    z = _logits(router, at)
    chosen = top_k(z, router.rule.top_k)
    out, into = boundary_distance(z, chosen, row_distances(router.weight, router.logit_bias)).pair.T
    normal = rows[out] - rows[into]
    gap = (z[token, out] - z[token, into]) / (normal**2).sum(axis=1)
    edge = at - gap[:, None] * normal
    z = _logits(router, edge)
    weights = routing_weights(z, softmax(z), chosen, router.rule.weights)
    points = torch.from_numpy(edge.astype(np.float32))
    outputs = np.stack([block.experts.one(e, points).numpy() for e in range(len(rows))], axis=1)
    share = weights[chosen == out[:, None]]
    jump = share * np.linalg.norm(outputs[token, out] - outputs[token, into], axis=1)
    mixed = (weights[:, :, None] * outputs[token[:, None], chosen]).sum(axis=1)
    return float(np.median(jump / np.linalg.norm(mixed, axis=1)))


def _logits(router: Router, inputs: np.ndarray) -> np.ndarray:
    logits = inputs.astype(np.float64) @ router.weight.astype(np.float64).T
    return logits if router.logit_bias is None else logits + router.logit_bias
