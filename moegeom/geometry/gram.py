"""Orthogonality of router rows, with what random rows and the best possible rows would show."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64


def cosines(gram: Float64[np.ndarray, "rows rows"]) -> Float64[np.ndarray, "rows rows"]:
    """Cosines between rows from their Gram matrix; nan where a row is zero. Clipped to [-1, 1]."""
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(gram / (lengths[:, None] * lengths[None, :]), -1.0, 1.0)


def gram_score(cosine: Float64[np.ndarray, "rows rows"]) -> float:
    r""":math:`1 - \lVert G - I \rVert_F / \sqrt{E (E - 1)}`, that is 1 - rms of the cosines.

    1 for orthonormal rows, 0 for rows on one line. Zero rows (nan) are left out; nan with fewer
    than two others. Source: THEORY.md D1 (003 A.3.5, whose metric is undefined, F-27).
    """
    off = _pairs(cosine)
    return 1.0 - float(np.sqrt(np.mean(off**2))) if off.size else float("nan")


def mean_absolute_cosine(cosine: Float64[np.ndarray, "rows rows"]) -> float:
    """Mean of |cos| over pairs of rows; nan with fewer than two rows. Source: THEORY.md D1."""
    off = _pairs(cosine)
    return float(np.mean(np.abs(off))) if off.size else float("nan")


def random_gram_score(num_rows: int, dimension: int, is_centred: bool) -> float:
    r"""Score of independent Gaussian rows, to first order in 1 / D.

    :math:`1 - \sqrt{\rho^2 + (1 - \rho^2)(1 - 2 \rho^2) / D}` with :math:`\rho = 0`, that is
    :math:`1 - 1/\sqrt{D}`, for raw rows and :math:`\rho = -1/(E-1)`, the correlation that the
    projector I - 11'/E gives, for centred ones. nan with fewer than two rows.
    Source: THEORY.md D1; the second moment of a correlation. Oracle in tests: Monte Carlo.
    """
    if num_rows < 2:
        return float("nan")
    square = 1.0 / (num_rows - 1.0) ** 2 if is_centred else 0.0
    return 1.0 - float(np.sqrt(square + (1.0 - square) * (1.0 - 2.0 * square) / dimension))


def random_gram_score_sd(num_rows: int, dimension: int, is_centred: bool = False) -> float:
    r"""Standard deviation of the score of Gaussian rows, for P pairs.

    :math:`\sqrt{2 / P} / (2 D r)` with r the rms cosine, one less :func:`random_gram_score`:
    :math:`1/\sqrt{2 D P}` for raw rows. Each squared cosine has variance 2/D^2 and pairs are nearly
    independent; for centred rows the common cosine cancels to first order. A rough figure for few
    dimensions and many rows, twice too large for three centred rows. nan with fewer than two rows.
    Source: THEORY.md D1 (E = 8, D = 128: .0118, Monte Carlo .0113).
    """
    pairs = num_rows * (num_rows - 1) / 2.0
    if not pairs:
        return float("nan")
    rms = 1.0 - random_gram_score(num_rows, dimension, is_centred)
    return float(np.sqrt(2.0 / pairs) / (2.0 * dimension * rms))


def best_gram_score(num_rows: int, dimension: int, is_centred: bool) -> float:
    r"""The largest score possible: :math:`1 - \sqrt{(E - r) / (r (E - 1))}`, the Welch bound.

    r is the largest rank possible: min(E, D), one less than E for centred rows.
    Source: THEORY.md D1 (E = 4, D = 3: .6667).
    """
    rank = min(num_rows - is_centred, dimension)
    if num_rows < 2 or rank < 1:
        return float("nan")
    return 1.0 - float(np.sqrt(max(num_rows - rank, 0) / (rank * (num_rows - 1.0))))


def _pairs(cosine: Float64[np.ndarray, "rows rows"]) -> Float64[np.ndarray, "pairs"]:
    off = cosine[np.triu_indices(len(cosine), 1)]
    return off[~np.isnan(off)]
