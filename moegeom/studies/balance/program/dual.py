"""The smoothed dual of balancing, and Newton steps down to a small smoothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_array

from moegeom.core.shapes import Bool, Float64, Int64

#: Newton steps at one smoothing. Warm starts need five to ten; more do not pay.
_STEPS = 25

#: Entries of x (1 - x) below this move no gradient by a thousandth of a token.
_NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Contenders:
    """The experts of each token that can be chosen or nearly so: their numbers and scores.

    ``is_whole`` says that every expert contends for every token, in order of its number.
    """

    scores: Float64[np.ndarray, "tokens contenders"]
    expert: Int64[np.ndarray, "tokens contenders"]
    is_whole: bool


def contenders(
    scores: Float64[np.ndarray, "tokens experts"], bias: Float64[np.ndarray, "experts"], size: int
) -> Contenders:
    """The ``size`` experts with the largest biased score of each token; all where few are left."""
    experts = scores.shape[1]
    if size + 8 >= experts:
        everyone = np.broadcast_to(np.arange(experts), scores.shape)
        return Contenders(scores, everyone, True)
    kept = np.argpartition(scores + bias, experts - size, axis=1)[:, experts - size :]
    return Contenders(np.take_along_axis(scores, kept, axis=1), kept, False)


def minimise_smoothed(
    found: Contenders,
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
    smoothing: float,
    tolerance: float,
) -> Float64[np.ndarray, "experts"]:
    r"""The bias that minimises the smoothed dual, by Newton steps that only go down.

    :math:`F(b) = \sum_t \min_\nu [\epsilon \sum_e \log(1 + e^{(q_{te} + b_e - \nu)/\epsilon}) +
    k \nu] - m \sum_e b_e`, whose derivative is the expected count less the quota when expert e is
    chosen with probability :math:`x_{te} = 1 / (1 + e^{-(q_{te} + b_e - \nu_t)/\epsilon})`. Convex,
    and tends to the dual of the linear program for small :math:`\epsilon`. Ends when no expected
    count is further than ``tolerance`` from the quota. Oracle: HiGHS, at the end of the descent.
    """
    point = _point(found, bias, top_k, quota, smoothing)
    for _ in range(_STEPS):
        if np.abs(point.gradient).max() <= tolerance:
            break
        step = _newton_step(found, point, smoothing)
        slope, size = float(step @ point.gradient), 1.0
        if not slope < 0.0:
            break
        while size > 1e-3:
            tried = _point(found, point.bias + size * step, top_k, quota, smoothing)
            if tried.value <= point.value + 1e-4 * size * slope:
                break
            size *= 0.3
        else:
            break
        point = tried
    return point.bias


@dataclass(frozen=True, eq=False)
class _Point:
    bias: Float64[np.ndarray, "experts"]
    value: float
    gradient: Float64[np.ndarray, "experts"]
    chance: Float64[np.ndarray, "tokens contenders"]


def _point(
    found: Contenders,
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
    smoothing: float,
) -> _Point:
    z = (found.scores + (bias if found.is_whole else bias[found.expert])) / smoothing
    level = _levels(z, top_k)
    z -= level[:, None]
    decay = np.exp(-np.abs(z))
    chance = np.where(z >= 0.0, 1.0, decay) / (1.0 + decay)
    softplus = (np.maximum(z, 0.0) + np.log1p(decay)).sum()
    value = smoothing * float(softplus + top_k * level.sum()) - quota * float(bias.sum())
    if found.is_whole:
        expected = chance.sum(axis=0)
    else:
        expected = np.bincount(found.expert.ravel(), chance.ravel(), len(bias))
    return _Point(bias, value, expected - quota, chance)


def _levels(
    z: Float64[np.ndarray, "tokens contenders"], top_k: int
) -> Float64[np.ndarray, "tokens"]:
    """The level of each token at which the chances add up to ``top_k``: Newton, kept in a bracket.

    The sum falls with the level from the number of contenders to 0, and is ``top_k`` once.
    """
    width = z.shape[1]
    border = np.partition(z, (width - top_k - 1, width - top_k), axis=1)
    level = 0.5 * (border[:, width - top_k - 1] + border[:, width - top_k])
    low, high = z.min(axis=1) - 50.0, z.max(axis=1) + 50.0
    open_rows = np.arange(len(z))
    for _ in range(60):
        part = z[open_rows] - level[open_rows, None]
        chance = 0.5 * (1.0 + np.tanh(0.5 * part))
        excess = chance.sum(axis=1) - top_k
        slope = (chance * (1.0 - chance)).sum(axis=1)
        left = np.abs(excess) > 1e-11 * top_k
        if not left.any():
            break
        open_rows, excess, slope = open_rows[left], excess[left], slope[left]
        at = level[open_rows]
        low[open_rows] = np.where(excess > 0.0, at, low[open_rows])
        high[open_rows] = np.where(excess > 0.0, high[open_rows], at)
        step = at + excess / np.maximum(slope, 1e-300)
        is_inside = (step > low[open_rows]) & (step < high[open_rows])
        level[open_rows] = np.where(is_inside, step, 0.5 * (low[open_rows] + high[open_rows]))
    return level


def _newton_step(
    found: Contenders, point: _Point, smoothing: float
) -> Float64[np.ndarray, "experts"]:
    """Minus the inverse of the second derivative times the gradient, no longer than 20 smoothings.

    The second derivative is the Laplacian of a graph that joins experts that contend for the same
    tokens. It is 0 for a common shift, so a small multiple of the identity is added.
    """
    wavering = point.chance * (1.0 - point.chance)
    of_token = wavering.sum(axis=1)
    rows = of_token > _NEGLIGIBLE
    wavering, of_token = wavering[rows], of_token[rows]
    experts = len(point.bias)
    if found.is_whole:
        own = wavering.sum(axis=0)
        shared = wavering.T @ (wavering / of_token[:, None])
    else:
        table = _sparse(wavering, found.expert[rows], wavering > _NEGLIGIBLE, experts)
        own = np.asarray(table.sum(axis=0)).ravel()
        scaled = table.copy()
        scaled.data = scaled.data / np.repeat(of_token, np.diff(table.indptr))
        shared = (table.T @ scaled).toarray()
    second = np.diag(own) - shared
    # a hundredth of a token's wavering: an expert that nobody hesitates about moves, but not far
    second[np.diag_indices(experts)] += 1e-2 + 1e-9 * own.max(initial=0.0)
    step = -smoothing * cho_solve(cho_factor(second), point.gradient)
    return np.clip(step - step.mean(), -20.0 * smoothing, 20.0 * smoothing)


def _sparse(
    values: Float64[np.ndarray, "tokens contenders"],
    expert: Int64[np.ndarray, "tokens contenders"],
    kept: Bool[np.ndarray, "tokens contenders"],
    experts: int,
) -> Any:
    ends = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
    return csr_array((values[kept], expert[kept], ends), shape=(len(values), experts))
