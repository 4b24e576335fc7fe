"""GGUF: one file, or all parts of a split one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.folder import Folder, Location
from moegeom.checkpoint.formats._gguf_blocks import decode
from moegeom.checkpoint.formats._gguf_config import config_of
from moegeom.checkpoint.formats._gguf_header import Header, read_header
from moegeom.checkpoint.formats._gguf_split import check_parts, models, parts
from moegeom.checkpoint.formats._gguf_types import BLOCK_DTYPES, GGML_TYPES
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote.lazy import lazy
from moegeom.checkpoint.shards import ShardedStore
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError

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
    def header(self) -> Header:
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
        kept = max(min(size, info.size_bytes - start), 0)
        return self.file.read(info.offset + start, kept)


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
    weights = [name for name in files if not fnmatchcase(name, _PROJECTOR)]
    found = models(weights)
    if not found:
        raise CheckpointError(
            f"{folder.label}: holds {files[0]} alone, an encoder without its model.",
            "Pass the folder or the file of the model.",
        )
    if len(found) > 1:
        shown = ", ".join(list(found)[:10]) + (", ..." if len(found) > 10 else "")
        raise CheckpointError(
            f"{folder.label}: holds {len(found)} models ({shown}).", "Pass the file to read."
        )
    return next(iter(found.values()))


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
