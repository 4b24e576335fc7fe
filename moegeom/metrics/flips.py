"""Flips: tokens that choose other experts under a variant, by rounding, or by noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, figure, metric
from moegeom.geometry import histogram
from moegeom.geometry.load import most_frequent
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.kernels.reductions import flips as reduced
from moegeom.kernels.reductions.histograms import EARLY, LATE
from moegeom.metrics import stacked
from moegeom.metrics.margins import within_ends

_SHARES = {
    "flipped_share": reduced.FLIPPED,
    "flipped_share_least": reduced.SURELY,
    "flipped_share_most": reduced.PERHAPS,
    "reordered_share": reduced.REORDERED,
    "tied_share": reduced.TIED,
    "proved_share": reduced.PROVED,
}


@metric(
    version=2,
    scope="flip",
    needs=("flips",),
    layers=(
        estimate(
            "flipped_share",
            "share of tokens with another chosen set, exact ties to the lower expert",
            "flipped_share",
        ),
        figure(
            "flipped_share_least",
            "share of tokens with another set however exact ties are broken",
            "flipped_share",
        ),
        figure(
            "flipped_share_most",
            "share of tokens with another set for some way of breaking exact ties",
            "flipped_share",
        ),
        Column("reordered_share", "share of tokens with the same set in another order"),
        Column("tied_share", "share of tokens on an exact tie that was none before"),
        figure(
            "proved_share",
            "share of tokens whose set is proved to stay for the recorded inputs, in any order "
            "of summation that the arithmetic allows",
            "proved_share",
        ),
        count("num_disproved", "proved tokens that flipped: 0, or a bound is wrong", "tokens"),
        estimate(
            "weight_moved_mean",
            "mean share of routing weight on experts that leave the set",
            "weight_moved",
        ),
        figure(
            "predicted_flipped_share",
            "flipped_share by the noise model, without emulation",
            "predicted_flipped_share",
        ),
    ),
    invariances=("token_permutation",),
)
def flips(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Flips: tokens whose chosen set is another one under a variant of the arithmetic.

    The variant is beside the router as stored, on the same recorded inputs. Exact ties go to the
    lower expert number; an engine that breaks them otherwise flips between ``flipped_share_least``
    and ``flipped_share_most`` of the tokens. ``proved_share`` are tokens whose set stays by a bound
    on all that is not known about the variant: the order in which it adds (any order that its
    preset allows) and what the last bit of its scores is; the recorded inputs are taken as exactly
    those of the engine. ``predicted_flipped_share`` needs no emulation: it is the noise model of
    docs/theory.md E4 with the size of the roundings, for linear boundaries. Of the choices of
    another run only the sets are known, of those of another checkpoint also their order; what is
    not known is missing. A flipped expert is not a wrong answer: ``weight_moved_mean`` says how
    much routing weight leaves the experts chosen before.
    """
    counts = reductions["flips"]
    tokens = int(counts[reduced.TOKENS, reduced.SUM])
    if not tokens:
        return {"layers": {}}
    sums = [
        int(total) if is_known else None
        for total, is_known in counts[:, [reduced.SUM, reduced.KNOWN]].tolist()
    ]
    return {
        "layers": {
            **{name: _over(sums[column], tokens) for name, column in _SHARES.items()},
            "num_disproved": sums[reduced.DISPROVED],
            "weight_moved_mean": _over(sums[reduced.MOVED], reduced.FIXED_POINT * tokens),
            "predicted_flipped_share": _over(sums[reduced.PREDICTED], reduced.FIXED_POINT * tokens),
        }
    }


def _over(total: int | None, tokens: float) -> float | None:
    return None if total is None else total / tokens


#: Share of the tokens, those with the least margin, that count as near.
NEAR = 0.1


