r"""Gated attention as a hierarchical mixture of experts (docs/theory.md C1 to C6).

.. math:: f(x) = \sum_{hk} \omega_{hk} \sum_i p_{hi}(x)\, a_{hik} \cdot x, \qquad
    p_{hi} = \text{softmax}_i(x^\top M_{hi} x)

is attention without an activation or a gate; regression functions have one in some place. All of it
is float64; arrays inside have the samples last. ``python -m benchmarks.gated_attention`` prints
what of the parameters of S2 data can tell, by where a non-linearity stands (docs/hmoe.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moegeom.core.shapes import Float64

# -------------------------------------------------------------------------------------- activations
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


# --------------------------------------------------------------------------------------- parameters
@dataclass(frozen=True, eq=False)
class Mixture:
    """Output weights, symmetric matrices of the scores, expert vectors; rows of gates, if any.

    Of attention, ``weights`` are entries of the output matrix, ``scores`` come from queries and
    keys and ``experts`` from the values; a gate has one row for each channel, or one for all
    channels of a head.
    """

    weights: Float64[np.ndarray, "heads channels"]
    scores: Float64[np.ndarray, "heads experts dims dims"]
    experts: Float64[np.ndarray, "heads experts channels dims"]
    gates: Float64[np.ndarray, "heads gates dims"] | None = None


def published_truth() -> Mixture:
    """The parameters that the experiment of S2 recovers: 2 heads, experts, channels, dimensions.

    Source: S2 appendix D and its Table 2; docs/theory.md C6.
    """
    return Mixture(
        np.array([[1.0, 0.5], [0.8, 0.3]]),
        np.array(
            [
                [[[2.0, 0.0], [0.0, 0.5]], [[0.5, 0.0], [0.0, 2.0]]],
                [[[1.5, 0.2], [0.2, 0.3]], [[0.3, -0.1], [-0.1, 1.2]]],
            ]
        ),
        np.array(
            [
                [[[1.0, -0.5], [0.5, 0.8]], [[-1.0, 0.8], [0.2, -0.3]]],
                [[[0.6, 0.4], [-0.2, 0.5]], [[-0.7, -0.2], [0.3, -0.4]]],
            ]
        ),
    )


# --------------------------------------------------------------- regression functions and gradients
Inputs = Float64[np.ndarray, "samples dims"]

#: Where a non-linearity can stand. ``gate_*`` multiply by a sigmoid of the input.
Position = Literal[
    "none", "query_or_key", "value", "sdpa", "output", "gate_per_head", "gate_per_channel"
]


@dataclass(frozen=True)
class Placement:
    """Which parts an activation is applied to, and how many rows a gate has for each head."""

    on_score: bool = False
    on_value: bool = False
    on_sdpa: bool = False
    on_output: bool = False
    gates: Literal["none", "head", "channel"] = "none"


#: Positions that have names: S2 calls ``value`` Setting I and ``sdpa`` Setting II.
PLACEMENTS: Mapping[Position, Placement] = {
    "none": Placement(),
    "query_or_key": Placement(on_score=True),
    "value": Placement(on_value=True),
    "sdpa": Placement(on_sdpa=True),
    "output": Placement(on_output=True),
    "gate_per_head": Placement(gates="head"),
    "gate_per_channel": Placement(gates="channel"),
}


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A pass over samples, with what the pass back needs: values, and slopes of activations."""

    inputs: Float64[np.ndarray, "dims samples"]
    mixing: Float64[np.ndarray, "heads experts samples"]
    score_slope: Float64[np.ndarray, "... dims samples"]
    value: Float64[np.ndarray, "heads experts channels samples"]
    value_slope: Float64[np.ndarray, "heads experts channels samples"]
    inner: Float64[np.ndarray, "heads channels samples"]
    outer: Float64[np.ndarray, "heads channels samples"]
    outer_slope: Float64[np.ndarray, "heads channels samples"]
    gate: Float64[np.ndarray, "heads gates samples"]
    output: Float64[np.ndarray, "samples"]
    output_slope: Float64[np.ndarray, "samples"]


