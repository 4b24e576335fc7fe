"""Outputs of experts: as recorded, and where they jump at the nearest boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import RouterFacts, Values, count, estimate, figure, metric
from moegeom.core.shapes import Float64, Int
from moegeom.geometry.load import most_frequent
from moegeom.geometry.space import energy_share, mean_direction_cosine, mean_energy_share
from moegeom.kernels.reductions.flips import FLIPPED, SUM, TOKENS


@metric(
    version=2,
    needs=("block_outputs",),
    layers=(
        *(
            estimate(
                f"{part}_energy_share",
                f"mean squared output of the {part} experts over that of the sum",
                "output_energy",
            )
            for part in ("shared", "routed")
        ),
        estimate(
            "shared_mean_cosine",
            "cosine of the mean shared output and the mean output",
            "output_energy",
        ),
        *(
            estimate(
                f"{part}_mean_energy_share",
                f"squared mean over mean square, output of {words}",
                "output_energy",
            )
            for part, words in (
                ("shared", "shared experts"),
                ("routed", "routed experts"),
                ("total", "their sum"),
            )
        ),
    ),
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
def output_energy(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """How much of the output of a layer its shared experts give, from recorded outputs.

    On tokens with recorded outputs Y_sh of the shared and Y_ro of the routed experts, Y their sum:
    the energy share mean |Y_sh|^2 / mean |Y|^2; the mean-energy share |mean Y|^2 / mean |Y|^2 of
    each part; and the cosine of the mean outputs. A shared expert that carries the common part has
    a large mean-energy share and the routed ones a small one. None of it tells what training would
    do without shared experts.
    """
    sample = reductions["block_outputs"]
    if len(sample["shared"]) < 2:
        return {"layers": {}}
    shared, routed = (sample[name].astype(np.float64) for name in ("shared", "routed"))
    total = shared + routed
    return {
        "layers": {
            "shared_energy_share": energy_share(shared, total),
            "routed_energy_share": energy_share(routed, total),
            "shared_mean_cosine": mean_direction_cosine(shared, total),
            "shared_mean_energy_share": mean_energy_share(shared),
            "routed_mean_energy_share": mean_energy_share(routed),
            "total_mean_energy_share": mean_energy_share(total),
        }
    }


@metric(
    needs=("output_cosines",),
    layers=(
        estimate(
            "overlap_output",
            "mean cosine of the outputs of two experts on one token",
            "overlap_output",
        ),
        estimate("max_output_cosine", "largest mean cosine of a pair of experts", "overlap_output"),
    ),
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
def output_overlap(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Overlap of expert outputs: whether experts say the same about the same token.

    Mean over pairs of experts, then over tokens, of the cosine of their outputs on one token, from
    a recording that holds the output of every expert. 1 when all experts agree in direction, 0 when
    their outputs are orthogonal on average; duplicates show as a pair with ``max_output_cosine``
    near 1. Outputs are not centred: a part that all experts share raises every cosine.
    """
    tokens, cosines = reductions["output_cosines"]
    if not tokens or len(cosines) < 2:
        return {"layers": {}}
    pairs = cosines[np.triu_indices(len(cosines), 1)]
    return {
        "layers": {"overlap_output": float(pairs.mean()), "max_output_cosine": float(pairs.max())}
    }


#: Pairs listed per router, the most frequent ones.
NUM_LISTED = 256


