r"""What best reproduces another's choices: an update of low rank, a factor for each block."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Integer
from moegeom.geometry.selection import sigmoid
from moegeom.geometry.set_code import chosen_mask

#: Steps of the search.
_STEPS = 30


def fitted_update(
    inputs: Float64[np.ndarray, "tokens hidden"],
    scores: Float64[np.ndarray, "tokens experts"],
    slope: Float64[np.ndarray, "tokens experts"],
    chosen: Integer[np.ndarray, "tokens k"],
    logit_changes: Float64[np.ndarray, "tokens experts"] | None,
    rank: int,
) -> Float64[np.ndarray, "experts hidden"]:
    r"""Rows :math:`U V^\top` of rank r to add, which make the choices S_t likely.

    Minimises over U [experts, r] and V [hidden, r], with :math:`\delta_t = U V^\top x_t`,

    .. math::
        \sum_t \log\left(1 + \Big(\sum_{e \notin S_t} e^{s_{te} / T}\Big)
        \Big(\sum_{e \in S_t} e^{-s_{te} / T}\Big)\right)
        + \sum_t \sum_e \frac{(r_{te} - \delta_{te} - c_t)^2}{2 \tau^2},
        \qquad s_{te} = \text{scores}_{te} + \text{slope}_{te} \delta_{te},

    a soft count of choices against the scores, and, where ``logit_changes`` (:math:`r_{te}`, nan
    where unknown) are given, their squared error up to a number :math:`c_t` of each token; T is the
    median gap between the scores on both sides of the boundary, :math:`\tau` the rms of the logit
    changes. Columns of ``inputs`` are scaled to equal size inside. A local minimum,
    from the leading directions of the gradient at 0. Scores that are not finite take no part.
    Zeros where nothing says anything.

    Oracle in tests: a planted update, of which the choices of other tokens are foretold.
    """
    from scipy.optimize import minimize

    experts = scores.shape[1]
    hidden = inputs.shape[1]
    size = np.sqrt((inputs**2).mean(axis=0))
    seen = inputs / np.where(size > 0.0, size, 1.0)
    is_known = np.isfinite(scores)
    is_chosen = chosen_mask(chosen, experts)
    usable = np.where(is_chosen, is_known, True).all(axis=1) & (is_known & ~is_chosen).any(axis=1)
    if not usable.any():
        return np.zeros((experts, hidden))
    seen, scores, slope = seen[usable], scores[usable], slope[usable]
    is_chosen, is_known = is_chosen[usable], is_known[usable]
    gap = np.abs(_edge(scores, is_chosen, is_known))
    soft = float(np.median(gap[gap > 0.0])) if (gap > 0.0).any() else 1.0
    residual, tau = None, 1.0
    if logit_changes is not None:
        residual = logit_changes[usable]
        centred = _centred(residual)
        tau = float(np.sqrt(np.nanmean(centred**2))) if np.isfinite(centred).any() else 0.0
        if tau == 0.0:
            residual = None

    def loss(
        change: Float64[np.ndarray, "some experts"],
    ) -> tuple[float, Float64[np.ndarray, "some experts"]]:
        """The sum and its gradient by the change of logits."""
        moved = (scores + slope * change) / soft
        value, pull = _set_loss(moved, is_chosen, is_known)
        pull = pull * slope / soft
        if residual is not None:
            off = np.nan_to_num(_centred(change - residual)) / tau
            value += 0.5 * float((off**2).sum())
            pull += off / tau
        return value, pull

    _, pull = loss(np.zeros_like(scores))
    left, strength, right = np.linalg.svd(pull.T @ seen, full_matrices=False)
    if strength[0] == 0.0:
        return np.zeros((experts, hidden))
    first = np.sqrt(soft / np.sqrt(hidden))
    share = np.sqrt(strength[:rank] / strength[0]) * first
    start = np.concatenate([(-left[:, :rank] * share).ravel(), (right[:rank].T * share).ravel()])

    def cost(both: np.ndarray) -> tuple[float, np.ndarray]:
        u, v = both[: experts * rank].reshape(experts, rank), both[experts * rank :]
        v = v.reshape(hidden, rank)
        along = seen @ v
        value, pull = loss(along @ u.T)
        return value, np.concatenate([(pull.T @ along).ravel(), (seen.T @ (pull @ u)).ravel()])

    solution = minimize(cost, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    u, v = solution[: experts * rank].reshape(experts, rank), solution[experts * rank :]
    return (u @ v.reshape(hidden, rank).T) / np.where(size > 0.0, size, 1.0)


def fitted_factors(
    inputs: Float[np.ndarray, "tokens hidden"],
    weight: Float[np.ndarray, "experts hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Integer[np.ndarray, "tokens k"],
    size: int = 1,
    bias: Float[np.ndarray, "experts"] | None = None,
) -> Float64[np.ndarray, "blocks"]:
    r"""A factor for each block of ``size`` columns that makes the choices likely.

    Minimises over f the soft count of :func:`fitted_update` for the logits
    :math:`z_{te} + \sum_d (f_{d / n} - 1) x_{td} W_{ed}`, n the size, or with a ``bias`` for their
    sigmoids and that, plus :math:`\tfrac{1}{2} \sum_b (f_b - 1)^2`; over the median f, since
    choices by logits say nothing of a common factor. The minimum for logits, which are convex in f,
    is the global one. Ones where nothing says anything.

    Oracle in tests: planted factors.
    """
    from scipy.optimize import minimize

    is_chosen, is_known = chosen_mask(chosen, logits.shape[1]), np.isfinite(logits)
    number = -(-inputs.shape[1] // size)
    seen, rows = inputs.astype(np.float32), weight.astype(np.float32)
    block = np.arange(inputs.shape[1]) // size

    def scored(moved: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        """Scores of logits, and their slopes."""
        if bias is None:
            return moved, 1.0
        chance = sigmoid(moved)
        return chance + bias, chance * (1.0 - chance)

    own = logits.astype(np.float64)
    gap = np.abs(_edge(scored(own)[0], is_chosen, is_known))
    soft = float(np.median(gap[gap > 0.0])) if (gap > 0.0).any() else 1.0

    def cost(change: np.ndarray) -> tuple[float, np.ndarray]:
        moved, slope = scored(own + seen @ (rows * change[block].astype(np.float32)).T)
        value, pull = _set_loss(moved / soft, is_chosen, is_known)
        pull = (pull * slope / soft).astype(np.float32)
        of_each = (seen * (pull @ rows)).sum(axis=0, dtype=np.float64)
        return value + 0.5 * float(change @ change), np.bincount(block, of_each, number) + change

    start = np.zeros(number)
    fit = 1.0 + minimize(cost, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    usual = float(np.median(fit))
    return fit / usual if usual > 0.0 else fit


def _edge(
    scores: Float64[np.ndarray, "tokens experts"],
    is_chosen: Bool[np.ndarray, "tokens experts"],
    is_known: Bool[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens"]:
    """The lowest chosen score less the highest other one."""
    last = np.where(is_chosen, scores, np.inf).min(axis=1)
    return last - np.where(is_known & ~is_chosen, scores, -np.inf).max(axis=1)


def _set_loss(
    scores: Float64[np.ndarray, "tokens experts"],
    is_chosen: Bool[np.ndarray, "tokens experts"],
    is_known: Bool[np.ndarray, "tokens experts"],
) -> tuple[float, Float64[np.ndarray, "tokens experts"]]:
    r""":math:`\sum_t \log(1 + e^{a_t + b_t})`, a and b the log-sums of others and of chosen."""
    others = np.where(is_known & ~is_chosen, scores, -np.inf)
    theirs = np.where(is_chosen, -scores, -np.inf)
    top, low = others.max(axis=1, keepdims=True), theirs.max(axis=1, keepdims=True)
    of_others, of_theirs = np.exp(others - top), np.exp(theirs - low)
    sum_others = of_others.sum(axis=1, keepdims=True)
    sum_theirs = of_theirs.sum(axis=1, keepdims=True)
    both = (top + low + np.log(sum_others) + np.log(sum_theirs))[:, 0]
    chance = np.exp(both - np.logaddexp(0.0, both))[:, None]
    pull = chance * (of_others / sum_others - of_theirs / sum_theirs)
    return float(np.logaddexp(0.0, both).sum()), pull


def _centred(apart: Float64[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    """Numbers less the mean of the finite ones of their token."""
    is_finite = np.isfinite(apart)
    number = np.maximum(is_finite.sum(axis=1, keepdims=True), 1)
    return apart - np.where(is_finite, apart, 0.0).sum(axis=1, keepdims=True) / number
