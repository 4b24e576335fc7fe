"""GGUF: one file, or all parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.folder import Folder, Location
from moegeom.checkpoint.formats._gguf_header import (
    ALIGNMENT,
    DEFAULT_ALIGNMENT,
    GgufHeader,
    read_header,
    round_up,
)
from moegeom.checkpoint.formats._gguf_types import BLOCK_DTYPES, GGML_TYPES, GgmlType
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote.lazy import lazy
from moegeom.checkpoint.shards import ShardedStore
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError
from moegeom.core.extras import install_command
from moegeom.core.limits import GGUF_NUMBERS, GGUF_PARTS
from moegeom.core.shapes import Float32, Shaped

_SUFFIX = ".gguf"

#: Encoders of images and sound, which lie beside the model that they belong to.
_PROJECTOR = "mmproj*.gguf"


@dataclass(frozen=True)
class GgufFile:
    """One file; the header is read on first use."""

    file: RangeFile

    @property
    def label(self) -> str:
        return self.file.label

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes()

    @lazy
    def header(self) -> GgufHeader:
        return read_header(self.file)

    def names(self) -> Collection[str]:
        return self.header.names

    def info(self, name: str) -> TensorInfo:
        return self.header.info(name)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        """The tensor; float32 if it is stored in blocks."""
        info = self.info(name)
        where = f"{info.file}: tensor {name!r}"
        raw = self.file.read(info.offset, info.size_bytes)
        if info.dtype in BLOCK_DTYPES:
            stored = GGML_TYPES[self.header.entries[name].type_code]
            return decode(raw, stored, info.shape, where)
        return as_array(raw, numpy_dtype(info.dtype, where), info.shape, where)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        info = self.info(name)
        length = max(min(size, info.size_bytes - start), 0)
        return self.file.read(info.offset + start, length)


class GgufStore(ShardedStore):
    """A ``TensorStore`` whose config is in the header of its first file."""

    def __init__(self, folder: Folder, files: Mapping[str, GgufFile]) -> None:
        super().__init__(folder, files, _file_by_name(files))
        self._first = next(iter(files.values()))

    @lazy
    def _config(self) -> Mapping[str, Any]:
        return config_of(self._first.header.settings, self._first.label)


def recognises(location: Location) -> bool:
    """True for a GGUF file, or a folder that holds one and no safetensors."""
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
