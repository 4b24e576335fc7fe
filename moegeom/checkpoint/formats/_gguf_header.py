"""The header of a GGUF file: counts, settings, and where each tensor lies behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from struct import Struct
from typing import Any, NamedTuple

from moegeom.checkpoint.formats._gguf_types import GGML_TYPES, GgmlType
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.store import TensorInfo
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import (
    GGUF_ARRAY_VALUES,
    GGUF_HEADER_BYTES,
    GGUF_NAME_LENGTH,
    GGUF_SETTINGS,
    GGUF_STRINGS,
    GGUF_TENSORS,
    GGUF_TEXT_BYTES,
)

# A place in a file that moves on; what lies behind it is fetched in pieces that grow.

#: The first piece holds the header of a file without a vocabulary; each further one is twice as
#: long, so that few are needed and little is read in vain.
_FIRST_PIECE = 2**16
_LARGEST_PIECE = 2**22

_LENGTH = Struct("<Q")

AGAIN = "Download or copy this file again."


class Cursor:
    """Reads numbers, strings and gaps one after the other, from the beginning of a file."""

    def __init__(self, file: RangeFile) -> None:
        self.file = file
        self.file_size = file.size_bytes()
        self._window = b""
        self._window_start = 0
        self._at = 0
        self._piece = _FIRST_PIECE
        self._num_read = 0
        self._num_strings = 0

    @property
    def offset(self) -> int:
        """Position in the file."""
        return self._window_start + self._at

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        self._reach(size)
        start = self._at
        self._at += size
        return self._window[start : self._at]

    def numbers(self, layout: Struct) -> tuple[Any, ...]:
        """The next numbers, of fixed size."""
        self._reach(layout.size)
        numbers = layout.unpack_from(self._window, self._at)
        self._at += layout.size
        return numbers

    def length(self) -> int:
        """The next 64-bit count."""
        return self.numbers(_LENGTH)[0]

    def skip(self, size: int) -> None:
        """Move on; what is not fetched yet never is."""
        self._check_inside(size)
        self._at += size

    def skip_strings(self, count: int) -> None:
        """Move behind ``count`` strings, each of which follows its length."""
        self._num_strings += count
        if self._num_strings > GGUF_STRINGS:
            raise CheckpointError(
                f"{self.file.label}: the arrays of the header hold {self._num_strings} strings, "
                f"more than the {GGUF_STRINGS} allowed.",
                AGAIN,
            )
        while count:
            self._reach(_LENGTH.size)
            at, last = self._at, len(self._window) - _LENGTH.size
            while count and at <= last:
                at += _LENGTH.size + _LENGTH.unpack_from(self._window, at)[0]
                count -= 1
            self.skip(at - self._at)

    def _reach(self, size: int) -> None:
        """Have the next ``size`` bytes in the window."""
        if self._at + size <= len(self._window):
            return
        self._check_inside(size)
        start = self.offset
        rest = self._window[self._at :]
        num_bytes = min(max(self._piece, size), self.file_size - start) - len(rest)
        self._num_read += num_bytes
        if self._num_read > GGUF_HEADER_BYTES:
            raise CheckpointError(
                f"{self.file.label}: the header is longer than the {GGUF_HEADER_BYTES} bytes "
                "allowed.",
                AGAIN,
            )
        self._window = rest + self.file.read(start + len(rest), num_bytes)
        self._window_start, self._at = start, 0
        self._piece = min(2 * self._piece, _LARGEST_PIECE)

    def _check_inside(self, size: int) -> None:
        end = self.offset + size
        if end > self.file_size:
            raise truncated(self.file.label, end, self.file_size)


def truncated(file: str, expected: int, size: int) -> CheckpointError:
    """The error for a file that is shorter than its header says."""
    return CheckpointError(
        f"{file}: truncated, has {size} bytes and its header promises {expected}.", AGAIN
    )


ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_START = Struct("<4sI")
_COUNTS = Struct("<QQ")
_NUMBER = Struct("<I")
_TYPE_AND_OFFSET = Struct("<IQ")


class GgufEntry(NamedTuple):
    """A tensor as the header describes it; the offset counts from the first tensor."""

    shape: tuple[int, ...]
    type_code: int
    offset: int

    @property
    def type(self) -> GgmlType | None:
        """None for a type of a later version, and for rows that are not whole blocks."""
        ggml_type = GGML_TYPES.get(self.type_code)
        row = self.shape[-1] if self.shape else 1
        return ggml_type if ggml_type and row % ggml_type.block_size == 0 else None

    @property
    def size_bytes(self) -> int | None:
        """Bytes in the file; None where ``type`` is."""
        if self.type is None:
            return None
        return prod(self.shape) // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True)
class GgufHeader:
    """A parsed header; no tensor in it ends behind the end of the file or in another tensor.

    ``end`` is where the header ends; the tensors begin at the next multiple of ``alignment``.
    """

    file: str
    settings: Mapping[str, Any]
    entries: Mapping[str, GgufEntry]
    end: int
    alignment: int

    @property
    def names(self) -> Collection[str]:
        return self.entries.keys()

    @property
    def data_start(self) -> int:
        return round_up(self.end, self.alignment)

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies; an error if its type is not known."""
        where = f"{self.file}: tensor {name!r}"
        if name not in self.entries:
            raise CheckpointError(f"{where} is not in this file, which holds {len(self.entries)}.")
        entry = self.entries[name]
        if entry.type_code not in GGML_TYPES:
            raise CheckpointError(
                f"{where} has the type {entry.type_code}, which is not known.",
                "A newer version of llama.cpp wrote it; convert this tensor to F32.",
            )
        if entry.type is None or entry.size_bytes is None:
            ggml_type = GGML_TYPES[entry.type_code]
            raise CheckpointError(
                f"{where} has shape {entry.shape}; rows of {ggml_type.name} are blocks of "
                f"{ggml_type.block_size}."
            )
        begin = self.data_start + entry.offset
        return TensorInfo(name, entry.type.name, entry.shape, self.file, begin, entry.size_bytes)


