"""Router inputs: their directions and dimensions, and the pull of their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, figure, metric
from moegeom.geometry import space
from moegeom.geometry.gram import effective_rows, mean_pairwise_cosine


@metric(
    needs=("directions",),
    layers=(
        estimate(
            "mean_resultant_length",
            "length of the mean unit vector of the router inputs: 1 when all point one way",
            "mean_resultant_length",
        ),
        estimate(
            "mean_pairwise_cosine",
            "mean cosine between the router inputs of two different tokens",
            "mean_pairwise_cosine",
        ),
    ),
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
def directions(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """How far router inputs point the same way.

    The length of the mean of the unit vectors y / |y| (``mean_resultant_length``), and the mean
    cosine between the inputs of two different tokens, which follows from it but does not depend on
    how many tokens there are. Near 1 all inputs point one way and routing sees little of the space;
    near 0 they are spread. On a sample of at most 4096 tokens.
    """
    total, tokens = reductions["directions"]
    if not tokens:
        return {"layers": {"mean_resultant_length": None, "mean_pairwise_cosine": None}}
    squared = float(total @ total)
    length = math.sqrt(squared)
    cosine = mean_pairwise_cosine(length, tokens) if tokens > 1 else None
    return {"layers": {"mean_resultant_length": length / tokens, "mean_pairwise_cosine": cosine}}


@metric(
    needs=("input_sample",),
    layers=(
        estimate(
            "participation_ratio",
            "participation ratio of the covariance, corrected for the size of the sample",
            "participation_ratio",
            "dimensions",
        ),
        figure(
            "participation_ratio_raw",
            "the same without correction",
            "participation_ratio",
            "dimensions",
        ),
    ),
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
def participation_ratio(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Participation ratio: how many directions share the variance of the router inputs.

    PR = (tr S)^2 / tr S^2, S the covariance of the inputs: 1 when all variance lies on a line, D
    when it is the same in every direction. A sample of T tokens can show T - 1 at most, so it is
    corrected: 1 / ((1 / PR - 1 / n) / (1 + 1 / n)), n = T - 1. On a sample of about 2048 tokens,
    outlier tokens left out. A linear measure: a curved set of low intrinsic dimension may have a
    large ratio.
    """
    moments = reductions["input_sample"].moments
    tokens = len(moments.squared_distance)
    raw = moments.participation_ratio if tokens > 2 else None
    ratio = None if raw is None else space.participation_ratio_corrected(raw, tokens)
    return {"layers": {"participation_ratio_raw": raw, "participation_ratio": ratio}}


