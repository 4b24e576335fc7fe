"""Whole tokens: biases between the ties of the linear program; updates for rules with groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.studies.balance.program.dual import contenders

#: Tokens by expert that a coordinate pass looks at: those with the smallest margins.
_NEAR = 32

#: Rounds of updates of a rule with groups, each of which routes all tokens: a quick fall of the
#: step, and a slow one from the best bias so far where that was not enough.
_ROUNDS = (80, 200)


def chosen_mask(
    biased: Float64[np.ndarray, "tokens experts"], top_k: int
) -> Bool[np.ndarray, "tokens experts"]:
    """True for the ``top_k`` largest of each token; equal scores: the lower index.

    The same sets as :func:`moegeom.geometry.selection.top_k`, without sorting.
    """
    experts = biased.shape[1]
    last = np.partition(biased, experts - top_k, axis=1)[:, [experts - top_k]]
    above, equal = biased > last, biased == last
    missing = top_k - above.sum(axis=1)
    tied = np.flatnonzero(equal.sum(axis=1) > missing)
    if len(tied):
        rank = np.cumsum(equal[tied], axis=1)
        equal[tied] &= rank <= missing[tied, None]
    return above | equal


def chosen_counts(
    biased: Float64[np.ndarray, "tokens experts"], top_k: int
) -> Int64[np.ndarray, "experts"]:
    """Tokens that choose each expert."""
    return chosen_mask(biased, top_k).sum(axis=0)


def unevenness(counts: Int64[np.ndarray, "experts"]) -> tuple[int, int]:
    """What a better bias makes smaller: the largest count, then the distance from even counts."""
    return int(counts.max()), int(np.abs(counts * len(counts) - counts.sum()).sum())


def settle_whole_tokens(
    scores: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
    num_contenders: int,
) -> Float64[np.ndarray, "experts"]:
    r"""Exact coordinate passes: the expert furthest from its quota gets exactly that many tokens.

    Expert e is chosen where :math:`q_{te} + b_e` exceeds the k-th largest of the others, so b_e
    between minus the n-th and the (n+1)-th largest of that difference gives it n tokens. Only the
    tokens with the smallest margins can change sides within such a step, so only they are looked
    at. Ends at counts that are the quota rounded, or after three passes' worth of steps. The bias
    with the smallest largest count that was met; ``bias`` itself when none is better.
    """
    experts = scores.shape[1]
    biased = scores + bias
    counts = chosen_counts(biased, top_k)
    border = np.partition(biased, (experts - top_k - 1, experts - top_k), axis=1)
    margin = border[:, experts - top_k] - border[:, experts - top_k - 1]
    near = np.argsort(margin, kind="stable")[: _NEAR * experts]
    found = contenders(scores[near], bias, num_contenders)
    value = found.scores + bias[found.expert]
    is_in = chosen_mask(value, top_k)
    settled = counts - np.bincount(found.expert[is_in], minlength=experts)
    order = np.argsort(found.expert, axis=None, kind="stable")
    ends = np.cumsum(np.bincount(found.expert.ravel(), minlength=experts))
    of_expert = np.split(order, ends[:-1])
    least, most = int(np.floor(quota)), int(np.ceil(quota))
    moved, best, best_score = bias.copy(), bias, unevenness(counts)
    for _ in range(3 * experts + 20):
        excess = np.where(counts > most, counts - most, np.minimum(counts - least, 0))
        if not excess.any():
            break
        expert = int(np.abs(excess).argmax())
        token, slot = np.divmod(of_expert[expert], value.shape[1])
        others = value[token]
        own = others[np.arange(len(token)), slot].copy()
        others[np.arange(len(token)), slot] = -np.inf
        width = others.shape[1]
        lead = np.sort(own - np.partition(others, width - top_k, axis=1)[:, width - top_k])[::-1]
        wanted = (most if excess[expert] > 0 else least) - int(settled[expert])
        if not 0 < wanted < len(lead):
            break
        shift = -0.5 * (lead[wanted - 1] + lead[wanted])
        before = found.expert[token][is_in[token]]
        value[token, slot] += shift
        moved[expert] += shift
        is_in[token] = chosen_mask(value[token], top_k)
        after = found.expert[token][is_in[token]]
        counts += np.bincount(after, minlength=experts) - np.bincount(before, minlength=experts)
        if (score := unevenness(counts)) < best_score:
            best, best_score = moved.copy(), score
    return best


def balance_by_updates(
    count: Callable[[Float64[np.ndarray, "experts"]], Int64[np.ndarray, "experts"]],
    starts: list[Float64[np.ndarray, "experts"]],
    step: float,
    enough: float = 0.0,
) -> Float64[np.ndarray, "experts"]:
    r"""The best bias met by loss-free updates with a falling step; a better one may exist.

    :math:`b_e \leftarrow b_e + \eta\, \mathrm{clip}(1 - c_e / m, -1, 1)`, less the mean, with
    :math:`\eta` falling geometrically from ``step`` to a ten-thousandth of it; c are the counts
    that ``count`` finds with the rule itself. Begins from the start with the smallest largest
    count; ends early when MaxVio is ``enough`` or less. Source of the update: arXiv 2408.15664,
    algorithm 1, there with the sign alone.
    """
    scored = [(unevenness(count(start)), number) for number, start in enumerate(starts)]
    best_score, number = min(scored)
    best = starts[number]
    for rounds in _ROUNDS:
        bias = best
        for step_now in step * np.geomspace(1.0, 1e-4, rounds):
            counts = count(bias)
            if (score := unevenness(counts)) < best_score:
                best, best_score = bias, score
            if counts.max() <= (1.0 + enough) * counts.mean():
                return best
            bias = bias + step_now * np.clip(1.0 - counts / counts.mean(), -1.0, 1.0)
            bias = bias - bias.mean()
    return best
