"""What is done to checkpoints of the museum and to routers, to be named or judged afterwards."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from tests.museum.checkpoint import BF16, Change, Checkpoint, name_of
from tests.museum.healthy import in_float32, sigmoid_model, softmax_model

SOFTMAX = Rule(4, "softmax", Weights("scores"))
SIGMOID = Rule(4, "sigmoid", Weights("scores"), has_selection_bias=True)
ZERO_FILLED = dataclasses.replace(SIGMOID, groups=GroupMask(4, 2, "top2_sum", 0.0))
INF_FILLED = dataclasses.replace(SIGMOID, groups=GroupMask(4, 2, "top2_sum", float("-inf")))


def softmax() -> Checkpoint:
    return softmax_model(layers=2)


def single() -> Checkpoint:
    return in_float32(softmax())


def sigmoid() -> Checkpoint:
    return sigmoid_model(layers=2)


def with_experts(model: Checkpoint, width: int = 8) -> Checkpoint:
    """With the matrices of small experts, which read what the router reads."""
    experts = {}
    for layer in model.layers:
        count, hidden = model.tensors[name_of("weight", layer)].shape
        draw = np.random.default_rng([7, layer])
        for expert in range(count):
            for leaf in ("gate", "up", "down"):
                values = draw.standard_normal(
                    (hidden, width) if leaf == "down" else (width, hidden)
                )
                experts[expert_name(layer, expert, leaf)] = values.astype(BF16)
    return model.changed(experts)


def expert_name(layer: int, expert: int, leaf: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight"


def cast(model: Checkpoint) -> Checkpoint:
    return model.edited("weight", lambda w, _: w, dtype=BF16)


def noise(size: float, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    return size * np.random.default_rng([17, layer]).standard_normal(shape)


def noisy(share: float) -> Change:
    return lambda w, layer: w + noise(share * np.sqrt((w**2).mean()), layer, w.shape)


def common(w: np.ndarray, layer: int) -> np.ndarray:
    return w + noise(0.05, layer, w.shape[1:])


@functools.cache
def rotation() -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(3).standard_normal((256, 256)))[0]


def rotated(model: Checkpoint) -> Checkpoint:
    """As QuaRot does: the gain goes into what reads it, and the hidden states turn."""
    gains = {layer: model.tensors[name_of("gain", layer)].astype(float) for layer in model.layers}
    turned = model.edited("weight", lambda w, layer: (w * gains[layer]) @ rotation())
    return turned.edited("gain", lambda g, _: np.ones_like(g))


def not_finite(value: float) -> Callable[[Checkpoint], Checkpoint]:
    return lambda m: m.edited("weight", lambda w, _: np.where(w == w.max(), value, w))


def made_up(
    weight: np.ndarray, rule: Rule = SOFTMAX, dtype: str = "F32", **parts: object
) -> Router:
    """A router of these rows, said to be stored as ``dtype``."""
    rule = dataclasses.replace(rule, has_logit_bias="logit_bias" in parts)
    provenance = Provenance("made up", ("w",), "", dtype)
    return Router("text/0", "text", 0, weight.astype(np.float32), rule, provenance, **parts)  # type: ignore[arg-type]
