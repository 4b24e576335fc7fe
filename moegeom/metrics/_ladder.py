"""Metrics of one quantity of a token: quantiles and a ladder of shares from its histogram."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.metric import Column, Invariance, Metric, RouterFacts, Values
from moegeom.core.text import percent
from moegeom.geometry.histogram import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    quantile,
    share_below,
    share_up_to,
)
from moegeom.geometry.statistics import jackknife_error

#: Small quantiles, because it is the near tokens that flip; by the suffix of their column.
QUANTILES = {"p001": 0.001, "p01": 0.01, "p50": 0.5}

#: Tokens below a quantile that are needed to tell its error.
LEAST_BELOW = 20

#: Columns of the table ``margins``, the same for every quantity.
_LADDER_COLUMNS = (
    Column("quantity", "what the threshold is compared with, such as margin", "", "str"),
    Column("threshold", "step of the ladder, in units of the quantity", "quantity"),
    Column("share_below", "share of tokens strictly below it", formula="ladder", has_se=True),
)

#: Further values of ``layers``: from the reductions, the facts, and the quantiles.
_More = Callable[[Mapping[str, Any], RouterFacts, Mapping[str, Any]], dict[str, Any]]


def ladder_metric(
    name: str,
    text: str,
    quantity: tuple[str, str, str],
    needs: tuple[str, ...],
    ladder: Float64[np.ndarray, "steps"],
    invariances: tuple[Invariance, ...],
    before: tuple[Column, ...] = (),
    after: tuple[Column, ...] = (),
    more: _More = lambda reductions, facts, quantiles: {},
) -> Metric:
    """The metric of ``quantity``: its name, which is that of its formula too, words and unit.

    The first of ``needs`` is the histogram. ``layers`` has a column for each of QUANTILES and one
    for what is known of those that are missing, between the columns ``before`` and ``after``, whose
    values ``more`` gives. Table ``margins`` has exact shares, since the steps of the ladder are
    edges of the histogram.
    """
    column, words, unit = quantity
    histogram = needs[0]

    def finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
        counts = reductions[histogram]
        quantiles = _quantiles(column, counts)
        return {
            "layers": quantiles | more(reductions, facts, quantiles),
            "margins": {
                "quantity": np.full(len(ladder), column),
                "threshold": ladder,
                "share_below": share_below(counts, ladder),
            },
        }

    def without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
        return {"margins": {"share_below": share_below(_stacked(parts, histogram), ladder)}}

    def errors(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Values:
        counts, rest = whole[histogram], _stacked(parts, histogram)
        found = {f"{column}_{s}": _quantile_error(counts, rest, p) for s, p in QUANTILES.items()}
        return {"layers": found}

    quantile_columns = (
        Column(
            f"{column}_{s}", f"{percent(p, 'g')} quantile of {words}", unit, "float", column, True
        )
        for s, p in QUANTILES.items()
    )
    bound = Column(
        f"{column}_bound",
        "bounds of the quantiles that are missing: the histogram ends at 2^-40 and 2^24",
        unit,
        "str",
    )
    return Metric(
        name=name,
        version=1,
        text=text,
        scope="router",
        needs=needs,
        columns={
            "layers": (*before, *quantile_columns, bound, *after),
            "margins": _LADDER_COLUMNS,
        },
        finish=finish,
        invariances=invariances,
        errors=errors,
        without_each=without_each,
    )


def _stacked(parts: Sequence[Mapping[str, Any]], need: str) -> np.ndarray:
    return np.stack([part[need] for part in parts])


def within_ends(value: float) -> float | None:
    """A number that was read off a histogram; None for infinity, which is its open last bin."""
    return value if np.isfinite(value) else None


def _quantiles(name: str, histogram: Int64[np.ndarray, "bins"]) -> dict[str, Any]:
    """The quantiles, nan for one beyond the ends of the histogram, and the bounds of those.

    A number there would be a guess: all that is below 2^-40 is counted together, ties included, and
    so is all from 2^24 on, infinity included.
    """
    values = quantile(histogram, np.array(list(QUANTILES.values()))).tolist()
    found: dict[str, Any] = {}
    bounds = []
    for suffix, value in zip(QUANTILES, values, strict=True):
        is_end = value == 0.0 or np.isinf(value)
        found[f"{name}_{suffix}"] = np.nan if is_end else value
        if is_end:
            end = f"< 2^{LOWEST_EXPONENT}" if value == 0.0 else f">= 2^{HIGHEST_EXPONENT}"
            bounds.append(f"{suffix} {end}")
    return found | {f"{name}_bound": ", ".join(bounds) or None}


def _quantile_error(
    whole: Int64[np.ndarray, "bins"], parts: Int64[np.ndarray, "blocks bins"], p: float
) -> float | None:
    """Standard error of the p-quantile x_p; None with fewer than LEAST_BELOW tokens below it.

    A quantile jumps from one value to the next, so leaving out blocks does not tell its error. What
    they tell is the error s of the share of tokens below x_p; the standard error is
    (x_(p + s) - x_(p - s)) / 2. Source: Woodruff 1952. Oracle in tests: resampled documents.
    """
    (value,) = quantile(whole, np.array([p])).tolist()
    if p * whole.sum() < LEAST_BELOW or not 2.0**LOWEST_EXPONENT <= value < 2.0**HIGHEST_EXPONENT:
        return None
    error = float(jackknife_error(share_up_to(parts, value)))
    low, high = quantile(whole, np.clip([p - error, p + error], 0.0, 1.0)).tolist()
    return (high - low) / 2.0 if np.isfinite(high) else None
