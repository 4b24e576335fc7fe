"""Studies that change one thing of the quick setting and leave the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.trained.methods import METHODS, Method
from benchmarks.trained.settings import Settings
from benchmarks.trained.training import Run, train

#: Seeds of a study.
SEEDS = 2


@dataclass(frozen=True)
class Study:
    """``values`` are names and what they change; the others are compared with ``base``."""

    text: str
    method: str
    values: Mapping[str, Mapping[str, Any]]
    base: str

    def train(self, value: str, settings: Settings, seed: int) -> list[Run]:
        """The run of a value, under its name."""
        method: Method = METHODS[self.method]
        runs = train(method, dataclasses.replace(settings, **self.values[value]), seed)
        return [runs[0] | {"method": value}]


def _one(field: str, *values: float) -> dict[str, dict[str, Any]]:
    return {f"{value:g}": {field: value} for value in values}


_RATES = (1e-3, 3e-3, 1e-2)

STUDIES = {
    "temperature": Study(
        "what the logits are divided by before the softmax",
        "top-k",
        _one("temperature", 0.1, 0.5, 1.0, 2.0),
        "1",
    ),
    "weights": Study(
        "routing weights as they are, or divided by their sum",
        "top-k",
        {"divided": {"renormalise": True}, "as they are": {"renormalise": False}},
        "divided",
    ),
    "smooth-rate": Study(
        "learning rate of routers that smooth, with gradients through the factor",
        "smooth",
        _one("router_learning_rate", 1e-4, 1e-3, 3e-3),
        "0.003",
    ),
    "shared": Study(
        "experts that every token goes through, beside those that are chosen",
        "top-k",
        _one("shared", 0, 1, 2),
        "1",
    ),
    "entropy": Study(
        "weight of the mean entropy of the scores in the loss",
        "top-k",
        _one("entropy", 0.0, 0.01, 0.1),
        "0",
    ),
    "first-dense": Study(
        "layers that are dense, from the first on", "top-k", _one("first_dense", 0, 1, 2), "0"
    ),
    "router-dimension": Study(
        "dimensions in which the cosine router compares",
        "cosine",
        _one("router_dimension", 8, 16, 32, 64),
        "16",
    ),
    "rates": Study(
        "learning rates of routers and of experts",
        "top-k",
        {
            f"router {router:g}, experts {expert:g}": {
                "router_learning_rate": router,
                "expert_learning_rate": expert,
            }
            for router in _RATES
            for expert in _RATES
        },
        "router 0.003, experts 0.003",
    ),
}
