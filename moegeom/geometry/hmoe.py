r"""Gated attention as a hierarchical mixture of experts (docs/theory.md C1 to C6).

.. math:: f(x) = \sum_{hk} \omega_{hk} \sum_i p_{hi}(x)\, a_{hik} \cdot x, \qquad
    p_{hi} = \text{softmax}_i(x^\top M_{hi} x)

is attention without an activation or a gate; regression functions have one in some place. All of it
is float64; arrays inside have the samples last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float64, Int64

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

    @property
    def num_channels(self) -> int:
        """Channels of a head."""
        return self.weights.shape[1]

    def moved(self, direction: Mixture, step: float) -> Mixture:
        """All parameters but the gates, ``step`` times ``direction`` further on."""
        return dataclasses.replace(
            self,
            weights=self.weights + step * direction.weights,
            scores=self.scores + step * direction.scores,
            experts=self.experts + step * direction.experts,
        )

    def norm_squared(self) -> float:
        """Sum of the squares of all parameters but those of gates."""
        parts = (self.weights, self.scores, self.experts)
        return float(sum(np.vdot(part, part) for part in parts))


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


def centred(mixture: Mixture) -> Mixture:
    r"""The same function with scores that add up to 0: :math:`M_{hi} - \frac1N \sum_j M_{hj}`.

    A softmax does not see what is added to all scores of a head; without this a loss between
    parameters measures it (F-21). One expert has the matrix 0. Source: S2 assumption (A.3), which
    sets the last matrix to 0 instead; docs/theory.md C2.
    Oracle in tests: the regression function, which stays.
    """
    mean = mixture.scores.mean(axis=1, keepdims=True)
    return dataclasses.replace(mixture, scores=mixture.scores - mean)


def with_channels(mixture: Mixture, channels: int) -> Mixture:
    """The same function with more channels: copies of the first ones, weights split evenly.

    Raises
    ------
    UsageError
        For fewer channels than there are.

    Oracle in tests: the regression function, which stays.
    """
    own = mixture.num_channels
    if channels < own:
        raise UsageError(f"{channels} channels: expected {own} or more, those of the truth.")
    source = np.arange(channels) % own
    weights = mixture.weights[:, source] / np.bincount(source)[source]
    return dataclasses.replace(mixture, weights=weights, experts=mixture.experts[:, :, source])


def split(mixture: Mixture, shift: Float64[np.ndarray, "dims"]) -> Mixture:
    r"""The first channel of every head as two of half its weight, their experts ``shift`` apart
    on either side.

    Without an activation the function stays, however long the shift: attention cannot tell channels
    apart. With one behind the values or around the mixture it moves by
    :math:`O(\lVert\text{shift}\rVert^2)`, which is why over-specified parameters are estimated
    at half the rate. Source: S2 equation (19); docs/theory.md C4.
    Oracle in tests: the regression functions by torch.
    """
    first = mixture.experts[:, :, :1]
    half = mixture.weights[:, :1] / 2.0
    return dataclasses.replace(
        mixture,
        weights=np.concatenate([half, half, mixture.weights[:, 1:]], axis=1),
        experts=np.concatenate([first + shift, first - shift, mixture.experts[:, :, 1:]], axis=2),
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


def channel_functions(
    mixture: Mixture, inputs: Inputs, position: Position = "none"
) -> Float64[np.ndarray, "samples heads channels"]:
    r"""What each channel of each head gives before its weight: :math:`\sum_i p_{hi} a_{hik} \cdot
    x`, with the activation inside where it stands behind the values.

    Source: S2 section 3 and 4; docs/theory.md C3. Oracle in tests: torch.
    """
    return np.moveaxis(traced(mixture, inputs, position).inner, -1, 0)


@dataclass(frozen=True, eq=False)
class _Sensitivity:
    """How the output of each sample moves with what parameters are multiplied by."""

    weight: Float64[np.ndarray, "heads channels samples"]
    score: Float64[np.ndarray, "heads experts samples"]
    product: Float64[np.ndarray, "heads experts channels samples"]


def _sensitivity(mixture: Mixture, trace: Evaluated) -> _Sensitivity:
    top = trace.output_slope
    weight = top * trace.gate * trace.outer
    inner = mixture.weights[:, :, None] * trace.gate * (top * trace.outer_slope)
    spread = trace.value - trace.inner[:, None]
    score = trace.mixing * (inner[:, None] * spread).sum(axis=2)
    product = (trace.mixing[:, :, None] * inner[:, None]) * trace.value_slope
    return _Sensitivity(weight, score, product)


def jacobian(
    mixture: Mixture, inputs: Inputs, position: Position = "none", activation: Activation = SIGMOID
) -> Float64[np.ndarray, "samples parameters"]:
    """Derivatives of each output: weights, upper triangles of the scores, experts, gates.

    An entry off the diagonal of a score matrix stands twice in it and counts as one parameter.
    Source: docs/theory.md C4. Oracle in tests: torch autograd.
    """
    trace = traced(mixture, inputs, position, activation)
    moves = _sensitivity(mixture, trace)
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
    derivatives: Float64[np.ndarray, "samples parameters"], noise: float, size: int, flat: int
) -> Float64[np.ndarray, "parameters"]:
    r"""The least standard deviation of each parameter that ``size`` samples allow.

    The root of the diagonal of :math:`\nu^2 (n I)^+`, I the mean of the outer products of the rows;
    the ``flat`` directions with the smallest singular values are held fixed. What an unbiased
    estimator cannot beat. Unit of the parameter; ``noise`` is a standard deviation (F-25).

    Source: docs/theory.md C6. Oracle in tests: the covariance that scipy.optimize.curve_fit
    estimates.
    """
    _, values, vectors = np.linalg.svd(derivatives / math.sqrt(len(derivatives)), False)
    count = len(values) - flat
    scaled = vectors[:count] / values[:count, None]
    return noise / math.sqrt(size) * np.linalg.norm(scaled, axis=0)


# -------------------------------------------------------------------------- distances of parameters
def voronoi_cells(
    fitted: Float64[np.ndarray, "samples heads channels"],
    true: Float64[np.ndarray, "samples true_heads true_channels"],
) -> Int64[np.ndarray, "heads channels"]:
    r"""Of each fitted channel, the number h K* + k of the nearest true one.

    Nearest in the mean square over the samples of what channels give; equal ones go to the lowest
    number. S2 prints the same index on both sides, K* for K and a missing star (F-20).
    Source: S2 section 3; docs/theory.md C3. Oracle in tests: scipy.spatial.distance.cdist.
    """
    channels = fitted.reshape(len(fitted), -1)
    true_channels = true.reshape(len(true), -1)
    distances = np.stack([((channels - one[:, None]) ** 2).mean(axis=0) for one in true_channels.T])
    return distances.argmin(axis=0).reshape(fitted.shape[1:])


def matched_experts(
    fitted: Mixture, true: Mixture, at: tuple[int, int], of: tuple[int, int]
) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
    r"""Distances of scores and of expert vectors when the experts of two heads are matched best.

    The permutation has the least :math:`\sum_i \lVert \Delta M_i \rVert^2 + \lVert \Delta a_i
    \rVert^2`; S2 takes the nearest, which need not be a permutation (F-20). ``at`` and ``of`` are
    (head, channel) of the fitted and of the true mixture. Source: docs/theory.md C3.
    Oracle in tests: all permutations.
    """
    from scipy.optimize import linear_sum_assignment

    (head, channel), (true_head, true_channel) = at, of
    score = fitted.scores[head][:, None] - true.scores[true_head]
    expert = fitted.experts[head, :, channel][:, None] - true.experts[true_head, :, true_channel]
    score_square = (score**2).sum(axis=(2, 3))
    expert_square = (expert**2).sum(axis=2)
    pairs = linear_sum_assignment(score_square + expert_square)
    return np.sqrt(score_square[pairs]), np.sqrt(expert_square[pairs])


@dataclass(frozen=True, eq=False)
class Matched:
    """A fitted mixture beside the true one: cells, and distances of matched experts."""

    weights: Float64[np.ndarray, "fitted"]
    true_weights: Float64[np.ndarray, "true"]
    cell: Int64[np.ndarray, "fitted"]
    score_distance: Float64[np.ndarray, "fitted experts"]
    expert_distance: Float64[np.ndarray, "fitted experts"]

    def loss(self, power: Float64[np.ndarray, "fitted"]) -> float:
        r"""Misplaced weight, and :math:`|\omega'| R(r)` with the power r of each fitted channel."""
        cell_weights = np.bincount(self.cell, self.weights, len(self.true_weights))
        r = power[:, None]
        apart = (self.score_distance**r + self.expert_distance**r).sum(axis=1)
        return float(np.abs(cell_weights - self.true_weights).sum() + np.abs(self.weights) @ apart)


def matched(
    fitted: Mixture,
    true: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    position: Position = "none",
) -> Matched:
    """Cells and distances between centred parameters, for both losses."""
    fitted, true = centred(fitted), centred(true)
    functions = [channel_functions(mixture, inputs, position) for mixture in (fitted, true)]
    cell = voronoi_cells(*functions)
    pairs = [
        matched_experts(fitted, true, place, divmod(int(cell[place]), true.num_channels))
        for place in np.ndindex(cell.shape)
    ]
    score, expert = (np.stack(parts) for parts in zip(*pairs, strict=True))
    return Matched(fitted.weights.ravel(), true.weights.ravel(), cell.ravel(), score, expert)


def loss_1(
    fitted: Mixture,
    true: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    power: float,
    position: Position = "none",
) -> float:
    r"""L_{1,r}: :math:`\sum_{hk} |\sum_{\text{cell}} \omega' - \omega^*| + \sum \omega' R(r)`,
    :math:`R(r) = \sum_i \lVert\Delta M_i\rVert^r + \lVert\Delta a_i\rVert^r`.

    Centred scores, cells of :func:`voronoi_cells` and matches of :func:`matched_experts`. An empty
    cell costs its weight. S2 assumes weights of at least 0 (A.2); a fitted one below 0 counts by
    its absolute value in the second sum. 0 for the same parameters in any order.
    Source: S2 section 3; docs/theory.md C3. Oracle in tests: worked numbers, brute force.
    """
    match = matched(fitted, true, inputs, position)
    return match.loss(np.full(len(match.weights), power))


def loss_2(
    fitted: Mixture,
    true: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    position: Position = "none",
) -> float:
    """L_2: as :func:`loss_1` with r = 1 in cells of one fitted channel and 2 in those of several.

    Source: S2 section 4.1; docs/theory.md C3. Oracle in tests: worked numbers, brute force.
    """
    match = matched(fitted, true, inputs, position)
    members = np.bincount(match.cell, minlength=len(match.true_weights))
    return match.loss(np.where(members[match.cell] == 1, 1.0, 2.0))


# ------------------------------------------------------------------------------------ least squares
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
