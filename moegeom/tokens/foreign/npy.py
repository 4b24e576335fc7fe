"""Arrays in NumPy's own format, found from their header; nothing is unpickled."""

from __future__ import annotations

import io
import math
import tokenize
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedIOBase

import numpy as np

from moegeom.core.errors import RecordingError, first_line

#: What NumPy raises on a damaged header, among them its attempts to read one of Python 2.
_BAD_HEADER = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

#: NumPy reads no longer ones.
_HEADER_BYTES = 10_000


@dataclass(frozen=True)
class NpyHeader:
    """``num_rows`` by ``width`` numbers, in C order, after ``data_start`` bytes of the stream.

    ``layers`` of them, one behind the other.
    """

    dtype: np.dtype
    num_rows: int
    width: int
    data_start: int
    layers: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.layers * self.num_rows * self.width * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of the numbers of one layer."""
        return self.size_bytes // self.layers


@lru_cache(64)  # files of replies hold one header a thousand times
def _header(raw: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"format version {version}")
    with warnings.catch_warnings():
        # a header of Python 2 is as good, and Python reads what it says as text of its own
        warnings.simplefilter("ignore")
        return _READ_HEADER[version](stream)


def raw_npy_header(stream: BufferedIOBase, where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether stored column by column, and dtype; the stream is left where numbers begin.

    RecordingError when it is no header; what it says is not checked.
    """
    try:
        start = stream.read(8)
        start += stream.read(2 if start[6:7] == b"\1" else 4)
        length = int.from_bytes(start[8:], "little")
        shape, is_fortran, dtype = _header(start + stream.read(min(length, _HEADER_BYTES)))
    except _BAD_HEADER as error:
        raise RecordingError(
            f"{where}: the npy header cannot be read ({first_line(error):.100})."
        ) from None
    return shape, is_fortran, dtype


def flattening(name: str, dimensions: int, is_column: bool = False, may_stack: bool = False) -> str:
    """How an array of batches gets one row per token: with ``may_stack`` layers come first."""
    if dimensions < 2 or (dimensions == 2 and not is_column):
        return ""
    if is_column:
        return f"Bring it to one number per token: {name}.reshape(-1)."
    flat = f"{name}.reshape(-1, {name}.shape[-1])"
    if not may_stack:
        return f"Bring it to one row per token: {flat}."
    stacked = f"{name}.reshape({name}.shape[0], -1, {name}.shape[-1])"
    return f"Bring it to one row per token: {stacked} where layers come first, else {flat}."


def read_npy_header(
    stream: BufferedIOBase,
    size: int,
    where: str,
    allowed: Collection[np.dtype],
    is_column: bool = False,
    may_stack: bool = False,
) -> NpyHeader:
    """The header of an array in a stream of ``size`` bytes, which must be long enough for it.

    A column has one dimension (width 1), everything else two, or three with ``may_stack``.
    """
    start = stream.tell()
    shape, is_fortran, dtype = raw_npy_header(stream, where)
    data_start = stream.tell() - start
    _check_dtype(dtype, allowed, where)
    is_stack = may_stack and len(shape) == 3
    if len(shape) != 2 - is_column + is_stack or not all(n > 0 for n in shape):
        expected = "(tokens,)" if is_column else "(tokens, width)"
        expected += " or (layers, tokens, width)" if may_stack else ""
        raise RecordingError(
            f"{where}: the array has shape {shape}; expected {expected}.",
            flattening("array", len(shape), is_column, may_stack),
        )
    if is_fortran:
        raise RecordingError(
            f"{where}: the array is stored column by column, so a range of tokens lies nowhere "
            "together.",
            "Save np.ascontiguousarray(array).",
        )
    needed = data_start + math.prod(shape) * dtype.itemsize
    if needed > size:
        raise RecordingError(
            f"{where}: {size} bytes; shape {shape} of {dtype} needs {needed}. It is truncated."
        )
    layers = shape[0] if is_stack else 1
    num_rows, *row = shape[is_stack:]
    return NpyHeader(dtype, num_rows, math.prod(row), data_start, layers)


def _check_dtype(dtype: np.dtype, allowed: Collection[np.dtype], where: str) -> None:
    if dtype.hasobject:
        raise RecordingError(
            f"{where}: the array holds pickled Python objects, which are never opened.",
            "Save an array of numbers.",
        )
    if dtype.newbyteorder("=") not in allowed:
        raise RecordingError(
            f"{where}: the array is {dtype}; "
            f"expected {', '.join(str(dtype) for dtype in allowed)}.",
            "np.save forgets the name of bfloat16: save float32, or use safetensors."
            if dtype.kind == "V"
            else "",
        )
