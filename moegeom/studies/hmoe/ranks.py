"""What data can tell of the published parameters, by where a non-linearity stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.hmoe.activation import ACTIVATIONS
from moegeom.geometry.hmoe.identifiability import (
    cramer_rao_sd,
    gauge_dimensions,
    numerical_rank,
)
from moegeom.geometry.hmoe.mixture import Mixture, published_truth
from moegeom.geometry.hmoe.regression import PLACEMENTS, Position, jacobian
from moegeom.studies.hmoe.record import LeastDeviation, Model, PositionRank

#: Standard deviation of the noise; S2 calls the same number a variance (F-25).
NOISE = 0.1

#: Models -> where their activation stands.
POSITIONS: dict[Model, Position] = {"mha": "none", "1": "value", "2": "sdpa"}

#: Points at which derivatives are taken.
_POINTS = 5000

#: Rows of the table: where, and with which activation.
_ROWS: Sequence[tuple[Position, str]] = (
    *((position, "sigmoid") for position in PLACEMENTS),
    ("value", "silu"),
    ("sdpa", "silu"),
)


def square(size: int, generator: np.random.Generator) -> Float64[np.ndarray, "samples dims"]:
    """Inputs of the experiment: uniform on [-1, 1]^2."""
    return generator.uniform(-1.0, 1.0, (size, 2))


def position_ranks(seed: int) -> tuple[PositionRank, ...]:
    """Ranks at the published parameters; rows of gates, which it has not, are normal numbers."""
    return tuple(_position_rank(*row, seed) for row in _ROWS)


def _position_rank(position: Position, activation: str, seed: int) -> PositionRank:
    generator = np.random.default_rng(seed)
    mixture = _with_gates(published_truth(), position, generator)
    points = square(_POINTS, generator)
    derivatives = jacobian(mixture, points, position, ACTIVATIONS[activation])
    found = numerical_rank(derivatives)
    gauge = gauge_dimensions(mixture, position)
    return PositionRank(
        position,
        activation,
        found.columns,
        found.rank,
        gauge,
        found.columns - found.rank - gauge,
        found.least,
        found.rest,
    )


def _with_gates(truth: Mixture, position: Position, generator: np.random.Generator) -> Mixture:
    heads, _, channels, dims = truth.experts.shape
    rows = {"none": 0, "head": 1, "channel": channels}[PLACEMENTS[position].gates]
    gates = generator.normal(size=(heads, rows, dims)) if rows else None
    return dataclasses.replace(truth, gates=gates)


def least_deviation(model: Model, size: int, seed: int) -> LeastDeviation:
    """With as many channels as the truth has, and the last score of each head held at its value."""
    truth = published_truth()
    heads, experts, _, dims = truth.scores.shape
    points = square(_POINTS, np.random.default_rng(seed))
    derivatives = jacobian(truth, points, POSITIONS[model])
    entries = dims * (dims + 1) // 2
    is_held = np.zeros(derivatives.shape[1], dtype=bool)
    scores = is_held[truth.weights.size :][: heads * experts * entries]
    scores.reshape(heads, experts, entries)[:, -1] = True
    deviations = cramer_rao_sd(derivatives[:, ~is_held], NOISE, size, flat=0)
    return LeastDeviation(model, size, float(np.median(deviations)))
