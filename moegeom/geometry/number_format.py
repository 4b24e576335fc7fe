"""Number formats that engines compute in: rounding to them, and how far rounding goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class NumberFormat:
    """Rounding to nearest, ties to even, into ``dtype`` (None: see ``rounded``).

    ``unit`` is the largest relative error of a normal number, ``least`` the largest absolute error
    below the normal range.
    """

    name: str
    unit: float
    least: float
    rounded: Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]


def _cast(dtype: type) -> Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]:
    def rounded(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        with np.errstate(over="ignore"):  # beyond the largest number is infinite, as on a device
            return values.astype(dtype).astype(values.dtype)

    return rounded


def _tf32(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Ten bits of mantissa behind the first one, in the exponents of float32."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    # half of what is cut off, less one where the last kept bit is even: ties go to even
    rounding = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    cut = ((bits + rounding) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(single), cut, single).astype(values.dtype)


#: Formats by the name that presets use.
NUMBER_FORMATS: dict[str, NumberFormat] = {
    form.name: form
    for form in (
        NumberFormat("float64", 2.0**-53, 0.0, _cast(np.float64)),
        NumberFormat("float32", 2.0**-24, 2.0**-150, _cast(np.float32)),
        NumberFormat("tf32", 2.0**-11, 2.0**-137, _tf32),
        NumberFormat("float16", 2.0**-11, 2.0**-25, _cast(np.float16)),
        NumberFormat("bfloat16", 2.0**-8, 2.0**-134, _cast(ml_dtypes.bfloat16)),
    )
}


def rounded_to(values: Float[np.ndarray, "..."], name: str) -> Float[np.ndarray, "..."]:
    r"""``values`` rounded to nearest, ties to even, in the format ``name``; same shape and dtype.

    :math:`|fl(x) - x| \le u |x|` in the normal range, with u the format's ``unit``. Numbers beyond
    its largest become infinite; nan and infinities stay. A format wider than the dtype of
    ``values`` changes nothing.
    Raises KeyError for a name that is not in ``NUMBER_FORMATS``. Oracle in tests: torch, and for
    tf32 the definition in integers.
    """
    return NUMBER_FORMATS[name].rounded(values)
