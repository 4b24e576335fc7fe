"""What experts compute, how many directions of the data they respond to, how far they lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float32, Float64, Int64, Integer
from moegeom.geometry.gram import RANK_TOLERANCE, cosines
from moegeom.geometry.noise import spacing
from moegeom.geometry.rows import drawn_errors
from moegeom.geometry.space import distinct_rows

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


# --------------------------------------------------------------------------------------- directions
@dataclass(frozen=True, eq=False)
class DataDirections:
    """Orthonormal ``axes`` of the data and the standard deviation along each, descending."""

    axes: Float64[np.ndarray, "hidden dims"]
    deviations: Float64[np.ndarray, "dims"]


def data_directions(
    rows: Float[np.ndarray, "tokens hidden"], share: float = 0.99, most: int | None = None
) -> DataDirections:
    """The least principal directions that hold a ``share`` of the variance, ``most`` of them.

    None of them where all rows are equal. Oracle in tests: covariances that are known.
    """
    values = rows.astype(np.float64)
    if not np.ptp(values, axis=0).any():
        return DataDirections(np.zeros((rows.shape[1], 0)), np.zeros(0))
    values -= values.mean(axis=0)
    if len(values) < values.shape[1]:
        squares, vectors = np.linalg.eigh(values @ values.T)
    else:
        squares, vectors = np.linalg.eigh(values.T @ values)
    sizes, axes = np.sqrt(np.maximum(squares[::-1], 0.0)), vectors.T[::-1]
    shares = np.cumsum(sizes**2) / (sizes**2).sum()
    number = min(int(np.searchsorted(shares, share) + 1), len(sizes) if most is None else most)
    axes, sizes = axes[:number], sizes[:number]
    if len(values) < values.shape[1]:
        axes = (axes @ values) / np.maximum(sizes, np.finfo(float).tiny)[:, None]
    return DataDirections(axes.T, sizes / math.sqrt(len(rows)))


def ranks_on_data(
    weight: Float[np.ndarray, "neurons hidden"], data: Sequence[DataDirections]
) -> list[tuple[int, float]]:
    r"""Rank and effective rank of :math:`A V \mathrm{diag}(\sigma)`, A the rows of an expert.

    For each of ``data``, V its directions and :math:`\sigma` their deviations. The rank counts
    singular values s above 1e-7 of the largest, the effective rank is :math:`\exp(-\sum p \ln p)`,
    :math:`p = s / \sum s`: at most the rank, and equal to it where all are equal. Both 0 where the
    rows see nothing of the data. Source: Roy and Vetterli 2007. Oracle in tests: diagonal cases.
    """
    values = weight.astype(np.float64)
    return [_ranks(_sizes(values @ (one.axes * one.deviations))) for one in data]


#: Numbers that are added up at a time in float32.
_BLOCK = 256


def _sizes(seen: Float[np.ndarray, "neurons dims"]) -> Float64[np.ndarray, "sizes"]:
    """Singular values, ascending; roots of the eigenvalues of whichever products are fewer."""
    side = seen if len(seen) <= seen.shape[1] else seen.T
    gram = np.zeros((len(side), len(side)))
    for start in range(0, side.shape[1], _BLOCK):
        block = side[:, start : start + _BLOCK]
        gram += block @ block.T
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0.0))


def _ranks(sizes: Float64[np.ndarray, "sizes"]) -> tuple[int, float]:
    sizes = sizes[sizes > RANK_TOLERANCE * sizes.max(initial=0.0)]
    share = sizes / sizes.sum()
    return len(sizes), float(np.exp(-(share * np.log(share)).sum())) if len(sizes) else 0.0


def ranks_in_float32(
    weight: Float[np.ndarray, "neurons hidden"],
    data: DataDirections,
    root: Float32[np.ndarray, "hidden dims"],
) -> tuple[int, float]:
    r"""As :func:`ranks_on_data`, by products in float32 where these prove that the rank is full.

    ``root`` is a triangular L with :math:`L L^T = V \mathrm{diag}(\sigma^2) V^T`
    (:func:`triangular_root`), half of which is 0. Sums of n products, in m blocks, are off by
    :math:`\gamma = (n + m + 3) u` of the sum of their sizes, :math:`u = 2^{-24}`. So A L is off by
    :math:`\gamma |A|_F |L|_F`, which moves no singular value by more (Weyl), and its products by
    :math:`\gamma |A L|_F^2`. The effective rank is then right to a few parts in a million.
    Oracle in tests: :func:`ranks_on_data`.
    """
    own = weight.astype(np.float32, copy=False)
    own = own[own.any(axis=1)]  # rows of zeros have no part in it
    if not len(own):
        return 0, 0.0
    seen = np.zeros((len(own), root.shape[1]), np.float32)
    for start in range(0, len(root), _BLOCK):
        there, last = slice(start, start + _BLOCK), min(start + _BLOCK, seen.shape[1])
        seen[:, :last] += own[:, there] @ root[there, :last]
    sizes = _sizes(seen)
    unit = (_BLOCK + max(root.shape) / _BLOCK + 3.0) * 2.0**-24
    total, moved = float((sizes**2).sum()), float(np.linalg.norm(own) * np.linalg.norm(root))
    least = math.sqrt(max(float(sizes[0]) ** 2 - unit * total, 0.0)) - unit * moved
    if least > RANK_TOLERANCE * math.sqrt(total):
        return _ranks(sizes)
    return ranks_on_data(own, [data])[0]


def triangular_root(data: DataDirections) -> Float32[np.ndarray, "hidden dims"]:
    """That of the covariance along the directions, for :func:`ranks_in_float32`."""
    _, root = np.linalg.qr((data.axes * data.deviations).T)
    return np.ascontiguousarray(root.T, np.float32)


#: Tokens whose surroundings are looked at, and neighbours of each.
_PLACES, _NEIGHBOURS = 64, 32

#: Inputs among which neighbours are looked for.
_AMONG = 2048

#: Experts that are looked at there, and random matrices that stand beside the experts.
_EXPERTS, _RANDOM = 16, 3

#: Products of numbers that the ranks of one expert, and of all of them, may take, and those of one
#: around all places over the neighbours: 1, 10 and 0.3 seconds of one core, about.
_OF_ONE, _OF_ALL, _OF_PLACES = 3.5e10, 3e11, 1e10 / _NEIGHBOURS


@dataclass(frozen=True)
class ExpertRanks:
    """Neurons of experts on the ``dims`` directions that hold 99 % of the variance of the inputs of
    ``num_tokens``.

    Ranks and effective ranks of ``num_looked_at`` gate matrices there; ``effective_random`` is that
    of random matrices of their shape. The local figures are medians around ``num_places`` tokens,
    on as many directions as the inputs have dimensions; None where those are not known, and over 16
    experts at most. Medians have a standard error where they are not over all experts.
    ``width_over_dimension`` is neurons over the larger end of the dimension.
    """

    width: int
    num_looked_at: int
    num_tokens: int
    dims: int
    rank_min: int
    rank_median: float
    effective_min: float
    effective_median: float
    effective_median_se: float | None
    effective_random: float
    num_places: int
    local_dims: int | None
    local_median: float | None
    local_median_se: float | None
    local_random: float | None
    width_over_dimension: float | None

    @property
    def is_narrow(self) -> bool:
        """Whether an expert has fewer neurons than the data dimensions."""
        return self.width_over_dimension is not None and self.width_over_dimension < 1.0


@dataclass(frozen=True)
class RanksPlan:
    """Which ``experts`` ranks are taken of, and on how many inputs: wide ones cost too much."""

    experts: tuple[int, ...]
    num_tokens: int
    num_places: int
    num_random: int

    @classmethod
    def of(cls, num_experts: int, width: int, hidden: int, num_tokens: int, seed: int) -> RanksPlan:
        """All experts on all inputs where these are narrow; else half of the inputs, or a quarter
        and so on, and as many drawn experts as the products of :data:`_OF_ALL` are enough for.
        """

        def products(tokens: int) -> float:
            dims = min(tokens, hidden)
            side = min(width, dims)
            return float(dims) * width * (hidden + side) + 4.0 * side**3

        while num_tokens > _NEIGHBOURS and products(num_tokens) > _OF_ONE:
            num_tokens = -(-num_tokens // 2)
        most, num_random = int(_OF_ALL / products(num_tokens)), _RANDOM
        if most < num_experts + num_random:
            most, num_random = max(most - 1, 2), 1
        some = np.random.default_rng([seed, num_experts]).permutation(num_experts)[:most]
        places = min(_PLACES, max(int(_OF_PLACES / (width * hidden)), 8))
        return cls(tuple(some.tolist()), num_tokens, places, num_random)


def expert_ranks(
    gates: Iterable[tuple[int, Float[np.ndarray, "neurons hidden"]]],
    num_experts: int,
    plan: RanksPlan,
    inputs: Float[np.ndarray, "tokens hidden"],
    dimension: tuple[float, float] | None,
    seed: int,
) -> ExpertRanks | None:
    """Ranks of gate matrices, those of the plan, on the widest directions, and of some of them
    where 64 of the tokens are.

    ``dimension`` is the range of the intrinsic dimension of the inputs. None where these do not
    differ.
    """
    some = inputs[:: -(-len(inputs) // plan.num_tokens)]
    whole = data_directions(some)
    if not len(whole.deviations):
        return None
    random, root = np.random.default_rng(seed), triangular_root(whole)
    near = _local(inputs, dimension, plan.num_places, random)
    places = [one.axes * one.deviations for one in near]
    local = np.hstack(places).astype(np.float32) if places else None
    ends = np.cumsum([axes.shape[1] for axes in places])[:-1]

    def around(weight: Float[np.ndarray, "neurons hidden"]) -> float:
        if local is None:
            return math.nan
        seen = np.split((weight.astype(np.float32, copy=False) @ local), ends, axis=1)
        return float(np.median([_ranks(_sizes(part.astype(np.float64)))[1] for part in seen]))

    def error(values: list[float]) -> float | None:
        """Of the median of a normal sample of all experts."""
        left = 1.0 - len(values) / num_experts
        return (
            float(np.std(values) * math.sqrt(math.pi / 2.0 / len(values) * left)) if left else None
        )

    ranks, medians, width = [], [], 0
    for expert, weight in gates:
        ranks.append(ranks_in_float32(weight, whole, root))
        if expert in plan.experts[:_EXPERTS]:
            medians.append(around(weight))
        width = len(weight)
    of_random = []
    for _ in range(plan.num_random):
        weight = random.standard_normal((width, inputs.shape[1]), np.float32)
        of_random.append((ranks_in_float32(weight, whole, root)[1], around(weight)))
    rank, effective = (np.array(values) for values in zip(*ranks, strict=True))
    random_effective, random_around = np.mean(of_random, axis=0).tolist()
    return ExpertRanks(
        width=width,
        num_looked_at=len(rank),
        num_tokens=len(some),
        dims=len(whole.deviations),
        rank_min=int(rank.min()),
        rank_median=float(np.median(rank)),
        effective_min=float(effective.min()),
        effective_median=float(np.median(effective)),
        effective_median_se=error(effective.tolist()),
        effective_random=random_effective,
        num_places=len(places),
        local_dims=places[0].shape[1] if places else None,
        local_median=float(np.median(medians)) if places else None,
        local_median_se=error(medians) if places else None,
        local_random=random_around if places else None,
        width_over_dimension=None if dimension is None else width / dimension[1],
    )


def _local(
    inputs: Float[np.ndarray, "tokens hidden"],
    dimension: tuple[float, float] | None,
    most: int,
    random: np.random.Generator,
) -> Iterator[DataDirections]:
    """As many directions around each of some tokens as the data have dimensions."""
    if dimension is None:
        return
    from sklearn.neighbors import NearestNeighbors

    rows = inputs[np.sort(random.permutation(len(inputs))[:_AMONG])].astype(np.float64)
    rows = rows[distinct_rows(rows)]
    dims = min(math.ceil(dimension[1]), _NEIGHBOURS - 1, rows.shape[1])
    places = random.permutation(len(rows))[:most]
    near = NearestNeighbors(n_neighbors=min(_NEIGHBOURS + 1, len(rows)), algorithm="brute")
    for neighbours in near.fit(rows).kneighbors(rows[places], return_distance=False):
        yield data_directions(rows[neighbours], 1.0, dims)


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
