"""What quantisation makes of a weight: rounded codes times scales, in float32."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from moegeom.geometry.number_format import NUMBER_FORMATS, rounded_to

#: Columns that share a scale in 4 bits, and the side of a block in fp8.
GROUP, BLOCK = 128, 128

#: Largest number of float8 e4m3.
_LARGEST_E4M3 = 448.0

#: Half of the range of the codes, by which scales are made: (127 + 128) / 2 and (7 + 8) / 2.
_HALF_RANGE_INT8, _HALF_RANGE_INT4 = 127.5, 7.5


def _scaled(amax: np.ndarray, half_range: float) -> np.ndarray:
    """Scales; 1 where everything is zero."""
    return np.where(amax > 0.0, amax / np.float32(half_range), 1.0).astype(np.float32)


def _int8_rows(weight: Float32[np.ndarray, "experts hidden"]) -> np.ndarray:
    scale = _scaled(np.abs(weight).max(axis=1, keepdims=True), _HALF_RANGE_INT8)
    return np.clip(np.rint(weight / scale), -128, 127) * scale


def _int4_groups(weight: Float32[np.ndarray, "experts hidden"]) -> np.ndarray:
    out = np.empty_like(weight)
    for start in range(0, weight.shape[1], GROUP):
        part = weight[:, start : start + GROUP]
        scale = _scaled(np.abs(part).max(axis=1, keepdims=True), _HALF_RANGE_INT4)
        out[:, start : start + GROUP] = np.clip(np.rint(part / scale), -8, 7) * scale
    return out


def _fp8_tensor(weight: Float32[np.ndarray, "experts hidden"]) -> np.ndarray:
    scale = _scaled(np.abs(weight).max(keepdims=True), _LARGEST_E4M3)
    clipped = np.clip(weight / scale, -_LARGEST_E4M3, _LARGEST_E4M3)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def _fp8_blocks(weight: Float32[np.ndarray, "experts hidden"]) -> np.ndarray:
    out = np.empty_like(weight)
    for row in range(0, weight.shape[0], BLOCK):
        for column in range(0, weight.shape[1], BLOCK):
            place = np.s_[row : row + BLOCK, column : column + BLOCK]
            out[place] = _fp8_tensor(weight[place])
    return out


#: Schemes by the name that presets use.
_SCHEMES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "int8_rows": _int8_rows,
    "int4_groups_of_128": _int4_groups,
    "fp8_tensor": _fp8_tensor,
    "fp8_blocks_of_128": _fp8_blocks,
}

#: All that a weight can be stored as: number formats and schemes.
WEIGHT_STORAGE = frozenset(_SCHEMES) | frozenset(NUMBER_FORMATS)


def stored_as(
    weight: Float[np.ndarray, "experts hidden"], storage: str
) -> Float[np.ndarray, "experts hidden"]:
    r"""What is left of ``weight`` after it was stored as ``storage``, in its own dtype.

    A number format, or codes times scales made in float32 by rounding to nearest:
    ``int8_rows`` (scale amax / 127.5 of a row), ``int4_groups_of_128`` (amax / 7.5 of 128 columns),
    ``fp8_tensor`` and ``fp8_blocks_of_128`` (e4m3, amax / 448). Methods that move errors between
    columns, such as GPTQ, are not functions of the weight alone.

    Raises
    ------
    KeyError
        For a name that is not in ``WEIGHT_STORAGE``.

    Source: compressed-tensors 0.20.0, calculate_qparams. Oracle in tests: the same.
    """
    if storage in NUMBER_FORMATS:
        return rounded_to(weight, storage)
    return _SCHEMES[storage](weight.astype(np.float32)).astype(weight.dtype)
