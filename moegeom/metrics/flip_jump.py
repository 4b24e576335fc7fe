"""Flip jump: what the flips of a variant cost at the router, by the jump at the nearest boundary.

``flip_jump_mean`` is the mean jump (metric ``jump``) over tokens that the variant flips;
``flip_cost`` multiplies it by the share of tokens that flip: the mean over all tokens of what they
cost. The boundary is the nearest one: a variant that takes a token far beyond it, or over another
one, changes the output by something else. Of at most 512 flipped tokens of each variant, whose
experts are read (``--experts``); missing where none of them has a known boundary point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.flips import FLIPPED, SUM, TOKENS
from moegeom.metrics.jump import finite_mean


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    found, counts = reductions["flip_jumps"], reductions["flips"][..., SUM]
    known = np.isfinite(found["height"])
    height, relative = found["height"][known], found["relative"][known]
    share = counts[FLIPPED] / counts[TOKENS] if counts[TOKENS] else np.nan
    mean, over_output = finite_mean(height), finite_mean(relative)
    return {
        "layers": {
            "num_flip_jump_tokens": len(known),
            "num_flip_jumps": int(known.sum()),
            "flip_jump_mean": mean,
            "flip_jump_over_output_mean": over_output,
            "flip_cost": _cost(share, mean),
            "flip_cost_over_output": _cost(share, over_output),
        }
    }


def _cost(share: float, mean: float | None) -> float | None:
    """Where nothing flips there is nothing to pay, whatever is known of jumps."""
    return 0.0 if share == 0.0 else None if mean is None else float(share * mean)


METRIC = Metric(
    name="flip_jump",
    version=1,
    text="Mean jump of the tokens that flip under a variant, and that times the share that flips.",
    scope="flip_jump",
    needs=("flip_jumps", "flips"),
    columns={
        "layers": (
            Column(
                "num_flip_jump_tokens", "flipped tokens whose jump was looked for", "tokens", "int"
            ),
            Column("num_flip_jumps", "those with a known boundary point", "tokens", "int"),
            Column("flip_jump_mean", "mean jump over those", "output", formula="jump", has_se=True),
            Column(
                "flip_jump_over_output_mean",
                "mean over those of the jump over the length of the output",
                formula="jump",
                has_se=True,
            ),
            Column(
                "flip_cost",
                "share of tokens that flip times the mean jump of those that do",
                "output",
                formula="flip_cost",
                has_se=True,
            ),
            Column(
                "flip_cost_over_output",
                "the same with the jump over the length of the output",
                formula="flip_cost",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
