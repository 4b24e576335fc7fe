"""The methods that are compared: what a block is made of, and what happens around a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.trained.model import Dense, Merged, MoE
from benchmarks.trained.osr import OSRRouter
from benchmarks.trained.settings import Settings
from moegeom.trainable.continuous import ReLURouter, SmoothTopKRouter, update_strength
from moegeom.trainable.router import RouterModule, product
from moegeom.trainable.top_k import CentredRouter, CosineRouter, TopKRouter

#: The method that others are compared with.
BASE = "top-k"

#: Length of the gradient of a step, of all weights together, beyond which it is scaled down.
CLIP = 1.0

#: Share of the steps before the sparsity loss of ReLU routing sets in: S0 gives it 2 of 80 epochs.
DENSE_PHASE = 0.025

#: Width of smoothing at the start where it is near 0 (S0 B.4).
NEAR_0 = 1e-3

#: Epochs in which the annealing of S0 (B.5) is told.
EPOCHS = 80.0

#: Of the class that the method makes.
Routers = Sequence[Any]


def _nothing(*_: object) -> None:
    """Methods that leave steps alone."""


def _no_bias(_: object) -> None:
    """Routers that add nothing to their logits."""


@dataclass(frozen=True, eq=False)
class Method:
    """``block`` builds the feed-forward block of a layer.

    ``rows`` are what a router compares inputs with, in the router's own space, None of one that has
    none; ``bias`` is what is added to its logits. ``is_affine``: the chosen are the top-k of
    ``W y + b``; ``jumps``: and are cut off there. ``before_step`` and ``after_step`` get the
    routers and the share of the training that is done. ``clip`` is the length that gradients of a
    step are cut to. ``also`` are other ways to evaluate the same
    training, told apart by ``prepare``.
    """

    name: str
    text: str
    block: Callable[[Settings], nn.Module]
    rows: Callable[[Any], np.ndarray] | None = None
    bias: Callable[[Any], np.ndarray | None] = _no_bias
    is_affine: bool = False
    jumps: bool = False
    before_step: Callable[[Routers, float], None] = _nothing
    after_step: Callable[[Routers, float], None] = _nothing
    clip: float = CLIP
    prepare: Callable[[Routers], None] = _nothing
    also: tuple[Method, ...] = ()

    def layer(self, settings: Settings, number: int) -> nn.Module:
        """The block of layer ``number``: dense in the first layers where a study asks for it."""
        if number < settings.first_dense:
            return Dense(settings.hidden, settings.top_k * settings.width)
        return self.block(settings)


def _dense(width: Callable[[Settings], int]) -> Callable[[Settings], nn.Module]:
    return lambda settings: Dense(settings.hidden, width(settings))


def _routed(make: Callable[[Settings], RouterModule]) -> Callable[[Settings], nn.Module]:
    return lambda settings: MoE(settings, make(settings))


def _sizes(settings: Settings) -> tuple[int, int, int]:
    return settings.experts, settings.top_k, settings.hidden


def _of_top_k(settings: Settings) -> dict[str, Any]:
    # the loss of each layer counts alike, however many there are
    balance = settings.balance / settings.layers
    return {"renormalise": settings.renormalise, "balance_coef": balance}


def _top_k(settings: Settings) -> RouterModule:
    return TopKRouter(*_sizes(settings), **_of_top_k(settings))


def _smooth(**options: Any) -> Callable[[Settings], nn.Module]:
    return _routed(
        lambda settings: SmoothTopKRouter(*_sizes(settings), **_of_top_k(settings), **options)
    )


class _PartlyAttached(SmoothTopKRouter):
    """Smoothed from near 0; the gradient through the factor reaches ``rows`` or inputs alone."""

    rows: bool

    def scored(self, inputs: Tensor) -> Tensor:
        tokens, weight = inputs.reshape(-1, self.hidden), self.weight
        cut = (tokens.detach(), weight) if self.rows else (tokens, weight.detach())
        self.for_factor = product(*cut)
        return super().scored(inputs)

    def selection(self, logits: Tensor) -> Tensor:
        return self.for_factor


class _ToRows(_PartlyAttached):
    rows = True


class _ToInputs(_PartlyAttached):
    rows = False


def _partly(kind: type[_PartlyAttached]) -> Callable[[Settings], nn.Module]:
    return _routed(lambda settings: kind(*_sizes(settings), **_of_top_k(settings), eps=NEAR_0))


def _cosine(settings: Settings) -> RouterModule:
    size = settings.router_dimension
    return CosineRouter(*_sizes(settings), projected=size, **_of_top_k(settings))


def _hard(is_hard: bool) -> Callable[[Routers], None]:
    def prepare(routers: Routers) -> None:
        for router in routers:
            router.hard_at_inference = is_hard

    return prepare


def _anneal(routers: Routers, progress: float) -> None:
    for router in routers:
        router.anneal(EPOCHS * progress)


def _relu(settings: Settings) -> RouterModule:
    return ReLURouter(*_sizes(settings), num_layers=settings.layers - settings.first_dense)


def _strengthen(routers: Routers, progress: float) -> None:
    if progress > DENSE_PHASE:
        update_strength(routers)


def _osr(settings: Settings) -> RouterModule:
    # expression vectors of all experts are orthonormal, so that they fit into the hidden size
    return OSRRouter(*_sizes(settings), router_dim=settings.hidden // settings.experts)


def _balanced(is_balanced: bool) -> Callable[[Routers], None]:
    def prepare(routers: Routers) -> None:
        for router in routers:
            router.balanced_at_inference = is_balanced

    return prepare


def _weight(router: Any) -> np.ndarray:
    return router.weight.detach().numpy().astype(np.float64)


_ALL = (
    Method(
        "dense-active", "dense, as wide as the chosen experts", _dense(lambda s: s.top_k * s.width)
    ),
    Method("dense-total", "dense, as wide as all experts", _dense(lambda s: s.experts * s.width)),
    Method(BASE, "top-k", _routed(_top_k), _weight, is_affine=True, jumps=True),
    Method(
        "top-k-unclipped",
        "top-k, gradients not clipped",
        _routed(_top_k),
        _weight,
        is_affine=True,
        jumps=True,
        clip=math.inf,
    ),
    Method(
        "smooth",
        "smooth top-k",
        _smooth(),
        _weight,
        is_affine=True,
        prepare=_hard(False),
        also=(
            Method(
                "smooth-hard",
                "smooth top-k, hard at inference",
                _smooth(),
                _weight,
                is_affine=True,
                jumps=True,
                prepare=_hard(True),
            ),
        ),
    ),
    Method(
        "smooth-detached",
        "smooth top-k, no gradient through the factor",
        _smooth(detach_gate=True),
        _weight,
        is_affine=True,
    ),
    Method(
        "smooth-exact",
        "smooth top-k, its width from the gaps of batches",
        _smooth(controller="exact"),
        _weight,
        is_affine=True,
    ),
    Method(
        "smooth-unclipped",
        "smooth top-k, gradients not clipped",
        _smooth(),
        _weight,
        is_affine=True,
        clip=math.inf,
    ),
    Method(
        "smooth-near-0", "smooth top-k from near 0", _smooth(eps=NEAR_0), _weight, is_affine=True
    ),
    Method(
        "smooth-near-0-detached",
        "smooth from near 0, no gradient through the factor",
        _smooth(eps=NEAR_0, detach_gate=True),
        _weight,
        is_affine=True,
    ),
    Method(
        "smooth-near-0-rows",
        "smooth from near 0, that gradient to rows alone",
        _partly(_ToRows),
        _weight,
        is_affine=True,
    ),
    Method(
        "smooth-near-0-inputs",
        "smooth from near 0, that gradient to inputs alone",
        _partly(_ToInputs),
        _weight,
        is_affine=True,
    ),
    Method(
        "smooth-annealed",
        "smooth top-k annealed, hard at inference",
        _smooth(hard_at_inference=True),
        _weight,
        is_affine=True,
        jumps=True,
        before_step=_anneal,
    ),
    Method("relu", "ReLU routing (ReMoE)", _routed(_relu), _weight, after_step=_strengthen),
    Method("cosine", "cosine router", _routed(_cosine), _weight),
    Method(
        "osr",
        "OSR, balanced over the batch at inference",
        _routed(_osr),
        lambda router: router.expression_mean.numpy().astype(np.float64),
        prepare=_balanced(True),
        also=(
            Method(
                "osr-causal", "OSR, causal at inference", _routed(_osr), prepare=_balanced(False)
            ),
        ),
    ),
    Method("smear", "SMEAR, merged for each prefix", Merged),
    Method(
        "centred",
        "top-k, logits centred",
        _routed(lambda settings: CentredRouter(_top_k(settings))),
        lambda router: _weight(router.router),
        lambda router: router.logit_bias.numpy().astype(np.float64),
        is_affine=True,
        jumps=True,
    ),
)

METHODS = {method.name: method for method in _ALL}
