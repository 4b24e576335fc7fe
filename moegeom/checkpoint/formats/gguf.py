"""GGUF: one file, or all parts of a split one.

A header holds counts, settings, and where each tensor lies behind it. Tensors are plain numbers, or
blocks that share scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from moegeom.checkpoint.dtypes import as_array
from moegeom.checkpoint.reading import AGAIN, Folder, Location, RangeFile, truncated
from moegeom.checkpoint.shards import HeadedShard, ShardedStore, lazy
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.extras import install_command
from moegeom.core.limits import (
    GGUF_ARRAY_VALUES,
    GGUF_HEADER_BYTES,
    GGUF_NAME_LENGTH,
    GGUF_NUMBERS,
    GGUF_PARTS,
    GGUF_SETTINGS,
    GGUF_STRINGS,
    GGUF_TENSORS,
    GGUF_TEXT_BYTES,
)
from moegeom.core.shapes import Float32, Shaped


# -------------------------------------------------------------------------------------------- types
class GgmlType(NamedTuple):
    """A tensor type: a row is cut into blocks of ``block_size`` elements."""

    name: str
    block_size: int
    block_bytes: int


#: By its number in the file; the layouts are those of ggml-common.h, checked against gguf 0.19.
GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

#: Types whose elements are stored in blocks; such a tensor is read as float32.
BLOCK_DTYPES = frozenset(row.name for row in GGML_TYPES.values() if row.block_size > 1)


# ------------------------------------------------------------------------------------------ headers
# A place in a file that moves on; what lies behind it is fetched in pieces that grow.

#: The first piece holds the header of a file without a vocabulary; each further one is twice as
#: long, so that few are needed and little is read in vain.
_FIRST_PIECE = 2**16
_LARGEST_PIECE = 2**22

_LENGTH = Struct("<Q")


class Cursor:
    """Reads numbers, strings and gaps one after the other, from the beginning of a file."""

    def __init__(self, file: RangeFile) -> None:
        self.file = file
        self.file_size: int = file.size_bytes()
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


ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_START = Struct("<4sI")
_COUNTS = Struct("<QQ")
_NUMBER_OF = Struct("<I")
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
    (dimensions,) = cursor.numbers(_NUMBER_OF)
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


# -------------------------------------------------------------------------------------------- files
_SUFFIX = ".gguf"

#: Encoders of images and sound, which lie beside the model that they belong to.
_PROJECTOR = "mmproj*.gguf"


class GgufFile(HeadedShard):
    """One file."""

    @lazy
    def header(self) -> GgufHeader:
        return read_header(self.file)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        """The tensor; float32 if it is stored in blocks."""
        info = self.info(name)
        if info.dtype not in BLOCK_DTYPES:
            return super().read(name)
        raw = self.file.read(info.offset, info.size_bytes)
        stored = GGML_TYPES[self.header.entries[name].type_code]
        return decode(raw, stored, info.shape, f"{info.file}: tensor {name!r}")


class GgufStore(ShardedStore):
    """A ``TensorStore`` whose config is in the header of its first file."""

    def __init__(self, folder: Folder, files: Mapping[str, GgufFile]) -> None:
        super().__init__(folder, files, _file_by_name(files))
        self._first = next(iter(files.values()))

    @lazy
    def _config(self) -> Mapping[str, Any]:
        return config_of(self._first.header.settings, self._first.label)


def recognises(location: Location) -> bool:
    """True for a GGUF file, or a folder that holds one and no safetensors.

    A file without a suffix is known by its first bytes: stores of models name files by digests.
    """
    if location.file is not None and "." not in location.file:
        file = location.folder.file(location.file)
        return file.size_bytes() >= len(_MAGIC) and file.read(0, len(_MAGIC)) == _MAGIC
    files = location.files
    return any(name.endswith(_SUFFIX) for name in files) and not any(
        name.endswith(".safetensors") for name in files
    )


def open_gguf(location: Location) -> GgufStore:
    """The model at a location that ``recognises`` accepts; reads the header of every part."""
    folder = location.folder
    name = location.file or _only_model(folder)
    opened = GgufFile(folder.file(name))
    names = parts(name, opened.header)
    for part in names:
        if part != name and not folder.has(part):
            raise CheckpointError(
                f"{name}: is one of {len(names)} parts, and {part!r} does not exist.",
                "Put all parts into one folder.",
            )
    files = {n: opened if n == name else GgufFile(folder.file(n)) for n in names}
    if len(names) > 1:
        check_parts([file.header for file in files.values()])
    return GgufStore(folder, files)


def _only_model(folder: Folder) -> str:
    """A file of the one model in a folder."""
    files = [name for name in folder.files() if name.endswith(_SUFFIX)]
    by_model = models(_weights(files))
    if not by_model:
        raise CheckpointError(
            f"{folder.label}: holds {files[0]} alone, an encoder without its model.",
            "Pass the folder or the file of the model.",
        )
    if len(by_model) > 1:
        names = ", ".join(list(by_model)[:10]) + (", ..." if len(by_model) > 10 else "")
        raise CheckpointError(
            f"{folder.label}: holds {len(by_model)} models ({names}).", "Pass the file to read."
        )
    return next(iter(by_model.values()))


def model_files(files: Sequence[str]) -> list[str]:
    """A file of each model among the files of a folder."""
    return list(models(_weights(files)).values())


def _weights(files: Sequence[str]) -> list[str]:
    names = [name for name in files if name.endswith(_SUFFIX)]
    return [name for name in names if not fnmatchcase(name, _PROJECTOR)]


def _file_by_name(files: Mapping[str, GgufFile]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for file, opened in files.items():
        for name in opened.names():
            if name in file_of:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is also in {file_of[name]}.",
                    "Do all parts come from the same download?",
                )
            file_of[name] = file
    return file_of


FORMAT = Format("gguf", recognises, open_gguf)


_GENERAL = "general."
_ARCHITECTURE = "general.architecture"


def config_of(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the header says about the model.

    Returns
    -------
    dict
        ``model_type`` is ``"gguf"``; ``architecture`` is that of the file, whose settings stand
        beside it, without their prefix and as nested tables. ``general`` holds the settings of
        every model and is flat: ``license`` and ``license.name`` are both values.

    Raises
    ------
    CheckpointError
        If the architecture is not given, or a key is both a value and a table.
    """
    architecture = settings.get(_ARCHITECTURE)
    if not isinstance(architecture, str) or not architecture:
        state = "is not given" if architecture is None else f"is {architecture!r}"
        raise CheckpointError(f"{where}: {_ARCHITECTURE} {state}, expected a name.")
    config: dict[str, Any] = {
        "model_type": "gguf",
        "architecture": architecture,
        "general": dict(_below(settings, _GENERAL)),
    }
    prefix = f"{architecture}."
    for key, value in _below(settings, prefix):
        *path, last = key.split(".")
        table: Any = config
        for step in path:
            table = table.setdefault(step, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict) or last in table or path[:1] == ["general"]:
            raise CheckpointError(
                f"{where}: {prefix + key!r} contradicts another key, which is a value where this "
                "one needs a table, or a table where this one is a value."
            )
        table[last] = value
    return config


