"""Boundary angle in the space in front of the norm, where the length of an input has no say."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32


def boundary_angle(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    effective_rows: Float64[np.ndarray, "experts hidden"],
    bias: Float64[np.ndarray, "experts"],
    unit_length: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Angle, in radians, from an RMS-normed input to the nearest direction with another choice.

    Two experts tie on the cone :math:`\cos \phi_0 = (b_j - b_i) / (\sqrt D |a|)` around
    :math:`a = \tilde w_i - \tilde w_j`, with :math:`\tilde w = w \odot g` the effective rows; the
    token is at :math:`\cos \phi = a \cdot u / (|a| |u|)`, u = y / g. The result is the least
    :math:`|\phi - \phi_0|` over i chosen, j not. Its sine times |x| is the distance before the
    norm (|x| itself from 90 degrees on). Without biases the cone is a plane through 0 and this is
    exact; with them the epsilon of the norm is neglected.

    ``unit_length`` is |u|, at most :math:`\sqrt D`. 0 on a boundary; inf when every expert is
    chosen, when no pair of rows can tie, and for an input of zeros (which has no direction) that
    is on no boundary. Absolute error about 1e-8 near 0 (arc cosine near 1: none, since boundaries
    without bias lie at 90 degrees). Source: docs/theory.md E3. Oracle in tests: minimisation over
    inputs before the norm.
    """
    tokens, experts = logits.shape
    dimension = effective_rows.shape[1]
    gram = effective_rows @ effective_rows.T
    squares = np.diag(gram)
    squared = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
    for i, j in np.argwhere(squared <= 1e-8 * (squares[:, None] + squares[None, :])):
        squared[i, j] = np.sum((effective_rows[i] - effective_rows[j]) ** 2)
    length = np.sqrt(squared)
    z = logits.astype(np.float64) - bias
    outside = np.ones((tokens, experts), dtype=bool)
    np.put_along_axis(outside, chosen.astype(np.int64), False, axis=1)
    nearest = np.full(tokens, np.inf)
    for rank in range(chosen.shape[1]):
        one = chosen[:, rank]
        shift = bias[None, :] - bias[one][:, None]
        projection = np.take_along_axis(z, one[:, None].astype(np.int64), axis=1) - z
        apart = length[one]
        with np.errstate(divide="ignore", invalid="ignore"):
            cone = shift / (np.sqrt(dimension) * apart)
            here = projection / (apart * unit_length[:, None])
            angle = np.abs(
                np.arcsin(np.clip(here, -1.0, 1.0)) - np.arcsin(np.clip(cone, -1.0, 1.0))
            )
        angle = np.where((np.abs(cone) > 1.0) | ~np.isfinite(angle), np.inf, angle)
        angle = np.where(projection == shift, 0.0, angle)  # an exact tie, permanent or not
        nearest = np.minimum(nearest, np.where(outside, angle, np.inf).min(axis=1))
    return nearest


def angle_bound(
    distance: Float64[np.ndarray, "tokens"], unit_length: Float64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Lower bound of that angle from a lower bound of the distance among inputs without gain.

    Two inputs u, u' of one length r at the angle :math:`\phi` are :math:`2 r \sin(\phi / 2)` apart,
    and the distance d from u to another choice is measured over all inputs, those of length r among
    them: :math:`\phi \ge 2 \arcsin(d / 2 r)`. inf for d > 2 r, and for inf. For any rule; d is that
    of the effective rows. The bound is near the angle where the nearest boundary does not lean
    towards the input itself. Source: docs/theory.md E3. Oracle in tests: minimisation over inputs
    before the norm.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        chord = distance / (2.0 * unit_length)
        angle = 2.0 * np.arcsin(np.minimum(chord, 1.0))
    return np.where(chord > 1.0, np.inf, angle)
