"""Rows: as stored, of the effective router, what they can reach, and the digits they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.metric import NUM_PROJECTIONS, Column, RouterFacts, Values, count, figure, metric
from moegeom.core.router import mantissa_bits
from moegeom.core.shapes import Float, Float64
from moegeom.geometry import gram
from moegeom.geometry.boundary.reachability import Proof, num_decided
from moegeom.geometry.boundary.reachability import reachability as reach_of
from moegeom.geometry.number_formats import (
    bias_precision,
    expected_window_levels,
    to_bfloat16,
    window_levels,
)
from moegeom.geometry.rows import ROWS_IN_CACHE, projected


@metric(
    scope="weights",
    layers=(
        count("num_non_finite_rows", "rows with nan or infinity, biases included", "experts"),
        count(
            "num_non_finite_gain",
            "entries of the gain of the norm in front that are nan or infinite",
            "",
        ),
        count("num_duplicate_rows", "rows equal to an earlier row", "experts"),
        count("num_zero_rows", "rows of zeros", "experts"),
        Column("row_norm_median", "median length of a row", "weight"),
        Column("row_norm_max_over_median", "longest row over the median length"),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            Column("row_norm", "Euclidean length of the router row", "weight"),
            Column("is_row_finite", "row and biases are finite", "", "bool"),
            count("duplicate_of", "earlier expert with the same row and bias, or -1", "expert"),
        )
    },
)
def rows(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Rows as stored: lengths, zero rows, rows that are not finite, and duplicate rows.

    Duplicate rows are bit-identical, with equal biases: no token tells the two experts apart, and
    ties go to the lower number. A zero row has the same logit for every token. These are faults of
    a file or of a merge, not of the data. Lengths are of the raw rows; see ``effective_router`` for
    the geometry that routing depends on.
    """
    router = facts.router
    biases = [b[:, None] for b in (router.logit_bias, router.selection_bias) if b is not None]
    finite = np.asarray(np.isfinite(router.weight).all(axis=1))
    for bias in biases:
        finite &= np.isfinite(bias).all(axis=1)
    own = np.arange(router.num_experts)
    norms = np.full(router.num_experts, np.nan)
    # summed in float64 without a float64 copy of the rows
    squares = np.einsum("ij,ij->i", router.weight, router.weight, dtype=np.float64)
    norms[finite] = np.sqrt(squares[finite])
    duplicate = _first_equal([router.weight, *biases], norms)
    median = float(np.median(norms[finite])) if finite.any() else 0.0
    return {
        "layers": {
            "num_non_finite_rows": int((~finite).sum()),
            "num_non_finite_gain": None
            if router.gain is None
            else int((~np.isfinite(router.gain)).sum()),
            "num_duplicate_rows": int((duplicate != own).sum()),
            "num_zero_rows": int((norms == 0.0).sum()),
            "row_norm_median": median if finite.any() else None,
            "row_norm_max_over_median": float(norms[finite].max()) / median if median else None,
        },
        "experts": {
            "expert": own,
            "row_norm": norms,
            "is_row_finite": finite,
            "duplicate_of": np.where(duplicate != own, duplicate, -1),
        },
    }


def _first_equal(columns: Sequence[np.ndarray], norms: np.ndarray) -> np.ndarray:
    """For each row the first row that equals it in all columns; itself when there is none.

    Equal rows have equal norms, so only rows that share theirs are compared; nan marks rows that
    are not finite, which equal nothing.
    """
    seen: dict[float, list[int]] = {}
    first = np.arange(len(norms))
    for row, norm in enumerate(norms.tolist()):
        alike = seen.setdefault(norm, [])
        for other in alike if norm == norm else ():
            if all(np.array_equal(column[row], column[other]) for column in columns):
                first[row] = other
                break
        else:
            alike.append(row)
    return first


#: Entries of rows that are no larger or smaller than two to this have no product beyond float32,
#: and none below it that counts.
_SAFE_EXPONENT = 30


