"""What a cast does to a selection bias."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float64

#: One update of a selection bias in loss-free balancing (arXiv 2408.15664: 0.001).
UPDATE_STEP = 1e-3


def to_bfloat16(values: Float[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Values rounded to float32 and then to bfloat16, ties to even. Oracle in tests: torch."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def ulp_bfloat16(value: float) -> float:
    """Step of bfloat16 at |value|, 2^(floor(log2 |value|) - 7), at least 2^-133; 0 for 0 and inf.

    Oracle in tests: the next number in the bits of torch's bfloat16.
    """
    if value == 0.0 or not np.isfinite(value):
        return 0.0
    exponent = int(np.frexp(value)[1]) - 1
    return float(2.0 ** (max(exponent, -126) - 7))


@dataclass(frozen=True)
class BiasPrecision:
    """Selection biases before and after a cast to bfloat16, as they are and recentred.

    ``middle`` is the middle of their range: subtracting it from every bias changes no difference.
    ``lost_update_share``: experts whose bias an update of 0.001 up or down leaves where it is in
    bfloat16.
    """

    num_distinct: int
    num_distinct_bf16: int
    num_distinct_bf16_recentred: int
    ulp_bf16: float
    spread: float
    middle: float
    lost_update_share: float
    largest_shift: float


def bias_precision(bias: Float[np.ndarray, "experts"]) -> BiasPrecision:
    """Figures of one selection bias. ``spread`` is its standard deviation, ddof 0, or inf."""
    values = bias.astype(np.float64)
    rounded = to_bfloat16(bias)
    middle = 0.5 * float(values.max()) + 0.5 * float(values.min())
    with np.errstate(over="ignore"):
        spread = float(values.std())
    steps = [to_bfloat16(to_bfloat16(bias) + sign * UPDATE_STEP) == rounded for sign in (1.0, -1.0)]
    return BiasPrecision(
        num_distinct=len(np.unique(values)),
        num_distinct_bf16=len(np.unique(rounded)),
        num_distinct_bf16_recentred=len(np.unique(to_bfloat16(values - middle))),
        ulp_bf16=ulp_bfloat16(float(np.abs(values).max())),
        spread=spread,
        middle=middle,
        lost_update_share=float((steps[0] & steps[1]).mean()),
        largest_shift=float(np.abs(rounded - values).max()),
    )