@metric(
    needs=("boundary_pairs",),
    tables={
        "pairs": (
            count("expert_out", "chosen expert that would be left", "expert"),
            count("expert_in", "expert that would be chosen instead", "expert"),
            count("num_tokens", "tokens whose nearest boundary is this one", "tokens"),
            figure("share", "num_tokens over all tokens with a known boundary", "boundary_pairs"),
        )
    },
    invariances=("token_permutation",),
)
def boundaries(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Boundaries: which pairs of experts the tokens are nearest to exchanging.

    For each token the pair (expert out, expert in) whose boundary is nearest, by the boundary
    distance; table ``pairs`` lists the 256 most frequent. Tokens whose distance is not exact
    (``distance_bracket``) mostly have no known boundary and are left out. Pairs that take a large
    share trade tokens under any disturbance: duplicate rows, or experts that learned the same.
    """
    return {"pairs": most_frequent(reductions["boundary_pairs"], NUM_LISTED)}


@metric(
    scope="jump",
    needs=("jumps", "boundary_pairs"),
    layers=(
        count("num_jump_tokens", "tokens whose jump was looked for", "tokens"),
        figure(
            "jump_known_share",
            "share of them whose nearest boundary point is known; the others are left out",
            "jump",
        ),
        figure("jump_p50", "median jump", "jump", "output"),
        figure("jump_p99", "99 % quantile of the jump", "jump", "output"),
        figure(
            "jump_over_output_p50",
            "median of the jump over the length of the output at the token",
            "jump",
        ),
        estimate(
            "expected_jump",
            "mean of the jump times the probability that rounding the input to bfloat16 flips "
            "the token",
            "expected_jump",
            "output",
        ),
        estimate(
            "expected_jump_over_output",
            "the same of the jump over the length of the output",
            "expected_jump",
        ),
    ),
    tables={
        "pairs": (
            count("expert_out", "chosen expert that would be left", "expert"),
            count("expert_in", "expert that would be chosen instead", "expert"),
            figure(
                "jump_mean",
                "mean jump of the tokens of the sample whose nearest boundary is this one",
                "jump",
                "output",
            ),
        )
    },
    invariances=("token_permutation",),
)
def jump(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Jump: how far the output of the experts moves where the nearest boundary is crossed.

    At the boundary point that is nearest to a token, two experts change places. The jump J is the
    length of the difference of the output of the routed experts just before and just behind it,
    with the weights of the model; ``jump_over_output_p50`` puts it beside the length of the output
    at the token. ``expected_jump`` is the mean over tokens of J times the probability that rounding
    the input to bfloat16 takes the token over the boundary: exposure, weighted by what a flip does.
    On a sample of at most 1,024 tokens whose experts are read (``--experts``). Tokens whose
    boundary point is not known are left out of all figures and counted by ``jump_known_share``:
    many of grouped rules. It is one block's output, without shared experts; what later layers make
    of it is not looked at.
    """
    jumps = reductions["jumps"]
    is_known = np.isfinite(jumps["height"])
    height, relative = jumps["height"][is_known], jumps["relative"][is_known]
    pairs = most_frequent(reductions["boundary_pairs"], NUM_LISTED)
    listed = np.stack([pairs["expert_out"], pairs["expert_in"]], axis=1)
    return {
        "layers": {
            "num_jump_tokens": len(is_known),
            "jump_known_share": float(is_known.mean()) if len(is_known) else None,
            "jump_p50": _quantile(height, 0.5),
            "jump_p99": _quantile(height, 0.99),
            "jump_over_output_p50": _quantile(relative, 0.5),
            "expected_jump": _mean(height * jumps["chance"][is_known]),
            "expected_jump_over_output": finite_mean(relative * jumps["chance"][is_known]),
        },
        "pairs": {
            "expert_out": pairs["expert_out"],
            "expert_in": pairs["expert_in"],
            "jump_mean": _mean_by_pair(height, jumps["pair"][is_known], listed),
        },
    }


def finite_mean(values: Float64[np.ndarray, "tokens"]) -> float | None:
    """Mean of the values that are finite: an output of zeros has no relative jump."""
    return _mean(values[np.isfinite(values)])


def _mean(values: Float64[np.ndarray, "tokens"]) -> float | None:
    return float(values.mean()) if len(values) else None


@metric(
    scope="harm",
    needs=("harm",),
    layers=(
        count("num_made_flips", "flips that were made in the running model", "tokens"),
        estimate(
            "harm_kl",
            "mean KL divergence of the flipped token's next token, before from after",
            "harm",
            "nat",
        ),
        figure("harm_kl_p50", "median of it", "harm", "nat"),
        estimate(
            "harm_kl_later",
            "mean of its sum over the 32 positions behind the flipped token",
            "harm",
            "nat",
        ),
        estimate(
            "harm_kl_beside",
            "mean after a step of the same length away from the boundary: no flip",
            "harm",
            "nat",
        ),
        estimate(
            "harm_token_share", "share of the flips after which another token is likeliest", "harm"
        ),
    ),
    invariances=("expert_relabelling",),
)
def harm(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Harm: what a flip changes of the tokens that the model says next.

    In the running model (``moegeom capture --flips``) one token at a time is taken across its
    nearest boundary, at the gate alone, and the rest of the model runs on: KL(p || q) in nats of
    the next token, p before the flip and q after it, at the token and added up over the 32
    positions behind it. Flipped are tokens of the tenth nearest to a boundary, which other
    arithmetics flip first. ``harm_kl_beside`` is the same after a step of the same length that
    flips nothing: what is left of ``harm_kl`` beyond it is the jump. A flip that other layers make
    good costs little here, however large its jump.
    """
    flips = reductions["harm"]
    kl, beside = flips["kl"], flips["kl_beside"]
    beside = beside[np.isfinite(beside)]
    return {
        "layers": {
            "num_made_flips": len(kl),
            "harm_kl": _mean(kl),
            "harm_kl_p50": _quantile(kl, 0.5),
            "harm_kl_later": _mean(flips["kl_later"]),
            "harm_kl_beside": _mean(beside),
            "harm_token_share": _mean(flips["is_other_token"].astype(np.float64)),
        }
    }


def _quantile(values: Float64[np.ndarray, "tokens"], p: float) -> float | None:
    value = float(np.quantile(values, p)) if len(values) else np.nan
    return value if np.isfinite(value) else None


def _mean_by_pair(
    height: Float64[np.ndarray, "tokens"],
    pair: Int[np.ndarray, "tokens 2"],
    listed: Int[np.ndarray, "pairs 2"],
) -> Float64[np.ndarray, "pairs"]:
    """Mean height of the tokens of each listed pair; nan where no token of the sample has it."""
    means = np.full(len(listed), np.nan)
    for place, one in enumerate(listed):
        own = height[(pair == one).all(axis=1)]
        if len(own):
            means[place] = own.mean()
    return means


@metric(
    scope="flip_jump",
    needs=("flip_jumps", "flips"),
    layers=(
        count("num_flip_jump_tokens", "flipped tokens whose jump was looked for", "tokens"),
        count("num_flip_jumps", "those with a known boundary point", "tokens"),
        estimate("flip_jump_mean", "mean jump over those", "jump", "output"),
        estimate(
            "flip_jump_over_output_mean",
            "mean over those of the jump over the length of the output",
            "jump",
        ),
        estimate(
            "flip_cost",
            "share of tokens that flip times the mean jump of those that do",
            "flip_cost",
            "output",
        ),
        estimate(
            "flip_cost_over_output",
            "the same with the jump over the length of the output",
            "flip_cost",
        ),
    ),
    invariances=("token_permutation",),
)
def flip_jump(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """
    Flip jump: what the flips of a variant cost at the router, by the jump at the nearest boundary.

    ``flip_jump_mean`` is the mean jump (metric ``jump``) over tokens that the variant flips;
    ``flip_cost`` multiplies it by the share of tokens that flip: the mean over all tokens of what
    they cost. The boundary is the nearest one: a variant that takes a token far beyond it, or over
    another one, changes the output by something else. Of at most 512 flipped tokens of each
    variant, whose experts are read (``--experts``); missing where none of them has a known boundary
    point.
    """
    jumps, counts = reductions["flip_jumps"], reductions["flips"][..., SUM]
    is_known = np.isfinite(jumps["height"])
    height, relative = jumps["height"][is_known], jumps["relative"][is_known]
    share = counts[FLIPPED] / counts[TOKENS] if counts[TOKENS] else np.nan
    mean, over_output = finite_mean(height), finite_mean(relative)
    return {
        "layers": {
            "num_flip_jump_tokens": len(is_known),
            "num_flip_jumps": int(is_known.sum()),
            "flip_jump_mean": mean,
            "flip_jump_over_output_mean": over_output,
            "flip_cost": _cost(share, mean),
            "flip_cost_over_output": _cost(share, over_output),
        }
    }


def _cost(share: float, mean: float | None) -> float | None:
    """Where nothing flips there is nothing to pay, whatever is known of jumps."""
    return 0.0 if share == 0.0 else None if mean is None else float(share * mean)
