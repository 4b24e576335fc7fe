r"""Cells along a great circle of inputs, and where each begins and ends.

Behind an RMS norm inputs lie on the ellipsoid :math:`y = \sqrt D\, g \odot u, |u| = 1`. On a great
circle of it :math:`z_i(\theta) = p_i \cos\theta + q_i \sin\theta + b_i`: two experts tie at most
twice, where :math:`R \cos(\theta - \phi) = \beta`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16

#: Angles that are evaluated at a time.
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Arcs:
    """Arcs in order around the circle; the first begins at the first tie at or above 0.

    An arc ends where the next begins, the last where the first begins, once around. ``is_proved``
    where the margin in the middle of the arc is larger than what float64 may be wrong by.
    """

    start: Float64[np.ndarray, "arcs"]
    expert_set: Int16[np.ndarray, "arcs k"]
    is_proved: Bool[np.ndarray, "arcs"]

    @property
    def stop(self) -> Float64[np.ndarray, "arcs"]:
        return np.append(self.start[1:], self.start[0] + 2.0 * np.pi)


def circle_arcs(
    cosine: Float64[np.ndarray, "experts"],
    sine: Float64[np.ndarray, "experts"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
) -> Arcs:
    """The expert sets on the circle, from the ties of all pairs; ties to the lower number.

    One arc without start (0) where nothing changes. Ends are right to some units of rounding over
    the angle at which logits cross. For 0 < k <= E. Oracle in tests: dense angles, and
    ``exact_cells`` of a central router in two dimensions.
    """
    ties = np.unique(_ties(cosine, sine, bias))
    if not len(ties):
        return Arcs(np.zeros(1), _top(cosine, sine, bias, k, np.zeros(1))[0], np.ones(1, bool))
    stops = np.append(ties[1:], ties[0] + 2.0 * np.pi)
    expert_set, is_proved = _top(cosine, sine, bias, k, (ties + stops) / 2.0)
    # pieces that rounding alone put between two ties tell nothing
    kept = is_proved | (stops - ties > 1e-9)
    ties, expert_set, is_proved = ties[kept], expert_set[kept], is_proved[kept]
    is_new = (expert_set != np.roll(expert_set, 1, axis=0)).any(axis=1)
    if not is_new.any():
        return Arcs(np.zeros(1), expert_set[:1], np.array([is_proved.all()]))
    first = np.flatnonzero(is_new)
    proved = np.logical_and.reduceat(np.roll(is_proved, -first[0]), first - first[0])
    return Arcs(ties[first], expert_set[first], proved)


def _ties(
    cosine: Float64[np.ndarray, "experts"],
    sine: Float64[np.ndarray, "experts"],
    bias: Float64[np.ndarray, "experts"],
) -> Float64[np.ndarray, "ties"]:
    """Angles in [0, 2 pi) at which some pair ties."""
    one, other = np.triu_indices(len(cosine), 1)
    p, q, beta = cosine[one] - cosine[other], sine[one] - sine[other], bias[other] - bias[one]
    reach = np.hypot(p, q)
    meets = (reach > 0.0) & (np.abs(beta) <= reach)
    middle = np.arctan2(q[meets], p[meets])
    half = np.arccos(beta[meets] / reach[meets])
    return np.mod(np.concatenate([middle - half, middle + half]), 2.0 * np.pi)


def _top(
    cosine: Float64[np.ndarray, "experts"],
    sine: Float64[np.ndarray, "experts"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    angles: Float64[np.ndarray, "angles"],
) -> tuple[Int16[np.ndarray, "angles k"], Bool[np.ndarray, "angles"]]:
    """The k largest logits at each angle, and whether the margin proves them."""
    reach = (np.abs(cosine) + np.abs(sine) + np.abs(bias)).max()
    sets, proved = [], []
    for start in range(0, len(angles), _CHUNK):
        angle = angles[start : start + _CHUNK, None]
        logits = cosine * np.cos(angle) + sine * np.sin(angle) + bias
        order = np.argsort(-logits, axis=1, kind="stable")
        ranked = np.take_along_axis(logits, order, axis=1)
        sets.append(np.sort(order[:, :k], axis=1).astype(np.int16))
        # eight roundings of numbers of at most ``reach``, on both sides
        gap = ranked[:, k - 1] - ranked[:, k] if k < len(bias) else np.full(len(angle), np.inf)
        proved.append(gap > 16.0 * 2.0**-53 * reach)
    return np.concatenate(sets), np.concatenate(proved)
