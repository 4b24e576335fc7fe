"""Digits of the router and of its selection bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.metric import Column, RouterFacts, Values, count, figure, metric
from moegeom.core.router import mantissa_bits
from moegeom.core.shapes import Float
from moegeom.geometry.number_formats import (
    bias_precision,
    expected_window_levels,
    to_bfloat16,
    window_levels,
)

#: Columns of each row that tell whether float32 storage holds bfloat16 numbers only.
_PROBED = 512


@metric(
    scope="weights",
    columns={
        "layers": (
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
        ),
        "experts": (
            count("expert", "expert number", "expert"),
            figure("row_levels_share", "levels_share of the row", "levels_share"),
            Column("zero_share", "share of exact zeros in the first 512 columns of the row"),
        ),
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
    digests = {
        "weight_digest": _digest(weight),
        "gain_digest": _digest(router.gain),
        "logit_bias_digest": _digest(router.logit_bias),
        "selection_bias_digest": _digest(router.selection_bias),
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
    columns={
        "layers": (
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
        "experts": (
            count("expert", "expert number", "expert"),
            Column("logit_bias", "bias that is added to the expert's logit", "logit"),
            Column("selection_bias", "bias of the expert as stored", "score"),
            Column("bias_cast_shift", "what a cast to bfloat16 would add to it", "score"),
        ),
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