@metric(
    scope="flip",
    needs=("effective_margin_histogram", "flipped_effective_margin_histogram"),
    layers=(
        estimate(
            "flipped_near_share",
            "share of the flipped tokens among the tenth of all tokens with the least margin",
            "flipped_near_share",
        ),
        estimate(
            "flipped_margin_rank",
            "mean share of tokens with less margin than a flipped one; 1/2 for any token",
            "flipped_margin_rank",
        ),
    ),
    invariances=("token_permutation",),
)
def near_flips(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Near flips: are the tokens that flip those that were nearly tied?

    The margin is that of the router as stored: how far the last chosen expert is ahead of the first
    one left out; where experts stand in groups, half the margin between groups if that is smaller.
    A small disturbance, such as rounding, flips tokens with little margin only: most of the flips
    are then among the tenth of the tokens with the least. Another rule, other inputs or other
    weights flip tokens whatever their margin: ``flipped_margin_rank`` goes to 1/2. Where more than
    a tenth of the tokens flip, ``flipped_near_share`` is at most a tenth over the share that flips.
    Both are missing where no token flips, and come from histograms with bins of 6 %.
    """
    whole = reductions["effective_margin_histogram"]
    flipped = reductions["flipped_effective_margin_histogram"]
    if not flipped.any():
        return {"layers": {"flipped_near_share": None, "flipped_margin_rank": None}}
    return {
        "layers": {
            "flipped_near_share": histogram.share_among_least(flipped, whole, NEAR),
            "flipped_margin_rank": histogram.mean_rank(flipped, whole),
        }
    }


#: Pairs listed per router and variant, the most frequent ones.
NUM_LISTED = 64


@metric(
    scope="flip",
    needs=("swapped_pairs",),
    layers=(
        figure(
            "load_shift_max",
            "tokens that the expert of the largest change gains, over a fair share; negative "
            "where it loses them",
            "load_shift",
        ),
        count("load_shift_expert", "that expert", "expert"),
    ),
    tables={
        "swaps": (
            count("expert_out", "expert that is chosen before and not after", "expert"),
            count("expert_in", "expert that is chosen instead", "expert"),
            count("num_tokens", "exchanges of these two", "tokens"),
            figure("share", "num_tokens over all exchanges", "swapped_pairs"),
        )
    },
    invariances=("token_permutation",),
)
def swaps(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Trades: which pairs of experts exchange tokens under a variant.

    ``load_shift_max`` is what they add up to for the expert whose load changes most. Table
    ``swaps`` lists the 64 most frequent pairs (expert out, expert in), with their share of all
    exchanges. Where several experts of a token change, the first that leaves is paired with the
    first that comes, by rank. Pairs with a large share trade tokens under any disturbance.
    """
    counts = reductions["swapped_pairs"]
    gained = counts.sum(axis=0) - counts.sum(axis=1)
    most = int(np.argmax(np.abs(gained)))
    fair = facts.num_tokens * facts.router.rule.top_k / facts.router.num_experts
    return {
        "layers": {
            "load_shift_max": float(gained[most] / fair) if fair else None,
            "load_shift_expert": most if fair else None,
        },
        "swaps": most_frequent(counts, NUM_LISTED),
    }


@metric(
    needs=("bf16_flip",),
    layers=(
        estimate(
            "bf16_flip_share_isotropic",
            "mean over tokens of Phi(-distance / rounding noise); assumes isotropic rounding",
            "bf16_flip",
        ),
    ),
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
def bf16_flip(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Tokens that rounding the router input to bfloat16 would flip, rounding taken as isotropic.

    The mean over tokens of Phi(-d / s), d the exact boundary distance and s the standard deviation
    of the rounding error of a coordinate: to first order the share of tokens whose chosen set
    changes when the input is kept in bfloat16. Exposure, not loss of quality. It grows with E and
    k, so read it beside the random router. ``rounding_noise`` counts the error coordinate by
    coordinate, on a sample.
    """
    tokens, expected = reductions["bf16_flip"]
    share = expected / reduced.FIXED_POINT / tokens if tokens else None
    return {"layers": {"bf16_flip_share_isotropic": share}}


#: Probability that is left of a flip.
_LEFT = 1e-6


@metric(
    needs=("rounding_sigmas_histogram", "relative_distance_histogram"),
    layers=(
        estimate(
            "stable_share_input_rounding_1e6",
            "share of tokens that independent roundings of the input to bfloat16 flip with "
            "probability 1e-6 at most",
            "input_stability",
        ),
        estimate(
            "stable_share_input_rounding_worst",
            "share of tokens that no rounding of the input to bfloat16 flips",
            "input_stability",
        ),
    ),
    without_each=stacked("input_stability"),
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
def input_stability(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Input stability: tokens whose set no rounding of the router input to bfloat16 can change.

    Two certificates, each with its assumption in the column's name. ``worst``: every coordinate is
    rounded in the worst direction at once, so a token is safe when its boundary distance exceeds
    2^-8 |y|; few are, which says more about the assumption than about the router. ``1e6``:
    roundings are independent and even, and a token is safe when Hoeffding's bound over all k (E -
    k) pairs leaves a probability of 1e-6; on a sample of at most 4096 tokens. Both take the
    recorded input as what is rounded, also where it is stored in bfloat16 already.
    """
    rule = facts.router.rule
    edges = histogram.bin_edges()
    # the next edge of a bin: a share must not be an interpolation
    needed = edges[np.searchsorted(edges, sigmas_needed(facts.router.num_experts, rule.top_k))]
    likely = histogram.share_below(reductions["rounding_sigmas_histogram"], np.array([needed]))
    worst = histogram.share_below(
        reductions["relative_distance_histogram"], np.array([UNIT_BFLOAT16])
    )
    return {
        "layers": {
            "stable_share_input_rounding_1e6": 1.0 - likely[..., 0],
            "stable_share_input_rounding_worst": 1.0 - worst[..., 0],
        }
    }


def sigmas_needed(num_experts: int, top_k: int) -> float:
    r"""Nearest boundary, in ``rounding_sigmas``, from which a flip has probability 1e-6 at most.

    Independent errors of mean 0, each at most :math:`u |y_d|`, cross a boundary with probability at
    most :math:`\exp(-s^2 / 2 u^2 \lVert (w_i - w_j) \odot y \rVert^2)` (Hoeffding); summed over
    k (E - k) pairs that is 1e-6 at :math:`\sqrt{2 \log(k (E - k) / 10^{-6})} / 0.4247` sigmas.
    """
    pairs = max(top_k * (num_experts - top_k), 1)
    return math.sqrt(2.0 * math.log(pairs / _LEFT)) / ROUNDING_RMS


_PROBABILITIES = {
    "noise_flipped_share": reduced.ESTIMATE,
    "noise_flipped_share_lower": reduced.LOWER,
    "noise_flipped_share_upper": reduced.UPPER,
}


@metric(
    scope="noise",
    needs=("noise_flips", "exit_time_histograms"),
    layers=(
        estimate(
            "noise_flipped_share",
            "expected share of tokens that the noise flips, every logit on its own",
            "noise_flip",
        ),
        figure(
            "noise_flipped_share_lower",
            "the same by the nearest boundary alone: a lower bound",
            "noise_flip",
        ),
        figure(
            "noise_flipped_share_upper",
            "the same by the sum over all boundaries: an upper bound",
            "noise_flip",
        ),
        estimate(
            "noise_simulated_share",
            "share of simulated noisy copies with another set",
            "noise_flip",
        ),
        figure(
            "exit_time_p50_lower",
            "time before which less than half of the paths of the median token have left",
            "exit_time",
            "time",
        ),
        figure(
            "exit_time_p50_upper",
            "time by which at least half of them have left",
            "exit_time",
            "time",
        ),
    ),
)
def noise_flip(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Noise on the router input: how many tokens it flips, and how soon a drift does.

    The noise is normal, independent between coordinates, of the size that ``--noise`` says or that
    two recordings of the same tokens show. Behind linear boundaries the probability that a token's
    set differs is bounded by its nearest boundary and by the sum over all, and estimated between
    them as if every logit moved on its own; simulated copies, routed by the rule itself, stand
    beside it for any rule. Exit times are those of an input that diffuses with this noise per unit
    of time: by ``exit_time_p50`` half of the paths of the median token have left their cell at some
    moment, which comes sooner than being elsewhere at that moment. On a sample of at most 4096
    tokens, simulation and exit times on a quarter of them. docs/theory.md A9, E4.
    """
    counts = reductions["noise_flips"]
    tokens, copies = int(counts[reduced.NOISY_TOKENS]), int(counts[reduced.DRAWN])
    if not tokens:
        return {"layers": {}}
    values: dict[str, float | None] = dict.fromkeys(_PROBABILITIES)
    values["noise_simulated_share"] = int(counts[reduced.SIMULATED]) / copies if copies else None
    if facts.router.rule.is_affine:
        for name, column in _PROBABILITIES.items():
            values[name] = int(counts[column]) / reduced.FIXED_POINT / tokens
        median = histogram.quantile(reductions["exit_time_histograms"], np.array([0.5]))[:, 0]
        values["exit_time_p50_lower"] = within_ends(float(median[EARLY]))
        values["exit_time_p50_upper"] = within_ends(float(median[LATE]))
    return {"layers": values}
