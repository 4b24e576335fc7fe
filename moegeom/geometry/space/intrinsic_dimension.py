"""Intrinsic dimension from nearest neighbours, and linear dimension from the spectrum."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int64

Nearest = Float64[np.ndarray, "tokens neighbours"]

#: Candidates beside the wanted neighbours, of which the nearest are found exactly.
_SPARE = 16

#: Relative error of a squared distance that is good enough.
_SHARP = 1e-10


def distinct_rows(rows: Float64[np.ndarray, "tokens dimension"]) -> Int64[np.ndarray, "kept"]:
    """Index of the first of each set of bit-identical rows, ascending.

    Repeated tokens have a neighbour at distance 0, which says nothing about the dimension.
    """
    raw = np.ascontiguousarray(rows + 0.0)  # -0.0 equals 0.0
    if not raw.shape[1]:
        return np.arange(min(len(raw), 1))
    keys = raw.view(np.dtype((np.void, raw.dtype.itemsize * raw.shape[1]))).ravel()
    _, first = np.unique(keys, return_index=True)
    return np.sort(first)


def squared_distances(
    rows: Float64[np.ndarray, "tokens dimension"],
) -> Float64[np.ndarray, "tokens tokens"]:
    r"""Squared distances of all pairs, :math:`|x|^2 + |y|^2 - 2 x \cdot y` of the centred rows.

    One matrix product. At least 0, and 0 on the diagonal; symmetric. The absolute error is that of
    the squared lengths, :math:`(D + 8) 2^{-53} (|x| + |y|)^2` at most, so distances far below
    the lengths are wrong: :func:`nearest_distances`. Oracle in tests: scipy.spatial.
    """
    centred = rows - rows.mean(axis=0) if len(rows) else rows
    gram = centred @ centred.T
    square = np.diag(gram)
    squared = np.maximum(square[:, None] + square[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(squared, 0.0)
    return squared


def nearest_distances(rows: Float64[np.ndarray, "tokens dimension"], count: int) -> Nearest:
    """Distances from each row to its ``count`` nearest others, ascending.

    From :func:`squared_distances` where its error is small beside the distances; else the nearest
    candidates are measured again by differences of rows, and all rows are where one that was left
    out could be nearer. Relative error at most 1e-10. nan where there are fewer than ``count``
    others. Oracle in tests: sklearn.neighbors.NearestNeighbors.
    """
    tokens, dimension = rows.shape
    nearest = np.full((tokens, count), np.nan)
    if tokens < 2:
        return nearest
    squared = squared_distances(rows)
    length = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    # of each pair the least that its squared distance can be
    least = squared - (dimension + 8) * 2.0**-53 * (length[:, None] + length[None, :]) ** 2
    np.fill_diagonal(least, np.inf)
    wanted, candidates = min(count, tokens - 1), min(count + _SPARE, tokens - 1)
    # the candidates, then the nearest of those left out
    order = np.argpartition(least, candidates, axis=1)[:, : candidates + 1]
    surely = np.take_along_axis(least, order, axis=1)
    near = np.take_along_axis(squared, order[:, :-1], axis=1)
    is_sharp = (surely[:, :-1] > (1.0 - _SHARP) * near).all(axis=1)
    nearest[is_sharp, :wanted] = np.sqrt(np.sort(near[is_sharp], axis=1)[:, :wanted])
    for token in np.flatnonzero(~is_sharp):
        found = _distances(rows, token, order[token, :-1])[:wanted]
        if found[-1] > 0.0 and found[-1] ** 2 > surely[token, -1]:
            found = _distances(rows, token, np.arange(tokens))[1 : wanted + 1]
        nearest[token, :wanted] = found
    return nearest


def _distances(
    rows: Float64[np.ndarray, "tokens dimension"],
    token: np.intp,
    others: Int64[np.ndarray, "others"],
) -> Float64[np.ndarray, "others"]:
    """Distances from one row to others, ascending."""
    difference = rows[others] - rows[token]
    return np.sort(np.sqrt(np.einsum("ij,ij->i", difference, difference)))


def two_nn(nearest: Nearest) -> float:
    r"""TwoNN estimate :math:`(T - 1) / \sum_i \log(r_2 / r_1)`; nan for fewer than 3 tokens.

    Source: Facco et al. 2017; docs/theory.md B12.
    """
    ratio = _log_ratios(nearest)
    total = float(ratio.sum())
    return (len(ratio) - 1) / total if len(ratio) > 2 and total > 0.0 else float("nan")


def two_nn_fitted(nearest: Nearest, kept: float = 0.9) -> float:
    """TwoNN by a line through 0: -log(1 - i/T) on the sorted log ratios, the lowest 90 % of them.

    Less moved by outliers than :func:`two_nn`. nan for fewer than 3 tokens.
    Source: Facco et al. 2017; docs/theory.md B12.
    """
    ratio = np.sort(_log_ratios(nearest))
    # the largest of all has -log 0
    number = min(int(kept * len(ratio)), len(ratio) - 1)
    if number < 3:
        return float("nan")
    x = ratio[:number]
    y = -np.log1p(-np.arange(1, number + 1) / len(ratio))
    square = float(x @ x)
    return float(x @ y) / square if square > 0.0 else float("nan")


def _log_ratios(nearest: Nearest) -> Float64[np.ndarray, "kept"]:
    known = nearest[np.isfinite(nearest[:, 1]) & (nearest[:, 0] > 0.0)]
    return np.log(known[:, 1] / known[:, 0])


def levina_bickel(nearest: Nearest, neighbours: int) -> float:
    r"""Maximum-likelihood dimension from k neighbours, averaged as :math:`1 / \mathrm{mean}(h_i)`.

    :math:`h_i = \frac{1}{k-1} \sum_{j<k} \log(r_k / r_j)`, unbiased for 1 / d; the mean of 1 / h_i
    would be biased upwards. nan for fewer than k neighbours, and for k below 2.
    Source: Levina and Bickel 2004; MacKay and Ghahramani 2005; docs/theory.md B12.
    """
    known = nearest[np.isfinite(nearest[:, neighbours - 1]) & (nearest[:, 0] > 0.0)]
    if not len(known) or neighbours < 2:
        return float("nan")
    ratio = known[:, [neighbours - 1]] / known[:, : neighbours - 1]
    mean = float(np.log(ratio).mean(axis=1).mean())
    return 1.0 / mean if mean > 0.0 else float("nan")


def participation_ratio(gram: Float64[np.ndarray, "tokens tokens"]) -> float:
    r"""Directions that share the variance, :math:`(\mathrm{tr}\,G)^2 / \lVert G \rVert^2`.

    G the Gram matrix of centred rows, whose spectrum is that of their covariance. 1 to T - 1; nan
    when all rows are equal. Source: docs/theory.md B12; oracle in tests: eigenvalues of the
    covariance.
    """
    square = float((gram**2).sum())
    return float(np.trace(gram) ** 2 / square) if square > 0.0 else float("nan")


def participation_ratio_corrected(ratio: float, num_tokens: int) -> float:
    """The ratio without the bias of a finite sample, 1 / ((1/PR - 1/n) / (1 + 1/n)), n = T - 1.

    inf when the sample shows no structure at all; nan for a ratio of nan and for fewer than two
    tokens. Source: docs/theory.md B12. Oracle in tests: samples of a known covariance.
    """
    n = num_tokens - 1
    if n < 1 or math.isnan(ratio):
        return float("nan")
    left = 1.0 / ratio - 1.0 / n
    return (1.0 + 1.0 / n) / left if left > 0.0 else float("inf")
