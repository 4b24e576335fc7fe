"""Small Mixture-of-Experts models of known families, with routers that look trained, rules that
engines have been seen to get wrong, and number formats with the conventions that engines use;
and documents of several domains: Zipf tokens that depend on the tokens before them.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int
from ml_dtypes import bfloat16

Granularity = Literal["row", "column", "block", "tensor"]
Fp8 = Literal["e4m3", "e5m2"]

#: Features of a block with a scale of its own.
BLOCK = 16

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Integers:
    """Signed with the scale amax / ``divisor``, or unsigned from the least with a zero point."""

    bits: int
    granularity: Granularity
    divisor: float
    is_signed: bool = True


def _blocks(w: np.ndarray, granularity: Granularity) -> tuple[np.ndarray, tuple[int, ...]]:
    """The weights with the axes over which a scale is shared, and these axes."""
    shapes = {
        "row": (w.shape, (1,)),
        "column": (w.shape, (0,)),
        "tensor": (w.shape, (0, 1)),
        "block": ((w.shape[0], w.shape[1] // BLOCK, BLOCK), (2,)),
    }
    shape, axes = shapes[granularity]
    return w.astype(np.float64).reshape(shape), axes


def to_integers(w: Float[np.ndarray, "rows columns"], form: Integers) -> np.ndarray:
    parts, axes = _blocks(w, form.granularity)
    if form.is_signed:
        scale = np.abs(parts).max(axis=axes, keepdims=True) / form.divisor
        scale = np.where(scale > 0, scale, 1.0)
        most = 2 ** (form.bits - 1)
        q = np.clip(np.round(parts / scale), -most, most - 1)
        return (q * scale).reshape(w.shape).astype(np.float32)
    least = parts.min(axis=axes, keepdims=True)
    scale = (parts.max(axis=axes, keepdims=True) - least) / (2**form.bits - 1)
    scale = np.where(scale > 0, scale, 1.0)
    zero = np.round(-least / scale)
    q = np.clip(np.round(parts / scale) + zero, 0, 2**form.bits - 1)
    return ((q - zero) * scale).reshape(w.shape).astype(np.float32)


def to_fp8(
    x: Float[np.ndarray, "rows columns"], name: Fp8, granularity: Granularity | None
) -> np.ndarray:
    """scale * fp8(x / scale) with amax / scale the largest number; no scale without granularity."""
    if granularity is None:
        clipped = np.clip(x, -_LARGEST[name], _LARGEST[name])
        return clipped.astype(_DTYPE[name]).astype(np.float32)
    parts, axes = _blocks(x, granularity)
    scale = np.abs(parts).max(axis=axes, keepdims=True) / _LARGEST[name]
    scale = np.where(scale > 0, scale, 1.0)
    stored = (parts / scale).astype(np.float32).astype(_DTYPE[name]).astype(np.float64)
    return (stored * scale).reshape(x.shape).astype(np.float32)


ScoreName = Literal[
    "softmax", "sigmoid", "sigmoid_share", "sqrt_softplus", "identity", "softmax_of_tokens"
]


@dataclass(frozen=True)
class Rule:
    """One rule: q = score(z) (+ bias), groups, top-k of q, weights of the chosen.

    ``top_k`` experts are written to the trace; ``num_run`` of them are run (None: all of these),
    and where more are run than written, ``written_by_index`` says that the slots come in the order
    of the experts and the last ones are lost. Logits are divided by ``temperature`` first. Groups
    have the experts of one number modulo their count where they are ``interleaved``. A search for
    the largest that starts at ``least`` leaves the expert ``nobody`` where all are smaller. Experts
    from ``num_seen`` on are no candidates. A token obeys the groups of the one ``mask_shift`` before.
    Logits have noise of the size ``noise``, and all but the first expert are sampled where
    ``is_sampled``; both depend on the logits and on ``seed`` alone. Logits are sums of which each
    ``sums_of`` terms are written in bfloat16.
    """

    top_k: int
    score: ScoreName
    bias: Literal["none", "selection", "logit"] = "none"
    num_groups: int = 1
    num_kept: int = 1
    group_score: Literal["top2", "max"] = "top2"
    fill: float = -np.inf
    softmax_over_chosen: bool = False
    renormalise: bool = False
    scale: float = 1.0
    soft_cap: float = np.inf
    bias_selects: bool = True
    bias_in_weights: bool = False
    ties_to_high_index: bool = False
    num_run: int | None = None
    written_by_index: bool = False
    temperature: float = 1.0
    interleaved: bool = False
    groups_without_bias: bool = False
    least: float = -np.inf
    nobody: int = 0
    num_seen: int | None = None
    mask_shift: int = 0
    noise: float = 0.0
    is_sampled: bool = False
    seed: int = 0
    sums_of: int = 0


@dataclass(frozen=True, eq=False)
class Choice:
    chosen: Int[np.ndarray, "tokens run"]
    weights: Float[np.ndarray, "tokens run"]
    selection: Float[np.ndarray, "tokens experts"]


def _softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


_SCORES = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sigmoid_share": lambda z: _sigmoid(z) / _sigmoid(z).sum(axis=1, keepdims=True),
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(0.0, z)),
    "identity": lambda z: z,
    "softmax_of_tokens": lambda z: _softmax(z.T).T,
}


def _largest(q: np.ndarray, k: int, ties_to_high_index: bool) -> np.ndarray:
    if ties_to_high_index:
        return q.shape[1] - 1 - np.argsort(-q[:, ::-1], axis=1, kind="stable")[:, :k]
    return np.argsort(-q, axis=1, kind="stable")[:, :k]


def _masked(q: np.ndarray, by: np.ndarray, rule: Rule) -> np.ndarray:
    """Without the experts of groups that are not among the best ``by`` the sum of a few."""
    if rule.num_kept >= rule.num_groups:
        return q
    expert = np.arange(q.shape[1])
    size = q.shape[1] // rule.num_groups
    group = expert % rule.num_groups if rule.interleaved else expert // size
    groups = by[:, np.argsort(group, kind="stable")].reshape(len(q), rule.num_groups, size)
    best = 1 if rule.group_score == "max" else 2
    score = np.sort(groups, axis=2)[:, :, -best:].sum(axis=2)
    kept = np.zeros(score.shape, bool)
    np.put_along_axis(kept, _largest(score, rule.num_kept, False), True, axis=1)
    kept = np.roll(kept, rule.mask_shift, axis=0)
    return np.where(kept[:, group], q, rule.fill)


def summed_in_bf16(
    x: Float[np.ndarray, "rows hidden"], weight: Float[np.ndarray, "experts hidden"], number: int
) -> Float[np.ndarray, "rows experts"]:
    """X @ W^T by an accumulator that is written in bfloat16 after each ``number`` features."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, x.shape[1], number):
        part = slice(start, start + number)
        total = rounded(total + x[:, part] @ weight[:, part].T)
    return total