def traced(
    mixture: Mixture, inputs: Inputs, position: Position = "none", activation: Activation = SIGMOID
) -> Evaluated:
    """A pass over the inputs that keeps what :func:`jacobian` needs."""
    place = PLACEMENTS[position]

    def act(on: bool, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (activation if on else IDENTITY).at(z)

    x = np.ascontiguousarray(inputs.T)
    heads, experts, channels, dims = mixture.experts.shape
    image = (mixture.scores.reshape(-1, dims) @ x).reshape(heads, experts, dims, -1)
    key, key_slope = act(place.on_score, image)
    # a quadratic form has twice the slope of a product with a fixed side
    score_slope = x * key_slope if place.on_score else x
    score = (x * key).sum(axis=2)
    mixing = np.exp(score - score.max(axis=1, keepdims=True))
    mixing /= mixing.sum(axis=1, keepdims=True)
    product = (mixture.experts.reshape(-1, dims) @ x).reshape(heads, experts, channels, -1)
    value, value_slope = act(place.on_value, product)
    inner = (mixing[:, :, None] * value).sum(axis=1)
    outer, outer_slope = act(place.on_sdpa, inner)
    gate = np.broadcast_to(1.0, (heads, 1, len(inputs)))
    if place.gates != "none":
        assert mixture.gates is not None
        assert mixture.gates.shape[1] == (1 if place.gates == "head" else channels)
        gate = SIGMOID.at(mixture.gates @ x)[0]
    summed = (mixture.weights[:, :, None] * gate * outer).sum(axis=(0, 1))
    output, output_slope = act(place.on_output, summed)
    return Evaluated(
        x,
        mixing,
        score_slope,
        value,
        value_slope,
        inner,
        outer,
        outer_slope,
        gate,
        output,
        output_slope,
    )


def regression(
    mixture: Mixture, inputs: Inputs, position: Position = "none", activation: Activation = SIGMOID
) -> Float64[np.ndarray, "samples"]:
    r"""The function f of a mixture, by where its activation :math:`\varphi` stands.

    ``value`` replaces :math:`a \cdot x` by :math:`\varphi(a \cdot x)`, ``sdpa`` the sum over i by
    :math:`\varphi(\sum_i p_i a_i \cdot x)`, ``output`` f by :math:`\varphi(f)`, ``query_or_key``
    the score by :math:`x \cdot \varphi(M x)`; gates multiply a channel by
    :math:`\sigma(w \cdot x)`, one w for each channel or one for each head. Unit of the values.
    Source: S2 equations (2), (9), (12); docs/theory.md C2.
    Oracle in tests: torch, and its multi-head attention.
    """
    return traced(mixture, inputs, position, activation).output


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """How the output of each sample moves with what parameters are multiplied by."""

    weight: Float64[np.ndarray, "heads channels samples"]
    score: Float64[np.ndarray, "heads experts samples"]
    product: Float64[np.ndarray, "heads experts channels samples"]


def sensitivity(mixture: Mixture, trace: Evaluated) -> Sensitivity:
    """By the weights, scores and expert products of a pass; docs/theory.md C4."""
    top = trace.output_slope
    weight = top * trace.gate * trace.outer
    inner = mixture.weights[:, :, None] * trace.gate * (top * trace.outer_slope)
    spread = trace.value - trace.inner[:, None]
    score = trace.mixing * (inner[:, None] * spread).sum(axis=2)
    product = (trace.mixing[:, :, None] * inner[:, None]) * trace.value_slope
    return Sensitivity(weight, score, product)


def jacobian(
    mixture: Mixture, inputs: Inputs, position: Position = "none", activation: Activation = SIGMOID
) -> Float64[np.ndarray, "samples parameters"]:
    """Derivatives of each output: weights, upper triangles of the scores, experts, gates.

    An entry off the diagonal of a score matrix stands twice in it and counts as one parameter.
    Source: docs/theory.md C4. Oracle in tests: torch autograd.
    """
    trace = traced(mixture, inputs, position, activation)
    moves = sensitivity(mixture, trace)
    x = trace.inputs
    dims = len(x)
    entries = (moves.score[:, :, None] * trace.score_slope)[:, :, :, None] * x
    rows, columns = np.triu_indices(dims)
    twice = (rows != columns)[:, None]
    upper = entries[:, :, rows, columns] + twice * entries[:, :, columns, rows]
    parts = [moves.weight, upper, moves.product[..., None, :] * x]
    if PLACEMENTS[position].gates != "none":
        parts.append(_gate_slope(mixture, trace)[:, :, None] * x)
    return np.concatenate([part.reshape(-1, len(inputs)) for part in parts]).T


def _gate_slope(mixture: Mixture, trace: Evaluated) -> Float64[np.ndarray, "heads gates samples"]:
    behind = mixture.weights[:, :, None] * trace.outer
    if trace.gate.shape[1] == 1:
        behind = behind.sum(axis=1, keepdims=True)
    return trace.output_slope * behind * trace.gate * (1.0 - trace.gate)


# -------------------------------------------------------------------------------------------- ranks
#: Singular values of a Jacobian below this share of the largest count as 0: rounding leaves 1e-12.
FISHER_THRESHOLD = 3e-9


@dataclass(frozen=True)
class Rank:
    """A numerical rank of ``columns``, those that are 0 left out, and how clear it is.

    ``least`` is the smallest singular value that counts and ``rest`` the largest that does not,
    both over the largest of all; nan where there is none.
    """

    rank: int
    columns: int
    least: float
    rest: float


def numerical_rank(columns: Float64[np.ndarray, "samples functions"]) -> Rank:
    """Rank of columns of length 1 by their singular values; columns of zeros are left out.

    0 with nothing left. Source: docs/theory.md C5. Oracle in tests: numpy.linalg.matrix_rank.
    """
    lengths = np.linalg.norm(columns, axis=0)
    directions = columns[:, lengths > 0.0] / lengths[lengths > 0.0]
    if not directions.shape[1]:
        return Rank(0, 0, math.nan, math.nan)
    values = np.linalg.svd(directions, compute_uv=False)
    shares = values / values[0]
    rank = int((shares > FISHER_THRESHOLD).sum())
    rest = float(shares[rank]) if rank < len(shares) else math.nan
    return Rank(rank, directions.shape[1], float(shares[rank - 1]), rest)


def gauge_dimensions(mixture: Mixture, position: Position) -> int:
    """Directions in which no function moves whatever the experts: scores of a head that all grow.

    H d (d + 1) / 2; 0 where an activation stands inside the score. Source: docs/theory.md C4.
    Oracle in tests: ranks with one expert vector for all.
    """
    if PLACEMENTS[position].on_score:
        return 0
    heads, _, dims, _ = mixture.scores.shape
    return heads * dims * (dims + 1) // 2


def cramer_rao_sd(
    derivatives: Float64[np.ndarray, "samples parameters"], noise: float, size: int
) -> Float64[np.ndarray, "parameters"]:
    r"""The least standard deviation of each parameter that ``size`` samples allow.

    The root of the diagonal of :math:`\nu^2 (n I)^{-1}`, I the mean of the outer products of the
    rows, of parameters none of which is free. What an unbiased estimator cannot beat. Unit of the
    parameter; ``noise`` is a standard deviation (F-25).
    Source: docs/theory.md C6. Oracle in tests: the covariance that scipy.optimize.curve_fit
    estimates.
    """
    _, values, vectors = np.linalg.svd(derivatives / math.sqrt(len(derivatives)), False)
    return noise / math.sqrt(size) * np.linalg.norm(vectors / values[:, None], axis=0)


# ------------------------------------------------------------------------------- what data can tell
#: Attention without a gate, and the two settings of S2, with where their activation stands.
Model = Literal["mha", "1", "2"]
POSITIONS: Mapping[Model, Position] = {"mha": "none", "1": "value", "2": "sdpa"}

#: Standard deviation of the noise; S2 calls the same number a variance (F-25).
NOISE = 0.1

#: Points at which derivatives are taken.
_RANK_POINTS = 5000

#: Rows of the table: where, and with which activation.
_ROWS: Sequence[tuple[Position, str]] = (
    *((position, "sigmoid") for position in PLACEMENTS),
    ("value", "silu"),
    ("sdpa", "silu"),
)


@dataclass(frozen=True)
class PositionRank:
    """``gauge`` directions are of scores that all grow alike, ``beyond`` the other flat ones."""

    position: Position
    activation: str
    rank: Rank
    gauge: int
    beyond: int


def square(size: int, generator: np.random.Generator) -> Inputs:
    """Inputs of the experiment: uniform on [-1, 1]^2."""
    return generator.uniform(-1.0, 1.0, (size, 2))


def ranks(seed: int = 0) -> Iterator[PositionRank]:
    """At the published parameters; rows of gates, which those have not, are normal numbers."""
    for position, activation in _ROWS:
        generator = np.random.default_rng(seed)
        mixture = _with_gates(published_truth(), position, generator)
        points = square(_RANK_POINTS, generator)
        rank = numerical_rank(jacobian(mixture, points, position, ACTIVATIONS[activation]))
        gauge = gauge_dimensions(mixture, position)
        yield PositionRank(position, activation, rank, gauge, rank.columns - rank.rank - gauge)


def _with_gates(truth: Mixture, position: Position, generator: np.random.Generator) -> Mixture:
    heads, _, channels, dims = truth.experts.shape
    rows = {"none": 0, "head": 1, "channel": channels}[PLACEMENTS[position].gates]
    return replace(truth, gates=generator.normal(size=(heads, rows, dims)) if rows else None)


def least_deviation(model: Model, size: int, seed: int = 0) -> float:
    """The median over parameters of what no unbiased estimator from ``size`` samples is below.

    With as many channels as the truth has, and the last score of each head fixed.
    """
    truth = published_truth()
    heads, experts, _, dims = truth.scores.shape
    points = square(_RANK_POINTS, np.random.default_rng(seed))
    derivatives = jacobian(truth, points, POSITIONS[model])
    entries = dims * (dims + 1) // 2
    is_fixed = np.zeros(derivatives.shape[1], dtype=bool)
    scores = is_fixed[truth.weights.size :][: heads * experts * entries]
    scores.reshape(heads, experts, entries)[:, -1] = True
    return float(np.median(cramer_rao_sd(derivatives[:, ~is_fixed], NOISE, size)))


def main() -> None:
    print(f"{'non-linearity':28} parameters  rank  flat  free   last | next")
    for one in ranks():
        rank, name = one.rank, f"{one.position}, {one.activation}"
        flat = f"{one.gauge + one.beyond:6}{one.beyond:6}"
        print(f"{name:28}{rank.columns:11}{rank.rank:6}{flat}   {rank.least:.0e} | {rank.rest:.0e}")
    for model in ("1", "2"):
        print(
            f"least deviation in Setting {'I' * int(model)}: {least_deviation(model, 100_000):.3g}"
        )


if __name__ == "__main__":
    main()
