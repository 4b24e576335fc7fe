r"""Rows as codes of few bits with a scale for each group of them, and read again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from moegeom.core.shapes import Float32

#: Formats of eight bits with an exponent, by name.
FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Code:
    """How rows are coded.

    ``form`` is ``int8``, ``int4``, ``uint8``, ``uint4``, ``e4m3`` or ``e5m2``. One scale for
    ``rows`` x ``columns`` entries, 0 for all there are; it is the largest absolute value over
    ``largest`` (None: the range of an unsigned code, or no scale). ``is_stored`` where the result
    is kept in bfloat16.
    """

    form: str
    rows: int
    columns: int
    largest: float | None
    is_stored: bool = False


def largest_of(form: str) -> np.float32:
    """The largest number of a format of eight bits with an exponent."""
    return np.float32(ml_dtypes.finfo(FLOATS[form]).max)


#: Numbers that are rounded at once, so that they stay in the processor's cache.
_AT_ONCE = 2**16


def in_eight_bits(
    values: Float32[np.ndarray, "*shape"], form: str
) -> Float32[np.ndarray, "*shape"]:
    """``values`` rounded to nearest, ties to even, in a format of ``FLOATS``; beyond its range
    what the format has there.

    The first 16 bits of a float32 and whether any later one is set decide, as both formats end two
    bits or more before these. Oracle in tests: ml_dtypes.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    rounded, table = np.empty_like(flat), _rounded_halves(form)
    for start in range(0, len(flat), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE].view(np.uint32)
        half = (bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)
        np.take(table, half, out=rounded[start : start + _AT_ONCE], mode="clip")
    return rounded.reshape(values.shape)


@cache
def _rounded_halves(form: str) -> Float32[np.ndarray, "halves"]:
    """The rounded number of every float32 whose last 16 bits are 0, by its first ones."""
    halves = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return halves.astype(FLOATS[form]).astype(np.float32)


def decoded(
    weight: Float32[np.ndarray, "experts hidden"], code: Code
) -> Float32[np.ndarray, "experts hidden"]:
    r"""What is left of rows: :math:`s \cdot \mathrm{round}(w / s)` within the range of the code.

    Signed integers of b bits run from :math:`-2^{b-1}` to :math:`2^{b-1} - 1`, unsigned ones have a
    code for zero beside the scale. A group of zeros stays zero; a group cut by the border of the
    matrix has a scale of its own. Ties go to even. Methods that move errors between columns, such
    as GPTQ, are not functions of the weight alone.

    Source: compressed-tensors 0.20.0, calculate_qparams. Oracle in tests: the same, and torch.
    """
    experts, hidden = weight.shape
    height, width = code.rows or experts, code.columns or hidden
    padded = np.zeros((-(-experts // height) * height, -(-hidden // width) * width), np.float32)
    padded[:experts, :hidden] = weight
    # [groups down, height, groups across, width]
    groups = padded.reshape(len(padded) // height, height, -1, width)
    if code.form.startswith("u"):
        rounded = _unsigned(groups, 2 ** int(code.form[4:]) - 1)
    else:
        most = np.abs(groups).max(axis=(1, 3), keepdims=True)
        scale = np.ones_like(most) if code.largest is None else most / np.float32(code.largest)
        scale = np.where(scale > 0.0, scale, np.float32(1.0))
        if code.form in FLOATS:
            last = largest_of(code.form)  # beyond it e4m3 has nothing but nan
            rounded = in_eight_bits(np.clip(groups / scale, -last, last), code.form) * scale
        else:
            half = 2 ** (int(code.form[3:]) - 1)
            rounded = np.clip(np.rint(groups / scale), -half, half - 1) * scale
    whole = rounded.reshape(padded.shape)[:experts, :hidden]
    if code.is_stored:
        whole = whole.astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(whole, np.float32)


def _unsigned(groups: np.ndarray, last: int) -> np.ndarray:
    """The range holds zero, which has a code of its own."""
    low = np.minimum(groups.min(axis=(1, 3), keepdims=True), 0.0)
    high = np.maximum(groups.max(axis=(1, 3), keepdims=True), 0.0)
    scale = (high - low) / np.float32(last)
    scale = np.where(scale > 0.0, scale, np.float32(1.0))
    zero = np.clip(np.rint(-low / scale), 0, last)
    return (np.clip(np.rint(groups / scale) + zero, 0, last) - zero) * scale
