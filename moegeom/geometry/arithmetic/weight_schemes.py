"""What quantisation makes of a weight: rounded codes times scales, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from moegeom.geometry.arithmetic.number_format import NUMBER_FORMATS, rounded_to

#: Columns that share a scale in 4 bits, and the side of a block in fp8.
GROUP, BLOCK = 128, 128

#: Largest number of float8 e4m3.
_LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class _Codes:
    """Integer codes that share a scale in ``group`` columns of a row; 0 for all of them.

    Signed codes have the scale amax / ``half_range``; unsigned ones, where that is None, have a
    code for zero, and the scale (max - min) / (number of steps) of a range that holds zero.
    """

    bits: int
    group: int
    half_range: float | None

    def __call__(self, weight: Float32[np.ndarray, "experts hidden"]) -> np.ndarray:
        width = self.group or weight.shape[1]
        out = np.empty_like(weight)
        for start in range(0, weight.shape[1], width):
            part = weight[:, start : start + width]
            out[:, start : start + width] = self._of_group(part)
        return out

    def _of_group(self, part: Float32[np.ndarray, "experts columns"]) -> np.ndarray:
        largest = 2 ** (self.bits - 1) - 1
        if self.half_range is not None:
            scale = _scaled(np.abs(part).max(axis=1, keepdims=True), self.half_range)
            return np.clip(np.rint(part / scale), -largest - 1, largest) * scale
        low = np.minimum(part.min(axis=1, keepdims=True), 0.0)
        high = np.maximum(part.max(axis=1, keepdims=True), 0.0)
        scale = _scaled(high - low, 2.0**self.bits - 1.0)
        zero = np.clip(np.rint(-low / scale), 0, 2 * largest + 1)
        return (np.clip(np.rint(part / scale) + zero, 0, 2 * largest + 1) - zero) * scale


def _scaled(amax: np.ndarray, half_range: float) -> np.ndarray:
    """Scales; 1 where everything is zero."""
    return np.where(amax > 0.0, amax / np.float32(half_range), 1.0).astype(np.float32)


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


#: Integer codes. Half of the range is (127 + 128) / 2 and (7 + 8) / 2 in some libraries, the
#: largest code in others.
_INTEGERS = {
    "int8_rows": _Codes(8, 0, 127.5),
    "int8_rows_by_127": _Codes(8, 0, 127.0),
    "uint8_rows": _Codes(8, 0, None),
    "int4_groups_of_128": _Codes(4, GROUP, 7.5),
    "int4_groups_of_128_by_7": _Codes(4, GROUP, 7.0),
    "uint4_groups_of_128": _Codes(4, GROUP, None),
}


def _then_bfloat16(codes: _Codes) -> Callable[[np.ndarray], np.ndarray]:
    """The same, multiplied out and stored in bfloat16."""
    return lambda weight: rounded_to(codes(weight), "bfloat16")


#: Schemes by the name that presets use.
_SCHEMES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **_INTEGERS,
    **{f"{name}_in_bfloat16": _then_bfloat16(codes) for name, codes in _INTEGERS.items()},
    "fp8_tensor": _fp8_tensor,
    "fp8_blocks_of_128": _fp8_blocks,
}

#: All that a weight can be stored as: number formats and schemes.
WEIGHT_STORAGE = tuple(dict.fromkeys([*_SCHEMES, *NUMBER_FORMATS]))


def stored_as(
    weight: Float[np.ndarray, "experts hidden"], storage: str
) -> Float[np.ndarray, "experts hidden"]:
    r"""What is left of ``weight`` after it was stored as ``storage``, in its own dtype.

    A number format, or codes times scales made in float32 by rounding to nearest:
    ``int8_rows`` (scale amax / 127.5 of a row), ``int4_groups_of_128`` (amax / 7.5 of 128 columns),
    the same ``by_127`` and ``by_7``, ``uint8_rows`` and ``uint4_groups_of_128`` with a code for
    zero, each of these ``in_bfloat16`` afterwards; ``fp8_tensor`` and ``fp8_blocks_of_128`` (e4m3,
    amax / 448). Methods that move errors between columns, such as GPTQ, are not functions of the
    weight alone.

    Raises
    ------
    KeyError
        For a name that is not in ``WEIGHT_STORAGE``.

    Source: compressed-tensors 0.20.0, calculate_qparams. Oracle in tests: the same.
    """
    if storage in NUMBER_FORMATS:
        return rounded_to(weight, storage)
    return _SCHEMES[storage](weight.astype(np.float32)).astype(weight.dtype)
