"""How often the chosen set differs if noise moved every logit on its own."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.boundary.linear import RowDistances

#: Thresholds between the two sides, and how far they reach beyond them in standard deviations.
_STEPS, _REACH = 128, 6.0

#: The same for the few experts that are nearest to each other.
_LAST, _FIRST, _FEW_STEPS, _FEW_REACH = 4, 8, 12, 3.5

#: Numbers held at once.
_AT_ONCE = 2**20


def logit_deviations(distances: RowDistances) -> Float64[np.ndarray, "experts"]:
    r"""Standard deviation of each logit's own noise that fits those of the differences best.

    Least squares of :math:`s_i^2 + s_j^2` on the squared row distances over all pairs; exact when
    the noises of the logits are independent but for a common one, which changes no choice.
    0 for a single expert, and where the fit would be negative. Equal rows are at distance 0.
    """
    experts = len(distances.inverse)
    with np.errstate(divide="ignore"):
        squares = np.where(distances.inverse > 0.0, distances.inverse**-2.0, 0.0)
    np.fill_diagonal(squares, 0.0)
    if experts < 3:
        return np.sqrt(squares.sum(axis=1) / 2.0)
    sums = squares.sum(axis=1)
    total = sums.sum() / (2.0 * (experts - 1))
    return np.sqrt(np.maximum((sums - total) / (experts - 2), 0.0))


def independent_flip(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    distances: RowDistances,
    scale: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability that the best expert left out comes before the worst chosen one.

    .. math:: 1 - \int \prod_{j \notin S} \Phi\Big(\frac{c - z_j}{s_j}\Big)\,
              d\Big(-\prod_{i \in S} \Phi\Big(\frac{z_i - c}{s_i}\Big)\Big)

    with s of :func:`logit_deviations` times ``scale``: exact for rows that are orthogonal once a
    common row is taken off, an estimate otherwise. Error 5e-3 of the value and 1e-9.
    0 for k = E and for scale 0. Source: docs/theory.md A9, E4. Oracle in tests: Monte Carlo.
    """
    tokens, k = chosen.shape
    experts = logits.shape[1]
    found = np.zeros(tokens)
    if k == experts:
        return found
    deviations = logit_deviations(distances)
    size = max(1, _AT_ONCE // (experts * (_STEPS + 1)))
    noisy = np.flatnonzero(scale * deviations.max(initial=0.0) > 0.0)
    for start in range(0, len(noisy), size):
        part = noisy[start : start + size]
        found[part] = _flip(logits[part].astype(np.float64), chosen[part], deviations, scale[part])
    return found


def nearest_flip(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    deviation: Float64[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens"]:
    """The same, quicker, for a standard deviation of each logit of each token.

    The last 4 chosen and the first 8 others stand for all: within 6 % of the value of all of them.
    ``chosen`` is best first. 0 for k = E; deviations must be finite.
    Oracle in tests: Monte Carlo.
    """
    tokens, k = chosen.shape
    experts = logits.shape[1]
    found = np.zeros(tokens)
    if k == experts:
        return found
    last = chosen[:, -_LAST:].astype(np.int64)
    size = max(1, _AT_ONCE // max((_LAST + _FIRST) * (_FEW_STEPS + 1), experts))
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        z = logits[part].astype(np.float64)
        others = z.copy()
        np.put_along_axis(others, chosen[part].astype(np.int64), -np.inf, axis=1)
        first = _largest(others, min(_FIRST, experts - k))
        spread = np.maximum(deviation[part], np.finfo(np.float64).tiny)
        near = [
            np.take_along_axis(a, rows, axis=1) for rows in (last[part], first) for a in (z, spread)
        ]
        found[part] = _overtaken(*near)
    return found


def _largest(values: Float64[np.ndarray, "tokens experts"], count: int) -> np.ndarray:
    """Columns of the ``count`` largest numbers of each row, in any order."""
    if count == values.shape[1]:
        return np.broadcast_to(np.arange(count), values.shape)
    return np.argpartition(values, -count, axis=1)[:, -count:]


def _overtaken(
    ahead: Float64[np.ndarray, "tokens last"],
    own: Float64[np.ndarray, "tokens last"],
    behind: Float64[np.ndarray, "tokens first"],
    others: Float64[np.ndarray, "tokens first"],
) -> Float64[np.ndarray, "tokens"]:
    """Over thresholds: the least of ``ahead`` lies there, and one of ``behind`` above it."""
    from scipy.special import ndtr

    # nearly all of the distribution of the least
    low = (ahead - _FEW_REACH * own).min(axis=1)[:, None]
    high = (ahead + _FEW_REACH * own).min(axis=1)[:, None]
    threshold = low + (high - low) * np.linspace(0.0, 1.0, _FEW_STEPS + 1)
    kept, below = np.ones(threshold.shape), np.ones(threshold.shape)
    with np.errstate(over="ignore"):
        for column in range(ahead.shape[1]):
            kept *= ndtr((ahead[:, [column]] - threshold) / own[:, [column]])
        for column in range(behind.shape[1]):
            below *= ndtr((threshold - behind[:, [column]]) / others[:, [column]])
    falling = kept[:, :-1] - kept[:, 1:]
    rising = 1.0 - 0.5 * (below[:, :-1] + below[:, 1:])
    return (rising * falling).sum(axis=1) / falling.sum(axis=1)


def _flip(
    z: Float64[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    deviations: Float64[np.ndarray, "experts"],
    scale: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    from scipy.special import log_ndtr

    is_chosen = np.zeros(z.shape, dtype=bool)
    np.put_along_axis(is_chosen, chosen.astype(np.int64), True, axis=1)
    spread = np.maximum(scale[:, None] * deviations, np.finfo(np.float64).tiny)
    # below `least` no chosen expert falls, above `largest` no other one rises
    least = np.where(is_chosen, z - _REACH * spread, np.inf).min(axis=1)
    largest = np.where(is_chosen, -np.inf, z + _REACH * spread).max(axis=1)
    width = np.maximum(largest - least, 0.0)
    threshold = least[:, None] + width[:, None] * np.linspace(0.0, 1.0, _STEPS + 1)
    sign = np.where(is_chosen, 1.0, -1.0)[:, None, :]
    with np.errstate(over="ignore"):
        above = sign * (z[:, None, :] - threshold[:, :, None]) / spread[:, None, :]
    logs = log_ndtr(above)
    kept = np.exp(np.where(is_chosen[:, None, :], logs, 0.0).sum(axis=2))
    overtaken = -np.expm1(np.where(is_chosen[:, None, :], 0.0, logs).sum(axis=2))
    falling = kept[:, :-1] - kept[:, 1:]
    return (0.5 * (overtaken[:, :-1] + overtaken[:, 1:]) * falling).sum(axis=1)