@metric(
    needs=("input_sample",),
    layers=(
        figure(
            "intrinsic_dimension_low",
            "lowest estimate over estimators and sample sizes",
            "intrinsic_dimension",
            "dimensions",
        ),
        figure("intrinsic_dimension_high", "highest of them", "intrinsic_dimension", "dimensions"),
        figure(
            "intrinsic_dimension_two_nn",
            "TwoNN on the whole sample",
            "intrinsic_dimension",
            "dimensions",
        ),
        figure(
            "intrinsic_dimension_mle_20",
            "Levina-Bickel with 20 neighbours on the whole sample",
            "intrinsic_dimension",
            "dimensions",
        ),
    ),
    tables={
        "intrinsic_dimension": (
            Column("estimator", "two_nn, two_nn_fitted, mle_10 or mle_20", "", "str"),
            count("num_tokens", "tokens of the sample that it used", "tokens"),
            figure("dimension", "estimate", "intrinsic_dimension", "dimensions"),
        )
    },
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
def intrinsic_dimension(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Intrinsic dimension of the router inputs: on how many coordinates the tokens really vary.

    Estimates from distances to nearest neighbours: TwoNN, from the ratio of the second to the first
    (``two_nn``, and ``two_nn_fitted`` on the lowest 90 % of the ratios), and Levina-Bickel with the
    average of MacKay and Ghahramani for 10 and 20 neighbours (``mle_10``, ``mle_20``). Each on the
    sample of about 2048 tokens, on half and on a quarter of it. Together they give a range, never
    one number: estimates fall with the dimension by boundary effects (a cube of 10 dimensions reads
    8.4) and move with the scale that the sample size sets.

    Bit-identical inputs and outlier tokens are left out. The dimension bounds how many cells tokens
    can meet: far fewer than the binomial coefficient when it is small.
    """
    sample = reductions["input_sample"]
    inputs = sample["input"]
    row = space.distinct_rows(inputs)
    # the sample is in the order of a hash: its beginning is a sample too
    products = sample.whole[1].gram[np.ix_(row, row)]
    estimates = space.dimension_estimates(inputs[row], products)
    values = [value for _, _, value in estimates if np.isfinite(value)]
    whole = {name: value for name, size, value in estimates if size == len(row)}
    return {
        "layers": {
            "intrinsic_dimension_low": min(values, default=None),
            "intrinsic_dimension_high": max(values, default=None),
            "intrinsic_dimension_two_nn": whole.get("two_nn"),
            "intrinsic_dimension_mle_20": whole.get("mle_20"),
        },
        "intrinsic_dimension": {
            "estimator": np.array([name for name, _, _ in estimates], dtype=object),
            "num_tokens": np.array([size for _, size, _ in estimates], dtype=np.int64),
            "dimension": np.array([value for _, _, value in estimates], dtype=np.float64),
        },
    }


_FORMULA = "input_pull"


@metric(
    needs=("score_sample",),
    layers=(
        estimate(
            "input_pull",
            "rms over experts of the mean score over the rms of what differs between tokens, "
            "without selection bias",
            _FORMULA,
        ),
        estimate(
            "input_pull_with_bias",
            "the same of the scores with the selection bias; missing without one",
            _FORMULA,
        ),
    ),
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"),
)
def input_pull(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Pull of the mean input: how much of the choice is made before a token says what it is.

    Scores of a token less their mean over experts have a mean over tokens, which favours some
    experts whatever is read, and a rest, which tells tokens apart. ``input_pull`` is the rms of the
    first over that of the second: 0 when no expert is favoured on average; beyond 1 the mean
    decides more than the tokens do, loads are uneven and few expert sets occur.
    ``input_pull_with_bias`` is that of the scores that are compared in the end, with the selection
    bias: a bias that balances loads takes the pull away.

    A router of random directions has a pull too, as large as its inputs are one-sided:
    ``input_pull_random`` and its standard deviation over such routers, of rows of the same lengths.

    On a sample of at most 4096 tokens; the range of random routers on that of about 2048 inputs.
    """
    moments: space.ScoreMoments = reductions["score_sample"]
    bias = facts.router.selection_bias
    pulls = (moments.pull(), math.nan if bias is None else moments.pull(bias))
    # endless where scores are so small that all tokens score alike
    finite = (pull if math.isfinite(pull) else None for pull in pulls)
    return {"layers": dict(zip(("input_pull", "input_pull_with_bias"), finite, strict=True))}


@metric(
    needs=("input_sample",),
    layers=(
        figure(
            "input_pull_random",
            "mean pull of the mean input over rows of the same lengths in random directions",
            _FORMULA,
        ),
        figure("input_pull_random_sd", "its standard deviation", _FORMULA),
    ),
    invariances=("expert_relabelling", "positive_scaling"),
)
def input_pull_random(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """The pull of the mean input on a router of random directions, of rows of the same lengths.

    Mean and standard deviation over all such routers, in closed form from the mean and the
    covariance of the router inputs. What :doc:`input_pull` finds beyond it is the router's own
    doing; below it the router has turned away from the mean, as routers do whose loads are even.

    On the sample of about 2048 inputs.
    """
    sample = reductions["input_sample"]
    mean = deviation = None
    if len(sample["input"]) > 1 and facts.is_whole:
        lengths = np.linalg.norm(facts.router.weight.astype(np.float64), axis=1)
        ratio = sample.moments.participation_ratio
        mean, deviation = space.pull_of_random_rows(sample["input"], ratio, lengths)
    return {"layers": {"input_pull_random": mean, "input_pull_random_sd": deviation}}


#: Tokens that are kept, and without which nothing is told of neighbours.
MOST_TOKENS, LEAST_TOKENS = 500, 50

#: Nearest tokens that are asked for their choice.
NEIGHBOURS = 10

#: Directions whose coordinates are kept: those that van der Maaten and Hinton 2008 draw t-SNE from.
MOST_DIRECTIONS = 30


@metric(
    needs=("input_sample",),
    layers=(
        Column("plane_share", "share of the variance of the inputs in their widest plane"),
        Column("widest_share", f"the same in their {MOST_DIRECTIONS} widest directions"),
        Column(
            "near_same_choice",
            f"share of the {NEIGHBOURS} nearest tokens with the same first choice",
        ),
        Column(
            "near_same_choice_chance",
            "the same for two tokens drawn at random: sum of squared shares of first choices",
        ),
        Column(
            "choice_silhouette",
            "mean silhouette of first choices: how much nearer tokens are to their own",
        ),
    ),
    tables={
        "sample": (
            count("expert", "first choice of the token, or the expert itself", "expert"),
            Column("is_expert", "a row of the router, not a token", "", "bool"),
            count("domain_number", "domain of the token in the order of names; -1: none", ""),
            Column("x", "coordinate on the widest direction of the inputs", "input"),
            Column("y", "coordinate on the second", "input"),
            Column("margin", "k-th minus (k+1)-th selection score of the token", "selection score"),
            Column(
                "widest",
                f"coordinates of a token on the {MOST_DIRECTIONS} widest directions of the inputs",
                "input",
                "list",
            ),
        )
    },
    is_for_figures=True,
)
def sample(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """A sample of tokens in the plane of their two widest directions, with what they chose.

    ``x`` and ``y`` are coordinates on the two principal components of the router inputs, the mean
    taken off, in units of the input; experts are the rows of the effective router on the same axes,
    scaled to the spread of the tokens. A plane shows what it can: ``plane_share`` is the part of
    the variance in it, and figures that do not depend on any plane stand beside it. ``widest`` are
    the coordinates of a token on the 30 widest directions, of which ``widest_share`` is the part of
    the variance: enough to draw maps that keep near tokens near, such as t-SNE.
    ``near_same_choice`` is the share of the 10 nearest tokens, in the full space, with the same
    first choice, by chance the sum of squared shares of first choices; ``choice_silhouette`` says
    how much nearer tokens are to those of their own first choice than to the next, -1 to 1.

    No token ids and no positions: of a token only its domain, choice and margin are kept.
    """
    sample = reductions["input_sample"]
    tokens = min(len(sample["input"]), MOST_TOKENS)
    if not facts.is_whole or tokens < LEAST_TOKENS:
        return {"layers": {}}
    inputs, first = sample["input"][:tokens].astype(np.float64), sample["first"][:tokens]
    wide = space.principal_components(inputs, max(min(MOST_DIRECTIONS, inputs.shape[1]), 2))
    plane, on_plane = wide.points[:, :2], wide.axes[:2]
    apart = space.distances(inputs)
    same, chance = space.neighbours_of_same_label(apart, first, NEIGHBOURS)
    rows = effective_rows(facts.router.weight, facts.router.gain)
    experts = rows.centred @ on_plane.T if rows.centred.shape[1] == inputs.shape[1] else None
    table = {
        "expert": first,
        "is_expert": np.zeros(tokens, np.bool_),
        "domain_number": sample["population"][:tokens],
        "x": plane[:, 0],
        "y": plane[:, 1],
        "margin": sample["margin"][:tokens],
        "widest": wide.points.tolist(),
    }
    if experts is not None and np.abs(experts).max(initial=0.0) > 0.0:
        experts *= np.abs(plane).max() / np.abs(experts).max()
        own = np.flatnonzero(rows.finite)
        blank = np.full(len(own), np.nan)
        marks = (own, np.ones(len(own), np.bool_), np.full(len(own), -1), *experts.T, blank)
        joined = zip(table.items(), marks, strict=False)
        table |= {name: np.concatenate([column, mark]) for (name, column), mark in joined}
        table["widest"] = [*wide.points.tolist(), *([None] * len(own))]
    return {
        "layers": {
            "plane_share": float(wide.shares[:2].sum()),
            "widest_share": float(wide.shares.sum()),
            "near_same_choice": same,
            "near_same_choice_chance": chance,
            "choice_silhouette": space.silhouette(apart, first),
        },
        "sample": table,
    }
