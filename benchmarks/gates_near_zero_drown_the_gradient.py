"""How much longer the gradient of a router is with the gradient through the smoothing factor.

The factor of a smoothed gate has slopes of up to 17.8 / eps (docs/theory.md A11). A byte model of
benchmarks/trained, ``published``, is trained as top-k for 60 steps; then, at each width, the
gradient of the same loss on four further batches is taken with the factor attached and without.
Printed are lengths with it over lengths without, of routers and of all other weights. Seconds.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.trained.methods import CLIP, METHODS
from benchmarks.trained.model import ByteModel, is_of_router, next_byte_loss
from benchmarks.trained.settings import PUBLISHED
from benchmarks.trained.text import batches
from benchmarks.trained.training import build, make_optimizer, prepare_torch, routers_of

WIDTHS = (0.001, 0.01, 0.1, 0.5)

STEPS, BATCHES = 60, 4


def backward(model: ByteModel, tokens: Tensor) -> None:
    model.zero_grad()
    logits, done = model(tokens)
    (next_byte_loss(logits, tokens) + sum(routed.loss for routed in done)).backward()


def trained(seed: int, data: list[Tensor]) -> ByteModel:
    """A top-k model after the first steps."""
    model = build(METHODS["top-k"], PUBLISHED, seed)
    optimizer, schedule = make_optimizer(model, PUBLISHED)
    for tokens in data:
        backward(model, tokens)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
    return model


def lengths(base: ByteModel, name: str, width: float, seed: int, data: list[Tensor]) -> np.ndarray:
    """Mean length of the gradient of routers and of other weights, at this width."""
    model = build(METHODS[name], PUBLISHED, seed)
    model.load_state_dict(base.state_dict(), strict=False)
    for router in routers_of(model):
        nn.init.constant_(router.theta, math.log(math.expm1(width)))
    found = []
    for tokens in data:
        backward(model, tokens)
        parts = [0.0, 0.0]
        for parameter_name, parameter in model.named_parameters():
            if not parameter_name.endswith(".theta"):
                parts[not is_of_router(parameter_name)] += float(parameter.grad.square().sum())
        found.append(np.sqrt(parts))
    return np.mean(found, axis=0)


def ratios(seed: int = 0) -> dict[float, np.ndarray]:
    """By width: of routers, and of other weights."""
    data = list(islice(batches(PUBLISHED, seed), STEPS + BATCHES))
    base, after = trained(seed, data[:STEPS]), data[STEPS:]
    names = ("smooth-near-0", "smooth-near-0-detached")
    found = {}
    for width in WIDTHS:
        attached, detached = (lengths(base, name, width, seed, after) for name in names)
        found[width] = attached / detached
    return found


def main() -> None:
    prepare_torch()
    print("width of smoothing   routers   other weights: gradient attached over detached")
    with torch.random.fork_rng():
        for width, (routers, others) in ratios().items():
            print(f"{width:<20g} {routers:<9.1f} {others:.2f}")


if __name__ == "__main__":
    main()
