"""How many standard deviations of a noise on the router input each boundary is away."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32

from moegeom.geometry.boundary.linear import NEVER, NO_BOUNDARY, RowDistances, row_distances

#: A covariance of the router input: one standard deviation for all coordinates, one for each, or a
#: factor F of the covariance F F^T.
Factor = float | Float64[np.ndarray, "hidden"] | Float64[np.ndarray, "hidden noises"]


def noisy_rows(
    weight: Float[np.ndarray, "experts hidden"], factor: Factor
) -> Float64[np.ndarray, "experts noises"]:
    """W F: what standard normal numbers, through the factor, do to the logits."""
    rows = weight.astype(np.float64)
    return rows @ factor if np.ndim(factor) == 2 else rows * factor


def noisy_distances(
    weight: Float[np.ndarray, "experts hidden"],
    factor: Factor,
    bias: Float[np.ndarray, "experts"] | None = None,
) -> RowDistances:
    """1 / |F^T (w_i - w_j)|: inverse standard deviations of the differences of two logits.

    NO_BOUNDARY for a pair whose difference the noise leaves alone; 0, as without noise, for a
    permanent tie. Source: docs/theory.md A9. Oracle in tests: the covariance, entry by entry.
    """
    found = row_distances(noisy_rows(weight, factor), bias)
    inverse = found.inverse
    for i, j in found.permanent_ties:
        # rows that differ only where there is no noise are no permanent tie
        if (weight[i] != weight[j]).any():
            inverse[i, j] = inverse[j, i] = NO_BOUNDARY
    kept = np.argwhere(np.triu(inverse == 0.0)).astype(np.int32)
    return RowDistances(inverse, inverse.min(axis=1), kept)


def boundary_sigmas(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: RowDistances,
) -> Float64[np.ndarray, "tokens boundaries"]:
    r"""Gap over standard deviation, :math:`r_{ij} = (z_i - z_j) / |F^T (w_i - w_j)|`, of each
    boundary.

    The k (E - k) pairs of a chosen expert i, in order of rank, and another j, in order of number;
    no column for k = E. 0 on a boundary and at a permanent tie, inf where the noise cannot reach.
    With the plain :func:`~moegeom.geometry.boundary.linear.row_distances` they are Euclidean
    distances. For affine rules. Source: docs/theory.md A9.
    """
    tokens, experts = logits.shape
    is_chosen = np.zeros((tokens, experts), dtype=bool)
    np.put_along_axis(is_chosen, chosen.astype(np.int64), True, axis=1)
    others = np.nonzero(~is_chosen)[1].reshape(tokens, experts - chosen.shape[1])
    z = logits.astype(np.float64)
    ahead = np.take_along_axis(z, chosen.astype(np.int64), axis=1)
    gaps = ahead[:, :, None] - np.take_along_axis(z, others, axis=1)[:, None, :]
    with np.errstate(over="ignore"):  # NO_BOUNDARY times a large gap is inf, which is meant
        sigmas = gaps * rows.inverse[chosen[:, :, None], others[:, None, :]]
    sigmas[sigmas > NEVER] = np.inf
    return sigmas.reshape(tokens, chosen.shape[1] * others.shape[1])


def are_boundaries_positive(
    rows: Float64[np.ndarray, "experts noises"], chosen: Int32[np.ndarray, "tokens k"]
) -> Bool[np.ndarray, "tokens"]:
    r"""True where no two boundaries' differences of logits are negatively correlated.

    :math:`(w_i - w_j) \cdot (w_{i'} - w_{j'}) \ge 0` for all chosen i, i' and others j, j', rows
    being those of :func:`noisy_rows`. Then Slepian's inequality holds for the chances to stay.
    Costs (k (E - k))^2 per token. Source: docs/theory.md A9.
    """
    gram = rows @ rows.T
    found = np.ones(len(chosen), dtype=bool)
    for token, inside in enumerate(chosen):
        outside = np.setdiff1d(np.arange(len(rows)), inside)
        cross = gram[np.ix_(inside, outside)]
        among = gram[np.ix_(outside, outside)]
        for first in range(len(inside)):
            for second in range(first, len(inside)):
                products = among - cross[first][None, :] - cross[second][:, None]
                least = products.min(initial=np.inf) + gram[inside[first], inside[second]]
                found[token] &= least >= 0.0
    return found
