"""One factor for all rows, and one for each column."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.router import Rule
from moegeom.geometry.description import number_bits
from moegeom.geometry.rows import (
    column_factors,
    common_factor,
    size,
    spread_factor,
    usual_factor,
)
from moegeom.studies.changes.edit import (
    Edit,
    RowFit,
    always,
    error_if_exact,
    says,
)
from moegeom.studies.changes.row_pair import RowPair

#: With fewer rows a factor for each column explains much by chance.
_LEAST_ROWS_FOR_COLUMNS = 4


def _common(pair: RowPair, sign: float) -> Iterator[RowFit]:
    same = not pair.is_projected and _has_same_weight(pair)
    spread = sign * spread_factor(pair.a, pair.b)
    for factor in (common_factor(*pair.centred), usual_factor(pair.a, pair.b), spread):
        if factor * sign <= 0.0:
            continue
        rows = factor * pair.a
        finest = max(size(pair.left_of(rows)), float(pair.finest.max()))
        yield RowFit(
            rows,
            number_bits(1, pair.a.size, size(pair.left), finest),
            kind="" if round(factor, 3) == -1.0 else f"by {abs(factor):.3g}",
            detail="by the gain; the weight is bit for bit the same" if same else "",
            evidence={"factor": factor},
            steps=max(1.0, abs(factor)),
            allows_subset=True,
        )


def _has_same_weight(pair: RowPair) -> bool:
    first, second = pair.routers
    return np.array_equal(first.weight[pair.place], second.weight)


def _scaled_meaning(rule: Rule) -> str:
    if rule.is_affine and not rule.has_logit_bias and not rule.has_selection_bias:
        return "a common factor changes no choice; routing weights change with it (temperature)."
    return "beside a bias, or with groups, a common factor changes choices."


SCALED = Edit(
    "scaled",
    "scaled {kind}",
    _scaled_meaning,
    always("failed"),
    lambda pair: _common(pair, 1.0),
    gate=error_if_exact,
)

NEGATED = Edit(
    "negated",
    "negated {kind}",
    says("every preference is turned round."),
    always("failed"),
    lambda pair: _common(pair, -1.0),
    gate=lambda change: "error",
)


def _columns(pair: RowPair) -> Iterator[RowFit]:
    a, b = pair.centred
    if pair.is_projected or len(a) < _LEAST_ROWS_FOR_COLUMNS or not (a.any() and b.any()):
        return
    factors = column_factors(a, b)
    rows = pair.a * factors
    left = size(pair.left_of(rows))
    # without a common shift the rows with their means tell the factors better
    whole = pair.a * column_factors(pair.a, pair.b)
    left_of_whole = size(pair.b - whole)
    if left_of_whole <= 2.0 * left + float(pair.finest.max()):
        rows, factors, left = whole, column_factors(pair.a, pair.b), left_of_whole
    low, high = np.percentile(factors, [5, 95]).tolist()
    finest = max(left, float(pair.finest.max()))
    yield RowFit(
        rows,
        number_bits(len(factors), pair.a.size, size(pair.left), finest),
        detail=f"factors {low:.3g} to {high:.3g} (5 % to 95 % of the columns)",
        size=pair.change_size,
        evidence={"low": low, "high": high},
    )


COLUMNS_SCALED = Edit(
    "columns scaled",
    "columns scaled, rows moved by {size}",
    says("the effective router weighs its inputs differently: choices change."),
    always("failed"),
    _columns,
)
