"""What data can tell of parameters: ranks of derivatives, by where the non-linearity stands."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.hmoe.mixture import Mixture
from moegeom.geometry.hmoe.regression import PLACEMENTS, Position

#: Singular values of a Jacobian below this share of the largest count as 0: rounding leaves 1e-12.
FISHER_THRESHOLD = 3e-9


@dataclass(frozen=True)
class Rank:
    """A numerical rank of ``columns``, those that are 0 left out, and how clear it is.

    ``least`` is the smallest singular value that counts and ``rest`` the largest that does not,
    both over the largest of all; nan where there is none.
    """

    rank: int
    columns: int
    least: float
    rest: float


def numerical_rank(columns: Float64[np.ndarray, "samples functions"]) -> Rank:
    """Rank of columns of length 1 by their singular values; columns of zeros are left out.

    0 with nothing left. Source: docs/theory.md C5. Oracle in tests: numpy.linalg.matrix_rank.
    """
    lengths = np.linalg.norm(columns, axis=0)
    kept = columns[:, lengths > 0.0] / lengths[lengths > 0.0]
    if not kept.shape[1]:
        return Rank(0, 0, math.nan, math.nan)
    values = np.linalg.svd(kept, compute_uv=False)
    shares = values / values[0]
    rank = int((shares > FISHER_THRESHOLD).sum())
    rest = float(shares[rank]) if rank < len(shares) else math.nan
    return Rank(rank, kept.shape[1], float(shares[rank - 1]), rest)


def gauge_dimensions(mixture: Mixture, position: Position) -> int:
    """Directions in which no function moves whatever the experts: scores of a head that all grow.

    H d (d + 1) / 2; 0 where an activation stands inside the score. Source: docs/theory.md C4.
    Oracle in tests: ranks with one expert vector for all.
    """
    if PLACEMENTS[position].on_score:
        return 0
    heads, _, dims, _ = mixture.scores.shape
    return heads * dims * (dims + 1) // 2


def cramer_rao_sd(
    derivatives: Float64[np.ndarray, "samples parameters"],
    noise: float,
    size: int,
    flat: int,
) -> Float64[np.ndarray, "parameters"]:
    r"""The least standard deviation of each parameter that ``size`` samples allow.

    The root of the diagonal of :math:`\nu^2 (n I)^+`, I the mean of the outer products of the rows;
    the ``flat`` directions with the smallest singular values are held fixed. What an unbiased
    estimator cannot beat. Unit of the parameter; ``noise`` is a standard deviation (F-25).

    Source: docs/theory.md C6. Oracle in tests: the covariance that scipy.optimize.curve_fit
    estimates.
    """
    _, values, vectors = np.linalg.svd(derivatives / math.sqrt(len(derivatives)), False)
    kept = len(values) - flat
    scaled = vectors[:kept] / values[:kept, None]
    return noise / math.sqrt(size) * np.linalg.norm(scaled, axis=0)
