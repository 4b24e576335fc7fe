"""Dimension of what a router sees, and what its layer makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int32, Int64, Integer
from moegeom.geometry.rows import ROWS_IN_CACHE

#: Products of all pairs of rows, less the mean of all.
Gram = Float64[np.ndarray, "points points"]


def centred_gram(rows: Float64[np.ndarray, "points dimension"]) -> Gram:
    """Products of all pairs of rows, less their mean."""
    centred = rows - rows.mean(axis=0) if len(rows) else rows
    return centred @ centred.T


# ----------------------------------------------------------------------------------- second moments
@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of some points about their own mean.

    ``squared_distance`` is |y - mean|^2 of each; ``square_sum`` the sum of the squares of the
    entries of their centred Gram matrix, which is tr S^2 times (points)^2, S the covariance.
    """

    mean: Float64[np.ndarray, "dimension"]
    squared_distance: Float64[np.ndarray, "kept"]
    square_sum: float

    @property
    def participation_ratio(self) -> float:
        r"""Directions that share the variance, :math:`(\mathrm{tr}\,S)^2 / \mathrm{tr}\,S^2`.

        1 to the number of points less 1; nan when all are equal. Source: docs/theory.md B12.
        """
        trace = float(self.squared_distance.sum())
        return trace**2 / self.square_sum if self.square_sum > 0.0 else float("nan")


@dataclass(frozen=True, eq=False)
class BlockedMoments:
    """Sums over pairs of blocks, from which the moments without any block follow in O(points).

    Points are kept less the mean of all of them (``centre``), so that little cancels; ``gram`` are
    the products of all pairs.
    """

    centre: Float64[np.ndarray, "dimension"]
    gram: Gram
    block: Int32[np.ndarray, "points"]
    diagonal: Float64[np.ndarray, "points"]
    row_sums: Float64[np.ndarray, "points blocks"]
    squares: Float64[np.ndarray, "blocks blocks"]
    block_sums: Float64[np.ndarray, "blocks dimension"]

    def of_blocks(self, kept: Bool[np.ndarray, "blocks"]) -> Moments:
        r"""Moments of the points in the kept blocks, about their own mean.

        With G the Gram matrix of those n points and 1 the vector of ones, the centred matrix is
        :math:`G - (1 1^T G + G 1 1^T) / n + (1^T G 1) 1 1^T / n^2`; its diagonal and the sum of its
        squares, :math:`|G|^2 - 2 |G 1|^2 / n + (1^T G 1)^2 / n^2`, need row sums alone.
        """
        inside = kept[self.block]
        n = max(int(inside.sum()), 1)
        rows = self.row_sums[inside][:, kept].sum(axis=1)
        total = float(rows.sum())
        distance = self.diagonal[inside] - 2.0 * rows / n + total / n**2
        square = float(self.squares[np.ix_(kept, kept)].sum())
        square += -2.0 * float(rows @ rows) / n + total**2 / n**2
        mean = self.centre + self.block_sums[kept].sum(axis=0) / n
        return Moments(mean, np.maximum(distance, 0.0), max(square, 0.0))


def blocked_moments(
    points: Float64[np.ndarray, "points dimension"],
    block: Int32[np.ndarray, "points"],
    num_blocks: int,
) -> BlockedMoments:
    """Moments of points in blocks; costs one product points x points^T.

    Oracle in tests: numpy.cov of the points that are left.
    """
    centre = points.mean(axis=0) if len(points) else np.zeros(points.shape[1])
    centred = points - centre
    gram = centred @ centred.T
    member = np.zeros((num_blocks, len(points)))
    member[block, np.arange(len(points))] = 1.0
    return BlockedMoments(
        centre=centre,
        gram=gram,
        block=block,
        diagonal=np.diag(gram).copy(),
        row_sums=gram @ member.T,
        squares=member @ gram**2 @ member.T,
        block_sums=member @ centred,
    )


