"""How many directions of the data an expert can tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float32, Float64, Integer
from moegeom.geometry.gram import row_spectrum


@dataclass(frozen=True, eq=False)
class DataDirections:
    """Orthonormal ``axes`` of the data and the standard deviation along each, descending."""

    axes: Float64[np.ndarray, "hidden dims"]
    deviations: Float64[np.ndarray, "dims"]


def data_directions(
    rows: Float[np.ndarray, "tokens hidden"], share: float = 0.99, most: int | None = None
) -> DataDirections:
    """The least principal directions that hold a ``share`` of the variance, ``most`` of them.

    None of them where all rows are equal. Oracle in tests: covariances that are known.
    """
    centred = rows.astype(np.float64)
    centred = centred - centred.mean(axis=0)
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    variances = values**2 / max(len(rows), 1)
    total = variances.sum()
    if not total > 0.0:
        return DataDirections(np.zeros((rows.shape[1], 0)), np.zeros(0))
    number = int(np.searchsorted(np.cumsum(variances), share * total) + 1)
    number = min(number, len(variances) if most is None else most)
    return DataDirections(axes[:number].T, np.sqrt(variances[:number]))


def ranks_on_data(
    weight: Float[np.ndarray, "neurons hidden"], data: Sequence[DataDirections]
) -> list[tuple[int, float]]:
    r"""Rank and effective rank of :math:`A V \mathrm{diag}(\sigma)`, A the rows of an expert.

    For each of ``data``, V its directions and :math:`\sigma` their deviations. The rank counts
    singular values s above 1e-7 of the largest, the effective rank is :math:`\exp(-\sum p \ln p)`,
    :math:`p = s / \sum s`: at most the rank, and equal to it where all are equal. Both 0 where the
    rows see nothing of the data. Source: Roy and Vetterli 2007. Oracle in tests: diagonal cases.
    """
    ends = np.cumsum([0, *(len(one.deviations) for one in data)])
    axes = np.hstack([one.axes * one.deviations for one in data])
    seen = weight.astype(np.float64) @ axes
    return [_rank(seen[:, start:stop]) for start, stop in itertools.pairwise(ends)]


def _rank(seen: Float64[np.ndarray, "neurons dims"]) -> tuple[int, float]:
    found = row_spectrum(seen.T @ seen, len(seen), False)
    return found.rank, found.effective_rank if found.rank else 0.0


# ------------------------------------------------------------------------------------------ overlap
def mean_pair_cosine(
    outputs: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Mean cosine of two outputs of one token, over its pairs.

    Of m outputs with unit vectors u: :math:`(|\sum u|^2 - m) / (m (m - 1))`, -1/(m-1) to 1. Outputs
    of 0 have no direction and are left out; nan where fewer than two are left.
    Oracle in tests: sklearn.metrics.pairwise.cosine_similarity.
    """
    found = np.full(len(outputs), np.nan)
    for token, rows in enumerate(outputs):
        rows = rows.astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1))
        rows = rows[length > 0.0] / length[length > 0.0, None]
        if (m := len(rows)) > 1:
            found[token] = (float((rows.sum(axis=0) ** 2).sum()) - m) / (m * (m - 1))
    return found


def centred_by_expert(
    outputs: Float32[np.ndarray, "tokens slots width"],
    experts: Integer[np.ndarray, "tokens slots"],
) -> Float32[np.ndarray, "tokens slots width"]:
    """Outputs less the mean output of the same expert over its tokens; 0 for its only one.

    Oracle in tests: a loop over experts.
    """
    left = np.zeros_like(outputs)
    for expert in np.unique(experts):
        token, slot = np.nonzero(experts == expert)
        rows = outputs[token, slot]
        if len(rows) > 1:
            left[token, slot] = rows - rows.mean(axis=0, dtype=np.float64)
    return left


def adding_up(
    contributions: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Length of the sum over the sum of the lengths, :math:`|\sum c_i| / \sum |c_i|`.

    1 where all point the same way, :math:`k^{-1/2}` for k orthogonal ones of one length, 0 where
    they cancel; nan where all are 0. Oracle in tests: vectors worked out by hand.
    """
    total = np.linalg.norm(contributions.sum(axis=1, dtype=np.float64), axis=1)
    lengths = np.linalg.norm(contributions.astype(np.float64), axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / lengths
