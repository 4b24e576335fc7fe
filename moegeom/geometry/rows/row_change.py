"""What turns the rows of one router into those of another: factors, a common vector, a rotation."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.gram.gram import cosines

#: With fewer rows the Gram matrix has too few entries to tell a rotation from chance.
LEAST_ROWS_FOR_GRAM = 3


def size(values: Float64[np.ndarray, "rows dimension"]) -> float:
    """Frobenius norm; 0 for an empty matrix."""
    return float(np.linalg.norm(values))


def common_factor(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    r""":math:`\langle a, b \rangle / \langle a, a \rangle`, the s that minimises :math:`|b - sa|`.

    1 when a is 0.
    """
    square = float(np.vdot(a, a))
    return float(np.vdot(a, b)) / square if square > 0.0 else 1.0


def column_factors(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, "dimension"]:
    r"""The same for each column: :math:`s_j = a_{\cdot j} \cdot b_{\cdot j} / |a_{\cdot j}|^2`.

    1 where a column of a is 0. With r rows of noise the factors take away a share 1 / r of its
    square, so that they explain nothing by chance from four rows on.
    """
    square = np.einsum("ij,ij->j", a, a)
    products = np.einsum("ij,ij->j", a, b)
    return np.divide(products, square, out=np.ones_like(square), where=square > 0.0)


def row_changes(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, "rows"]:
    r""":math:`|b_i - a_i| / |a_i|` of each row; infinite for a row that was 0 and is not."""
    moved, lengths = (np.linalg.norm(rows, axis=1) for rows in (b - a, a))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(moved > 0.0, moved / lengths, 0.0)


def own_cosines(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> Float64[np.ndarray, "rows"]:
    """Cosine between each row and the same row of the other; nan where one is 0."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.einsum("ij,ij->i", a, b) / lengths, -1.0, 1.0)


def likeness_z(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    r"""Mean cosine of equal rows less that of different rows, in standard errors of the first.

    :math:`(\bar c_{ii} - \bar c_{ij}) \sqrt{E} / s` with s the standard deviation of the cosines
    between different rows, at least that of random directions, :math:`1 / \sqrt{D}`. About a
    standard normal for two unrelated routers; nan when no cosine is defined.
    """
    both = np.concatenate([a, b])
    across = cosines(both @ both.T)[: len(a), len(a) :]
    own = np.diag(across)
    own = own[~np.isnan(own)]
    others = across[~np.eye(len(a), dtype=bool)]
    others = others[~np.isnan(others)]
    if not own.size:
        return float("nan")
    spread = max(float(others.std()) if others.size else 0.0, 1.0 / np.sqrt(a.shape[1]))
    centre = float(others.mean()) if others.size else 0.0
    return (float(own.mean()) - centre) * np.sqrt(own.size) / spread


def gram_noise(
    a: Float64[np.ndarray, "rows dimension"], b: Float64[np.ndarray, "rows dimension"]
) -> float:
    r"""Relative noise of the rows that would change their Gram matrix as much as it changed.

    Noise of relative size r in random directions changes :math:`a_i \cdot a_j / (|a_i| |a_j|)` by
    :math:`r \sqrt{2 / D}` rms, and by :math:`\sqrt 2` times as much where i = j; this is the rms of
    the changes in those units, more than r when r is not small (noise lengthens rows). 0 for a
    rotation, :math:`A A^\top = B B^\top`, of the order of 1 for unrelated rows of equal lengths.
    Zero rows are left out; nan with fewer than LEAST_ROWS_FOR_GRAM others. Oracle in tests:
    orthogonal matrices, Monte Carlo.
    """
    lengths = np.linalg.norm(a, axis=1)
    kept = lengths > 0.0
    if kept.sum() < LEAST_ROWS_FOR_GRAM:
        return float("nan")
    a, b, lengths = a[kept], b[kept], lengths[kept]
    changes = (b @ b.T - a @ a.T) / (lengths[:, None] * lengths[None, :])
    changes *= np.sqrt(a.shape[1] / 2.0)
    np.fill_diagonal(changes, np.diag(changes) / np.sqrt(2.0))
    entries = changes[np.triu_indices(len(changes))]
    return float(np.sqrt(np.mean(entries**2)))
