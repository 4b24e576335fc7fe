"""What experts compute, how many directions of the data they respond to, how far they lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float32, Float64, Int64, Integer
from moegeom.geometry.gram import cosines
from moegeom.geometry.noise import spacing
from moegeom.geometry.rows import drawn_errors

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


#: Rows of a matrix that are multiplied at a time.
_ROWS = 256


def affine(
    inputs: Float[np.ndarray, "tokens width"],
    matrix: Float[np.ndarray, "outputs width"],
    bias: Float[np.ndarray, "outputs"] | None,
) -> Float[np.ndarray, "tokens outputs"]:
    """``W y + b`` of each token, in the dtype of the inputs. Oracle in tests: torch linear."""
    outputs = np.empty((len(inputs), len(matrix)), inputs.dtype)
    for start in range(0, len(matrix), _ROWS):  # a wider copy of all of it would be the memory
        rows = slice(start, start + _ROWS)
        outputs[:, rows] = inputs @ matrix[rows].astype(inputs.dtype, copy=False).T
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


# ------------------------------------------------------------------------------------------ overlap
def mean_pair_cosine(
    outputs: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Mean cosine of two outputs of one token, over its pairs.

    Of m outputs with unit vectors u: :math:`(|\sum u|^2 - m) / (m (m - 1))`, -1/(m-1) to 1. Outputs
    of 0 have no direction and are left out; nan where fewer than two are left.
    Oracle in tests: sklearn.metrics.pairwise.cosine_similarity.
    """
    cosines = np.full(len(outputs), np.nan)
    for token, rows in enumerate(outputs):
        rows = rows.astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1))
        rows = rows[length > 0.0] / length[length > 0.0, None]
        if (m := len(rows)) > 1:
            cosines[token] = (float((rows.sum(axis=0) ** 2).sum()) - m) / (m * (m - 1))
    return cosines


def centred_by_expert(
    outputs: Float32[np.ndarray, "tokens slots width"], experts: Integer[np.ndarray, "tokens slots"]
) -> Float32[np.ndarray, "tokens slots width"]:
    """Outputs less the mean output of the same expert over its tokens; 0 for its only one.

    Oracle in tests: a loop over experts.
    """
    left = np.zeros_like(outputs)
    for expert in np.unique(experts):
        token, slot = np.nonzero(experts == expert)
        rows = outputs[token, slot]
        if len(rows) > 1:
            left[token, slot] = rows - rows.mean(axis=0, dtype=np.float64)
    return left


