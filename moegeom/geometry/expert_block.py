"""What experts compute: activations by name, one expert, and the mixture that a block gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float64, Int64, Integer

Array = Float[np.ndarray, "*shape"]


# -------------------------------------------------------------------------------------- activations
def logistic(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`1 / (1 + e^{-x})` in the dtype of x, 0 to 1. Oracle in tests: torch.sigmoid."""
    from scipy.special import expit

    return expit(x)


def silu(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`x / (1 + e^{-x})`; 0 at 0. Oracle in tests: torch.nn.functional.silu."""
    return x * logistic(x)


def gelu(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`x \Phi(x)` with the normal distribution :math:`\Phi`; 0 at 0.

    Oracle in tests: torch.nn.functional.gelu.
    """
    from scipy.special import ndtr

    return x * ndtr(x)


def gelu_tanh(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`\frac{x}{2} (1 + \tanh(\sqrt{2/\pi} (x + 0.044715 x^3)))`; 0 at 0.

    Oracle in tests: torch.nn.functional.gelu(approximate="tanh").
    """
    return 0.5 * x * (1.0 + np.tanh(float(np.sqrt(2.0 / np.pi)) * (x + 0.044715 * (x * x * x))))


def quick_gelu(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`x / (1 + e^{-1.702 x})`; 0 at 0. Oracle in tests: transformers' QuickGELU."""
    return x * logistic(1.702 * x)


def relu(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`\max(x, 0)`. Oracle in tests: torch.relu."""
    return np.maximum(x, 0.0)


def relu2(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    r""":math:`\max(x, 0)^2`. Oracle in tests: torch.relu, squared."""
    return np.square(relu(x))


def linear(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """x itself. Oracle in tests: transformers' LinearActivation."""
    return x


#: Activations of one number, by the names that configs have for them.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": relu2,
    "relu_squared": relu2,
    "sigmoid": logistic,
    "tanh": np.tanh,
    "linear": linear,
}


# -------------------------------------------------------------------------------------- one expert
@dataclass(frozen=True)
class Neurons:
    """How the neurons of an expert follow from the outputs of its first matrices.

    ``activation`` is a name out of :data:`ACTIVATIONS` or :data:`PRODUCTS`. ``limit`` bounds gate
    (from above) and up (on both sides), with ``limits_activation`` the activation of the gate in
    the place of the gate; inf where nothing is bounded. ``slope`` stands before the gate in the
    sigmoid of ``clamped_swiglu``; ``gate_cap`` and ``up_cap`` are of ``softcapped_swiglu``.
    """

    activation: str
    limit: float = np.inf
    limits_activation: bool = False
    slope: float = 1.702
    gate_cap: float = np.inf
    up_cap: float = np.inf


def clamped_swiglu(gate: Array, up: Array, how: Neurons) -> Array:
    r""":math:`g \sigma(a g) (u + 1)`, g and u behind the limits, with the slope a.

    Source: transformers 5.23.0 modeling_gpt_oss.py. Oracle in tests: its module.
    """
    gate, up = np.minimum(gate, how.limit), np.clip(up, -how.limit, how.limit)
    return gate * logistic(how.slope * gate) * (up + 1.0)


def softcapped_swiglu(gate: Array, up: Array, how: Neurons) -> Array:
    r""":math:`c \tanh(g/c)\, \sigma(g)\, d \tanh(u/d)` with caps c and d; inf: not capped.

    Source: transformers 5.23.0 modeling_inkling2.py. Oracle in tests: its module.
    """
    return _capped(gate, how.gate_cap) * logistic(gate) * _capped(up, how.up_cap)


def _capped(x: Array, cap: float) -> Array:
    return x if np.isinf(cap) else cap * np.tanh(x / cap)


#: Products of gate and up that are not the activation of one times the other.
PRODUCTS: dict[str, Callable[[Array, Array, Neurons], Array]] = {
    "clamped_swiglu": clamped_swiglu,
    "softcapped_swiglu": softcapped_swiglu,
}


def is_known(how: Neurons, is_gated: bool) -> bool:
    """True where :func:`neurons` has the activation; a product needs gate and up."""
    return how.activation in ACTIVATIONS or (is_gated and how.activation in PRODUCTS)


def neurons(
    gate: Float[np.ndarray, "tokens neurons"],
    up: Float[np.ndarray, "tokens neurons"] | None,
    how: Neurons,
) -> Float[np.ndarray, "tokens neurons"]:
    r""":math:`\phi(g) u`, in the dtype of the gate; :math:`\phi(g)` without up.

    ``how`` says which activation and what is bounded. KeyError for an activation that is not known.
    Oracle in tests: the expert modules of transformers.
    """
    if how.activation in PRODUCTS and up is not None:
        return PRODUCTS[how.activation](gate, up, how)
    activation = ACTIVATIONS[how.activation]
    if how.limits_activation:
        active = np.minimum(activation(gate), how.limit)
    else:
        active = activation(np.minimum(gate, how.limit) if up is not None else gate)
    return active if up is None else active * np.clip(up, -how.limit, how.limit)


def affine(
    inputs: Float[np.ndarray, "tokens width"],
    matrix: Float[np.ndarray, "outputs width"],
    bias: Float[np.ndarray, "outputs"] | None,
) -> Float[np.ndarray, "tokens outputs"]:
    """``W y + b`` of each token, in the dtype of the inputs. Oracle in tests: torch linear."""
    outputs = inputs @ matrix.astype(inputs.dtype, copy=False).T
    return outputs if bias is None else outputs + bias.astype(inputs.dtype, copy=False)


def over_rms(
    values: Float[np.ndarray, "tokens width"], eps: float
) -> Float[np.ndarray, "tokens width"]:
    r""":math:`x / \sqrt{mean(x^2) + \epsilon}` in the dtype of the values; 0 for 0.

    Oracle in tests: the expert blocks of transformers that hold a norm.
    """
    square = (values * values).mean(axis=1, keepdims=True)
    return values / np.sqrt(square + values.dtype.type(eps))


def expert_output(
    inputs: Float[np.ndarray, "tokens hidden"],
    gate: Float[np.ndarray, "neurons hidden"],
    up: Float[np.ndarray, "neurons hidden"] | None,
    down: Float[np.ndarray, "outputs neurons"],
    how: Neurons,
    gate_bias: Float[np.ndarray, "neurons"] | None = None,
    up_bias: Float[np.ndarray, "neurons"] | None = None,
    down_bias: Float[np.ndarray, "outputs"] | None = None,
) -> Float[np.ndarray, "tokens outputs"]:
    r"""What one expert gives on each token, :math:`D(\phi(G y + b_g) (U y + b_u)) + b_d`.

    Computed in the dtype of the inputs: float32 for speed, float64 to be exact about the stored
    weights. Oracle in tests: the expert modules of transformers.
    """
    first = affine(inputs, gate, gate_bias)
    second = None if up is None else affine(inputs, up, up_bias)
    return affine(neurons(first, second, how), down, down_bias)


# ----------------------------------------------------------------------------------- the mixture
def tokens_by_expert(
    chosen: Integer[np.ndarray, "tokens k"],
) -> Iterator[tuple[int, Int64[np.ndarray, "some"], Int64[np.ndarray, "some"]]]:
    """Each expert that is chosen at all, ascending, with the tokens and the slots that name it.

    Negative numbers are empty slots. Oracle in tests: a loop.
    """
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    experts, first = np.unique(flat[order], return_index=True)
    for expert, places in zip(experts.tolist(), np.split(order, first[1:]), strict=True):
        if expert >= 0:
            token, slot = np.divmod(places, chosen.shape[1])
            yield expert, token, slot


def mixed_output(
    contribution: Callable[
        [int, Float[np.ndarray, "some hidden"], Float[np.ndarray, "some"]],
        Float[np.ndarray, "some outputs"],
    ],
    inputs: Float[np.ndarray, "tokens hidden"],
    chosen: Integer[np.ndarray, "tokens k"],
    weights: Float[np.ndarray, "tokens k"],
) -> Float64[np.ndarray, "tokens outputs"]:
    r"""The mixture :math:`\sum_{i \in S} g_i E_i(y)` of each token, added up in float64.

    ``contribution(expert, inputs, weights)`` gives :math:`g_i E_i(y)` of some tokens; it is called
    once for each expert. Zero where no slot is filled; as wide as the inputs where nothing is
    chosen at all. Oracle in tests: the expert blocks of transformers.
    """
    total = None
    for expert, token, slot in tokens_by_expert(chosen):
        outputs = contribution(expert, inputs[token], weights[token, slot])
        if total is None:
            total = np.zeros((len(inputs), outputs.shape[1]))
        np.add.at(total, token, outputs)
    return np.zeros(inputs.shape) if total is None else total
