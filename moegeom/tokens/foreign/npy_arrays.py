"""Arrays of numbers of any shape in NumPy's own formats; nothing is unpickled."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.checkpoint.zipped import read_archive
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.files import open_regular
from moegeom.core.limits import NPZ_ARRAYS, NPZ_COMPRESSION, NPZ_INFLATION, TRACE_BYTES
from moegeom.core.shapes import Integer, Shaped
from moegeom.tokens.foreign.npy import raw_npy_header
from moegeom.tokens.rows import ArrayRows, FileRows, Rows
from moegeom.tokens.stages import EXPERT_DTYPES, FLOAT_DTYPES

#: What the numbers of an array may be, and the word for it.
_INTEGERS = frozenset(EXPERT_DTYPES.values())
_NUMBERS = _INTEGERS | frozenset(FLOAT_DTYPES.values()) | {np.dtype(bool)}

#: NotImplementedError is how zipfile refuses a version that it does not know.
_BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
)

#: How NumPy writes members. Others inflate without a bound: 4 KiB of bzip2 can be 90 MB.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

_IS_ENCRYPTED = 0x1

#: Members that are looked at to recognise a file; reading it looks at all of them.
_LOOKED_AT = 1000

#: Bytes of a member that hold its header.
_HEADER_BYTES = 4096


@contextlib.contextmanager
def npz_members(path: Path) -> Iterator[tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]]:
    """An archive with its members: stored or deflated, each name once, none in another one.

    Raises
    ------
    RecordingError
        For any other archive, and for whatever goes wrong with its bytes inside the block.
    """
    try:
        # first with a reader that is bounded by the size of the file, and refuses overlaps
        read_archive(CountingFile(path, path.name, ReadLog()), "np.savez", NPZ_ARRAYS)
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint) from None
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            for info in members:
                if info.compress_type not in _METHODS or info.flag_bits & _IS_ENCRYPTED:
                    raise RecordingError(
                        f"{path.name}: {info.filename:.80} is encrypted, or compressed otherwise "
                        "than NumPy does.",
                        "Write it with np.savez.",
                    )
                if info.file_size > NPZ_INFLATION * (info.compress_size + 1):
                    raise RecordingError(
                        f"{path.name}: {info.filename:.80} has {info.compress_size} bytes, which "
                        f"cannot hold {info.file_size}."
                    )
            yield archive, members
    except _BAD_ARCHIVE as error:
        raise RecordingError(f"{path.name}: not a readable npz file ({str(error)[:80]}).") from None


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
    shape, is_fortran, dtype = raw_npy_header(stream, where)
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
    numbers = np.frombuffer(raw, dtype, math.prod(shape), start)
    return numbers.reshape(shape, order="F" if is_fortran else "C").astype(
        dtype.newbyteorder("="), copy=False
    )


def npy_shape(path: Path) -> tuple[int, ...] | None:
    """The shape of a file of integers; None for anything else."""
    with open_regular(path, follows=True) as stream:
        return _shape_of(stream.read(_HEADER_BYTES))


def npz_shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """The shapes of the first members; None for what is no array of integers; empty if no archive.

    For recognising a file: readers look at every member.
    """
    try:
        with npz_members(path) as (archive, members):
            shapes = {}
            for info in itertools.islice(members, _LOOKED_AT):
                with archive.open(info) as member:
                    shapes[_key(info)] = _shape_of(member.read(_HEADER_BYTES))
            return shapes
    except RecordingError:
        return {}


def npy_rows(path: Path, offset: int = 0, size: int | None = None, is_mask: bool = False) -> Rows:
    """The integers of an npy file of two axes or more, to be read by ranges of the first.

    A mask may be of any numbers, and of one axis. The file may be the ``size`` bytes from
    ``offset`` on of another one. What is stored column by column lies nowhere together and is held
    in memory.

    Raises
    ------
    RecordingError
        When it is damaged, or holds no integers; when it is too large to be held.
    """
    with open_regular(path, follows=True) as stream:
        size = os.fstat(stream.fileno()).st_size - offset if size is None else size
        stream.seek(offset)
        shape, is_fortran, dtype = raw_npy_header(stream, path.name)
        start = stream.tell()
        if is_fortran or dtype.newbyteorder("=") != dtype:
            if size > TRACE_BYTES:
                raise RecordingError(
                    f"{path.name}: {size:,} bytes, stored column by column or with the larger "
                    f"byte first; more than {TRACE_BYTES:,} are not held.",
                    "Save np.ascontiguousarray(array), or several files.",
                )
            stream.seek(offset)
            return _held(stream.read(size), path.name, is_mask)
    allowed, least = (_NUMBERS, 1) if is_mask else (_INTEGERS, 2)
    if dtype not in allowed or len(shape) < least or not all(n >= 0 for n in shape):
        raise RecordingError(
            f"{path.name}: the array is {dtype} {shape}; expected "
            + ("numbers." if is_mask else "integers of two axes or more.")
        )
    needed, available = math.prod(shape) * dtype.itemsize, size - (start - offset)
    if needed > available:
        raise RecordingError(
            f"{path.name}: {available} bytes of numbers; shape {shape} of {dtype} needs {needed}. "
            "It is truncated.",
            "Copy it again.",
        )
    return FileRows(path, start, dtype, shape[0], tuple(shape[1:]))


def _held(raw: bytes, where: str, is_mask: bool) -> Rows:
    allowed, word = (_NUMBERS, "numbers") if is_mask else (_INTEGERS, "integers")
    array = _parsed(raw, where, allowed, word)
    return ArrayRows(array if array.ndim else array[None], where)


def npz_rows(path: Path, names: Collection[str], masks: Collection[str] = ()) -> dict[str, Rows]:
    """Those of the arrays that are there, to be read by ranges: in place unless compressed.

    ``names`` are of integers and of two axes or more, ``masks`` may be of any numbers and of one.

    Raises
    ------
    RecordingError
        When one is damaged, or compressed and too large to be held.
    """
    rows: dict[str, Rows] = {}
    with npz_members(path) as (archive, members):
        for info in members:
            is_mask = _key(info) in masks
            if not is_mask and _key(info) not in names:
                continue
            where = f"{path.name}: {info.filename}"
            if info.compress_type == zipfile.ZIP_STORED:
                start = data_start(path, info)
                rows[_key(info)] = npy_rows(path, start, info.file_size, is_mask)
                continue
            if info.file_size > TRACE_BYTES:
                raise RecordingError(
                    f"{where}: {info.file_size:,} bytes that are compressed in one block; more "
                    f"than {TRACE_BYTES:,} are not held.",
                    "Save with np.savez, which does not compress, or several files.",
                )
            with archive.open(info) as member:
                rows[_key(info)] = _held(member.read(info.file_size), where, is_mask)
    return rows


#: A local file header before its two variable fields, whose lengths end it (APPNOTE 4.3.7).
_LOCAL_HEADER_BYTES = 30


def data_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the data of a stored member begins."""
    with open_regular(path, follows=True) as file:
        file.seek(info.header_offset)
        local = file.read(_LOCAL_HEADER_BYTES)
    variable = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return info.header_offset + _LOCAL_HEADER_BYTES + variable


