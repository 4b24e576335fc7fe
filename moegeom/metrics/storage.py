"""How the router is stored: digits kept, and traces of an earlier quantisation.

``weight_bits`` are the mantissa bits of the stored dtype, ``weight_bits_kept`` those that the
family keeps. ``levels_share`` compares the number of different values in a window with that of
random numbers of the dtype: about 1 for trained weights, half or less when a coarser grid was
rounded into bfloat16. Digests tell equal tensors apart from changed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from moegeom.core.digest import digest_of
from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.core.router import mantissa_bits
from moegeom.geometry.number_formats import expected_window_levels, to_bfloat16, window_levels

#: Columns of each row that tell whether float32 storage holds bfloat16 numbers only.
_PROBED = 512


def _finish(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
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


METRIC = Metric(
    name="storage",
    version=1,
    text="Precision of the stored numbers, of what the family keeps, and of what the values use.",
    scope="weights",
    needs=(),
    columns={
        "layers": (
            Column("weight_bits", "explicit mantissa bits of the stored weight", "bits", "int"),
            Column("weight_bits_kept", "the same as the family keeps it", "bits", "int"),
            Column("bias_bits", "explicit mantissa bits of the stored bias", "bits", "int"),
            Column("bias_bits_kept", "the same as the family keeps it", "bits", "int"),
            Column("is_weight_bf16", "the first 512 columns hold bfloat16 numbers", "", "bool"),
            Column(
                "levels_share",
                "different values in windows of 32 over what Gaussian rows of the stored dtype "
                "hold; mean over rows",
                formula="levels_share",
            ),
            Column("weight_digest", "hash of the weight", "", "str"),
            Column("gain_digest", "hash of the gain of the norm in front", "", "str"),
            Column("logit_bias_digest", "hash of the logit bias", "", "str"),
            Column("selection_bias_digest", "hash of the selection bias", "", "str"),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column("row_levels_share", "levels_share of the row", formula="levels_share"),
            Column("zero_share", "share of exact zeros in the first 512 columns of the row"),
        ),
    },
    finish=_finish,
    invariances=(),
)
