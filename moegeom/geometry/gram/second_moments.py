"""Second moments of a sample of points, ready for leaving out one block after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32


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

    Points are kept less the mean of all of them (``centre``), so that little cancels.
    """

    centre: Float64[np.ndarray, "dimension"]
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
        block=block,
        diagonal=np.diag(gram).copy(),
        row_sums=gram @ member.T,
        squares=member @ gram**2 @ member.T,
        block_sums=member @ centred,
    )