def round_up(offset: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def read_header(file: RangeFile) -> GgufHeader:
    """The header of one file; costs its own bytes, less the numbers of a vocabulary."""
    cursor = Cursor(file)
    num_tensors, num_settings = _read_start(cursor)
    settings: dict[str, Any] = {}
    for index in range(num_settings):
        key = read_name(cursor, f"{file.label}: the key of setting {index}")
        if key in settings:
            raise CheckpointError(f"{file.label}: holds the key {key!r} twice.")
        settings[key] = read_value(cursor, f"{file.label}: {key!r}")
    entries: dict[str, GgufEntry] = {}
    for index in range(num_tensors):
        name = read_name(cursor, f"{file.label}: the name of tensor {index}")
        if name in entries:
            raise CheckpointError(f"{file.label}: holds the tensor {name!r} twice.")
        entries[name] = _read_entry(cursor, f"{file.label}: tensor {name!r}")
    alignment = _alignment(file.label, settings)
    header = GgufHeader(file.label, settings, entries, cursor.offset, alignment)
    _check_places(header, cursor.file_size)
    return header


def _read_start(cursor: Cursor) -> tuple[int, int]:
    """The numbers of tensors and of settings."""
    label = cursor.file.label
    if cursor.file_size < _START.size + _COUNTS.size:
        raise CheckpointError(f"{label}: truncated, has {cursor.file_size} bytes.", AGAIN)
    magic, version = cursor.numbers(_START)
    if magic != _MAGIC:
        raise CheckpointError(
            f"{label}: begins with {magic!r}, expected {_MAGIC!r}.",
            "Is this a GGUF file? Older GGML files must be converted by llama.cpp.",
        )
    if version % 2**16 == 0:
        raise CheckpointError(
            f"{label}: is big-endian, expected little-endian.",
            "Convert it: python -m gguf.scripts.gguf_convert_endian FILE little.",
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{label}: is of version {version} of GGUF, expected 2 or 3.",
            "Convert the model again with a current llama.cpp.",
        )
    counts = cursor.numbers(_COUNTS)
    claims = zip(counts, ("tensors", "settings"), (GGUF_TENSORS, GGUF_SETTINGS), strict=True)
    for count, what, most in claims:
        if count > most:
            raise CheckpointError(
                f"{label}: claims {count} {what}, more than the {most} allowed.", AGAIN
            )
    return counts


def _read_entry(cursor: Cursor, what: str) -> GgufEntry:
    (dimensions,) = cursor.numbers(_NUMBER)
    if dimensions > limits.DIMENSIONS:
        raise CheckpointError(
            f"{what} has {dimensions} dimensions, expected at most {limits.DIMENSIONS}."
        )
    # the dimension that lies together comes first in the file and last in numpy
    shape = tuple(cursor.length() for _ in range(dimensions))[::-1]
    if prod(max(n, 1) for n in shape) > limits.LARGEST_COUNT // 8:
        raise CheckpointError(f"{what} has shape {shape}, more than a 64-bit count of bytes.")
    type_code, offset = cursor.numbers(_TYPE_AND_OFFSET)
    return GgufEntry(shape, type_code, offset)


def _alignment(label: str, settings: Mapping[str, Any]) -> int:
    alignment = settings.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{label}: {ALIGNMENT} is {alignment!r}, expected a power of two.")
    return alignment


def _check_places(header: GgufHeader, file_size: int) -> None:
    """Raise unless every tensor begins on the grid, ends in the file and overlaps no other."""
    last, last_end = "", 0
    largest_end = header.end
    by_place = sorted(header.entries.items(), key=lambda e: (e[1].offset, e[1].size_bytes or 0))
    for name, entry in by_place:
        where = f"{header.file}: tensor {name!r}"
        if entry.offset % header.alignment:
            raise CheckpointError(
                f"{where} has the offset {entry.offset}, expected a multiple of "
                f"{header.alignment}.",
                AGAIN,
            )
        if entry.offset < last_end:
            raise CheckpointError(
                f"{where} has the offset {entry.offset}, where tensor {last!r} goes on to "
                f"{last_end}.",
                AGAIN,
            )
        last, last_end = name, entry.offset + (entry.size_bytes or 0)
        largest_end = max(largest_end, header.data_start + last_end)
    if largest_end > file_size:
        raise truncated(header.file, largest_end, file_size)


_BOOL = 7
_STRING = 8
_ARRAY = 9

#: Value types by their number in the file.
_SCALARS: dict[int, Struct] = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    _BOOL: Struct("<B"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}

_TYPE = Struct("<I")
_ARRAY_HEAD = Struct("<IQ")


@dataclass(frozen=True)
class Unread:
    """A value that is too long for a setting: bytes of a string, elements of an array."""

    length: int


def read_name(cursor: Cursor, what: str) -> str:
    """The key of a setting, or the name of a tensor."""
    size = cursor.length()
    if size > GGUF_NAME_LENGTH:
        raise CheckpointError(f"{what} has {size} bytes, more than the {GGUF_NAME_LENGTH} allowed.")
    return _text(cursor.take(size), what)


def read_value(cursor: Cursor, what: str) -> Any:
    """A typed value: int, float, bool, str, a list of one of these, or ``Unread``."""
    (kind,) = cursor.numbers(_TYPE)
    if kind != _ARRAY:
        return _element(cursor, kind, what)
    element, length = cursor.numbers(_ARRAY_HEAD)
    if element == _ARRAY:
        raise CheckpointError(f"{what} is an array of arrays, expected numbers or strings.")
    if length <= GGUF_ARRAY_VALUES:
        return [_element(cursor, element, what) for _ in range(length)]
    if element == _STRING:
        cursor.skip_strings(length)
    else:
        cursor.skip(length * _scalar(element, what).size)
    return Unread(length)


def _element(cursor: Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        size = cursor.length()
        if size <= GGUF_TEXT_BYTES:
            return _text(cursor.take(size), what)
        cursor.skip(size)
        return Unread(size)
    (value,) = cursor.numbers(_scalar(kind, what))
    if kind != _BOOL:
        return value
    if value > 1:
        raise CheckpointError(f"{what} is a bool with the value {value}, expected 0 or 1.")
    return bool(value)


def _scalar(kind: int, what: str) -> Struct:
    if kind not in _SCALARS:
        raise CheckpointError(f"{what} has the value type {kind}, expected 0 to 12.")
    return _SCALARS[kind]


def _text(raw: bytes, what: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8 at byte {error.start}.") from None
