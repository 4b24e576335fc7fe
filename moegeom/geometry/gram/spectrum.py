"""Rank, condition and effective rank of a set of rows, from the spectrum of their Gram matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

#: Singular values below this share of the largest count as zero: squares in float64 resolve 1.5e-8.
RANK_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Spectrum:
    """Figures of the singular values; ``condition`` is inf when the rank is not full.

    ``effective_rank`` is exp of the entropy of the singular values as shares of their sum, between
    1 and the rank. nan throughout when every value is 0.
    """

    rank: int
    largest_possible_rank: int
    condition: float
    effective_rank: float


def row_spectrum(
    gram: Float64[np.ndarray, "rows rows"], dimension: int, is_centred: bool
) -> Spectrum:
    r"""Spectrum of rows in ``dimension`` dimensions with Gram matrix ``gram``.

    Singular values are roots of the eigenvalues. ``condition`` is the largest over the r-th, r =
    min(E, D), or min(E - 1, D) for centred rows, whose sum is zero. Effective rank: Roy and
    Vetterli 2007. Oracle in tests: numpy.linalg.svd.
    """
    rank = max(min(len(gram) - is_centred, dimension), 0)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)) if len(gram) else np.empty(0)
    if not rank or values[0] == 0.0:
        return Spectrum(0, rank, float("nan"), float("nan"))
    kept = values[:rank]
    nonzero = kept[kept > RANK_TOLERANCE * kept[0]]
    share = nonzero / nonzero.sum()
    full = len(nonzero) == rank
    return Spectrum(
        rank=len(nonzero),
        largest_possible_rank=rank,
        condition=float(kept[0] / kept[-1]) if full else float("inf"),
        effective_rank=float(np.exp(-(share * np.log(share)).sum())),
    )