def iter_npz(path: Path, first: int = 0) -> Iterator[tuple[str, Integer[np.ndarray, "..."]]]:
    """The members of an archive of integers one by one, from number ``first`` on.

    Raises
    ------
    RecordingError
        When one is damaged or too large.
    """
    with npz_members(path) as (archive, members):
        size, stored = sum(info.file_size for info in members), path.stat().st_size
        if size > TRACE_BYTES + NPZ_COMPRESSION * stored:
            raise RecordingError(
                f"{path.name}: {size:,} bytes of arrays in a file of {stored:,}: more than "
                f"{TRACE_BYTES:,} are read where they take {NPZ_COMPRESSION} times less "
                "compressed.",
                "Save with np.savez, which does not compress.",
            )
        for info in members[first:]:
            if info.file_size > TRACE_BYTES:
                raise RecordingError(
                    f"{path.name}: {info.filename:.80} has {info.file_size:,} bytes, more than the "
                    f"{TRACE_BYTES:,} allowed in one array.",
                    "Save an array for each request.",
                )
            with archive.open(info) as member:
                raw = member.read(info.file_size)
            yield _key(info), _parsed(raw, f"{path.name}: {info.filename}", _INTEGERS, "integers")


def read_numbers(path: Path, most: int = TRACE_BYTES) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Every member of an archive that holds nothing but integers, floats and truth values.

    Raises
    ------
    RecordingError
        When it is damaged, or has more than ``most`` bytes of numbers.
    """
    with npz_members(path) as (archive, members):
        size = sum(info.file_size for info in members)
        if size > most:
            raise RecordingError(
                f"{path.name}: {size:,} bytes of arrays, more than the {most:,} allowed.",
                "Give less in one file.",
            )
        arrays = {}
        for info in members:
            with archive.open(info) as member:
                # no more than the directory promised, whatever decompression would give
                raw = member.read(info.file_size)
            arrays[_key(info)] = _parsed(raw, f"{path.name}: {info.filename}", _NUMBERS, "numbers")
        return arrays


def _key(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _shape_of(raw: bytes) -> tuple[int, ...] | None:
    try:
        shape, _, dtype = raw_npy_header(io.BytesIO(raw), "")
    except RecordingError:
        return None
    return shape if dtype.kind in "iu" else None
