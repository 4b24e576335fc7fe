"""Margins and distances: how near tokens are to another expert set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import (
    Column,
    Invariance,
    Metric,
    RouterFacts,
    Values,
    estimate,
    figure,
    metric,
)
from moegeom.core.registry import record_of_function
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import percent
from moegeom.geometry import histogram as bins
from moegeom.geometry.statistics import jackknife_error
from moegeom.kernels.reduction import means
from moegeom.kernels.reductions.choices import AMBIGUOUS, BOUNDED

#: Small quantiles, because it is the near tokens that flip; by the suffix of their column.
QUANTILES = {"p001": 0.001, "p01": 0.01, "p50": 0.5}

_PROBABILITIES = np.array(list(QUANTILES.values()))

#: Tokens below a quantile that are needed to tell its error.
LEAST_BELOW = 20

#: Columns of the table ``margins``, the same for every quantity.
_LADDER_COLUMNS = (
    Column("quantity", "what the threshold is compared with, such as margin", "", "str"),
    Column("threshold", "step of the ladder, in units of the quantity", "quantity"),
    estimate("share_below", "share of tokens strictly below it", "ladder"),
)

#: Further values of ``layers``: from the reductions, the facts, and the quantiles.
_More = Callable[[Mapping[str, Any], RouterFacts, Mapping[str, Any]], dict[str, Any]]


@record_of_function
def ladder_metric(
    name: str,
    page: str,
    more: _More,
    quantity: tuple[str, str, str],
    needs: tuple[str, ...],
    ladder: Float64[np.ndarray, "steps"],
    invariances: tuple[Invariance, ...],
    before: tuple[Column, ...] = (),
    after: tuple[Column, ...] = (),
) -> Metric:
    """The metric of ``quantity``: its name, which is that of its formula too, words and unit.

    The first of ``needs`` is the histogram. ``layers`` has a column for each of QUANTILES and one
    for what is known of those that are missing, between the columns ``before`` and ``after``, whose
    values ``more``, the function under it, gives. Table ``margins`` has exact shares, since the
    steps of the ladder are edges of the histogram.
    """
    column, words, unit = quantity
    histogram, uncertain = needs[0], [c.name for c in (*before, *after) if c.has_se]

    def finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
        counts = reductions[histogram]
        quantiles = _quantiles(column, counts)
        return {
            "layers": quantiles | more(reductions, facts, quantiles),
            "margins": {
                "quantity": np.full(len(ladder), column),
                "threshold": ladder,
                "share_below": bins.share_below(counts, ladder),
            },
        }

    def without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
        own = [more(part, facts, {}) for part in parts] if uncertain else []
        shares = bins.share_below(_stacked(parts, histogram), ladder)
        layers = {name: [values[name] for values in own] for name in uncertain}
        return {"layers": layers, "margins": {"share_below": shares}}

    def errors(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Values:
        every = _quantile_errors(whole[histogram], _stacked(parts, histogram))
        return {"layers": {f"{column}_{s}": e for s, e in zip(QUANTILES, every, strict=True)}}

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
        name,
        page,
        finish,
        columns={"layers": (*before, *quantile_columns, bound, *after), "margins": _LADDER_COLUMNS},
        needs=needs,
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
    values = bins.quantile(histogram, _PROBABILITIES).tolist()
    columns: dict[str, Any] = {}
    bounds = []
    for suffix, value in zip(QUANTILES, values, strict=True):
        is_end = value == 0.0 or np.isinf(value)
        columns[f"{name}_{suffix}"] = np.nan if is_end else value
        if is_end:
            end = f"< 2^{bins.LOWEST_EXPONENT}" if value == 0.0 else f">= 2^{bins.HIGHEST_EXPONENT}"
            bounds.append(f"{suffix} {end}")
    return columns | {f"{name}_bound": ", ".join(bounds) or None}


def _quantile_errors(
    whole: Int64[np.ndarray, "bins"], parts: Int64[np.ndarray, "blocks bins"]
) -> list[float | None]:
    """Standard error of each p-quantile x_p; None with fewer than LEAST_BELOW tokens below it.

    A quantile jumps from one value to the next, so leaving out blocks does not tell its error. What
    they tell is the error s of the share of tokens below x_p; the standard error is
    (x_(p + s) - x_(p - s)) / 2. Source: Woodruff 1952. Oracle in tests: resampled documents.
    """
    p, value = _PROBABILITIES, bins.quantile(whole, _PROBABILITIES)
    is_inside = (value >= 2.0**bins.LOWEST_EXPONENT) & (value < 2.0**bins.HIGHEST_EXPONENT)
    is_known = (p * whole.sum() >= LEAST_BELOW) & is_inside
    shares = bins.share_up_to(parts, np.where(is_known, value, 1.0))
    error = np.array([jackknife_error(share) for share in shares])
    ends = bins.quantile(whole, np.clip([p - error, p + error], 0.0, 1.0).ravel()).reshape(2, -1)
    rows = zip(is_known.tolist(), *ends.tolist(), strict=True)
    return [(high - low) / 2.0 if tells and high < np.inf else None for tells, low, high in rows]


@ladder_metric(
    ("margin", "the margin", "selection score"),
    ("margin_histogram",),
    2.0 ** np.arange(-16, 5),
    ("token_permutation", "expert_relabelling"),
    before=(Column("margin_unit", "what a margin is measured in", "", "str"),),
)
def margins(
    reductions: Mapping[str, Any], facts: RouterFacts, quantiles: Mapping[str, Any]
) -> dict[str, Any]:
    """Margins: how far the last chosen expert is ahead of the first one left out.

    q_[k] - q_[k+1] in units of the selection score (``margin_unit``): logits for an affine rule,
    biased scores else. Margins of different rules or layers do not compare, and a small margin is
    not a small distance: it takes the rows of the two experts to say how far the input is from the
    boundary (``boundary_distance``). Quantiles are those of a histogram with bins of 6 %; the
    shares of the ladder (table ``margins``) are exact.
    """
    return {"margin_unit": facts.router.rule.selection_score_unit}


@ladder_metric(
    (
        "boundary_distance",
        "the distance to the boundary; a lower bound unless distance_exact_share is 1",
        "router input",
    ),
    ("distance_histogram",),
    2.0 ** np.arange(-12, 9),
    ("token_permutation", "expert_relabelling", "common_row_shift"),
)
def boundary_distance(
    reductions: Mapping[str, Any], facts: RouterFacts, quantiles: Mapping[str, Any]
) -> dict[str, Any]:
    """Boundary distance: how far the nearest input with another chosen set is.

    Behind linear boundaries d(y) = min over i chosen, j not, of (z_i - z_j) / |w_i - w_j|, exactly;
    the pair that attains it is not that of the k-th and next logit in every seventh token or so.
    Boundaries of scores with a selection bias are curved: exact within 1e-6 for scores of one logit
    (sigmoid, root of softplus), a certified lower bound for groups and for softmax, on a sample of
    at most 4096 tokens. Where only the largest logits are recorded and do not decide it, its lower
    bound stands for it as well. ``distance_bracket`` says for how many tokens: quantiles are then
    lower bounds, and shares of the ladder upper bounds.

    Quantiles are those of a histogram with bins of 6 %; the shares of the ladder (table
    ``margins``) are exact. For another unit see ``tropical_saturation`` (over |y|),
    ``noise_sigmas`` (over rounding noise) and ``pre_norm_angle`` (in front of the norm).
    """
    return {}


@ladder_metric(
    ("boundary_distance_over_norm", "the boundary distance over the length of the input", "1"),
    ("relative_distance_histogram",),
    2.0 ** np.arange(-20, 0),
    ("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
    after=(
        figure(
            "tropical_saturation",
            "least relative distance of a token, at most 6 % below it",
            "boundary_distance_over_norm",
        ),
    ),
)
def tropical_saturation(
    reductions: Mapping[str, Any], facts: RouterFacts, quantiles: Mapping[str, Any]
) -> dict[str, Any]:
    """Tropical saturation: how far the tokens stay from every boundary, relative to their length.

    For a threshold delta, the share of tokens with d > delta |y|, d the boundary distance and |y|
    the length of the router input: one minus ``share_below`` in the rows
    ``boundary_distance_over_norm`` of table ``margins``. The boundaries of an affine router are
    where the tropical polynomial "sum of the k largest logits" bends, so a saturated set of tokens
    sees a linear function. The least relative distance over all tokens (``tropical_saturation``, a
    lower bound within 6 %) is an extreme: it falls with the number of tokens, so quantiles stand
    beside it.

    A connected set of inputs that stays away from all boundaries has one chosen set only; real
    tokens visit many cells, so the least distance of many tokens is near 0 for every working
    router.
    """
    return {"tropical_saturation": bins.lowest(reductions["relative_distance_histogram"])}


@ladder_metric(
    ("pre_norm_angle", "the angle to the nearest boundary", "radian"),
    ("angle_histogram",),
    2.0 ** np.arange(-20, 0),
    ("expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"),
)
def pre_norm_angle(
    reductions: Mapping[str, Any], facts: RouterFacts, quantiles: Mapping[str, Any]
) -> dict[str, Any]:
    """Angle before the norm to the nearest direction with another chosen set.

    An RMS norm takes the length out of the residual stream, so what can flip a token is its
    direction: the least angle, in radians, between the input x of the norm and one with another
    choice. Its sine times |x| is the distance in front of the norm. Exact without logit biases
    (boundaries are planes through 0); with them the epsilon of the norm is neglected. Behind curved
    and grouped boundaries it is a certified lower bound. On a sample of at most 4096 tokens.

    Compare layers by this rather than by ``boundary_distance``, whose unit is that of the normed
    input with its gain.
    """
    return {}


#: From an eighth of a sigma, where half the tokens flip, to what no noise reaches.
SIGMA_LADDER = 2.0 ** np.arange(-3, 7)


@ladder_metric(
    ("noise_sigmas", "the boundary distance in sigmas", "sigma"),
    ("noise_sigmas_histogram",),
    SIGMA_LADDER,
    ("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
def noise_sigmas(
    reductions: Mapping[str, Any], facts: RouterFacts, quantiles: Mapping[str, Any]
) -> dict[str, Any]:
    """Boundary distance in standard deviations of input rounding, taken as isotropic noise.

    r = d / s, d the boundary distance and s = 0.4247 x 2^-8 |y| / sqrt(D) the standard deviation of
    each coordinate when the router input is rounded to bfloat16. Noise of s in every direction
    crosses the nearest boundary with probability Phi(-r): a token within one sigma is at risk, one
    beyond three is not. Distances over sqrt(D) say nothing of the kind: nearly all tokens are
    within 0.0017 sqrt(D) of a boundary, in a direction that noise hardly ever takes.

    Rounding errors are proportional to their coordinate, not isotropic; ``rounding_noise`` counts
    them so, on a sample.
    """
    return {}


@ladder_metric(
    ("rounding_sigmas", "the nearest boundary in sigmas", "sigma"),
    ("rounding_sigmas_histogram", "rounding_flip"),
    SIGMA_LADDER,
    ("expert_relabelling", "common_row_shift", "positive_scaling"),
    after=(
        estimate(
            "bf16_flip_share",
            "expected share of tokens that rounding the input to bfloat16 flips",
            "rounding_sigmas",
        ),
    ),
)
def rounding_noise(
    reductions: Mapping[str, Any], facts: RouterFacts, quantiles: Mapping[str, Any]
) -> dict[str, Any]:
    """Nearest boundary in standard deviations of what rounding each coordinate to bfloat16 does.

    r = min over i chosen, j not, of (z_i - z_j) / sigma_ij, sigma_ij^2 = (0.4247 x 2^-8)^2 sum_d
    (w_id - w_jd)^2 y_d^2: the error of a coordinate is proportional to it. Phi(-r) bounds the
    probability of a flip from below and estimates it to first order; ``bf16_flip_share`` is its
    mean over the sample. On a sample of at most 4096 tokens, since it looks at every coordinate of
    every near pair.
    """
    return {"bf16_flip_share": means(reductions["rounding_flip"])[0]}


@metric(
    needs=("bracket_histogram",),
    layers=(
        estimate(
            "distance_exact_share",
            "share of tokens whose boundary distance is exact; for the others it is a lower bound",
            "distance_bracket",
        ),
        figure(
            "distance_bracket_p50",
            "median of upper over lower bound, of tokens whose distance is not exact; missing "
            "where all are",
            "distance_bracket",
        ),
        figure(
            "distance_bracket_max",
            "largest upper over lower bound, its excess over 1 rounded up by at most 6 %; 1 "
            "where all are exact",
            "distance_bracket",
        ),
    ),
    invariances=("token_permutation", "expert_relabelling", "common_row_shift"),
)
def distance_bracket(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """How far the boundary distance is known.

    Behind linear boundaries a recording of all logits or of router inputs gives the distance of
    every token exactly (``distance_exact_share`` 1). One of the m largest logits gives a bracket,
    because a logit that is not known may be anything up to the least known one. So do the
    boundaries of groups, and of softmax scores with a selection bias: below by a certified bound,
    above by a step after which the rule really chooses another set. Where the bracket is a point
    (closed to 1e-6 for curved boundaries) the distance is exact. Elsewhere its lower end stands for
    it: distances, and with them the columns of ``boundary_distance``, are then lower bounds, and
    the nearest boundary of such a token is not counted unless every other boundary is farther. More
    logits narrow the brackets; 16 more than are chosen close nearly all.
    """
    histogram = reductions["bracket_histogram"]
    total = int(histogram.sum())
    if not total:
        unknown = ("distance_exact_share", "distance_bracket_p50", "distance_bracket_max")
        return {"layers": dict.fromkeys(unknown)}
    return {
        "layers": {
            "distance_exact_share": int(histogram[0]) / total,
            "distance_bracket_p50": _median(histogram),
            "distance_bracket_max": _largest(histogram),
        }
    }


def _median(histogram: Int64[np.ndarray, "bins"]) -> float | None:
    """Median ratio of the tokens that are not exact; None where all are."""
    (width,) = bins.quantile(np.append(0, histogram[1:]), np.array([0.5])).tolist()
    return within_ends(1.0 + width)


def _largest(histogram: Int64[np.ndarray, "bins"]) -> float | None:
    """1, or 1 plus the upper edge of the last bin that holds a token; None for the open bin."""
    last = int(np.flatnonzero(histogram)[-1])
    return within_ends(1.0 + float(bins.bin_edges()[last + 1])) if last else 1.0


@metric(
    needs=("ambiguity",),
    layers=(
        estimate(
            "ambiguous_share",
            "share of tokens whose margin is within the bound on float32 rounding, so that "
            "two correct engines may choose differently",
            "float_bound",
        ),
    ),
    invariances=("token_permutation", "expert_relabelling", "positive_scaling"),
)
def ambiguity(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Ambiguous tokens: those whose choice two correct float32 engines may make differently.

    A token is ambiguous when its margin is at most a bound on what the order of summation can do to
    two selection scores (``float_bound`` of the formulas). It is a worst case: of the ambiguous
    tokens few really differ. All figures here hold for the others on any machine; exact ties go to
    the lower expert number.
    """
    counts = reductions["ambiguity"]
    bounded = counts[BOUNDED]
    return {"layers": {"ambiguous_share": counts[AMBIGUOUS] / bounded if bounded else None}}
