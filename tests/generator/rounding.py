"""Number formats of quantised weights, caches and inputs, with the conventions that engines use."""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float

Granularity = Literal["row", "column", "block", "tensor"]
Fp8 = Literal["e4m3", "e5m2"]

#: Features of a block with a scale of its own.
BLOCK = 16

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Integers:
    """Signed with the scale amax / ``divisor``, or unsigned from the least with a zero point."""

    bits: int
    granularity: Granularity
    divisor: float
    is_signed: bool = True


def _blocks(w: np.ndarray, granularity: Granularity) -> tuple[np.ndarray, tuple[int, ...]]:
    """The weights with the axes over which a scale is shared, and these axes."""
    shapes = {
        "row": (w.shape, (1,)),
        "column": (w.shape, (0,)),
        "tensor": (w.shape, (0, 1)),
        "block": ((w.shape[0], w.shape[1] // BLOCK, BLOCK), (2,)),
    }
    shape, axes = shapes[granularity]
    return w.astype(np.float64).reshape(shape), axes


def to_integers(w: Float[np.ndarray, "rows columns"], form: Integers) -> np.ndarray:
    parts, axes = _blocks(w, form.granularity)
    if form.is_signed:
        scale = np.abs(parts).max(axis=axes, keepdims=True) / form.divisor
        scale = np.where(scale > 0, scale, 1.0)
        most = 2 ** (form.bits - 1)
        q = np.clip(np.round(parts / scale), -most, most - 1)
        return (q * scale).reshape(w.shape).astype(np.float32)
    least = parts.min(axis=axes, keepdims=True)
    scale = (parts.max(axis=axes, keepdims=True) - least) / (2**form.bits - 1)
    scale = np.where(scale > 0, scale, 1.0)
    zero = np.round(-least / scale)
    q = np.clip(np.round(parts / scale) + zero, 0, 2**form.bits - 1)
    return ((q - zero) * scale).reshape(w.shape).astype(np.float32)


def to_fp8(
    x: Float[np.ndarray, "rows columns"], name: Fp8, granularity: Granularity | None
) -> np.ndarray:
    """scale * fp8(x / scale) with amax / scale the largest number; no scale without granularity."""
    if granularity is None:
        clipped = np.clip(x, -_LARGEST[name], _LARGEST[name])
        return clipped.astype(_DTYPE[name]).astype(np.float32)
    parts, axes = _blocks(x, granularity)
    scale = np.abs(parts).max(axis=axes, keepdims=True) / _LARGEST[name]
    scale = np.where(scale > 0, scale, 1.0)
    stored = (parts / scale).astype(np.float32).astype(_DTYPE[name]).astype(np.float64)
    return (stored * scale).reshape(x.shape).astype(np.float32)
