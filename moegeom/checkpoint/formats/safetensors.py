"""Safetensors: one file, a folder with an index, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.folder import Location
from moegeom.checkpoint.formats._dcp_slices import check_complete, check_whole, open_slices
from moegeom.checkpoint.formats._indexed import Naming, choose, open_index
from moegeom.checkpoint.formats._safetensors_header import SafetensorsHeader, read_header
from moegeom.checkpoint.ranks import open_files
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote.lazy import lazy
from moegeom.checkpoint.shards import ShardedStore
from moegeom.checkpoint.store import Format, TensorInfo

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_NAMING = Naming(_INDEX_SUFFIX, "model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True)
class SafetensorsFile:
    """One file; the header is read on first use. Behind an index, its tensors must be whole."""

    file: RangeFile
    is_indexed: bool = False

    @property
    def label(self) -> str:
        return self.file.label

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes()

    @lazy
    def header(self) -> SafetensorsHeader:
        header = read_header(self.file)
        if self.is_indexed:
            check_whole(header.file, header.slices)
        return header

    @property
    def slices(self) -> Any:
        return self.header.slices

    def names(self) -> Collection[str]:
        return self.header.names

    def info(self, name: str) -> TensorInfo:
        return self.header.info(name)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        info = self.info(name)
        where = f"{info.file}: tensor {name!r}"
        dtype = numpy_dtype(info.dtype, where)
        return as_array(self.file.read(info.offset, info.size_bytes), dtype, info.shape, where)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        info = self.info(name)
        kept = max(min(size, info.size_bytes - start), 0)
        return self.file.read(info.offset + start, kept)


def recognises(location: Location) -> bool:
    """True for a safetensors file, an index of such files, or a folder that holds either."""
    return any(name.endswith((_SUFFIX, _INDEX_SUFFIX)) for name in location.files)


def open_safetensors(location: Location) -> ShardedStore:
    """The checkpoint at a location that ``recognises`` accepts."""
    folder = location.folder
    files = [name for name in location.files if name.endswith(_SUFFIX)]
    chosen = choose(location, files, _NAMING)
    if chosen.index:
        return open_index(folder, chosen, lambda name: SafetensorsFile(folder.file(name), True))
    if location.file is not None:
        check_complete(location.file, folder)
    shards = {name: SafetensorsFile(folder.file(name)) for name in chosen.files}
    if any(shard.slices != "" for shard in shards.values()):
        return open_slices(folder, shards)
    return open_files(folder, shards)


FORMAT = Format("safetensors", recognises, open_safetensors)
