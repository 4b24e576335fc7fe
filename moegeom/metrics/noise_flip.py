"""Noise on the router input: how many tokens it flips, and how soon a drift does.

The noise is normal, independent between coordinates, of the size that ``--noise`` says or that two
recordings of the same tokens show. Behind linear boundaries the probability that a token's set
differs is bounded by its nearest boundary and by the sum over all, and estimated between them as if
every logit moved on its own; simulated copies, routed by the rule itself, stand beside it for any
rule. Exit times are those of an input that diffuses with this noise per unit of time: by
``exit_time_p50`` half of the paths of the median token have left their cell at some moment, which
comes sooner than being elsewhere at that moment. On a sample of at most 4096 tokens, simulation and
exit times on a quarter of them. docs/theory.md A9, E4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.histogram import quantile
from moegeom.kernels.reductions.flips import (
    DRAWN,
    ESTIMATE,
    FIXED_POINT,
    LOWER,
    NOISY_TOKENS,
    SIMULATED,
    UPPER,
)
from moegeom.kernels.reductions.histograms import EARLY, LATE
from moegeom.metrics._ladder import within_ends

_PROBABILITIES = {
    "noise_flipped_share": ESTIMATE,
    "noise_flipped_share_lower": LOWER,
    "noise_flipped_share_upper": UPPER,
}


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["noise_flips"]
    tokens, drawn = int(counts[NOISY_TOKENS]), int(counts[DRAWN])
    if not tokens:
        return {"layers": {}}
    values: dict[str, float | None] = dict.fromkeys(_PROBABILITIES)
    values["noise_simulated_share"] = int(counts[SIMULATED]) / drawn if drawn else None
    if facts.router.rule.is_affine:
        for name, column in _PROBABILITIES.items():
            values[name] = int(counts[column]) / FIXED_POINT / tokens
        median = quantile(reductions["exit_time_histograms"], np.array([0.5]))[:, 0]
        values["exit_time_p50_lower"] = within_ends(float(median[EARLY]))
        values["exit_time_p50_upper"] = within_ends(float(median[LATE]))
    return {"layers": values}


METRIC = Metric(
    name="noise_flip",
    version=1,
    text="Tokens that noise on the router input flips: bounds, estimate and simulation.",
    scope="noise",
    needs=("noise_flips", "exit_time_histograms"),
    columns={
        "layers": (
            Column(
                "noise_flipped_share",
                "expected share of tokens that the noise flips, every logit on its own",
                formula="noise_flip",
                has_se=True,
            ),
            Column(
                "noise_flipped_share_lower",
                "the same by the nearest boundary alone: a lower bound",
                formula="noise_flip",
            ),
            Column(
                "noise_flipped_share_upper",
                "the same by the sum over all boundaries: an upper bound",
                formula="noise_flip",
            ),
            Column(
                "noise_simulated_share",
                "share of simulated noisy copies with another set",
                formula="noise_flip",
                has_se=True,
            ),
            Column(
                "exit_time_p50_lower",
                "time before which less than half of the paths of the median token have left",
                "time",
                formula="exit_time",
            ),
            Column(
                "exit_time_p50_upper",
                "time by which at least half of them have left",
                "time",
                formula="exit_time",
            ),
        )
    },
    finish=_finish,
)
