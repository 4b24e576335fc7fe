"""The effective router W diag(g), centred: what top-k routing depends on, free of gauges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

#: Longer rows are left out: float64 holds no fourth power of them.
_LONGEST = 1e70


@dataclass(frozen=True, eq=False)
class EffectiveRows:
    """Rows of the effective router, and their Gram matrix after centring.

    ``centred`` are the rows less their mean, ``mean``; adding one vector to every row leaves them
    alone, and so does moving a factor between the gain and the weight. ``lengths`` are those of the
    rows before centring. Rows that are not finite are left out of everything; ``finite`` says which
    remain.
    """

    centred: Float64[np.ndarray, "kept hidden"]
    mean: Float64[np.ndarray, "hidden"]
    gram: Float64[np.ndarray, "kept kept"]
    lengths: Float64[np.ndarray, "kept"]
    finite: Bool[np.ndarray, "experts"]

    @property
    def squared_norms(self) -> Float64[np.ndarray, "kept"]:
        """Squared lengths of the centred rows."""
        return np.diag(self.gram)


def effective_rows(
    weight: Float[np.ndarray, "experts hidden"],
    gain: Float[np.ndarray, "hidden"] | None,
) -> EffectiveRows:
    r"""Centred rows of :math:`W \operatorname{diag}(g)` and their Gram matrix, in float64.

    With a softmax or any affine rule routing depends on the centred rows alone: a vector added to
    every row adds one number to every logit. A column whose gain is not finite makes every row not
    finite; a row longer than 1e70 counts as not finite. Equal rows give zeros, not rounding.
    Source: docs/theory.md E3.
    """
    scale = np.ones(weight.shape[1]) if gain is None else gain.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij,j->i", weight, weight, scale**2, dtype=np.float64))
        finite = np.asarray(lengths <= _LONGEST)
    kept = weight if finite.all() else weight[finite]
    if not len(kept):
        empty = np.zeros((0, weight.shape[1]))
        return EffectiveRows(empty, np.zeros(weight.shape[1]), empty @ empty.T, lengths[:0], finite)
    # the mean of n equal numbers need not be that number: first make equal rows exactly 0
    rows = np.subtract(kept, kept[0], dtype=np.float64)
    rows *= scale
    rest = rows.mean(axis=0)
    rows -= rest
    mean = kept[0] * scale + rest
    return EffectiveRows(rows, mean, rows @ rows.T, lengths[finite], finite)
