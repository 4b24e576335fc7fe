"""Effective rows W diag(g) of two routers beside each other, and how far rounding can move them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from moegeom.core.router import Router, mantissa_bits
from moegeom.geometry.number_formats import CASTS


@dataclass(frozen=True, eq=False)
class RowPair:
    """Rows of both sides in the order of the second, centred, with their means.

    ``half_step`` bounds the rounding of each value of the two together; nothing is known of it
    for projections.
    """

    a: Float64[np.ndarray, "experts dimension"]
    b: Float64[np.ndarray, "experts dimension"]
    mean_a: Float64[np.ndarray, "dimension"]
    mean_b: Float64[np.ndarray, "dimension"]
    half_step: Float64[np.ndarray, "experts dimension"]


def row_pair(a: Router, b: Router, place: Int64[np.ndarray, "experts"]) -> RowPair:
    """Rows of both, row i of ``b`` beside row ``place[i]`` of ``a``; values must be finite."""
    effective = [effective_rows_of(a)[place], effective_rows_of(b)]
    steps = _half_steps(a)[place] + _half_steps(b)
    means = [rows.mean(axis=0) for rows in effective]
    if len(effective[0]) == 1:  # a single row less its mean would be nothing
        means = [np.zeros_like(mean) for mean in means]
    centred = [rows - mean for rows, mean in zip(effective, means, strict=True)]
    return RowPair(centred[0], centred[1], means[0], means[1], steps)


def effective_rows_of(router: Router) -> Float64[np.ndarray, "experts hidden"]:
    """W diag(g) in float64."""
    weight = router.weight.astype(np.float64)
    return weight if router.gain is None else weight * router.gain.astype(np.float64)


def _half_steps(router: Router) -> Float64[np.ndarray, "experts hidden"]:
    """Largest error of each effective value when weight and gain were rounded to what they are."""
    weight = np.abs(router.weight.astype(np.float64))
    bits = min(stored_bits(router.provenance.stored_dtype), _held_bits(router.weight))
    error = weight * 2.0 ** -(bits + 1)
    if router.gain is None:
        return error
    gain = router.gain.astype(np.float64)
    norm = router.norm
    # what is rounded is the gain without its scale and its offset
    stored = np.abs(gain if norm is None else gain / norm.gain_scale - norm.gain_offset)
    error *= np.abs(gain)
    scale = 1.0 if norm is None else norm.gain_scale
    return error + weight * stored * scale * 2.0 ** -(_held_bits(stored.astype(np.float32)) + 1)


def stored_bits(dtype: str) -> int:
    """Mantissa bits of a stored dtype; those of float32 where it is no plain float."""
    bits = mantissa_bits(dtype)
    return 23 if bits is None else bits


def _held_bits(values: Float[np.ndarray, "*shape"]) -> int:
    """Mantissa bits that the values need: 7 for numbers of bfloat16 in a float32 file."""
    flat = values.reshape(1, -1)
    for cast, bits in (("bf16", 7), ("fp16", 10)):
        with np.errstate(over="ignore"):
            if np.array_equal(CASTS[cast](flat.astype(np.float32)), flat):
                return bits
    return 23
