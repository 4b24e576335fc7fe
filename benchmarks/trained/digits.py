"""Digits at four angles, one angle left out: domain generalisation in miniature.

``sklearn.datasets.load_digits`` turned by 0, 15, 30 and 45 degrees makes four domains of the same
1797 images. A model is trained on three of them and tested on the fourth, on images that it has
seen at no angle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.trained.model import NORM_EPS, initialise
from benchmarks.trained.settings import Settings
from benchmarks.trained.training import Run, fit, prepare_router_seed, rounded, routers_of, run_of

if TYPE_CHECKING:
    from benchmarks.trained.methods import Method
    from moegeom.trainable.router import Routed

ANGLES = (0, 15, 30, 45)
METHODS = ("top-k", "smooth", "cosine")

#: One image in five is tested on and never trained on.
TEST_SHARE, SPLIT_SEED = 5, 6

CLASSES = 10

DIGITS = Settings(
    name="digits",
    hidden=32,
    layers=2,
    heads=1,
    experts=8,
    top_k=2,
    width=32,
    length=1,
    sequences_per_domain=32,
    steps=400,
    seeds=5,
    renormalise=True,
)


@dataclass(frozen=True)
class Angle:
    """Images [images, 64] of one domain in units of the brightest pixel, and their classes."""

    training: Tensor
    training_class: Tensor
    test: Tensor
    test_class: Tensor


@cache
def angles() -> dict[int, Angle]:
    """The domains; the same images are for testing in each."""
    from scipy.ndimage import rotate
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(data.images))
    test, training = np.split(order, [len(order) // TEST_SHARE])
    found = {}
    for angle in ANGLES:
        turned = rotate(data.images, angle, axes=(2, 1), reshape=False, order=1) / 16.0
        images = torch.from_numpy(turned.reshape(len(turned), -1).astype(np.float32))
        classes = torch.from_numpy(data.target.astype(np.int64))
        found[angle] = Angle(images[training], classes[training], images[test], classes[test])
    return found


class DigitLayer(nn.Module):
    """A feed-forward block behind a norm and beside the residual stream."""

    def __init__(self, settings: Settings, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(settings.hidden, NORM_EPS), mlp

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routed | None]:
        out, routed = self.mlp(self.norm(hidden))
        return hidden + out, routed


class DigitModel(nn.Module):
    """Logits of the class of an image, and what every routed block did."""

    def __init__(self, settings: Settings, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(64, settings.hidden)
        self.layers = nn.ModuleList(DigitLayer(settings, block) for block in blocks)
        self.norm = nn.RMSNorm(settings.hidden, NORM_EPS)
        self.head = nn.Linear(settings.hidden, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Routed]]:
        hidden, done = self.embed(images), []
        for layer in self.layers:
            hidden, routed = layer(hidden)
            if routed is not None:
                done.append(routed)
        return self.head(self.norm(hidden)), done


def batches(settings: Settings, seed: int, left_out: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless images and classes, as many of each domain but the one left out."""
    generator = torch.Generator().manual_seed(seed)
    domains = [domain for angle, domain in angles().items() if angle != left_out]
    size = (settings.sequences_per_domain,)
    while True:
        rows = [torch.randint(len(d.training), size, generator=generator) for d in domains]
        yield (
            torch.cat([d.training[r] for d, r in zip(domains, rows, strict=True)]),
            torch.cat([d.training_class[r] for d, r in zip(domains, rows, strict=True)]),
        )


def train(method: Method, settings: Settings, seed: int) -> list[Run]:
    """One run: accuracy in percent at each angle when it is left out, and their mean."""
    figures: dict[str, float] = {}
    seconds = 0.0
    for left_out in ANGLES:
        blocks = []
        for number in range(settings.layers):
            prepare_router_seed(seed, number)
            blocks.append(method.layer(settings, number))
        model = DigitModel(settings, blocks)
        initialise(model, seed)
        fitted = fit(
            model, method, settings, batches(settings, seed, left_out), functional.cross_entropy
        )
        model.eval()
        method.prepare(routers_of(model))
        with torch.no_grad():
            logits, done = model(angles()[left_out].test)
        hit = logits.argmax(dim=1) == angles()[left_out].test_class
        figures[f"accuracy_{left_out}"] = 100.0 * hit.double().mean().item()
        chosen = [routed.num_chosen.double().mean().item() for routed in done]
        figures[f"experts_per_token_{left_out}"] = float(np.mean(chosen))
        seconds += fitted.ms_per_step * settings.steps / 1e3
    for name in ("accuracy", "experts_per_token"):
        figures[name] = float(np.mean([figures[f"{name}_{angle}"] for angle in ANGLES]))
    return [
        run_of(method.name, seed, settings.steps, model, figures) | {"seconds": rounded(seconds)}
    ]
