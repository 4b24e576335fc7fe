"""Rows of a router that are as its config draws them, among rows that are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64

#: Fewer rows are no group: single ones may have that length by chance.
_LEAST_ROWS = 4

#: With fewer columns a length tells nothing, and with fewer numbers a spread: of so many it is
#: known to one per cent.
_LEAST_COLUMNS, _LEAST_NUMBERS = 128, 4096

#: Directions that trained rows share, as many as are looked at.
_DIRECTIONS = 16

#: Standard errors within which figures of drawn numbers lie.
_ERRORS = 4.0


def drawn_row_facts(routers: Iterable[Router], sigma: float) -> list[dict[str, Any]]:
    """Facts for ``run.json``: by router the rows, some and not all, that are as drawn with
    ``sigma``. Rows behind a projection are no drawn numbers, and are left out.
    """
    facts = []
    for router in routers:
        with np.errstate(over="ignore"):
            norms = np.linalg.norm(router.weight, axis=1)
        count = int(_has_drawn_length(norms, sigma, router.hidden_size).sum())
        if router.projection is None and _LEAST_ROWS <= count < len(norms):
            rows = drawn_rows(router.weight.astype(np.float64), sigma)
            if rows:
                facts.append({"router": router.name, "num_rows": len(norms), "rows": rows})
    return facts


def drawn_rows(weight: Float64[np.ndarray, "experts hidden"], sigma: float) -> list[int]:
    r"""Rows that are as drawn from :math:`N(0, \sigma^2)`; none unless all of them together are.

    A row is one of them when its squared length is within four standard errors of
    :math:`D \sigma^2`, the kurtosis of its entries of 3, and its share in the r leading directions
    of rows of other lengths of :math:`r/D`, that of an independent row. Together they are, when
    the spread, mean and kurtosis of all entries, the spread of the lengths and the mean squared
    cosine, :math:`1/D` for independent rows, are too.
    """
    hidden = weight.shape[1]
    norms = np.linalg.norm(weight, axis=1)
    is_drawn = _has_drawn_length(norms, sigma, hidden)
    is_drawn &= np.abs(_kurtosis(weight)) <= _ERRORS * math.sqrt(24.0 / hidden)
    others = weight[~is_drawn & np.isfinite(norms)]
    if hidden < _LEAST_COLUMNS or not len(others):
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        is_drawn &= _alignment(weight / norms[:, None], others) <= _ERRORS
    if is_drawn.sum() < max(_LEAST_ROWS, _LEAST_NUMBERS / hidden):
        return []
    errors = _errors(weight[is_drawn] / sigma)
    return [] if max(map(abs, errors)) > _ERRORS else np.flatnonzero(is_drawn).tolist()


def _has_drawn_length(
    norms: Float[np.ndarray, "experts"], sigma: float, hidden: int
) -> Bool[np.ndarray, "experts"]:
    """Squared length over sigma squared: chi-squared of ``hidden`` degrees of freedom."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs((norms / sigma) ** 2 - hidden) <= _ERRORS * math.sqrt(2 * hidden))


def _alignment(
    unit: Float64[np.ndarray, "experts hidden"], others: Float64[np.ndarray, "others hidden"]
) -> Float64[np.ndarray, "experts"]:
    """How far the share of rows in the leading directions of others is above r/D, in errors."""
    hidden = unit.shape[1]
    count = max(1, min(len(others) // 2, _DIRECTIONS))
    _, vectors = np.linalg.eigh(others @ others.T)
    leading, _ = np.linalg.qr(others.T @ vectors[:, -count:])
    shares = ((unit @ leading) ** 2).sum(axis=1)
    return (shares * hidden - count) / math.sqrt(2.0 * count)


def _kurtosis(rows: Float64[np.ndarray, "rows hidden"]) -> Float64[np.ndarray, "rows"]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        squares = rows**2
        return (squares**2).mean(axis=1) / squares.mean(axis=1) ** 2 - 3.0


def _errors(rows: Float64[np.ndarray, "rows hidden"]) -> Iterator[float]:
    """Distances of figures of standard normal rows from what they should be, in their errors."""
    count, hidden = rows.shape
    numbers = rows.size
    lengths = (rows**2).sum(axis=1)
    yield (rows.std() - 1.0) * math.sqrt(2.0 * numbers)
    yield rows.mean() * math.sqrt(numbers)
    yield float(_kurtosis(rows.reshape(1, -1))[0]) * math.sqrt(numbers / 24.0)
    yield (((lengths - hidden) ** 2).mean() / (2.0 * hidden) - 1.0) * math.sqrt(count / 2.0)
    unit = rows / np.sqrt(lengths)[:, None]
    off = (unit @ unit.T)[np.triu_indices(count, 1)]
    yield ((off**2).mean() * hidden - 1.0) * math.sqrt(len(off) / 2.0)
