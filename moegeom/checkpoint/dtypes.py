"""Stored dtypes: their spelling in safetensors, their size, and the exact way to float."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Float, Float32, Integer, Shaped


@dataclass(frozen=True)
class StoredDtype:
    """One row of the table; ``numpy`` is None where an element is no whole number of bytes."""

    bits: int
    numpy: np.dtype | None


def _row(scalar: type) -> StoredDtype:
    dtype = np.dtype(scalar)
    return StoredDtype(8 * dtype.itemsize, dtype)


#: Every dtype of safetensors 0.8, in its spelling. Files are little-endian.
DTYPES: dict[str, StoredDtype] = {
    "BOOL": _row(np.bool_),
    "U8": _row(np.uint8),
    "I8": _row(np.int8),
    "U16": _row(np.uint16),
    "I16": _row(np.int16),
    "U32": _row(np.uint32),
    "I32": _row(np.int32),
    "U64": _row(np.uint64),
    "I64": _row(np.int64),
    "F16": _row(np.float16),
    "BF16": _row(ml_dtypes.bfloat16),
    "F32": _row(np.float32),
    "F64": _row(np.float64),
    "C64": _row(np.complex64),
    "F8_E4M3": _row(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": _row(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": _row(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": _row(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": _row(ml_dtypes.float8_e8m0fnu),
    "F4": StoredDtype(4, None),
    "F6_E2M3": StoredDtype(6, None),
    "F6_E3M2": StoredDtype(6, None),
}

#: Floating-point dtypes whose values mean something without a scale beside them.
PLAIN_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

#: Floating-point dtypes that are stored together with a scale.
SCALED_FLOATS = frozenset({"F8_E4M3", "F8_E5M2"})


def numpy_dtype(name: str, where: str) -> np.dtype:
    """The numpy dtype of a stored dtype, which must have one."""
    row = DTYPES.get(name)
    if row is None or row.numpy is None:
        readable = ", ".join(n for n, r in DTYPES.items() if r.numpy is not None)
        raise CheckpointError(
            f"{where} has dtype '{name}', which cannot be read.", f"Known: {readable}."
        )
    return row.numpy


def as_array(
    raw: bytes, dtype: np.dtype, shape: tuple[int, ...], where: str
) -> Shaped[np.ndarray, "*shape"]:
    """The elements that are stored in C order, without a copy."""
    try:
        return np.frombuffer(raw, dtype).reshape(shape)
    except (ValueError, OverflowError):
        raise no_array(shape, where) from None


def empty_array(
    dtype: np.dtype, shape: tuple[int, ...], where: str
) -> Shaped[np.ndarray, "*shape"]:
    """An array to be filled."""
    try:
        return np.empty(shape, dtype)
    except (ValueError, OverflowError, MemoryError):
        raise no_array(shape, where) from None


def no_array(shape: tuple[int, ...], where: str) -> CheckpointError:
    """The error for a shape that has no place in memory, be it that one of its sizes is 0."""
    return CheckpointError(f"{where} has shape {shape}, which is more than memory can address.")


def upcast(values: Shaped[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """The same numbers as float64 where stored so, else as float32; exact for floats.

    Every NaN is a quiet one: a signalling NaN would warn in whatever is computed with it.
    """
    if values.dtype.name.startswith("float8"):
        codes = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        even = np.append(codes, codes[-1:]) if len(codes) % 2 else codes
        numbers = pairs_of_floats(even.view(np.uint16), _float8_pairs(values.dtype))
        return numbers[: len(codes)].reshape(values.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
        if np.isnan(np.vdot(wide, wide)):  # a NaN among them: the squares are read once, and fast
            wide = np.where(np.isnan(wide), wide.dtype.type(np.nan), wide)
        return wide


#: Codes that are looked up at once, so that their places stay in the processor's cache.
_AT_ONCE = 2**16


def pairs_of_floats(
    codes: Integer[np.ndarray, "codes"], table: Float32[np.ndarray, "all_codes 2"]
) -> Float32[np.ndarray, "floats"]:
    """The two numbers that stand for each code, one after the other."""
    pairs, numbers = table.view(np.uint64).ravel(), np.empty(len(codes), np.uint64)
    for start in range(0, len(codes), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        np.take(pairs, codes[part], out=numbers[part], mode="clip")
    return numbers.view(np.float32)


@cache
def _float8_pairs(dtype: np.dtype) -> Float32[np.ndarray, "all_codes 2"]:
    """Both numbers of every two bytes, the first of them first in memory."""
    with np.errstate(invalid="ignore"):
        floats = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    floats[np.isnan(floats)] = np.nan
    return floats[np.arange(2**16, dtype="<u2").view(np.uint8).reshape(-1, 2)]


def largest_size(values: Shaped[np.ndarray, "*shape"]) -> float:
    r"""The largest :math:`|v|` of floats of any width; nan or inf where one is not finite.

    Without its sign bit an IEEE number is a whole number of the same order.
    Oracle in tests: numpy.
    """
    if not values.size:
        return 0.0
    width = 8 * values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"u{width // 8}")
    most = (bits & bits.dtype.type(2 ** (width - 1) - 1)).max()
    return float(most.reshape(1).view(values.dtype)[0])