def _below(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return (
        (key.removeprefix(prefix), value)
        for key, value in settings.items()
        if key.startswith(prefix)
    )


def decode(
    raw: bytes, stored: GgmlType, shape: tuple[int, ...], where: str
) -> Float32[np.ndarray, "*shape"]:
    """The numbers that the blocks of a tensor stand for, in its shape.

    Raises ``CheckpointError`` when the gguf package is not there, or does not know the type.
    """
    gguf = _package(stored, where)
    row_bytes = shape[-1] // stored.block_size * stored.block_bytes
    if not raw or not row_bytes:
        return as_array(b"", np.dtype(np.float32), shape, where)
    if prod(shape) > GGUF_NUMBERS:
        raise CheckpointError(
            f"{where} has {prod(shape)} numbers in blocks of {stored.name}, more than the "
            f"{GGUF_NUMBERS} that are decoded at once.",
            "Convert this tensor to F32.",
        )
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, row_bytes)
    try:
        # a scale may be anything, NaN and infinity included
        with np.errstate(all="ignore"):
            rows = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[stored.name])
    except (KeyError, NotImplementedError):
        raise CheckpointError(
            f"{where} is {stored.name}, which the installed gguf package cannot decode.",
            "Upgrade it (pip install -U gguf), or convert this tensor to F32.",
        ) from None
    return rows.reshape(shape)


