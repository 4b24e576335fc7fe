"""Arrays in NumPy's own formats, npy and npz, found from their headers; nothing is unpickled."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.checkpoint.zipped import Archive, read_archive
from moegeom.core.digest import digest_of
from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import CheckpointError, RecordingError, first_line
from moegeom.core.files import open_regular, write_whole
from moegeom.core.limits import NPZ_ARRAYS, NPZ_COMPRESSION, NPZ_INFLATION, TRACE_BYTES
from moegeom.core.shapes import Integer, Shaped
from moegeom.tokens.rows import ArrayRows, FileRows, Rows
from moegeom.tokens.stages import EXPERT_DTYPES, FLOAT_DTYPES

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

#: What the numbers of an array may be, and the word for it.
_INTEGERS = frozenset(EXPERT_DTYPES.values()), "integers"
_NUMBERS = _INTEGERS[0] | frozenset(FLOAT_DTYPES.values()) | {np.dtype(bool)}, "numbers"

_Allowed = tuple[frozenset[np.dtype], str]


class NpyHeader(NamedTuple):
    """``start`` bytes of the stream are in front of the numbers."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    start: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def refuse_short(self, available: int, where: str) -> None:
        """Raises RecordingError where so many bytes are not all numbers."""
        if not all(size >= 0 for size in self.shape):
            raise RecordingError(f"{where}: the array has shape {self.shape}.")
        if self.size_bytes > available:
            raise RecordingError(
                f"{where}: {available} bytes of numbers; shape {self.shape} of {self.dtype} needs "
                f"{self.size_bytes}. It is truncated.",
                "Copy it again.",
            )


def read_npy_header(stream: BufferedIOBase, where: str) -> NpyHeader:
    """The header of an array; the stream is left where numbers begin.

    RecordingError when it is none; what it says is not checked.
    """
    try:
        head = stream.read(8)
        head += stream.read(2 if head[6:7] == b"\1" else 4)
        head += stream.read(min(int.from_bytes(head[8:], "little"), _HEADER_BYTES))
        return NpyHeader(*_header(head), len(head))
    except _BAD_HEADER as error:
        raise RecordingError(
            f"{where}: the npy header cannot be read ({first_line(error):.100})."
        ) from None


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


def parse_npy(raw: bytes, where: str, allowed: _Allowed = _INTEGERS) -> np.ndarray:
    """The array, of integers unless others are allowed, in the bytes of one npy file.

    Raises
    ------
    RecordingError
        When the header is damaged, the numbers are others, or bytes are missing.
    """
    header = read_npy_header(io.BytesIO(raw), where)
    own = header.dtype.newbyteorder("=")
    if own not in allowed[0]:
        raise RecordingError(f"{where}: the array is {header.dtype}; expected {allowed[1]}.")
    header.refuse_short(len(raw) - header.start, where)
    numbers = np.frombuffer(raw, header.dtype, math.prod(header.shape), header.start)
    order = "F" if header.is_fortran else "C"
    return numbers.reshape(header.shape, order=order).astype(own, copy=False)


def npy_shape(path: Path) -> tuple[int, ...] | None:
    """The shape of a file of integers; None for anything else."""
    with open_regular(path, follows=True) as stream:
        return _shape_of(stream)


def _shape_of(stream: BufferedIOBase) -> tuple[int, ...] | None:
    try:
        header = read_npy_header(stream, "")
    except RecordingError:
        return None
    return header.shape if header.dtype.kind in "iu" else None


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
    allowed = _NUMBERS if is_mask else _INTEGERS
    with open_regular(path, follows=True) as stream:
        size = os.fstat(stream.fileno()).st_size - offset if size is None else size
        stream.seek(offset)
        header = read_npy_header(stream, path.name)
        if header.is_fortran or header.dtype.newbyteorder("=") != header.dtype:
            if size > TRACE_BYTES:
                raise RecordingError(
                    f"{path.name}: {size:,} bytes, stored column by column or with the larger "
                    f"byte first; more than {TRACE_BYTES:,} are not held.",
                    "Save np.ascontiguousarray(array), or several files.",
                )
            stream.seek(offset)
            return _in_memory(stream.read(size), path.name, allowed)
    if header.dtype not in allowed[0] or len(header.shape) < 2 - is_mask:
        raise RecordingError(
            f"{path.name}: the array is {header.dtype} {header.shape}; expected "
            + ("numbers." if is_mask else "integers of two axes or more.")
        )
    header.refuse_short(size - header.start, path.name)
    num_rows, *row = header.shape
    return FileRows(path, offset + header.start, header.dtype, num_rows, tuple(row))


def _in_memory(raw: bytes, where: str, allowed: _Allowed) -> Rows:
    array = parse_npy(raw, where, allowed)
    return ArrayRows(array if array.ndim else array[None], where)


# --------------------------------------------------------------------------------------- archives

#: NotImplementedError is how zipfile refuses a version that it does not know.
_BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
)

#: How NumPy writes members. Others inflate without a bound: 4 KiB of bzip2 can be 90 MB.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

_IS_ENCRYPTED = 0x1

#: Members by which a file is recognised; reading it looks at all of them.
_FIRST_MEMBERS = 1000


