"""Least squares by gradient descent with a backtracking line search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.hmoe.activation import SIGMOID, Activation
from moegeom.geometry.hmoe.mixture import Mixture
from moegeom.geometry.hmoe.regression import Position, gradient, traced

#: Share of the decrease that a line promises which a step must keep, and the first step tried.
ARMIJO, TRIAL = 0.25, 0.05

#: Halvings of a step after which there is no lower place in this direction.
_MOST_HALVINGS = 40


@dataclass(frozen=True, eq=False)
class Descended:
    """Where a descent ended: ``loss`` is the mean square; not ``settled``: steps ran out."""

    mixture: Mixture
    loss: float
    epochs: int
    settled: bool


def descended(
    start: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    targets: Float64[np.ndarray, "samples"],
    position: Position = "none",
    activation: Activation = SIGMOID,
    epochs: int = 1000,
    trial: float = TRIAL,
) -> Descended:
    r"""Gradient descent on :math:`\frac1n \sum (f(x) - y)^2`, all parameters but gates.

    Every step is tried at ``trial`` and halved until the loss falls by at least a quarter of step
    times squared gradient. It settles where 40 halvings find nothing lower.

    Source: S2 section 5 (Armijo's constant is not given there); docs/theory.md C6.
    Oracle in tests: scipy.optimize.minimize from the same start.
    """
    here = start
    trace = traced(here, inputs, position, activation)
    loss = float(np.mean((trace.output - targets) ** 2))
    for epoch in range(epochs):
        slope = gradient(here, trace, (2.0 / len(targets)) * (trace.output - targets))
        square = slope.norm_squared()
        step = trial
        for _ in range(_MOST_HALVINGS):
            tried = here.moved(slope, -step)
            ahead = traced(tried, inputs, position, activation)
            lower = float(np.mean((ahead.output - targets) ** 2))
            if lower <= loss - ARMIJO * step * square and lower < loss:
                break
            step /= 2.0
        else:
            return Descended(here, loss, epoch, True)
        here, trace, loss = tried, ahead, lower
    return Descended(here, loss, epochs, False)