def _package(stored: GgmlType, where: str) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise CheckpointError(
            f"{where} is {stored.name}, stored in blocks, which needs the gguf package.",
            install_command("gguf"),
        ) from None
    return gguf


_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)

_COUNT = "split.count"
_NUMBER = "split.no"
_NUM_TENSORS = "split.tensors.count"

_SAME = "Do all parts come from the same download?"


@dataclass(frozen=True)
class PartName:
    """What the name of a part says; parts are numbered from 1."""

    stem: str
    number: int
    count: int

    def of(self, number: int) -> str:
        """The file name of another part."""
        return f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf"


def part_name(file: str) -> PartName | None:
    """The name of a part taken apart; None for the name of a model in one file."""
    match = _PART.fullmatch(file)
    return PartName(match[1], int(match[2]), int(match[3])) if match else None


def models(files: Sequence[str]) -> dict[str, str]:
    """One file of every model, by its name without numbers."""
    first: dict[str, str] = {}
    for file in files:
        part = part_name(file)
        first.setdefault(f"{part.stem} ({part.count} parts)" if part else file, file)
    return first


def parts(file: str, header: GgufHeader) -> list[str]:
    """All files of the model that ``file`` is, or is a part of, in their order.

    The name and the header of the file must agree.
    """
    count = _setting(header, _COUNT, default=1)
    if count <= 1:
        return [file]
    if count > GGUF_PARTS:
        raise CheckpointError(
            f"{file}: says that there are {count} parts, more than the {GGUF_PARTS} allowed."
        )
    number = 1 + _setting(header, _NUMBER)
    name = part_name(file)
    if name is None or (name.number, name.count) != (number, count):
        raise CheckpointError(
            f"{file}: is part {number} of {count}, expected a name that ends in "
            f"-{number:05d}-of-{count:05d}.gguf.",
            "Give every part its original name.",
        )
    return [name.of(n) for n in range(1, count + 1)]


def check_parts(headers: Sequence[GgufHeader]) -> None:
    """Raise unless the parts, in their order, are those of one model.

    Raises
    ------
    CheckpointError
        If a part says another number or count, if a tensor is missing or comes twice, or if
        nothing says where the tensors of a part begin.
    """
    first, *others = headers
    count = len(headers)
    for index, header in enumerate(headers):
        part = (_setting(header, _NUMBER), _setting(header, _COUNT))
        if part != (index, count):
            raise CheckpointError(
                f"{header.file}: says {_NUMBER} {part[0]} and {_COUNT} {part[1]}, expected "
                f"{index} and {count}.",
                _SAME,
            )
    for header in others:
        _check_alignment(first, header)
    total = sum(len(header.entries) for header in headers)
    expected = _setting(first, _NUM_TENSORS, default=total)
    if total != expected:
        raise CheckpointError(
            f"{first.file}: says {_NUM_TENSORS} {expected}, and the {count} parts hold {total}.",
            _SAME,
        )


def _check_alignment(first: GgufHeader, part: GgufHeader) -> None:
    """Raise if it is left open on which grid the tensors of a part lie.

    The first part alone holds the settings. Some writers keep its alignment in the other parts,
    and readers take each part by itself.
    """
    if ALIGNMENT not in part.settings and round_up(part.end, first.alignment) != part.data_start:
        raise CheckpointError(
            f"{part.file}: does not give {ALIGNMENT}, which is {first.alignment} in {first.file} "
            f"and {DEFAULT_ALIGNMENT} by default.",
            "Join the parts (llama-gguf-split --merge), or write them with the default.",
        )


def _setting(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A count of the header; without ``default`` it must be given."""
    number: Any = header.settings.get(key, default)
    if type(number) is not int or number < 0:
        state = "is not given" if number is None else f"is {number!r}"
        raise CheckpointError(f"{header.file}: {key} {state}, expected a count.", _SAME)
    return number
