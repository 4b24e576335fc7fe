"""Choices over a batch: transport plans, experts that choose tokens, a capacity of each expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int32
from moegeom.geometry.load import expert_capacity
from moegeom.geometry.rows import unit_rows

#: Largest exponent before scaling, and what the plain form adds to every sum.
CLIP, GUARD = 50.0, 1e-8


# -------------------------------------------------------------------------------------------- costs
def osr_cost(
    similarity: Float[np.ndarray, "tokens experts"],
    expert_rows: Float[np.ndarray, "experts hidden"],
    overlap: float = 0.5,
    excess: float = 0.5,
    threshold: float = 0.7,
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Cost of a token at an expert, :math:`C = -S + \lambda |S| R + \beta (|S| - \tau)_+^2`.

    S are cosines of tokens and experts, and :math:`R_{ij} = G_{ij}^2`, 0 on the diagonal, squares
    of cosines between experts, entry by entry. :math:`\lambda` is ``overlap``, :math:`\beta`
    ``excess``, :math:`\tau` ``threshold``. No unit; from -1 to about
    :math:`1 + \lambda (E - 1) + \beta (1 - \tau)^2`. A zero row has cosine 0 with all.
    Equal experts have equal costs: nothing in it tells them apart.
    Source: S3 A.3.1. Oracle in tests: torch.
    """
    s = similarity.astype(np.float64)
    unit = unit_rows(expert_rows)
    overlaps = (unit @ unit.T) ** 2
    np.fill_diagonal(overlaps, 0.0)
    size = np.abs(s)
    return -s + overlap * (size @ overlaps) + excess * np.maximum(size - threshold, 0.0) ** 2


# ------------------------------------------------------------------------------------------ scaling
@dataclass(frozen=True, eq=False)
class TransportPlan:
    """What Sinkhorn scaling gives: the share of each token that goes to each expert.

    ``log_share`` is its logarithm, which also orders shares that are 0 as a float; -inf where a
    cost is inf. ``clipped_share`` is the share of costs beyond the clip, whose order was lost.
    """

    log_share: Float64[np.ndarray, "tokens experts"]
    clipped_share: float

    @property
    def share(self) -> Float64[np.ndarray, "tokens experts"]:
        """0 to 1; rows sum to 1."""
        return np.exp(self.log_share)


def sinkhorn(
    cost: Float[np.ndarray, "tokens experts"],
    eps: float,
    steps: int,
    clip: float = CLIP,
    in_logarithms: bool = True,
) -> TransportPlan:
    r"""Shares :math:`Q \propto e^{-C/\epsilon}` with rows and columns scaled in turn.

    :math:`L = clip(-C / \epsilon, \pm clip)`; ``steps`` times rows to sum 1 and columns to N / E;
    rows again. Rows are exact, columns are not (:func:`column_error`): three steps are far from
    enough where tokens come in clusters. ``steps`` 0 is the softmax of each token. A batch of one
    token has 1 / E everywhere, whatever its costs (but for what a guard leaves). A number that is
    the same for all experts of a token changes nothing; one that is the same for all tokens of an
    expert nothing in the limit of many steps (both but for clip and rounding). As eps goes to 0 and
    steps to inf, with an infinite clip, the plan of least cost with these sums: the balanced choice
    of one expert a token. A cost of inf is never chosen; a token or an expert with no other is left
    out of the scaling.

    ``in_logarithms`` subtracts log-sums, which loses nothing; else sums are divided by with 1e-8
    added, as it is usually coded: 1e-8 less for each of 2 * steps + 1 sums, if none is small.
    Source: S3 A.3.2. Oracle in tests: torch; scipy.optimize.linear_sum_assignment.
    """
    exponent = -cost.astype(np.float64) / eps
    allowed = np.isfinite(cost)
    clipped = float((np.abs(exponent[allowed]) > clip).mean()) if allowed.any() else 0.0
    exponent = np.where(allowed, np.clip(exponent, -clip, clip), -np.inf)
    scale = _by_logarithms if in_logarithms else _by_division
    return TransportPlan(scale(exponent, steps), clipped)