@dataclass(frozen=True, eq=False)
class NpzMember:
    """One array of an archive, which is open as long as its members are read."""

    info: zipfile.ZipInfo
    where: str
    _zipped: zipfile.ZipFile
    _archive: Archive

    @property
    def key(self) -> str:
        return self.info.filename.removesuffix(".npy")

    @property
    def size(self) -> int:
        """Bytes of header and numbers."""
        return self.info.file_size

    @property
    def is_stored(self) -> bool:
        """Whether it lies in the file as it is."""
        return self.info.compress_type == zipfile.ZIP_STORED

    @property
    def start(self) -> int:
        """Where in the file it begins, where it is stored."""
        return self._archive.start(self.info.filename)

    def open(self) -> BufferedIOBase:
        return cast(BufferedIOBase, self._zipped.open(self.info))

    def read(self) -> bytes:
        """All of it, but no more than the directory promises, whatever decompression gives."""
        with self.open() as stream:
            return stream.read(self.size)


@contextlib.contextmanager
def npz_members(path: Path) -> Iterator[Sequence[NpzMember]]:
    """The members of an archive: stored or deflated, each name once, none in another one.

    Raises
    ------
    RecordingError
        For any other archive, and for whatever goes wrong with its bytes inside the block.
    """
    try:
        # first with a reader that is bounded by the size of the file, and refuses overlaps
        archive = read_archive(CountingFile(path, path.name, ReadLog()), "np.savez", NPZ_ARRAYS)
        with zipfile.ZipFile(path) as zipped:
            for info in zipped.infolist():
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
            yield [
                NpzMember(info, f"{path.name}: {info.filename}", zipped, archive)
                for info in zipped.infolist()
            ]
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint) from None
    except _BAD_ARCHIVE as error:
        raise RecordingError(f"{path.name}: not a readable npz file ({str(error)[:80]}).") from None


def npz_shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """The shapes of the first members; None for what is no array of integers; empty if no archive.

    For recognising a file: readers look at every member.
    """
    shapes: dict[str, tuple[int, ...] | None] = {}
    try:
        with npz_members(path) as members:
            for member in itertools.islice(members, _FIRST_MEMBERS):
                with member.open() as stream:
                    shapes[member.key] = _shape_of(stream)
    except RecordingError:
        return {}
    return shapes


def npz_rows(path: Path, names: Collection[str], masks: Collection[str] = ()) -> dict[str, Rows]:
    """Those of the arrays that are there, to be read by ranges: in place unless compressed.

    ``names`` are of integers and of two axes or more, ``masks`` may be of any numbers and of one.

    Raises
    ------
    RecordingError
        When one is damaged, or compressed and too large to be held.
    """
    rows: dict[str, Rows] = {}
    with npz_members(path) as members:
        for member in members:
            is_mask = member.key in masks
            if not is_mask and member.key not in names:
                continue
            if member.is_stored:
                rows[member.key] = npy_rows(path, member.start, member.size, is_mask)
                continue
            if member.size > TRACE_BYTES:
                raise RecordingError(
                    f"{member.where}: {member.size:,} bytes that are compressed in one block; more "
                    f"than {TRACE_BYTES:,} are not held.",
                    "Save with np.savez, which does not compress, or several files.",
                )
            allowed = _NUMBERS if is_mask else _INTEGERS
            rows[member.key] = _in_memory(member.read(), member.where, allowed)
    return rows


def iter_npz(path: Path, first: int = 0) -> Iterator[tuple[str, Integer[np.ndarray, "..."]]]:
    """The members of an archive of integers one by one, from number ``first`` on.

    Raises
    ------
    RecordingError
        When one is damaged or too large.
    """
    with npz_members(path) as members:
        size, stored = sum(member.size for member in members), path.stat().st_size
        if size > TRACE_BYTES + NPZ_COMPRESSION * stored:
            raise RecordingError(
                f"{path.name}: {size:,} bytes of arrays in a file of {stored:,}: more than "
                f"{TRACE_BYTES:,} are read where they take {NPZ_COMPRESSION} times less "
                "compressed.",
                "Save with np.savez, which does not compress.",
            )
        for member in members[first:]:
            if member.size > TRACE_BYTES:
                raise RecordingError(
                    f"{path.name}: {member.info.filename:.80} has {member.size:,} bytes, more than "
                    f"the {TRACE_BYTES:,} allowed in one array.",
                    "Save an array for each request.",
                )
            yield member.key, parse_npy(member.read(), member.where)


def read_numbers(path: Path, most: int = TRACE_BYTES) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Every member of an archive that holds nothing but integers, floats and truth values.

    Raises
    ------
    RecordingError
        When it is damaged, or has more than ``most`` bytes of numbers.
    """
    with npz_members(path) as members:
        size = sum(member.size for member in members)
        if size > most:
            raise RecordingError(
                f"{path.name}: {size:,} bytes of arrays, more than the {most:,} allowed.",
                "Give less in one file.",
            )
        return {one.key: parse_npy(one.read(), one.where, _NUMBERS) for one in members}


# -------------------------------------------------------- arrays and facts that stay between runs

#: The array with the text that says the facts, and what all of it hashes to.
_FACTS = "header"


def write_sealed(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes ``path`` whole or not at all, with a hash that exposes any change.

    ``facts`` are what JSON has.
    """
    text = json.dumps({**facts, "digest": _digest(facts, arrays)})
    members = {**arrays, _FACTS: np.frombuffer(text.encode(), np.uint8)}
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **members))


def read_sealed(path: Path, most: int) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Facts and arrays; None when there are none, or they are not as they were written.

    No more than ``most`` bytes of arrays are read.
    """
    if not path.exists():
        return None
    try:
        arrays = read_numbers(path, most)
        facts = parse_json(arrays.pop(_FACTS, np.zeros(0, np.uint8)).tobytes())
    except (RecordingError, DocumentError):
        return None
    if not isinstance(facts, dict) or facts.pop("digest", None) != _digest(facts, arrays):
        return None
    return facts, arrays


def _digest(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """A hash of everything that the file says."""
    return digest_of(json.dumps(facts, sort_keys=True), arrays)
