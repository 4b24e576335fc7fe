"""Arrays of numbers of any shape in NumPy's own formats; nothing is unpickled."""

from __future__ import annotations

import io
import math
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Integer, Shaped

from moegeom.core.errors import RecordingError, first_line
from moegeom.tokens.stages import EXPERT_DTYPES, FLOAT_DTYPES
from moegeom.tokens.trace import TRACE_BYTES

_BAD_HEADER = (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)

#: What the numbers of an array may be, and the word for it.
_INTEGERS = frozenset(EXPERT_DTYPES.values())
_NUMBERS = _INTEGERS | frozenset(FLOAT_DTYPES.values())

#: NotImplementedError is how zipfile refuses a compression or a version that it does not know.
_BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
)

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def parse_npy(raw: bytes, where: str) -> Integer[np.ndarray, "..."]:
    """The array of integers in the bytes of one npy file.

    Raises
    ------
    RecordingError
        When the header is damaged, the numbers are no integers, or bytes are missing.
    """
    return _parsed(raw, where, _INTEGERS, "integers")


def _parsed(raw: bytes, where: str, allowed: frozenset[np.dtype], word: str) -> np.ndarray:
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _READ_HEADER:
            raise ValueError(f"format version {version}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            shape, is_fortran, dtype = _READ_HEADER[version](stream)
    except _BAD_HEADER as error:
        raise RecordingError(
            f"{where}: the npy header cannot be read ({first_line(error):.80})."
        ) from None
    if dtype.newbyteorder("=") not in allowed:
        raise RecordingError(f"{where}: the array is {dtype}; expected {word}.")
    if not all(size >= 0 for size in shape):
        raise RecordingError(f"{where}: the array has shape {shape}.")
    needed = math.prod(shape) * dtype.itemsize
    start = stream.tell()
    if needed > len(raw) - start:
        raise RecordingError(
            f"{where}: {len(raw) - start} bytes of numbers; shape {shape} of {dtype} needs "
            f"{needed}. It is truncated.",
            "Copy it again.",
        )
    found = np.frombuffer(raw, dtype, math.prod(shape), start)
    return found.reshape(shape, order="F" if is_fortran else "C").astype(
        dtype.newbyteorder("="), copy=False
    )


def npy_shape(path: Path) -> tuple[int, ...] | None:
    """The shape of a file of integers; None for anything else."""
    with path.open("rb") as stream:
        return _shape_of(stream.read(4096))


def npz_shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """The shape of every member; None for what is no array of integers; empty if no archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {}
            for info in archive.infolist()[:100_000]:
                with archive.open(info) as member:
                    shapes[info.filename.removesuffix(".npy")] = _shape_of(member.read(4096))
            return shapes
    except _BAD_ARCHIVE:
        return {}


def read_npz(path: Path) -> dict[str, Integer[np.ndarray, "..."]]:
    """Every member of an archive that holds nothing but integers.

    Raises
    ------
    RecordingError
        When it is damaged or too large.
    """
    return _read(path, _INTEGERS, "integers")


def read_numbers(path: Path) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Every member of an archive that holds nothing but integers and floats.

    Raises
    ------
    RecordingError
        When it is damaged or too large.
    """
    return _read(path, _NUMBERS, "numbers")


def _read(path: Path, allowed: frozenset[np.dtype], word: str) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(info.file_size for info in members)
            if size > TRACE_BYTES:
                raise RecordingError(
                    f"{path.name}: {size:,} bytes of arrays, more than the {TRACE_BYTES:,} "
                    "allowed.",
                    "Give less in one file.",
                )
            arrays = {}
            for info in members:
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as member:
                    # no more than the directory promised, whatever decompression would give
                    raw = member.read(info.file_size)
                arrays[name] = _parsed(raw, f"{path.name}: {info.filename}", allowed, word)
            return arrays
    except _BAD_ARCHIVE as error:
        raise RecordingError(f"{path.name}: not a readable npz file ({str(error)[:80]}).") from None


def _shape_of(raw: bytes) -> tuple[int, ...] | None:
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            shape, _, dtype = _READ_HEADER[version](stream)
    except (*_BAD_HEADER, KeyError):
        return None
    return shape if dtype.kind in "iu" else None
