"""Arrays in NumPy's own format, found from their header; nothing is unpickled."""

from __future__ import annotations

import math
import tokenize
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from io import BufferedIOBase

import numpy as np

from moegeom.core.errors import RecordingError, first_line

#: What NumPy raises on a damaged header, among them its attempts to read one of Python 2.
_BAD_HEADER = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    RecursionError,
    MemoryError,
    OSError,
)

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class NpyHeader:
    """``num_rows`` by ``width`` numbers, in C order, after ``data_start`` bytes of the stream."""

    dtype: np.dtype
    num_rows: int
    width: int
    data_start: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.num_rows * self.width * self.dtype.itemsize


def read_npy_header(
    stream: BufferedIOBase,
    size: int,
    where: str,
    allowed: Collection[np.dtype],
    is_column: bool = False,
) -> NpyHeader:
    """The header of an array in a stream of ``size`` bytes, which must be long enough for it.

    A column has one dimension (width 1), everything else two.
    """
    try:
        start = stream.tell()
        version = np.lib.format.read_magic(stream)
        if version not in _READ_HEADER:
            raise ValueError(f"format version {version}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a header of Python 2 is as good
            shape, is_fortran, dtype = _READ_HEADER[version](stream)
        data_start = stream.tell() - start
    except _BAD_HEADER as error:
        raise RecordingError(
            f"{where}: the npy header cannot be read ({first_line(error):.100})."
        ) from None
    _check_dtype(dtype, allowed, where)
    if len(shape) != 2 - is_column or not all(n > 0 for n in shape):
        expected = "(tokens,)" if is_column else "(tokens, width)"
        raise RecordingError(f"{where}: the array has shape {shape}; expected {expected}.")
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
    return NpyHeader(dtype, shape[0], 1 if is_column else shape[1], data_start)


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