# ---------------------------------------------------------------------------------------- dimension
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
    gram = centred_gram(rows)
    square = np.diag(gram)
    squared = np.maximum(square[:, None] + square[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(squared, 0.0)
    return squared


def nearest_distances(
    rows: Float64[np.ndarray, "tokens dimension"], count: int, gram: Gram | None = None
) -> Nearest:
    """Distances from each row to its ``count`` nearest others, ascending.

    As :func:`squared_distances` has them where their error is small beside the distances; else the
    nearest candidates are measured again by differences of rows, and all rows are where one that
    was left out could be nearer. ``gram`` is :func:`centred_gram` of the rows, where it is there.
    Relative error at most 1e-10. nan where there are fewer than ``count`` others. Oracle in tests:
    sklearn.neighbors.NearestNeighbors.
    """
    tokens, dimension = rows.shape
    nearest = np.full((tokens, count), np.nan)
    if tokens < 2:
        return nearest
    gram = centred_gram(rows) if gram is None else gram
    length = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    square = np.diag(gram)
    for start in range(0, tokens, ROWS_IN_CACHE):
        there = np.arange(start, min(start + ROWS_IN_CACHE, tokens))
        squared = square[there, None] + square[None, :]
        squared -= 2.0 * gram[start : start + ROWS_IN_CACHE]
        np.maximum(squared, 0.0, out=squared)
        least = (length[there, None] + length[None, :]) ** 2
        least *= (dimension + 8) * 2.0**-53
        np.subtract(squared, least, out=least)
        nearest[there] = _nearest_of(rows, there, squared, least, count)
    return nearest


def _nearest_of(
    rows: Float64[np.ndarray, "tokens dimension"],
    there: Int64[np.ndarray, "some"],
    squared: Float64[np.ndarray, "some tokens"],
    least: Float64[np.ndarray, "some tokens"],
    count: int,
) -> Float64[np.ndarray, "some neighbours"]:
    """Those of some rows, from squared distances and the least that each of them can be."""
    tokens = len(rows)
    nearest = np.full((len(there), count), np.nan)
    least[np.arange(len(there)), there] = np.inf
    wanted, candidates = min(count, tokens - 1), min(count + _SPARE, tokens - 1)
    # the candidates, then the nearest of those left out
    order = _least_columns(least, candidates)
    surely = np.take_along_axis(least, order, axis=1)
    near = np.take_along_axis(squared, order[:, :-1], axis=1)
    is_sharp = (surely[:, :-1] > (1.0 - _SHARP) * near).all(axis=1)
    nearest[is_sharp, :wanted] = np.sqrt(np.sort(near[is_sharp], axis=1)[:, :wanted])
    for row in np.flatnonzero(~is_sharp):
        token = there[row]
        found = _distances(rows, token, order[row, :-1])[:wanted]
        if found[-1] > 0.0 and found[-1] ** 2 > surely[row, -1]:
            found = _distances(rows, token, np.arange(tokens))[1 : wanted + 1]
        nearest[row, :wanted] = found
    return nearest


def _least_columns(
    values: Float64[np.ndarray, "some tokens"], last: int
) -> Int64[np.ndarray, "some least"]:
    """Columns of the ``last`` + 1 least of each row; that of the largest of them comes last.

    No more than half of the groups that columns are cut into have a least value above a limit that
    ``last`` + 1 of them have below: only what is up to the limit is put in order.
    """
    rows, columns = values.shape
    groups = 2 * (last + 1)
    size = columns // groups
    if size < 2:
        return np.argpartition(values, last, axis=1)[:, : last + 1]
    group_least = values[:, : groups * size].reshape(rows, size, groups).min(axis=1)
    limit = np.partition(group_least, last, axis=1)[:, last]
    row, column = np.nonzero(values <= limit[:, None])
    number = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
    found = np.full((rows, int(number.max())), np.inf)
    found[row, place] = values[row, column]
    at = np.zeros(found.shape, np.int64)
    at[row, place] = column
    order = np.argpartition(found, last, axis=1)[:, : last + 1]
    return np.take_along_axis(at, order, axis=1)


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


#: Neighbours of the likelihood estimates.
_NEIGHBOURS = (10, 20)

#: Fewer rows give no estimate worth printing.
_LEAST_ROWS = 100


def dimension_estimates(
    rows: Float64[np.ndarray, "tokens dimension"], gram: Gram | None = None
) -> list[tuple[str, int, float]]:
    """Estimates of the intrinsic dimension: estimator, number of rows, dimension.

    TwoNN and its fitted form, Levina-Bickel with 10 and 20 neighbours; each on all rows, on the
    first half and on the first quarter, which should be in no order. No estimates below 100 rows;
    rows should differ (:func:`distinct_rows`). ``gram`` is :func:`centred_gram` of all rows, where
    it is there. Together they are a range and never one number:
    docs/theory.md B12.
    """
    found: list[tuple[str, int, float]] = []
    for size in (len(rows), len(rows) // 2, len(rows) // 4):
        if size < _LEAST_ROWS:
            continue
        nearest = nearest_distances(
            rows[:size], max(_NEIGHBOURS), gram if size == len(rows) else None
        )
        found += [
            ("two_nn", size, two_nn(nearest)),
            ("two_nn_fitted", size, two_nn_fitted(nearest)),
            *((f"mle_{k}", size, levina_bickel(nearest, k)) for k in _NEIGHBOURS),
        ]
    return found


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


# -------------------------------------------------------------------------------------- affine part
Inputs = Float64[np.ndarray, "tokens hidden"]
Outputs = Float64[np.ndarray, "tokens width"]
Residual = Float64[np.ndarray, "tested width"]
Train = Bool[np.ndarray, "tokens"]

#: Fewer training tokens leave no component to fit.
LEAST_TRAIN = 20

#: Squares below this share of those of the outputs are the rounding of float64.
ROUNDING = 1e-26


def energy_share(part: Outputs, whole: Outputs) -> float:
    """Mean |part|^2 over mean |whole|^2; above 1 when parts cancel; nan for a whole of zeros.

    Source: docs/theory.md B11.
    """
    total = float((whole**2).sum())
    return float((part**2).sum()) / total if total > 0.0 else float("nan")


def mean_energy_share(values: Outputs) -> float:
    """|mean y|^2 / mean |y|^2: 1 for constant outputs, 1/T or so for independent ones; nan for 0.

    Source: docs/theory.md B11; S1 Remark 5.10.
    """
    total = float((values**2).sum(axis=1).mean()) if len(values) else 0.0
    mean = values.mean(axis=0) if len(values) else np.zeros(0)
    return float(mean @ mean) / total if total > 0.0 else float("nan")


def mean_direction_cosine(part: Outputs, whole: Outputs) -> float:
    """Cosine between the mean outputs; nan when one of them is 0. Source: docs/theory.md B11."""
    first, second = part.mean(axis=0), whole.mean(axis=0)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths > 0.0 else float("nan")


def affine_residual(inputs: Inputs, outputs: Outputs, train: Train) -> Residual:
    """What an affine map of the input leaves of the outputs, on tokens that it was not fitted on.

    Least squares on the leading principal components of the training inputs, fewer than a tenth as
    many as training tokens, so that the fit cannot follow noise. One row per token outside
    ``train``. Linear in the outputs: residuals of parts add up to that of their sum. For fewer than
    20 training tokens all nan. Source: docs/theory.md B11; oracle in tests: scikit-learn.
    """
    fitted, tested = inputs[train], inputs[~train]
    if len(fitted) < LEAST_TRAIN:
        return np.full((len(tested), outputs.shape[1]), np.nan)
    centre, mean = fitted.mean(axis=0), outputs[train].mean(axis=0)
    rank = min((len(fitted) - 1) // 10, inputs.shape[1])
    _, _, directions = np.linalg.svd(fitted - centre, full_matrices=False)
    basis = directions[:rank].T
    slope, *_ = np.linalg.lstsq((fitted - centre) @ basis, outputs[train] - mean, rcond=None)
    return outputs[~train] - mean - (tested - centre) @ basis @ slope


def affine_r2(inputs: Inputs, outputs: Outputs, train: Train) -> float:
    """R^2 of an affine map from input to output on tokens that it was not fitted on.

    1 - SSE / SST, SSE of :func:`affine_residual`, SST about the training mean. At most 1; negative
    for a map worse than the mean; nan for fewer than 20 training tokens or no test token, or when
    the test outputs are the training mean up to rounding. Source: docs/theory.md B11; oracle in
    tests: scikit-learn.
    """
    if train.sum() < LEAST_TRAIN:
        return float("nan")
    wrong = affine_residual(inputs, outputs, train)
    return _explained(wrong, outputs[~train] - outputs[train].mean(axis=0), outputs[~train])


def residual_r2(inputs: Inputs, part: Outputs, whole: Outputs, train: Train) -> float:
    """R^2 of a part as prediction of the whole, the affine fit taken out of both, on unseen tokens.

    1 - sum |r_whole - r_part|^2 / sum |r_whole|^2 with the residuals of :func:`affine_residual`.
    With the routed experts as part: 1 when all that is not affine in the input comes from them, 0
    when none of it does (the shared experts hold it); negative when parts cancel. nan for fewer
    than 20 training tokens, no test token, or a whole without residual.

    docs/theory.md B11 asks for R^2 of the routed output after removing the affine fit. Read so, it
    is a figure of its own; R^2 of the routed output as what is explained is 1 - :func:`affine_r2`.
    Oracle in tests: scikit-learn.
    """
    if train.sum() < LEAST_TRAIN:
        return float("nan")
    left = affine_residual(inputs, whole, train)
    wrong = affine_residual(inputs, whole - part, train)
    return _explained(wrong, left, whole[~train])


def _explained(wrong: Residual, spread: Residual, outputs: Residual) -> float:
    """1 - |wrong|^2 / |spread|^2; nan for a spread that is nothing but rounding of the outputs."""
    total = float((spread**2).sum())
    if not total > ROUNDING * float((outputs**2).sum()):
        return float("nan")
    return 1.0 - float((wrong**2).sum()) / total


# ----------------------------------------------------------------------------- principal components
@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """The widest directions of some points: their coordinates, and each one's part of the variance.

    ``axes`` are the directions as unit vectors; the coordinate largest in size is above 0.
    """

    points: Float64[np.ndarray, "points components"]
    axes: Float64[np.ndarray, "components dimension"]
    shares: Float64[np.ndarray, "components"]


def principal_components(
    rows: Float64[np.ndarray, "points dimension"],
    squared: Float64[np.ndarray, "points points"],
    count: int = 2,
) -> PrincipalComponents:
    r"""The widest components of ``rows`` from ``squared``, their :func:`squared_distances`.

    With :math:`J = I - 1 1^T / n` the Gram matrix of the centred rows is :math:`-J D J / 2`; its
    largest eigenvalues :math:`\lambda_i`, in descending order, with vectors u_i give coordinates
    :math:`\sqrt{\lambda_i} u_i` and shares :math:`\lambda_i / \mathrm{tr}`. In units of the rows,
    float64; 0 along components that the rows do not spread in; all 0, with shares nan, where the
    rows are equal. Needs more points than components.
    Source: docs/theory.md B12. Oracle in tests: numpy.linalg.svd of the centred rows.
    """
    from scipy.linalg import eigh

    means = squared.mean(axis=0)
    gram = (means[:, None] + means[None, :] - squared - means.mean()) / 2.0
    trace, points = float(np.trace(gram)), len(gram)
    values, vectors = eigh(gram, subset_by_index=(points - count, points - 1))
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    if not values[0] > 0.0:
        nothing = np.zeros((points, count)), np.zeros((count, rows.shape[1]))
        return PrincipalComponents(*nothing, np.full(count, math.nan))
    sign = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(count)])
    found = vectors * sign * np.sqrt(values)
    axes = found.T @ (rows - rows.mean(axis=0))
    lengths = np.linalg.norm(axes, axis=1, keepdims=True)
    axes = np.divide(axes, lengths, out=np.zeros_like(axes), where=lengths > 0.0)
    return PrincipalComponents(found, axes, values / trace)


def neighbours_of_same_label(
    squared: Float64[np.ndarray, "points points"],
    label: Integer[np.ndarray, "points"],
    count: int,
) -> tuple[float, float]:
    r"""Share of the ``count`` nearest others with the label of a point, and that of chance.

    Chance is :math:`\sum_a n_a (n_a - 1) / (n (n - 1))`, two points drawn without order. Both in
    [0, 1]; nan with fewer than ``count`` others. Oracle in tests: sklearn.neighbors.
    """
    points = len(label)
    if points <= count:
        return math.nan, math.nan
    others = squared.copy()
    np.fill_diagonal(others, np.inf)
    nearest = np.argpartition(others, count - 1, axis=1)[:, :count]
    sizes = np.unique(label, return_counts=True)[1].astype(np.float64)
    chance = float((sizes * (sizes - 1.0)).sum()) / (points * (points - 1.0))
    return float((label[nearest] == label[:, None]).mean()), chance


def silhouette(
    squared: Float64[np.ndarray, "points points"], label: Integer[np.ndarray, "points"]
) -> float:
    r"""Mean over points of :math:`(b - a) / \max(a, b)`.

    a is the mean distance to the others of its label, b the least over other labels of the mean
    distance to theirs; 0 for a point alone with its label. -1 to 1; nan with one label only.
    Source: Rousseeuw 1987. Oracle in tests: sklearn.metrics.silhouette_score.
    """
    names, number = np.unique(label, return_inverse=True)
    if len(names) < 2:
        return math.nan
    member = number[:, None] == np.arange(len(names))
    sums = np.sqrt(squared) @ member
    sizes = member.sum(axis=0)
    own = sizes[number] - 1
    inside = sums[member] / np.maximum(own, 1)
    outside = np.where(member, np.inf, sums / sizes).min(axis=1)
    widest = np.maximum(inside, outside)
    value = np.divide(outside - inside, widest, out=np.zeros_like(widest), where=widest > 0.0)
    return float(np.where(own > 0, value, 0.0).mean())
