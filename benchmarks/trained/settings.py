"""Every number of a training that is not a matter of the method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """A model, its data and its training; what studies change is here too.

    ``width`` is that of one expert. ``renormalise`` divides the routing weights of the chosen
    experts by their sum. ``shared`` experts run for every token; the first ``first_dense`` layers
    have a dense block as wide as the chosen experts together. ``balance`` and ``entropy`` weigh the
    load-balancing loss and the mean entropy of the scores.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    experts: int
    top_k: int
    width: int
    length: int
    sequences_per_domain: int
    steps: int
    seeds: int
    renormalise: bool
    held_out_per_domain: int = 32
    learning_rate: float = 3e-3
    router_learning_rate: float = 3e-3
    expert_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    balance: float = 0.02
    entropy: float = 0.0
    temperature: float = 1.0
    shared: int = 0
    first_dense: int = 0
    router_dimension: int = 16


#: What two cores can repeat in a quarter of an hour.
QUICK = Settings(
    name="quick",
    hidden=48,
    layers=2,
    heads=4,
    experts=8,
    top_k=2,
    width=32,
    length=96,
    sequences_per_domain=3,
    steps=600,
    seeds=3,
    renormalise=True,
)

#: The architecture of the sample checkpoints, olmoe-balanced, and their length of training.
FULL = Settings(
    name="full",
    hidden=64,
    layers=3,
    heads=4,
    experts=16,
    top_k=4,
    width=32,
    length=128,
    sequences_per_domain=4,
    steps=1500,
    seeds=5,
    renormalise=False,
)

#: E, k, the rate and the optimiser of S0 (Table 6) at the width and the text of QUICK; the balance
#: of each of two layers is 0.01.
PUBLISHED = dataclasses.replace(
    QUICK,
    name="published",
    experts=16,
    learning_rate=7e-4,
    router_learning_rate=7e-4,
    expert_learning_rate=7e-4,
    weight_decay=0.0,
)

SIZES = {settings.name: settings for settings in (QUICK, FULL, PUBLISHED)}
