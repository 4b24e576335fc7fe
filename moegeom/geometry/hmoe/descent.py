"""Least squares by gradient descent with a backtracking line search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.hmoe.activation import SIGMOID, Activation
from moegeom.geometry.hmoe.mixture import Mixture
from moegeom.geometry.hmoe.regression import Inputs, Position, gradient, traced

#: From parameters to a loss and its gradient in all of them but gates.
Objective = Callable[[Mixture], tuple[float, Mixture]]

#: Share of the decrease that a line promises which a step must keep, and the first step tried.
ARMIJO, TRIAL = 0.25, 0.05

#: Halvings of a step after which there is no lower place in this direction.
_MOST_HALVINGS = 40


@dataclass(frozen=True, eq=False)
class Descended:
    """Where a descent ended: ``loss`` is what was made small; not ``settled``: steps ran out."""

    mixture: Mixture
    loss: float
    epochs: int
    settled: bool


def mean_square(
    inputs: Inputs,
    targets: Float64[np.ndarray, "samples"],
    position: Position = "none",
    activation: Activation = SIGMOID,
) -> Objective:
    r"""What least squares make small: :math:`\frac1n \sum (f(x) - y)^2`, and its gradient.

    Unit of the targets, squared. Source: S2 section 5; docs/theory.md C6.
    Oracle in tests: torch autograd.
    """

    def at(mixture: Mixture) -> tuple[float, Mixture]:
        trace = traced(mixture, inputs, position, activation)
        apart = trace.output - targets
        return float(np.mean(apart**2)), gradient(mixture, trace, (2.0 / len(targets)) * apart)

    return at


def descended(
    start: Mixture, objective: Objective, epochs: int = 1000, trial: float = TRIAL
) -> Descended:
    r"""Gradient descent in all parameters but gates.

    Every step is tried at ``trial`` and halved until the loss falls by at least a quarter of step
    times squared gradient. It settles where 40 halvings find nothing lower. A trial is nearly
    always kept, so that its gradient is taken at once.

    Source: S2 section 5 (Armijo's constant is not given there); docs/theory.md C6.
    Oracle in tests: scipy.optimize.minimize from the same start.
    """
    here = start
    loss, slope = objective(here)
    for epoch in range(epochs):
        square = slope.norm_squared()
        step = trial
        for _ in range(_MOST_HALVINGS):
            tried = here.moved(slope, -step)
            lower, ahead = objective(tried)
            if lower <= loss - ARMIJO * step * square and lower < loss:
                break
            step /= 2.0
        else:
            return Descended(here, loss, epoch, True)
        here, loss, slope = tried, lower, ahead
    return Descended(here, loss, epochs, False)
