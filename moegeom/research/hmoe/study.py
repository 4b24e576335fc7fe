"""``research hmoe``: ranks and least deviations at the parameters of S2's appendix D."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.hmoe import (
    ACTIVATIONS,
    PLACEMENTS,
    Mixture,
    Position,
    cramer_rao_sd,
    gauge_dimensions,
    jacobian,
    numerical_rank,
    published_truth,
    unmet_assumptions,
)
from moegeom.research.hmoe.record import HmoeRequest, LeastDeviation, Mixtures, Model, PositionRank

if TYPE_CHECKING:
    from moegeom.pipeline import Watch

#: Standard deviation of the noise; S2 calls the same number a variance (F-25).
NOISE = 0.1

#: Models -> where their activation stands.
POSITIONS: dict[Model, Position] = {"mha": "none", "1": "value", "2": "sdpa"}

#: Points at which derivatives are taken.
_RANK_POINTS = 5000

#: The largest number of samples in S2's Figure 1.
_MOST_SAMPLES = 100_000

#: Rows of the table: where, and with which activation.
_ROWS: Sequence[tuple[Position, str]] = (
    *((position, "sigmoid") for position in PLACEMENTS),
    ("value", "silu"),
    ("sdpa", "silu"),
)


def hmoe(request: HmoeRequest, watch: Watch | None = None) -> Mixtures:
    """Ranks by position, and the least standard deviations that any unbiased estimator allows.

    No checkpoint is read; docs/theory.md C4 and C6.

    Raises
    ------
    UsageError
        For a seed below 0.

    Examples
    --------
    >>> import moegeom as mg
    >>> report = mg.hmoe()
    >>> [one.position for one in report.value.ranks if one.beyond == 0]
    ['value', 'sdpa', 'value', 'sdpa']
    """
    return Mixtures(
        tuple(_position_rank(*row, request.seed) for row in _ROWS),
        tuple(least_deviation(model, _MOST_SAMPLES, request.seed) for model in ("1", "2")),
        unmet_assumptions(published_truth()),
    )


def square(size: int, generator: np.random.Generator) -> Float64[np.ndarray, "samples dims"]:
    """Inputs of the experiment: uniform on [-1, 1]^2."""
    return generator.uniform(-1.0, 1.0, (size, 2))


def _position_rank(position: Position, activation: str, seed: int) -> PositionRank:
    """At the published parameters; rows of gates, which those have not, are normal numbers."""
    generator = np.random.default_rng(seed)
    mixture = _with_gates(published_truth(), position, generator)
    points = square(_RANK_POINTS, generator)
    rank = numerical_rank(jacobian(mixture, points, position, ACTIVATIONS[activation]))
    gauge = gauge_dimensions(mixture, position)
    beyond = rank.columns - rank.rank - gauge
    return PositionRank(
        position, activation, rank.columns, rank.rank, gauge, beyond, rank.least, rank.rest
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
    points = square(_RANK_POINTS, np.random.default_rng(seed))
    derivatives = jacobian(truth, points, POSITIONS[model])
    entries = dims * (dims + 1) // 2
    is_held = np.zeros(derivatives.shape[1], dtype=bool)
    scores = is_held[truth.weights.size :][: heads * experts * entries]
    scores.reshape(heads, experts, entries)[:, -1] = True
    deviations = cramer_rao_sd(derivatives[:, ~is_held], NOISE, size)
    return LeastDeviation(model, size, float(np.median(deviations)))
