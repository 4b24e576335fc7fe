"""Whether numbers are other numbers rounded: cast to a narrower float, or to a grid with scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Float32

Matrix = Float32[np.ndarray, "rows columns"]

#: Rows that are tried before all of them.
_FIRST = 2

#: Values on a grid that lie between two steps may go either way: this share may be a step off.
_TIES = 1e-3


def _through(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values.astype(dtype).astype(np.float32)


def _cut_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits, as a copy of raw memory makes it."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


#: Plain casts from float32, the finest first. ml_dtypes rounds to nearest, ties to even.
CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp16": _through(np.float16),
    "bf16": _through(ml_dtypes.bfloat16),
    "bf16 by cutting off bits": _cut_bfloat16,
    "fp8 e4m3": _through(ml_dtypes.float8_e4m3fn),
    "fp8 e5m2": _through(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class _Grid:
    """Numbers that a scale is multiplied by; the largest value is ``top`` steps."""

    name: str
    tops: tuple[float, ...]
    nearest: Callable[[np.ndarray], np.ndarray]


#: Symmetric grids. Both conventions for the largest value of an integer grid are in use.
_GRIDS = (
    _Grid("fp8 e4m3", (448.0,), _through(ml_dtypes.float8_e4m3fn)),
    _Grid("int8", (127.0, 127.5), lambda steps: np.clip(np.rint(steps), -128, 127)),
    _Grid("int4", (7.0, 7.5), lambda steps: np.clip(np.rint(steps), -8, 7)),
)

#: Rows and columns that share a scale; None for all of them.
_SCOPES: dict[str, tuple[int | None, int | None]] = {
    "one scale": (None, None),
    "a scale for each row": (1, None),
    "a scale for 128 x 128 values": (128, 128),
    "a scale for 128 values": (1, 128),
    "a scale for 64 values": (1, 64),
    "a scale for 32 values": (1, 32),
}


def cast_of(
    values: Float[np.ndarray, "rows columns"], others: Float[np.ndarray, "rows columns"]
) -> str | None:
    """The cast that makes ``others`` of ``values``, bit for bit; None if there is none.

    The finest that fits. Equal matrices give None. From float64 the cast to float32 comes first
    ("fp32" when that is all). Oracle in tests: torch's casts.
    """
    if np.array_equal(values, others):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = values.astype(np.float32), others.astype(np.float32)
        if not np.array_equal(after, others):
            return None
        if np.array_equal(before, after):
            return "fp32"
        for name, cast in CASTS.items():
            if np.array_equal(cast(before[:1]), after[:1]) and np.array_equal(cast(before), after):
                return name
    return None


def grid_of(
    values: Float[np.ndarray, "rows columns"],
    others: Float[np.ndarray, "rows columns"],
    precision: float,
) -> str | None:
    """The symmetric quantisation with scales that makes ``others`` of ``values``; None if none.

    A scale is the largest absolute value of its scope over the largest step; values go to the
    nearest step and are multiplied by the scale again. ``precision`` is the relative rounding of
    the stored products (2^-8 for bf16). Grids with a zero point, and scales chosen by search, are
    not recognised: what cannot be told exactly is noise.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = values.astype(np.float32), others.astype(np.float32)
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return None
    for name, largest, top, nearest in _grids(before):
        scales = _scales(largest[:_FIRST], top)
        first = nearest(before[:_FIRST] / scales) * scales
        near = _is_near(first, after[:_FIRST], scales, precision)
        if near.mean() < 1.0 - 10.0 * _TIES:  # few values: a tie weighs more
            continue
        scales = _scales(largest, top)
        if _fits(nearest(before / scales) * scales, after, scales, precision):
            return name
    return None


def _scales(largest: Matrix, top: float) -> Matrix:
    return np.where(largest > 0.0, largest / np.float32(top), np.float32(1.0))


def _grids(
    values: Matrix,
) -> Iterator[tuple[str, Matrix, float, Callable[[np.ndarray], np.ndarray]]]:
    """Name, largest value of each scope, the largest step and the rounding, for each grid."""
    sizes = np.abs(values)
    for scope, (rows, columns) in _SCOPES.items():
        largest = _largest(sizes, rows, columns)
        if largest is None:
            continue
        for grid in _GRIDS:
            for top in grid.tops:
                yield f"{grid.name}, {scope}", largest, top, grid.nearest


def _largest(values: Matrix, rows: int | None, columns: int | None) -> Matrix | None:
    """Largest value of its scope for each value; None where the scope does not divide."""
    shape = values.shape
    height = shape[0] if rows is None else rows
    width = shape[1] if columns is None else columns
    if not values.size or shape[0] % height or shape[1] % width:
        return None
    blocks = values.reshape(shape[0] // height, height, shape[1] // width, width)
    largest = blocks.max(axis=(1, 3), keepdims=True)
    return np.broadcast_to(largest, blocks.shape).reshape(shape)


def _is_near(
    found: Matrix, wanted: Matrix, scales: Matrix, precision: float
) -> Bool[np.ndarray, "rows columns"]:
    return np.abs(found - wanted) <= 1.01 * precision * np.abs(found) + 1e-6 * scales


def _fits(found: Matrix, wanted: Matrix, scales: Matrix, precision: float) -> bool:
    near = _is_near(found, wanted, scales, precision)
    if near.mean() < 1.0 - _TIES:
        return False
    return bool((np.abs(found - wanted) <= 1.01 * scales + precision * np.abs(found))[~near].all())