def _sampled(selection: np.ndarray, z: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What leaves the first expert first and orders the others by logits with Gumbel noise."""
    order = z + rng.gumbel(size=z.shape)
    np.put_along_axis(order, selection.argmax(axis=1)[:, None], np.inf, axis=1)
    return order


def choose(
    logits: Float[np.ndarray, "tokens experts"],
    bias: Float[np.ndarray, "experts"] | None,
    rule: Rule,
) -> Choice:
    """S = top-k of mask(score(cap(z / t)) + b), w_i = scale s_i / sum s; z holds a logit bias."""
    z = logits.astype(np.float64) / rule.temperature
    if np.isfinite(rule.soft_cap):
        z = rule.soft_cap * np.tanh(z / rule.soft_cap)
    rng = np.random.default_rng([rule.seed, zlib.crc32(z.tobytes())])
    if rule.noise:
        z = z + rule.noise * rng.standard_normal(z.shape)
    scores = _SCORES[rule.score](z)
    has_bias = rule.bias == "selection" and bias is not None
    biased = scores + bias if has_bias else scores
    selected_by = biased if rule.bias_selects else scores
    grouped_by = scores if rule.groups_without_bias else selected_by
    selection = _masked(selected_by, grouped_by, rule)
    if rule.num_seen is not None:
        is_seen = np.arange(selection.shape[1]) < rule.num_seen
        selection = np.where(is_seen, selection, -np.inf)
    if rule.is_sampled:
        selection = _sampled(selection, z, rng)
    run = rule.num_run or rule.top_k
    chosen = _largest(selection, max(run, rule.top_k), rule.ties_to_high_index)
    # experts that are named and not run have no weight, and no part in a sum
    runs = np.arange(chosen.shape[1]) < run
    if np.isfinite(rule.least):
        runs = runs & (np.take_along_axis(selection, chosen, axis=1) >= rule.least)
    if rule.softmax_over_chosen:
        weights = _softmax(np.where(runs, np.take_along_axis(z, chosen, axis=1), -np.inf))
    else:
        source = biased if rule.bias_in_weights else scores
        weights = np.where(runs, np.take_along_axis(source, chosen, axis=1), 0.0)
    if rule.renormalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    if np.isfinite(rule.least):
        chosen = np.where(runs, chosen, rule.nobody)
        weights = np.where(runs, weights, 0.0)
    if rule.written_by_index:
        order = np.argsort(chosen, axis=1)
        chosen = np.take_along_axis(chosen, order, axis=1)
        weights = np.take_along_axis(weights, order, axis=1)
    return Choice(chosen, (weights * rule.scale).astype(np.float32), selection)


Size = Literal["small", "middle", "large"]
Stored = Literal["bfloat16", "float32"]

NORM_EPS = 1e-6

#: Initialisation of a router that was never trained.
INITIALISER_RANGE = 0.02


_BALANCING_STEPS, _BALANCING_STEP = 30, 0.01


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    experts: int
    top_k: int
    inner: int
    vocabulary: int
    documents: int
    length: int


SHAPES: Mapping[Size, Shape] = {
    "small": Shape(2, 32, 8, 2, 16, 256, 24, 52),
    "middle": Shape(3, 128, 32, 4, 16, 512, 48, 106),
    "large": Shape(4, 512, 64, 8, 16, 1024, 128, 160),
}

#: How a shape is bent for faults that need one: a square router, or ids beyond 7 or 8 bits.
BENT: Mapping[str, Callable[[Shape], Shape]] = {
    "": lambda shape: shape,
    "square": lambda shape: (
        replace(shape, experts=shape.hidden, hidden=shape.hidden)
        if shape.hidden <= 128
        else replace(shape, hidden=128, experts=128)
    ),
    "beyond_127": lambda shape: replace(shape, experts=160, inner=4),
    "beyond_255": lambda shape: replace(shape, experts=320, inner=4),
}


@dataclass(frozen=True)
class Family:
    """A family by its model type: its rule, its config.json, the names of its tensors."""

    model_type: str
    rule: Callable[[Shape], Rule]
    config: Callable[[Shape, Rule], dict[str, Any]]
    router: str = "mlp.gate.weight"
    bias: str = ""
    has_shared_expert: bool = False


def _group_count(shape: Shape) -> int:
    return {8: 2}.get(shape.experts, 4 if shape.experts < 64 else 8)


def _grouped(shape: Shape) -> Rule:
    groups = _group_count(shape)
    return replace(_ungrouped(shape), num_groups=groups, num_kept=groups // 2)


def _ungrouped(shape: Shape) -> Rule:
    return Rule(shape.top_k, "sigmoid", bias="selection", renormalise=True, scale=2.5)


def _deepseek_config(shape: Shape, rule: Rule) -> dict[str, Any]:
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "n_group": rule.num_groups,
        "topk_group": rule.num_kept,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": rule.scale,
        "first_k_dense_replace": 0,
    }


def _softmax_config(shape: Shape, rule: Rule) -> dict[str, Any]:
    return {"num_experts": shape.experts, "norm_topk_prob": rule.renormalise}


FAMILIES: Mapping[str, Family] = {
    "olmoe": Family("olmoe", lambda shape: Rule(shape.top_k, "softmax"), _softmax_config),
    "qwen3_moe": Family(
        "qwen3_moe",
        lambda shape: Rule(shape.top_k, "softmax", renormalise=True),
        lambda shape, rule: (
            _softmax_config(shape, rule) | {"decoder_sparse_step": 1, "mlp_only_layers": []}
        ),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        lambda shape: Rule(shape.top_k, "identity", bias="logit", softmax_over_chosen=True),
        lambda shape, rule: {"num_local_experts": shape.experts},
        router="mlp.router.weight",
        bias="mlp.router.bias",
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        _grouped,
        _deepseek_config,
        bias="mlp.gate.e_score_correction_bias",
        has_shared_expert=True,
    ),
    "deepseek_v3_ungrouped": Family(
        "deepseek_v3",
        _ungrouped,
        _deepseek_config,
        bias="mlp.gate.e_score_correction_bias",
        has_shared_expert=True,
    ),
}


def config_of(family: Family, shape: Shape, stored: Stored) -> dict[str, Any]:
    rule = family.rule(shape)
    return {
        "model_type": family.model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_experts_per_tok": rule.top_k,
        "moe_intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": NORM_EPS,
        "initializer_range": INITIALISER_RANGE,
        "dtype": stored,
    } | family.config(shape, rule)


@dataclass(frozen=True, eq=False)
class RouterTensors:
    """What is loaded for one router: rows, bias of scores or of logits, gain of the norm before."""

    weight: Float[np.ndarray, "experts hidden"]
    bias: Float[np.ndarray, "experts"] | None
    gain: Float[np.ndarray, "hidden"]


@dataclass(frozen=True, eq=False)
class Layer:
    """Its tensors but the router; ``into``, ``decay``, ``out``: a running decayed average."""

    into: Float[np.ndarray, "hidden rank"]
    decay: Float[np.ndarray, "rank"]
    out: Float[np.ndarray, "rank hidden"]
    up: Float[np.ndarray, "experts hidden inner"]
    down: Float[np.ndarray, "experts inner hidden"]
    shared_up: Float[np.ndarray, "hidden inner"] | None
    shared_down: Float[np.ndarray, "inner hidden"] | None


@dataclass(frozen=True, eq=False)
class Model:
    family: Family
    shape: Shape
    stored: Stored
    rule: Rule
    embedding: Float[np.ndarray, "vocabulary hidden"]
    layers: tuple[Layer, ...]
    routers: tuple[RouterTensors, ...]
    older: tuple[RouterTensors, ...]
    other: tuple[RouterTensors, ...]


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(bfloat16).astype(np.float32)


def _embedding(rng: np.random.Generator, shape: Shape, topics: np.ndarray) -> np.ndarray:
    """Tokens are mixtures of topics, with a part that all have in common."""
    mixture = rng.dirichlet(np.full(len(topics), 0.25), size=shape.vocabulary)
    common = 0.3 * rng.standard_normal(shape.hidden)
    noise = 0.5 * rng.standard_normal((shape.vocabulary, shape.hidden))
    table = 1.6 * np.sqrt(shape.hidden) * mixture @ topics + common + noise
    return rounded(table)


def _rows(
    rng: np.random.Generator, shape: Shape, topics: np.ndarray, unit: np.ndarray, gain: np.ndarray
) -> np.ndarray:
    """Each prefers a few topics; what all tokens have in common hardly moves trained rows."""
    taste = rng.standard_normal((shape.experts, len(topics)))
    taste *= rng.random(taste.shape) < 0.35
    rows = taste @ topics + 0.25 * rng.standard_normal((shape.experts, shape.hidden)) / np.sqrt(
        shape.hidden
    )
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 0.05
    rows *= np.exp(0.2 * rng.standard_normal((shape.experts, 1)))
    common = (unit * gain).mean(axis=0)
    rows -= 0.9 * np.outer(rows @ common, common) / (common @ common)
    spread = ((unit * gain) @ rows.T).std()
    return rows * (1.5 / spread)


def _balancing_bias(x: np.ndarray, rows: np.ndarray, top_k: int) -> np.ndarray:
    """The bias after some steps that lift underused experts, as training without a loss does."""
    scores = 1.0 / (1.0 + np.exp(-(x @ rows.T)))
    bias = np.zeros(len(rows))
    for _ in range(_BALANCING_STEPS):
        chosen = np.argpartition(-(scores + bias), top_k - 1, axis=1)[:, :top_k]
        load = np.bincount(chosen.ravel(), minlength=len(rows))
        bias += _BALANCING_STEP * np.sign(load.mean() - load)
    return bias


def _layer(rng: np.random.Generator, family: Family, shape: Shape, scale: float) -> Layer:
    rank = max(8, shape.hidden // 4)

    def normal(*size: int, spread: float) -> np.ndarray:
        return rounded(spread * rng.standard_normal(size))

    hidden, inner = shape.hidden, shape.inner
    shared = family.has_shared_expert
    return Layer(
        into=normal(hidden, rank, spread=hidden**-0.5),
        decay=rounded(rng.uniform(0.5, 0.97, rank)),
        out=normal(rank, hidden, spread=0.6 * rank**-0.5),
        up=normal(shape.experts, hidden, inner, spread=hidden**-0.5),
        down=normal(shape.experts, inner, hidden, spread=0.8 * inner**-0.5 / scale),
        shared_up=normal(hidden, inner, spread=hidden**-0.5) if shared else None,
        shared_down=normal(inner, hidden, spread=0.3 * inner**-0.5) if shared else None,
    )


def _as_stored(tensors: RouterTensors, stored: Stored) -> RouterTensors:
    """Rows and gain in the dtype of the checkpoint; the bias is kept in float32."""
    keep = rounded if stored == "bfloat16" else lambda x: x.astype(np.float32)
    bias = None if tensors.bias is None else tensors.bias.astype(np.float32)
    return RouterTensors(keep(tensors.weight), bias, keep(tensors.gain))


def _older(rng: np.random.Generator, now: RouterTensors) -> RouterTensors:
    """The router some steps before: rows moved mostly along few directions, biases a little."""
    experts, hidden = now.weight.shape
    size = rng.uniform(0.03, 0.2) * np.linalg.norm(now.weight)
    moved = rng.standard_normal((experts, 3)) @ rng.standard_normal((3, hidden))
    moved += 0.5 * np.sqrt(3) * rng.standard_normal((experts, hidden))
    weight = now.weight + size * moved / np.linalg.norm(moved)
    bias = now.bias
    if bias is not None:
        bias = bias + 0.25 * bias.std() * rng.standard_normal(experts)
    gain = now.gain * (1.0 + 0.02 * rng.standard_normal(hidden))
    return RouterTensors(weight, bias, gain)


def draw_model(
    rng: np.random.Generator,
    name: str,
    shape: Shape,
    stored: Stored,
    equal_rows: bool = False,
    bias_level: float | None = None,
) -> Model:
    """With ``equal_rows`` a quarter of the experts are copies; ``bias_level`` None is drawn."""
    family = FAMILIES[name]
    rule = family.rule(shape)
    topics = rng.standard_normal((max(6, min(shape.experts, shape.hidden) // 2), shape.hidden))
    topics /= np.linalg.norm(topics, axis=1, keepdims=True)
    embedding = _embedding(rng, shape, topics)
    unit = embedding / np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    level = float(rng.choice([0.0, 0.0, 1.0, 4.0])) if bias_level is None else bias_level

    def draw_router() -> RouterTensors:
        gain = 0.6 * np.exp(0.35 * rng.standard_normal(shape.hidden))
        gain[rng.integers(shape.hidden, size=2)] *= 4.0
        weight = _rows(rng, shape, topics, unit, gain)
        bias = None
        if rule.bias == "selection":
            bias = level + _balancing_bias(unit * gain, weight, shape.top_k)
            bias += 0.03 * rng.standard_normal(shape.experts)
        elif rule.bias == "logit":
            bias = 0.5 * rng.standard_normal(shape.experts)
        if equal_rows:
            copies = rng.permutation(shape.experts)[: 2 * (shape.experts // 4)]
            here, there = copies.reshape(2, -1)
            weight[there] = weight[here]
            if bias is not None:
                bias[there] = bias[here]
        return RouterTensors(weight, bias, gain)

    layers = tuple(_layer(rng, family, shape, rule.scale) for _ in range(shape.layers))
    routers = [draw_router() for _ in range(shape.layers)]
    sets = [routers, [_older(rng, one) for one in routers], [draw_router() for _ in routers]]
    stored_sets = [tuple(_as_stored(one, stored) for one in part) for part in sets]
    return Model(family, shape, stored, rule, embedding, layers, *stored_sets)


# -------------------------------------------------------------------------------------------- texts
#: Share of tokens that follow from the one before, and of those that repeat it.
_FOLLOWS, _REPEATS = 0.3, 0.08

#: Every document begins with the same few tokens, as chat templates do.
_TEMPLATE = 4

DOMAINS = ("web", "code", "maths", "dialogue")


@dataclass(frozen=True, eq=False)
class Text:
    """Documents side by side; behind the end of a document stands the padding token 0."""

    token_id: Int[np.ndarray, "documents length"]
    lengths: Int[np.ndarray, "documents"]
    domain: Int[np.ndarray, "documents"]

    @property
    def is_token(self) -> Bool[np.ndarray, "documents length"]:
        return np.arange(self.token_id.shape[1]) < self.lengths[:, None]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def position(self) -> Int[np.ndarray, "documents length"]:
        return np.broadcast_to(np.arange(self.token_id.shape[1]), self.token_id.shape)

    @property
    def index(self) -> Int[np.ndarray, "documents length"]:
        """The number of each token when documents follow one another; -1 for padding."""
        there = self.is_token
        index = np.full(there.shape, -1)
        index[there] = np.arange(self.num_tokens)
        return index


def draw_text(rng: np.random.Generator, documents: int, length: int, vocabulary: int) -> Text:
    """Documents of 0.6 to 1 times ``length``; domains have Zipf laws and followers of their own."""
    domain = rng.integers(len(DOMAINS), size=documents)
    ranks = np.arange(1, vocabulary)
    cumulated = np.cumsum(1.0 / ranks**1.1)
    order = np.stack([rng.permutation(ranks) for _ in DOMAINS])
    follower = np.stack([rng.permutation(ranks) for _ in DOMAINS])
    drawn = np.searchsorted(cumulated, rng.random((documents, length)) * cumulated[-1])
    token = order[domain[:, None], np.minimum(drawn, vocabulary - 2)]
    kind = rng.random((documents, length))
    token[:, :_TEMPLATE] = rng.integers(1, vocabulary, size=_TEMPLATE)
    for at in range(_TEMPLATE, length):
        before = token[:, at - 1]
        follows, repeats = kind[:, at] < _FOLLOWS, kind[:, at] > 1.0 - _REPEATS
        token[:, at] = np.where(follows, follower[domain, before - 1], token[:, at])
        token[:, at] = np.where(repeats, before, token[:, at])
    lengths = rng.integers(int(0.6 * length), length + 1, size=documents)
    lengths[0] = length
    token[np.arange(length) >= lengths[:, None]] = 0
    return Text(token, lengths, domain)
