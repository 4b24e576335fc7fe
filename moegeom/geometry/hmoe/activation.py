"""Activations with their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

Values = Float64[np.ndarray, "*values"]

#: Slope of a leaky ReLU below 0.
_LEAK = 0.01


@dataclass(frozen=True, eq=False)
class Activation:
    """``at`` gives the values and the first derivatives, ``curvature`` the second ones.

    At a kink, 0 of the ReLUs, the derivatives are those from the left.
    """

    name: str
    at: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    curvature: Callable[[np.ndarray], np.ndarray]

    def shifted(self, bias: float) -> Activation:
        """The activation of z + bias."""
        return Activation(
            f"{self.name}(z + {bias:g})",
            lambda z: self.at(z + bias),
            lambda z: self.curvature(z + bias),
        )


def _identity(z: Values) -> tuple[Values, Values]:
    return z, np.broadcast_to(1.0, z.shape)


def _sigmoid(z: Values) -> tuple[Values, Values]:
    from scipy.special import expit

    value = np.asarray(expit(z))
    return value, value * (1.0 - value)


def _sigmoid_curvature(z: Values) -> Values:
    value, slope = _sigmoid(z)
    return slope * (1.0 - 2.0 * value)


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


IDENTITY = Activation("identity", _identity, np.zeros_like)
SIGMOID = Activation("sigmoid", _sigmoid, _sigmoid_curvature)

#: Activations by name.
ACTIVATIONS: Mapping[str, Activation] = {
    one.name: one
    for one in (
        IDENTITY,
        SIGMOID,
        Activation("tanh", _tanh, lambda z: -2.0 * np.tanh(z) * (1.0 - np.tanh(z) ** 2)),
        Activation("silu", _silu, lambda z: 2.0 * _sigmoid(z)[1] + z * _sigmoid_curvature(z)),
        Activation("relu", _leaky(0.0), np.zeros_like),
        Activation("leaky_relu", _leaky(_LEAK), np.zeros_like),
    )
}


def homogeneity_residual(activation: Activation, values: Float64[np.ndarray, "values"]) -> float:
    r"""How far an activation is from :math:`z \varphi'(z) = \varphi(z)`, the PDE of linear experts.

    :math:`\lVert z \varphi' - \varphi \rVert / \lVert \varphi \rVert` over the values, float64, no
    unit: 0 for the identity and for every ReLU, which solve the PDE too (F-24). nan where the
    activation is 0 at all of them. Source: S2 equation (5); docs/theory.md C4.
    Oracle in tests: torch autograd.
    """
    value, slope = activation.at(values)
    size = float(np.linalg.norm(value))
    return float(np.linalg.norm(values * slope - value)) / size if size else float("nan")
