"""Number formats that engines compute in: rounding to them, and how far rounding goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float

#: Numbers that are rounded at once, so that they stay in the processor's cache.
_AT_ONCE = 2**16


@dataclass(frozen=True)
class NumberFormat:
    """Rounding to nearest, ties to even, into ``dtype`` (None: see ``rounded``).

    ``unit`` is the largest relative error of a normal number, ``least`` the largest absolute error
    below the normal range; a number beyond ``largest`` may become infinite.
    """

    name: str
    unit: float
    least: float
    largest: float
    rounded: Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]

    @property
    def largest_exponent(self) -> float:
        """The largest whole n for which exp(-n) is a normal number."""
        return float(math.floor(-math.log(self.least / self.unit))) if self.least else 708.0


def _cast(dtype: type) -> Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]:
    def rounded(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        with np.errstate(over="ignore"):  # beyond the largest number is infinite, as on a device
            return values.astype(dtype).astype(values.dtype)

    return rounded


def _tf32(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Ten bits of mantissa behind the first one, in the exponents of float32."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32).reshape(-1)
    cut = np.empty_like(bits)
    for start in range(0, len(bits), _AT_ONCE):
        part, out = bits[start : start + _AT_ONCE], cut[start : start + _AT_ONCE]
        # half of what is cut off, less one where the last kept bit is even: ties go to even
        np.right_shift(part, np.uint32(13), out=out)
        out &= np.uint32(1)
        out += np.uint32(0xFFF)
        out += part
        out &= np.uint32(0xFFFFE000)
    rounded = cut.view(np.float32).reshape(single.shape)
    if np.isnan(single).any():  # its bits may have run over
        rounded = np.where(np.isnan(single), single, rounded)
    return rounded.astype(values.dtype, copy=False)


def _largest(bits: int, exponent: int) -> float:
    """The largest number with so many bits of mantissa, the first one included."""
    return (2.0 - 2.0 ** (1 - bits)) * 2.0**exponent


#: Formats by the name that presets use.
NUMBER_FORMATS: dict[str, NumberFormat] = {
    form.name: form
    for form in (
        NumberFormat("float64", 2.0**-53, 0.0, float(np.finfo(np.float64).max), _cast(np.float64)),
        NumberFormat("float32", 2.0**-24, 2.0**-150, _largest(24, 127), _cast(np.float32)),
        NumberFormat("tf32", 2.0**-11, 2.0**-137, _largest(11, 127), _tf32),
        NumberFormat("float16", 2.0**-11, 2.0**-25, _largest(11, 15), _cast(np.float16)),
        NumberFormat("bfloat16", 2.0**-8, 2.0**-134, _largest(8, 127), _cast(ml_dtypes.bfloat16)),
    )
}


def rounded_to(values: Float[np.ndarray, "..."], name: str) -> Float[np.ndarray, "..."]:
    r"""``values`` rounded to nearest, ties to even, in the format ``name``; same shape and dtype.

    :math:`|fl(x) - x| \le u |x|` in the normal range, with u the format's ``unit``. Numbers beyond
    its largest become infinite; nan and infinities stay. A format as wide as the dtype
    of ``values`` changes nothing: they are returned themselves.
    Raises KeyError for a name that is not in ``NUMBER_FORMATS``. Oracle in tests: torch, and for
    tf32 the definition in integers.
    """
    form = NUMBER_FORMATS[name]
    is_wider = 2.0 * form.unit <= float(np.finfo(values.dtype).eps)
    return values if is_wider else form.rounded(values)
