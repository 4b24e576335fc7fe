"""Incidents of the selection bias: never updated, frozen, or run away."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import Checkpoint
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import in_float32, sigmoid_model


def _constant(value: float, layers: tuple[int, ...]) -> Callable[[], Checkpoint]:
    return lambda: sigmoid_model().edited("bias", lambda b, _: np.full_like(b, value), layers)


BIAS_NEVER_UPDATED = Incident(
    "bias_never_updated",
    ("AI-Hypercomputer/maxtext#2494",),
    "A DeepSeek-V3 training declared the routing bias and never updated it: without a gradient and "
    "without an update rule it stays what it was initialised to.",
    "MGN116",
    (
        Case("one layer of four all 0", _constant(0.0, (2,)), ("MGN116",), ("text/2",)),
        Case(
            "all layers 0",
            _constant(0.0, (0, 1, 2, 3)),
            ("MGN116",),
            ("text/0", "text/1", "text/2", "text/3"),
        ),
        Case(
            "all layers one constant, 0.5",
            _constant(0.5, (0, 1, 2, 3)),
            ("MGN116",),
            ("text/0", "text/1", "text/2", "text/3"),
        ),
    ),
    (Case("biases that were updated", sigmoid_model),),
)


def _moved(share: float, step: float) -> Callable[[], Checkpoint]:
    """Rows that moved by a share of their length, biases by a step up or down."""

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        noise = np.random.default_rng([2953, layer]).standard_normal(weight.shape)
        return weight + share * noise / np.sqrt(weight.shape[1])

    def biases(bias: np.ndarray, layer: int) -> np.ndarray:
        up = np.random.default_rng([2954, layer]).random(len(bias)) < 0.5
        return bias + np.where(up, step, -step)

    return lambda: trainable_model().edited("weight", rows).edited("bias", biases)


def trainable_model() -> Checkpoint:
    """Rows in float32, so that the smallest movement is not rounded away."""
    return in_float32(sigmoid_model())


_ALL = ("text/0", "text/1", "text/2", "text/3")

BIAS_FROZEN = Incident(
    "bias_frozen",
    ("PrimeIntellect-ai/prime-rl#2953",),
    "The trainer loaded the biases and left them where they were: rows trained on, and nothing "
    "balanced the load any more.",
    "MGN123",
    (
        Case("rows moved by 0.02 % of their length", _moved(0.0002, 0.0)),
        Case("rows moved by 0.5 %", _moved(0.005, 0.0), ("MGN123",), _ALL),
        Case("rows moved by 5 %", _moved(0.05, 0.0), ("MGG401", "MGN123"), _ALL),
    ),
    (Case("rows moved by 0.5 %, biases by 0.0005", _moved(0.005, 0.0005)),),
    trainable_model,
)


def _runaway(value: float) -> Callable[[], Checkpoint]:
    def lowered(bias: np.ndarray, _: int) -> np.ndarray:
        return np.where(np.arange(len(bias)) == 9, value, bias)

    return lambda: sigmoid_model().edited("bias", lowered, (1,))


BIAS_RAN_AWAY = Incident(
    "bias_ran_away",
    (),
    "A bias that an update rule kept lowering: a sigmoid adds at most 1, so below about -1 no "
    "input brings the expert back.",
    "MGI110",
    (
        Case("one bias at -0.9: still reachable by the best inputs", _runaway(-0.9)),
        Case("one bias at -1.5", _runaway(-1.5), ("MGI110",), ("text/1",)),
        Case("one bias at -3", _runaway(-3.0), ("MGI110",), ("text/1",)),
    ),
    (Case("one bias at -0.3", _runaway(-0.3)),),
)

INCIDENTS = (BIAS_NEVER_UPDATED, BIAS_FROZEN, BIAS_RAN_AWAY)
