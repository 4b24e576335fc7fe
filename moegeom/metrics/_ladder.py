"""Quantiles and a ladder of shares from a histogram, for whatever quantity was counted."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.metric import Column
from moegeom.geometry.float_bits import quantile, share_below

#: Small quantiles, because it is the near tokens that switch; by the suffix of their column.
QUANTILES = {"p001": 0.001, "p01": 0.01, "p50": 0.5}

#: Columns of the table ``margins``, the same for every quantity.
LADDER_COLUMNS = (
    Column("quantity", "margin or boundary_distance", "", "str"),
    Column("threshold", "step of the ladder, in units of the quantity", "quantity"),
    Column("share_below", "share of tokens strictly below it", formula="ladder", has_se=True),
)


def quantile_columns(name: str, text: str, unit: str, formula: str) -> tuple[Column, ...]:
    """A column for each of QUANTILES."""
    return tuple(
        Column(
            f"{name}_{suffix}", f"{100 * p:g} % quantile of {text}", unit, "float", formula, True
        )
        for suffix, p in QUANTILES.items()
    )


def quantile_values(name: str, histogram: Int64[np.ndarray, "bins"]) -> dict[str, float]:
    """Values of :func:`quantile_columns`."""
    values = quantile(histogram, np.array(list(QUANTILES.values()))).tolist()
    return {f"{name}_{suffix}": value for suffix, value in zip(QUANTILES, values, strict=True)}


def ladder_values(
    name: str, histogram: Int64[np.ndarray, "bins"], ladder: Float64[np.ndarray, "steps"]
) -> dict[str, np.ndarray]:
    """Values of LADDER_COLUMNS; exact shares, since the steps are edges of the histogram."""
    return {
        "quantity": np.full(len(ladder), name),
        "threshold": ladder,
        "share_below": share_below(histogram, ladder),
    }