def adding_up(
    contributions: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Length of the sum over the sum of the lengths, :math:`|\sum c_i| / \sum |c_i|`.

    1 where all point the same way, :math:`k^{-1/2}` for k orthogonal ones of one length, 0 where
    they cancel; nan where all are 0. Oracle in tests: vectors worked out by hand.
    """
    total = np.linalg.norm(contributions.sum(axis=1, dtype=np.float64), axis=1)
    lengths = np.linalg.norm(contributions.astype(np.float64), axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / lengths


# ---------------------------------------------------------------------------------------- distances
#: Entries count whose spacing in storage is at most so many deviations of the noise: rounding adds
#: to such as independent uniform noise does, to a few parts in a million.
_MOST_STEPS = 1.25

#: Estimates of the noise, each from the entries that count by the one before.
_ROUNDS = 4

#: Correlations that join experts into groups, one after the other; from which on noise may be below
#: the digits; standard errors of a chance correlation, and within which noise lies.
_LEVELS = (0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999, 0.9999)
_HIDDEN, _BY_CHANCE, _ERRORS = 0.9, 6.0, 4.0

#: Rows that contrasts are parted into where they are fewer, and rows that are looked at.
_PARTS, _MOST_ROWS = 8, 1024


@dataclass(frozen=True)
class MatrixSample:
    """The same entries of one matrix of all experts. ``unit`` is the unit roundoff of floats;
    ``bits`` of packed numbers, whose step is that of 6 deviations in 2^bits values; ``columns`` of
    the matrix, 0 where the entries do not lie in rows.
    """

    numbers: Float[np.ndarray, "experts entries"]
    unit: float = 0.0
    bits: float = 0.0
    columns: int = 0

    def steps(self, mean: Float64[np.ndarray, "entries"]) -> Float64[np.ndarray, "entries"]:
        """Between neighbours of each entry, in storage."""
        if not self.bits:
            return spacing(mean, self.unit)
        return np.full(len(mean), 6.0 * float(self.numbers.std()) / 2.0**self.bits)


@dataclass(frozen=True)
class Copies:
    """Experts with a common start: the ``correlation`` that joins them, in each matrix; the root
    mean square that lies between two of them over that of their entries; whether that
    ``is_resolved`` or hidden by the digits of their storage.
    """

    experts: tuple[int, ...]
    correlation: float
    deviation: float
    is_resolved: bool


def near_copies(samples: Sequence[MatrixSample]) -> list[Copies]:
    r"""Groups of experts whose differences are independent normal noise, in each of some matrices.

    With :math:`r_{ef}` the least over matrices of the correlation of the entries of two experts,
    groups are the connected components of :math:`r \ge c`, for rising c. Of a group the contrasts
    :math:`H W`, H with orthonormal rows that sum to 0, are independent normal numbers of one
    variance if there is nothing but noise, whatever its experts share: ``drawn_errors`` holds them
    against such, the rounding of each entry being part of its variance. Where most entries have
    noise below their spacing, r is above 0.9 or there is no group. What is packed shows no noise
    beyond its step. A direction that experts have in common is in no contrast, and a direction of
    their own is no noise.

    float64; experts without variation are in no group. Oracle in tests: sets that are made.
    """
    from scipy.sparse.csgraph import connected_components

    alike = np.minimum.reduce([_correlations(sample.numbers) for sample in samples])
    least = _BY_CHANCE / math.sqrt(min(sample.numbers.shape[1] for sample in samples))
    groups, pending = [], [np.arange(len(alike))]
    for level in (level for level in _LEVELS if level >= least):
        parts: list[np.ndarray] = []
        for group in pending:
            count, label = connected_components(alike[np.ix_(group, group)] >= level, False)
            parts += [group[label == number] for number in range(count)]
        pending = []
        for part in (part for part in parts if len(part) > 1):
            among = alike[np.ix_(part, part)]
            # copies of an expert that stands beside them itself have noise that it has not
            others = np.delete(part, among.sum(axis=1).argmax())
            for some in (part, others) if len(part) > 2 else (part,):
                spreads = [_noise(sample, some) for sample in samples]
                resolved = [is_resolved for _, is_resolved, _ in spreads]
                is_near = level >= _HIDDEN or all(resolved)
                if is_near and all(is_noise for _, _, is_noise in spreads):
                    correlation = float(among.max(axis=1).min())
                    deviation = max(deviation for deviation, _, _ in spreads)
                    groups.append(
                        Copies(tuple(part.tolist()), correlation, deviation, any(resolved))
                    )
                    break
            else:
                pending.append(part)
    return groups


def _correlations(
    numbers: Float[np.ndarray, "experts entries"],
) -> Float64[np.ndarray, "experts experts"]:
    """Of all pairs; 0 beside an expert without variation, and of an expert with itself."""
    apart = numbers.astype(np.float64) - numbers.mean(axis=1, dtype=np.float64, keepdims=True)
    products = np.nan_to_num(cosines(apart @ apart.T))
    np.fill_diagonal(products, 0.0)
    return products


def _noise(sample: MatrixSample, group: Int64[np.ndarray, "some"]) -> tuple[float, bool, bool]:
    """What lies between experts over their size; whether that is resolved; whether it is noise."""
    from scipy.linalg import helmert

    values = sample.numbers[group].astype(np.float64)
    contrasts, steps = helmert(len(group)) @ values, sample.steps(values.mean(axis=0))
    rounding, spread = steps**2 / 12.0, float((contrasts**2).mean())
    deviation = math.sqrt(2.0 * spread / float((values**2).mean()))
    variance, is_usable = spread, np.ones(len(steps), dtype=bool)
    for _ in range(_ROUNDS):  # what rounding adds makes the noise look larger than it is
        is_usable = steps <= _MOST_STEPS * math.sqrt(max(variance, 0.0))
        if not is_usable.any():
            break
        variance = float((contrasts**2)[:, is_usable].mean() - rounding[is_usable].mean())
    if not (variance > 0.0 and 2 * is_usable.sum() >= is_usable.size):
        return deviation, False, True
    scaled = (contrasts / np.sqrt(variance + rounding))[:, is_usable]
    share = float((rounding / (variance + rounding))[is_usable].mean())
    if sample.bits or not scaled.any(axis=1).all():
        return deviation, True, False
    rows = sample.numbers.shape[1] // max(sample.columns, 1)
    if sample.columns and rows > 1 and is_usable.all():
        scaled = scaled[: max(_MOST_ROWS // rows, 1), : rows * sample.columns]
        scaled = scaled.reshape(-1, sample.columns)
    if len(scaled) < _PARTS:
        scaled = scaled.ravel()[: scaled.size // _PARTS * _PARTS].reshape(_PARTS, -1)
    return deviation, True, bool(max(map(abs, drawn_errors(scaled, 0.0, share**2))) <= _ERRORS)