def _by_logarithms(
    exponent: Float64[np.ndarray, "tokens experts"], steps: int
) -> Float64[np.ndarray, "tokens experts"]:
    tokens, experts = exponent.shape
    logarithm = exponent
    for _ in range(steps):
        logarithm = logarithm - _log_sum(logarithm, axis=1)
        logarithm = logarithm - _log_sum(logarithm, axis=0) + np.log(tokens / experts)
    return logarithm - _log_sum(logarithm, axis=1)


def _log_sum(
    logarithm: Float64[np.ndarray, "tokens experts"], axis: int
) -> Float64[np.ndarray, "some others"]:
    """Log-sum-exp along an axis, which is kept; 0 where there is nothing to sum."""
    largest = logarithm.max(axis=axis, keepdims=True)
    largest = np.where(np.isneginf(largest), 0.0, largest)
    total = np.exp(logarithm - largest).sum(axis=axis, keepdims=True)
    return np.where(total > 0.0, largest + np.log(np.where(total > 0.0, total, 1.0)), 0.0)


def _by_division(
    exponent: Float64[np.ndarray, "tokens experts"], steps: int
) -> Float64[np.ndarray, "tokens experts"]:
    tokens, experts = exponent.shape
    share = np.exp(exponent)
    for _ in range(steps):
        share = share / (share.sum(axis=1, keepdims=True) + GUARD)
        share = share / (share.sum(axis=0, keepdims=True) + GUARD) * (tokens / experts)
    with np.errstate(divide="ignore"):  # shares of 0
        return np.log(share / (share.sum(axis=1, keepdims=True) + GUARD))


def column_error(share: Float64[np.ndarray, "tokens experts"]) -> float:
    r"""How far the sums of columns are from N / E: :math:`\max_e |\sum_t Q_{te} E / N - 1|`.

    0 for a plan that is balanced; at most E - 1. nan without tokens.
    Source: S3 A.3.2, which takes it to be 0.
    """
    tokens, experts = share.shape
    if not tokens:
        return float("nan")
    return float(np.abs(share.sum(axis=0) * experts / tokens - 1.0).max())


# ------------------------------------------------------------------------------------------- limits
def batch_capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Tokens that an expert takes of a batch, ceil(f k T / E), never more than there are.

    Source: docs/theory.md D3, :func:`~moegeom.geometry.load.expert_capacity`.
    """
    if factor * k >= num_experts:
        return num_tokens
    return min(expert_capacity(num_tokens, num_experts, k, factor), num_tokens)


def _ranks(
    scores: Float64[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens experts"]:
    """Place of each token among those of an expert, 0 for the best; equal: the earlier token.

    inf for a score of -inf, which has no place.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    rank = np.empty(scores.shape)
    places = np.broadcast_to(np.arange(len(scores), dtype=np.float64)[:, None], scores.shape)
    np.put_along_axis(rank, order, places, axis=0)
    return np.where(np.isneginf(scores), np.inf, rank)


def expert_choice(
    scores: Float[np.ndarray, "tokens experts"], capacity: int
) -> Bool[np.ndarray, "tokens experts"]:
    """Each expert takes the ``capacity`` tokens that score highest with it, as a mask.

    Equal scores: the earlier token. -inf is never taken. A token may have none or all experts, and
    what it has depends on every other token. Source: docs/theory.md D3. Oracle in tests: torch.
    """
    return _ranks(scores.astype(np.float64)) < capacity


def kept_within_capacity(
    chosen: Int32[np.ndarray, "tokens k"],
    num_experts: int,
    capacity: int,
    scores: Float[np.ndarray, "tokens experts"] | None = None,
) -> Bool[np.ndarray, "tokens k"]:
    """Which choices an expert with room for ``capacity`` tokens serves.

    The first ones in the order of tokens; with ``scores`` those that score highest with it, the
    earlier token among equals. By order what happens to a token depends on earlier ones alone.
    Slots of -1 are not kept. The others are dropped, sum of max(0, c_e - C) in all.
    Source: docs/theory.md D3. Oracle in tests: tokens served one at a time.
    """
    token, slot = np.nonzero(chosen >= 0)
    expert = chosen[token, slot]
    wish = np.full((len(chosen), num_experts), -np.inf)
    wish[token, expert] = 0.0 if scores is None else scores[token, expert]
    is_served = np.zeros(chosen.shape, dtype=bool)
    is_served[token, slot] = (_ranks(wish) < capacity)[token, expert]
    return is_served