@metric(
    scope="weights",
    needs=("effective_rows",),
    layers=(
        figure(
            "gram_score_raw",
            "1 - rms cosine of the rows as stored: a common shift or a gain changes it",
            "gram_score",
            changes_with=("common_row_shift", "gain_folding"),
        ),
        figure("gram_score_centred", "1 - rms cosine of the centred effective rows", "gram_score"),
        figure(
            "gram_score_random", "what centred random rows of this shape would show", "gram_score"
        ),
        figure(
            "gram_score_best",
            "the largest score that centred rows of this shape can have (Welch)",
            "gram_score",
        ),
        figure(
            "gram_score_z",
            "score less the random score, in standard deviations of random rows",
            "gram_score",
            "sigmas",
        ),
        figure(
            "mean_abs_cosine_centred",
            "mean |cosine| over pairs of centred effective rows",
            "gram_score",
        ),
        figure(
            "max_cosine_centred",
            "largest cosine between two centred effective rows",
            "nearest_cosine",
        ),
        count("row_rank", "rank of the centred effective rows", "", formula="row_spectrum"),
        count(
            "row_rank_possible",
            "largest rank that centred rows of this shape can have",
            "",
            formula="row_spectrum",
        ),
        figure(
            "row_condition",
            "largest over smallest singular value of the centred effective rows",
            "row_spectrum",
        ),
        figure(
            "effective_rank",
            "exp entropy of the singular values of the centred effective rows",
            "row_spectrum",
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
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
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
            count(
                "nearest_expert",
                "expert whose centred effective row has the largest cosine, or -1",
                "expert",
                formula="nearest_cosine",
            ),
            figure("nearest_cosine", "that cosine", "nearest_cosine"),
            Column("row_kurtosis", "fourth moment over squared second of the row's entries"),
        )
    },
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"),
)
def effective_router(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Geometry of the effective router: the rows times the gain of the norm, less their mean.

    Top-k routing of a softmax or affine rule depends on nothing else: one vector added to all rows
    changes no choice, and a factor moved between gain and weight changes no logit. The Gram score
    is one minus the root-mean-square cosine between rows, 1 for orthogonal rows; beside it stand
    what random rows of the shape show, the largest value possible (Welch), and the distance from
    chance in standard deviations. The score of the raw rows is shown as raw: a common shift moves
    it at will.
    """
    rows: gram.EffectiveRows = quantities["effective_rows"]
    kept_rows, hidden = rows.centred.shape
    cosine = gram.cosines(rows.gram)
    score = gram.gram_score(cosine)
    chance = gram.random_gram_score(kept_rows, hidden, is_centred=True)
    spread = gram.random_gram_score_sd(kept_rows, hidden, is_centred=True)
    spectrum = gram.row_spectrum(rows.gram, hidden, is_centred=True)
    norms = np.sqrt(np.maximum(rows.squared_norms, 0.0))
    median = float(np.median(norms)) if kept_rows else 0.0
    nearest, closeness = _nearest(cosine)
    return {
        "layers": {
            "gram_score_raw": gram.gram_score(_raw_cosines(facts.router.weight[rows.finite])),
            "gram_score_centred": score,
            "gram_score_random": chance,
            "gram_score_best": gram.best_gram_score(kept_rows, hidden, is_centred=True),
            # rows that cannot but lie on one line have no spread
            "gram_score_z": (score - chance) / spread if spread else None,
            "mean_abs_cosine_centred": gram.mean_absolute_cosine(cosine),
            "max_cosine_centred": None
            if np.isnan(closeness).all()
            else float(np.nanmax(closeness)),
            "row_rank": spectrum.rank,
            "row_rank_possible": spectrum.largest_possible_rank,
            "row_condition": spectrum.condition,
            "effective_rank": spectrum.effective_rank,
            "centred_norm_median": median if kept_rows else None,
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


def _raw_cosines(weight: np.ndarray) -> Float64[np.ndarray, "rows rows"]:
    """Of the rows as stored; float32 products are exact enough for a figure shown as raw.

    A power of two takes each row to the size of 1 before where a square could leave the format.
    """
    largest = np.maximum(weight.max(axis=1, initial=0.0), -weight.min(axis=1, initial=0.0))
    _, exponent = np.frexp(largest)
    is_safe = np.abs(exponent).max(initial=0) <= _SAFE_EXPONENT
    rows = weight if is_safe else np.ldexp(weight, -exponent[:, None])
    return gram.cosines((rows @ rows.T).astype(np.float64))


def _nearest(
    cosine: Float64[np.ndarray, "rows rows"],
) -> tuple[np.ndarray, Float64[np.ndarray, "rows"]]:
    """The row with the largest cosine to each row, and that cosine."""
    others = np.where(np.isnan(cosine), -np.inf, cosine)
    np.fill_diagonal(others, -np.inf)
    if len(others) < 2:
        return np.full(len(others), -1), np.full(len(others), np.nan)
    nearest, largest = others.argmax(axis=1), others.max(axis=1)
    is_known = np.isfinite(largest)
    return np.where(is_known, nearest, -1), np.where(is_known, largest, np.nan)


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


def _spread(values: np.ndarray, rows: gram.EffectiveRows) -> np.ndarray:
    """Values of the finite rows, nan for the others."""
    everywhere = np.full(len(rows.finite), np.nan)
    everywhere[rows.finite] = values
    return everywhere


def _numbers(nearest: np.ndarray, rows: gram.EffectiveRows) -> np.ndarray:
    """Indices among the finite rows as expert numbers; -1 for the others."""
    everywhere = np.full(len(rows.finite), -1)
    experts = np.flatnonzero(rows.finite)
    everywhere[rows.finite] = np.where(nearest >= 0, experts[nearest], -1)
    return everywhere


#: Experts whose matrix is kept: 260 kB of numbers for each router.
MOST_EXPERTS = 512

#: The same for every matrix of a router.
COLUMNS = (
    Column("matrix", "row_cosine, or coactivation", "", "str"),
    count("expert", "expert number: the row of the matrix", "expert"),
    Column("values", "values for this expert and each later one, three digits", "1", "list"),
)


@metric(
    scope="weights", needs=("effective_rows",), tables={"matrices": COLUMNS}, is_for_figures=True
)
def matrices(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Cosines of the effective rows, pair by pair: what the Gram heat map shows.

    Cosines between the centred rows of the effective router, whose root mean square is one minus
    the Gram score. Half precision is enough for a picture: three digits. Routers of more than 512
    experts have none.
    """
    rows: gram.EffectiveRows = quantities["effective_rows"]
    experts = len(rows.finite)
    if facts.is_random or experts > MOST_EXPERTS:
        return {}
    matrix = np.full((experts, experts), np.nan)
    matrix[np.ix_(rows.finite, rows.finite)] = gram.cosines(rows.gram)
    return {"matrices": upper_triangle("row_cosine", matrix)}


def upper_triangle(name: str, matrix: Float64[np.ndarray, "experts experts"]) -> dict[str, Any]:
    """Rows of the table ``matrices``: the values right of the diagonal, in half precision."""
    rounded = matrix.astype(np.float16)
    rows = [row[number + 1 :].tolist() for number, row in enumerate(rounded)]
    if np.isnan(rounded).any():
        rows = [[None if value != value else value for value in row] for row in rows]
    return {"matrix": np.full(len(matrix), name), "expert": np.arange(len(matrix)), "values": rows}


@metric(
    scope="weights",
    needs=("effective_rows",),
    layers=(
        Column(
            "mean_row_projections",
            "projections of the mean effective row, which a common shift changes",
            "weight",
            "list",
            "row_projections",
            changes_with=("common_row_shift",),
        ),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            Column(
                "row_projections",
                "32 projections of the centred effective row; missing when a row is not finite",
                "weight",
                "list",
                "row_projections",
                changes_with=("common_row_shift",),
            ),
        )
    },
    invariances=("common_row_shift", "gain_folding"),
)
def signature(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Projections of the rows: what a baseline keeps of them.

    Each centred effective row times a fixed random matrix of 32 columns. Distances between rows,
    and between a row and its former self, survive within 12 %, so that two checkpoints can be
    compared row by row from their results alone. Nothing else can be read off the numbers.
    """
    rows: gram.EffectiveRows = quantities["effective_rows"]
    experts = np.arange(len(rows.finite))
    if not rows.finite.all():
        return {"layers": {}, "experts": {"expert": experts}}
    with np.errstate(over="ignore"):  # rows beyond float32 give no baseline: that is refused there
        signature, mean = _float32(rows)
    return {
        "layers": {"mean_row_projections": mean},
        "experts": {"expert": experts, "row_projections": list(signature)},
    }


def _float32(rows: gram.EffectiveRows) -> tuple[np.ndarray, np.ndarray]:
    signature = projected(rows.centred, NUM_PROJECTIONS).astype(np.float32)
    return signature, projected(rows.mean[None], NUM_PROJECTIONS)[0].astype(np.float32)


#: Experts of a certificate that are listed; k suffice, and k is at most this in known families.
_MOST_LISTED = 32


@metric(
    scope="weights",
    needs=("effective_rows",),
    layers=(
        count("num_reachable", "experts proved reachable", "experts", formula="reachability"),
        count(
            "num_unreachable",
            "experts proved unreachable: k others beat them everywhere",
            "experts",
            formula="reachability",
        ),
        count("num_reach_open", "experts not decided", "experts", formula="reachability"),
        count("num_certain", "experts that every input chooses", "experts", formula="reachability"),
        count(
            "num_certain_bf16",
            "the same after a cast of the bias to bfloat16",
            "experts",
            formula="reachability",
        ),
        count(
            "num_unreachable_bf16",
            "experts that would be unreachable after a cast of the bias to bfloat16",
            "experts",
            formula="reachability",
        ),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            Column(
                "reach",
                "point, affine independence, beaten everywhere, or open",
                "",
                "str",
                "reachability",
            ),
            Column("is_certain", "every input chooses it", "", "bool", "reachability"),
            count(
                "num_beaten_by",
                "experts that beat it for every input",
                "experts",
                formula="reachability",
            ),
            Column("beaten_by", "those experts, at most 32", "", "list", "reachability"),
        )
    },
    invariances=("expert_relabelling", "gain_folding"),
)
def reachability(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Reachability: which experts some input can choose at all.

    An expert is unreachable when k others beat it for every input that the norm can give; it is
    reachable when an input is found that chooses it, or when the rows are affinely independent.
    Both are proofs; what is neither is counted as open. An expert that every input chooses is
    certain. Nothing here depends on tokens: an expert can be reachable and yet dead on all text
    that comes.
    """
    router = facts.router
    experts = np.arange(router.num_experts)
    if router.norm is not None and router.norm.kind != "rms":
        # a layer norm reaches a slice of the ball only: nothing is derived for it
        return {"layers": {}, "experts": {"expert": experts}}
    if router.rule.pick == "threshold":
        # no expert competes: whatever reaches its half-space reaches it
        return {"layers": {}, "experts": {"expert": experts}}
    if router.has_cosine_logits and not router.rule.is_affine:
        # W y + b are divided by a length before they are scored: their range is another one
        return {"layers": {}, "experts": {"expert": experts}}
    radius = np.inf if router.norm is None else float(np.sqrt(router.hidden_size))
    biases = (router.logit_bias, router.selection_bias)
    if any(bias is not None and not np.isfinite(bias).all() for bias in biases):
        return {"layers": {}, "experts": {"expert": experts}}
    reach = reach_of(quantities["effective_rows"], router.rule, radius, *biases)
    after_cast: tuple[int | None, int | None] = (None, None)
    if router.selection_bias is not None:
        cast = (router.logit_bias, to_bfloat16(router.selection_bias))
        after_cast = num_decided(quantities["effective_rows"], router.rule, radius, *cast)
    proofs = np.array([proof.value for proof in reach.proofs])
    reached = np.isin(proofs, (Proof.point.value, Proof.independence.value))
    return {
        "layers": {
            "num_reachable": int(reached.sum()),
            "num_unreachable": int((proofs == Proof.beaten.value).sum()),
            "num_reach_open": int((proofs == Proof.open.value).sum()),
            "num_certain": int(reach.is_certain.sum()),
            "num_unreachable_bf16": after_cast[0],
            "num_certain_bf16": after_cast[1],
        },
        "experts": {
            "expert": experts,
            "reach": proofs,
            "is_certain": reach.is_certain,
            "num_beaten_by": np.array([len(others) for others in reach.beaten_by]),
            "beaten_by": [others[:_MOST_LISTED].astype(np.int32) for others in reach.beaten_by],
        },
    }


# ------------------------------------------------------------------------------------------- digits

#: Columns of each row that tell whether float32 storage holds bfloat16 numbers only.
_PROBED = 512


@metric(
    scope="weights",
    layers=(
        count("weight_bits", "explicit mantissa bits of the stored weight", "bits"),
        count("weight_bits_kept", "the same as the family keeps it", "bits"),
        count("bias_bits", "explicit mantissa bits of the stored bias", "bits"),
        count("bias_bits_kept", "the same as the family keeps it", "bits"),
        Column("is_weight_bf16", "the first 512 columns hold bfloat16 numbers", "", "bool"),
        figure(
            "levels_share",
            "different values in windows of 32 over what Gaussian rows of the stored dtype "
            "hold; mean over rows",
            "levels_share",
        ),
        Column("weight_digest", "hash of the weight", "", "str"),
        Column("gain_digest", "hash of the gain of the norm in front", "", "str"),
        Column("logit_bias_digest", "hash of the logit bias", "", "str"),
        Column("selection_bias_digest", "hash of the selection bias", "", "str"),
        Column("parts_digest", "hash of scales, gate of shared experts and projection", "", "str"),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            figure("row_levels_share", "levels_share of the row", "levels_share"),
            Column("zero_share", "share of exact zeros in the first 512 columns of the row"),
        )
    },
)
def storage(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    """How the router is stored: digits kept, and traces of an earlier quantisation.

    ``weight_bits`` are the mantissa bits of the stored dtype, ``weight_bits_kept`` those that the
    family keeps. ``levels_share`` compares the number of different values in a window with that of
    random numbers of the dtype: about 1 for trained weights, half or less when a coarser grid was
    rounded into bfloat16. Digests tell equal tensors apart from changed ones.
    """
    router, stored = facts.router, facts.router.provenance
    weight = router.weight
    finite = np.isfinite(weight).all(axis=1)
    levels = np.full(len(weight), np.nan)
    scale = _rms(weight[finite])
    expected = expected_window_levels(scale, mantissa_bits(stored.stored_dtype) or 0)
    probe = weight[finite, :_PROBED]
    zeros = np.full(len(weight), np.nan)
    zeros[finite] = (probe == 0.0).mean(axis=1) if probe.size else np.nan
    if finite.any():
        levels[finite] = window_levels(weight[finite]) / expected
    parts = router.other_parts.items()
    digests = {
        "weight_digest": _digest(weight),
        "gain_digest": _digest(router.gain),
        "logit_bias_digest": _digest(router.logit_bias),
        "selection_bias_digest": _digest(router.selection_bias),
        "parts_digest": digest_of(*chain(*parts))
        if (parts := router.other_parts.items())
        else None,
    }
    return {
        "layers": {
            "weight_bits": mantissa_bits(stored.stored_dtype),
            "weight_bits_kept": mantissa_bits(stored.kept_dtype),
            "bias_bits": mantissa_bits(stored.bias_dtype),
            "bias_bits_kept": mantissa_bits(stored.kept_bias_dtype),
            "is_weight_bf16": bool((to_bfloat16(probe) == probe).all()) if probe.size else None,
            "levels_share": None if np.isnan(levels).all() else float(np.nanmean(levels)),
            **digests,
        },
        "experts": {
            "expert": np.arange(len(weight)),
            "row_levels_share": levels,
            "zero_share": zeros,
        },
    }


def _rms(rows: Float[np.ndarray, "rows hidden"]) -> float:
    if not rows.size:
        return 0.0
    return float(np.sqrt(np.einsum("ij,ij->", rows, rows, dtype=np.float64) / rows.size))


def _digest(values: Float[np.ndarray, "*shape"] | None) -> str | None:
    """SHA-256 of the values as they are in memory; tells equal from changed."""
    return None if values is None else digest_of(values)


_FORMULA = "bias_precision"


@metric(
    scope="weights",
    layers=(
        count("bias_num_distinct", "different values among the experts", "", formula=_FORMULA),
        count(
            "bias_num_distinct_bf16",
            "different values after a cast to bfloat16",
            "",
            formula=_FORMULA,
        ),
        count(
            "bias_num_distinct_bf16_recentred",
            "the same when the middle of the range is subtracted first",
            "",
            formula=_FORMULA,
        ),
        figure("bias_ulp_bf16", "step of bfloat16 at the largest bias", _FORMULA, "score"),
        Column("bias_spread", "standard deviation over experts, ddof 0", "score"),
        Column("bias_middle", "middle between least and largest bias", "score"),
        figure(
            "bias_lost_update_share",
            "experts whose bias an update of 0.001 does not move in bfloat16",
            _FORMULA,
        ),
        Column("bias_largest_shift", "largest change of a bias by the cast", "score"),
        Column("bias_mean", "mean over experts", "score"),
        Column("bias_range", "largest less least bias", "score"),
        Column("is_bias_bf16", "every bias is a bfloat16 number already", "", "bool"),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            Column("logit_bias", "bias that is added to the expert's logit", "logit"),
            Column("selection_bias", "bias of the expert as stored", "score"),
            Column("bias_cast_shift", "what a cast to bfloat16 would add to it", "score"),
        )
    },
    invariances=("expert_relabelling",),
)
def selection_bias(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    """The selection bias: its range, and what a cast to bfloat16 leaves of it.

    A bias that balances loads spreads over a few tenths around a mean that drifts; bfloat16 steps
    by 2^-7 of its size, so that a mean of 7 leaves a dozen values out of 256, and an update of
    0.001 moves nothing above 1/2. A constant added to all biases changes no choice (where dropped
    groups are -inf), so subtracting the middle of the range fixes what a cast would destroy.
    """
    bias, added = facts.router.selection_bias, facts.router.logit_bias
    experts: dict[str, np.ndarray] = {"expert": np.arange(facts.router.num_experts)}
    if added is not None:
        experts["logit_bias"] = added.astype(np.float64)
    if bias is None:
        return {"layers": {}, "experts": experts}
    values = bias.astype(np.float64)
    experts["selection_bias"] = values
    if not np.isfinite(values).all():
        return {"layers": {}, "experts": experts}
    figures = {f"bias_{name}": v for name, v in dataclasses.asdict(bias_precision(bias)).items()}
    return {
        "layers": {
            **figures,
            "bias_mean": float(values.mean()),
            "bias_range": float(values.max() - values.min()),
            "is_bias_bf16": bool((to_bfloat16(bias) == values).all()),
        },
        "experts": {**experts, "bias_cast_shift": to_bfloat16(bias) - values},
    }
