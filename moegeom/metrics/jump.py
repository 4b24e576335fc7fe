"""Jump: how far the output of the experts moves where the nearest boundary is crossed.

At the boundary point that is nearest to a token, two experts change places. The jump J is the
length of the difference of the output of the routed experts just before and just behind it, with
the weights of the model; ``jump_over_output_p50`` puts it beside the length of the output at the
token. ``expected_jump`` is the mean over tokens of J times the probability that rounding the input
to bfloat16 takes the token over the boundary: exposure, weighted by what a flip does. On a sample
of at most 1,024 tokens whose experts are read (``--experts``). Tokens whose boundary point is not
known are left out of all figures and counted by ``jump_known_share``: many of grouped rules. It is
one block's output, without shared experts; what later layers make of it is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import most_frequent
from moegeom.metrics.boundaries import NUM_LISTED


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    found = reductions["jumps"]
    known = np.isfinite(found["height"])
    height, relative = found["height"][known], found["relative"][known]
    pairs = most_frequent(reductions["boundary_pairs"], NUM_LISTED)
    listed = np.stack([pairs["expert_out"], pairs["expert_in"]], axis=1)
    return {
        "layers": {
            "num_jump_tokens": len(known),
            "jump_known_share": float(known.mean()) if len(known) else None,
            "jump_p50": _quantile(height, 0.5),
            "jump_p99": _quantile(height, 0.99),
            "jump_over_output_p50": _quantile(relative, 0.5),
            "expected_jump": _mean(height * found["chance"][known]),
            "expected_jump_over_output": finite_mean(relative * found["chance"][known]),
        },
        "pairs": {
            "expert_out": pairs["expert_out"],
            "expert_in": pairs["expert_in"],
            "jump_mean": _mean_by_pair(height, found["pair"][known], listed),
        },
    }


def finite_mean(values: Float64[np.ndarray, "tokens"]) -> float | None:
    """Mean of the values that are finite: an output of zeros has no relative jump."""
    return _mean(values[np.isfinite(values)])


def _mean(values: Float64[np.ndarray, "tokens"]) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: Float64[np.ndarray, "tokens"], p: float) -> float | None:
    found = float(np.quantile(values, p)) if len(values) else np.nan
    return found if np.isfinite(found) else None


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


METRIC = Metric(
    name="jump",
    version=1,
    text="How far the output of the routed experts jumps at the nearest boundary of a token, on a "
    "sample, and its mean weighted by the probability that bfloat16 crosses it.",
    scope="jump",
    needs=("jumps", "boundary_pairs"),
    columns={
        "layers": (
            Column("num_jump_tokens", "tokens whose jump was looked for", "tokens", "int"),
            Column(
                "jump_known_share",
                "share of them whose nearest boundary point is known; the others are left out",
                formula="jump",
            ),
            Column("jump_p50", "median jump", "output", formula="jump"),
            Column("jump_p99", "99 % quantile of the jump", "output", formula="jump"),
            Column(
                "jump_over_output_p50",
                "median of the jump over the length of the output at the token",
                formula="jump",
            ),
            Column(
                "expected_jump",
                "mean of the jump times the probability that rounding the input to bfloat16 flips "
                "the token",
                "output",
                formula="expected_jump",
                has_se=True,
            ),
            Column(
                "expected_jump_over_output",
                "the same of the jump over the length of the output",
                formula="expected_jump",
                has_se=True,
            ),
        ),
        "pairs": (
            Column("expert_out", "chosen expert that would be left", "expert", "int"),
            Column("expert_in", "expert that would be chosen instead", "expert", "int"),
            Column(
                "jump_mean",
                "mean jump of the tokens of the sample whose nearest boundary is this one",
                "output",
                formula="jump",
            ),
        ),
    },
    finish=_finish,
    invariances=("token_permutation",),
)
