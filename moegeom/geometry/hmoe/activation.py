"""Activations with their first derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64

Values = Float64[np.ndarray, "*values"]

#: Slope of a leaky ReLU below 0.
_LEAK = 0.01


@dataclass(frozen=True, eq=False)
class Activation:
    """``at`` gives the values and the derivatives, at a kink those from the left."""

    name: str
    at: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _identity(z: Values) -> tuple[Values, Values]:
    return z, np.broadcast_to(1.0, z.shape)


def _sigmoid(z: Values) -> tuple[Values, Values]:
    from scipy.special import expit

    value = np.asarray(expit(z))
    return value, value * (1.0 - value)


def _tanh(z: Values) -> tuple[Values, Values]:
    value = np.tanh(z)
    return value, 1.0 - value**2


def _silu(z: Values) -> tuple[Values, Values]:
    value, slope = _sigmoid(z)
    return z * value, value + z * slope


def _leaky(leak: float) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    def at(z: Values) -> tuple[Values, Values]:
        slope = np.where(z > 0.0, 1.0, leak)
        return slope * z, slope

    return at


IDENTITY = Activation("identity", _identity)
SIGMOID = Activation("sigmoid", _sigmoid)

#: Activations by name.
ACTIVATIONS: Mapping[str, Activation] = {
    one.name: one
    for one in (
        IDENTITY,
        SIGMOID,
        Activation("tanh", _tanh),
        Activation("silu", _silu),
        Activation("relu", _leaky(0.0)),
        Activation("leaky_relu", _leaky(_LEAK)),
    )
}
