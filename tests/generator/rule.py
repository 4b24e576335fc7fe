"""How the engine chooses experts, with every turn that engines have been seen to get wrong."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

ScoreName = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True)
class Rule:
    """One rule: q = score(z) (+ bias), groups, top-k of q, weights of the chosen.

    ``top_k`` experts are written to the trace; ``num_run`` of them are run (None: all of these),
    and where more are run than written, ``written_by_index`` says that the slots come in the order
    of the experts and the last ones are lost.
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


@dataclass(frozen=True, eq=False)
class Choice:
    chosen: Int[np.ndarray, "tokens run"]
    weights: Float[np.ndarray, "tokens run"]
    selection: Float[np.ndarray, "tokens experts"]


def _softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


_SCORES = {
    "softmax": _softmax,
    "sigmoid": lambda z: 0.5 * (1.0 + np.tanh(0.5 * z)),
    "identity": lambda z: z,
}


def _largest(q: np.ndarray, k: int, ties_to_high_index: bool) -> np.ndarray:
    if ties_to_high_index:
        return q.shape[1] - 1 - np.argsort(-q[:, ::-1], axis=1, kind="stable")[:, :k]
    return np.argsort(-q, axis=1, kind="stable")[:, :k]


def _masked(q: np.ndarray, rule: Rule) -> np.ndarray:
    if rule.num_kept >= rule.num_groups:
        return q
    groups = q.reshape(len(q), rule.num_groups, -1)
    best = 1 if rule.group_score == "max" else 2
    score = np.sort(groups, axis=2)[:, :, -best:].sum(axis=2)
    kept = np.zeros(score.shape, bool)
    np.put_along_axis(kept, _largest(score, rule.num_kept, False), True, axis=1)
    return np.where(kept[:, :, None], groups, rule.fill).reshape(q.shape)


def choose(
    logits: Float[np.ndarray, "tokens experts"],
    bias: Float[np.ndarray, "experts"] | None,
    rule: Rule,
) -> Choice:
    """S = top-k of mask(score(cap(z)) + b), w_i = scale s_i / sum s; z holds a logit bias."""
    z = logits.astype(np.float64)
    if np.isfinite(rule.soft_cap):
        z = rule.soft_cap * np.tanh(z / rule.soft_cap)
    scores = _SCORES[rule.score](z)
    has_bias = rule.bias == "selection" and bias is not None
    biased = scores + bias if has_bias else scores
    selection = _masked(biased if rule.bias_selects else scores, rule)
    run = rule.num_run or rule.top_k
    chosen = _largest(selection, max(run, rule.top_k), rule.ties_to_high_index)
    # experts that are named and not run have no weight, and no part in a sum
    runs = np.arange(chosen.shape[1]) < run
    if rule.softmax_over_chosen:
        weights = _softmax(np.where(runs, np.take_along_axis(z, chosen, axis=1), -np.inf))
    else:
        source = biased if rule.bias_in_weights else scores
        weights = np.where(runs, np.take_along_axis(source, chosen, axis=1), 0.0)
    if rule.renormalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    if rule.written_by_index:
        order = np.argsort(chosen, axis=1)
        chosen = np.take_along_axis(chosen, order, axis=1)
        weights = np.take_along_axis(weights, order, axis=1)
    return Choice(chosen, (weights * rule.scale).astype(np.float32), selection)
