"""Geometry of the effective router: the rows times the gain of the norm, less their mean.

Top-k routing of a softmax or affine rule depends on nothing else: one vector added to all rows
changes no choice, and a factor moved between gain and weight changes no logit. The Gram score is
one minus the root-mean-square cosine between rows, 1 for orthogonal rows; beside it stand what
random rows of the shape show, the largest value possible (Welch), and the distance from chance in
standard deviations. The score of the raw rows is shown as raw: a common shift moves it at will.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.gram import (
    EffectiveRows,
    best_gram_score,
    cosines,
    gram_score,
    mean_absolute_cosine,
    random_gram_score,
    random_gram_score_sd,
    row_spectrum,
)
from moegeom.geometry.rows import ROWS_IN_CACHE


def _finish(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    rows: EffectiveRows = quantities["effective_rows"]
    kept, hidden = rows.centred.shape
    cosine = cosines(rows.gram)
    score = gram_score(cosine)
    chance = random_gram_score(kept, hidden, is_centred=True)
    spread = random_gram_score_sd(kept, hidden, is_centred=True)
    spectrum = row_spectrum(rows.gram, hidden, is_centred=True)
    norms = np.sqrt(np.maximum(rows.squared_norms, 0.0))
    median = float(np.median(norms)) if kept else 0.0
    nearest, closeness = _nearest(cosine)
    return {
        "layers": {
            "gram_score_raw": gram_score(_raw_cosines(facts.router.weight[rows.finite])),
            "gram_score_centred": score,
            "gram_score_random": chance,
            "gram_score_best": best_gram_score(kept, hidden, is_centred=True),
            # rows that cannot but lie on one line have no spread
            "gram_score_z": (score - chance) / spread if spread else None,
            "mean_abs_cosine_centred": mean_absolute_cosine(cosine),
            "max_cosine_centred": None
            if np.isnan(closeness).all()
            else float(np.nanmax(closeness)),
            "row_rank": spectrum.rank,
            "row_rank_possible": spectrum.largest_possible_rank,
            "row_condition": spectrum.condition,
            "effective_rank": spectrum.effective_rank,
            "centred_norm_median": median if kept else None,
            "centred_norm_max_over_median": float(norms.max()) / median if median else None,
            "centred_norm_min_over_median": float(norms.min()) / median if median else None,
        },
        "experts": {
            "expert": np.arange(len(rows.finite)),
            "effective_row_norm": _spread(rows.lengths, rows),
            "centred_row_norm": _spread(norms, rows),
            "nearest_expert": _numbers(nearest, rows),
            "nearest_cosine": _spread(closeness, rows),
            "row_kurtosis": _spread(_kurtosis(rows.centred), rows),
        },
    }


#: Entries of rows that are no larger or smaller than two to this have no product beyond float32,
#: and none below it that counts.
_SAFE_EXPONENT = 30


def _raw_cosines(weight: np.ndarray) -> Float64[np.ndarray, "rows rows"]:
    """Of the rows as stored; float32 products are exact enough for a figure shown as raw.

    A power of two takes each row to the size of 1 before where a square could leave the format.
    """
    largest = np.maximum(weight.max(axis=1, initial=0.0), -weight.min(axis=1, initial=0.0))
    _, exponent = np.frexp(largest)
    is_safe = np.abs(exponent).max(initial=0) <= _SAFE_EXPONENT
    rows = weight if is_safe else np.ldexp(weight, -exponent[:, None])
    return cosines((rows @ rows.T).astype(np.float64))


def _nearest(
    cosine: Float64[np.ndarray, "rows rows"],
) -> tuple[np.ndarray, Float64[np.ndarray, "rows"]]:
    """The row with the largest cosine to each row, and that cosine."""
    others = np.where(np.isnan(cosine), -np.inf, cosine)
    np.fill_diagonal(others, -np.inf)
    if len(others) < 2:
        return np.full(len(others), -1), np.full(len(others), np.nan)
    nearest, largest = others.argmax(axis=1), others.max(axis=1)
    known = np.isfinite(largest)
    return np.where(known, nearest, -1), np.where(known, largest, np.nan)


def _kurtosis(rows: Float64[np.ndarray, "rows hidden"]) -> Float64[np.ndarray, "rows"]:
    """Fourth moment over the squared second; 3 for Gaussian entries, nan for a zero row."""
    second, fourth = np.empty(len(rows)), np.empty(len(rows))
    for start in range(0, len(rows), ROWS_IN_CACHE):
        there = slice(start, start + ROWS_IN_CACHE)
        squares = rows[there] ** 2
        second[there] = squares.mean(axis=1)
        fourth[there] = np.einsum("ij,ij->i", squares, squares) / rows.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return fourth / second**2


def _spread(values: np.ndarray, rows: EffectiveRows) -> np.ndarray:
    """Values of the finite rows, nan for the others."""
    everywhere = np.full(len(rows.finite), np.nan)
    everywhere[rows.finite] = values
    return everywhere


def _numbers(nearest: np.ndarray, rows: EffectiveRows) -> np.ndarray:
    """Indices among the finite rows as expert numbers; -1 for the others."""
    everywhere = np.full(len(rows.finite), -1)
    experts = np.flatnonzero(rows.finite)
    everywhere[rows.finite] = np.where(nearest >= 0, experts[nearest], -1)
    return everywhere


METRIC = Metric(
    name="effective_router",
    version=1,
    text="Geometry of the rows of W diag(g), g the gain of the norm in front, less their mean.",
    scope="weights",
    needs=("effective_rows",),
    columns={
        "layers": (
            Column(
                "gram_score_raw",
                "1 - rms cosine of the rows as stored: a common shift or a gain changes it",
                formula="gram_score",
                changes_with=("common_row_shift", "gain_folding"),
            ),
            Column(
                "gram_score_centred",
                "1 - rms cosine of the centred effective rows",
                formula="gram_score",
            ),
            Column(
                "gram_score_random",
                "what centred random rows of this shape would show",
                formula="gram_score",
            ),
            Column(
                "gram_score_best",
                "the largest score that centred rows of this shape can have (Welch)",
                formula="gram_score",
            ),
            Column(
                "gram_score_z",
                "score less the random score, in standard deviations of random rows",
                "sigmas",
                formula="gram_score",
            ),
            Column(
                "mean_abs_cosine_centred",
                "mean |cosine| over pairs of centred effective rows",
                formula="gram_score",
            ),
            Column(
                "max_cosine_centred",
                "largest cosine between two centred effective rows",
                formula="nearest_cosine",
            ),
            Column("row_rank", "rank of the centred effective rows", "", "int", "row_spectrum"),
            Column(
                "row_rank_possible",
                "largest rank that centred rows of this shape can have",
                "",
                "int",
                "row_spectrum",
            ),
            Column(
                "row_condition",
                "largest over smallest singular value of the centred effective rows",
                formula="row_spectrum",
            ),
            Column(
                "effective_rank",
                "exp entropy of the singular values of the centred effective rows",
                formula="row_spectrum",
            ),
            Column(
                "centred_norm_median",
                "median length of a centred effective row",
                "weight",
                changes_with=("positive_scaling",),
            ),
            Column("centred_norm_max_over_median", "longest of them over the median"),
            Column("centred_norm_min_over_median", "shortest of them over the median"),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column(
                "effective_row_norm",
                "length of the row times the gain, not centred",
                "weight",
                changes_with=("common_row_shift", "positive_scaling"),
            ),
            Column(
                "centred_row_norm",
                "length of the centred effective row",
                "weight",
                changes_with=("positive_scaling",),
            ),
            Column(
                "nearest_expert",
                "expert whose centred effective row has the largest cosine, or -1",
                "expert",
                "int",
                "nearest_cosine",
            ),
            Column("nearest_cosine", "that cosine", formula="nearest_cosine"),
            Column("row_kurtosis", "fourth moment over squared second of the row's entries"),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"),
)
