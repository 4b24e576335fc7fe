"""Changes that leave every choice as it was, and what the gate says of them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tests.museum import healthy
from tests.museum.checkpoint import (
    BF16,
    Build,
    Checkpoint,
    name_of,
    permuted,
    rounded,
    within_groups,
)


@dataclass(frozen=True)
class Model:
    """A checkpoint to change; ``groups`` of experts that a rule keeps as a whole."""

    build: Build
    is_softmax: bool
    groups: int = 1


MODELS: Mapping[str, Model] = {
    "synthetic softmax": Model(lambda: healthy.with_experts(healthy.softmax_model()), True),
    "synthetic sigmoid": Model(lambda: healthy.with_experts(healthy.sigmoid_model()), False, 2),
    "olmoe-balanced": Model(healthy.olmoe, True),
    "olmoe-collapsed": Model(lambda: healthy.trained("olmoe-collapsed/step_1500"), True),
    "deepseek-tiny": Model(healthy.trained_sigmoid, False, 4),
}


@dataclass(frozen=True)
class Neutral:
    """A change, and what the gate ``says`` where routing weights change and choices do not."""

    text: str
    change: Callable[[Checkpoint, Model], Checkpoint]
    for_softmax_only: bool = False
    says: tuple[str, ...] = ()


def _shifted(times: float) -> Callable[[Checkpoint, Model], Checkpoint]:
    def shifted(checkpoint: Checkpoint, _: Model) -> Checkpoint:
        def change(weight: np.ndarray, layer: int) -> np.ndarray:
            common = np.random.default_rng([3, layer]).standard_normal(weight.shape[1])
            length = np.median(np.linalg.norm(weight, axis=1))
            return weight + times * length * common / np.linalg.norm(common)

        return checkpoint.edited("weight", change)

    return shifted


def _scaled(factor: float) -> Callable[[Checkpoint, Model], Checkpoint]:
    return lambda checkpoint, _: checkpoint.edited("weight", lambda w, _: factor * w)


def _renumbered(checkpoint: Checkpoint, model: Model) -> Checkpoint:
    experts = len(checkpoint.tensors[name_of("weight", checkpoint.layers[0])])
    order = within_groups(experts, model.groups)
    parts = ("weight", "experts") if model.is_softmax else ("weight", "bias", "experts")
    return permuted(checkpoint, order, parts)


def _folded(checkpoint: Checkpoint, _: Model) -> Checkpoint:
    gains = {
        layer: checkpoint.tensors[name_of("gain", layer)].astype(np.float64)
        for layer in checkpoint.layers
    }
    folded = checkpoint.edited("weight", lambda w, layer: w * gains[layer])
    return folded.edited("gain", lambda gain, _: np.ones_like(gain))


def _rounded_again(checkpoint: Checkpoint, _: Model) -> Checkpoint:
    return checkpoint.edited("weight", lambda w, _: rounded(rounded(w)), dtype=BF16)


NEUTRAL: Mapping[str, Neutral] = {
    "shift": Neutral("one vector, as long as a row, added to all rows", _shifted(1.0), True),
    "long shift": Neutral("one vector, three times as long", _shifted(3.0), True),
    "renumbering": Neutral("experts renumbered with all that belongs to them", _renumbered),
    "folding": Neutral("the gain folded into the router, rounded to bfloat16", _folded),
    "half": Neutral("the router times 0.5", _scaled(0.5), True, ("MGI128",)),
    "double": Neutral("the router times 2", _scaled(2.0), True, ("MGI128",)),
    "triple": Neutral("the router times 3, rounded to bfloat16", _scaled(3.0), True, ("MGI128",)),
    "rounding": Neutral("the router rounded to bfloat16 again", _rounded_again),
}


def applicable() -> list[tuple[str, str]]:
    return [
        (change, model)
        for change, neutral in NEUTRAL.items()
        for model, facts in MODELS.items()
        if facts.is_softmax or not neutral.for_softmax_only
    ]


@functools.cache
def changed(change: str, model: str) -> tuple[Checkpoint, Checkpoint]:
    original = MODELS[model].build()
    return NEUTRAL[change].change(original, MODELS[model]), original
