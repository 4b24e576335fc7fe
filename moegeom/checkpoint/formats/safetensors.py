"""Safetensors: one file, a folder with an index, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.folder import Folder, Location
from moegeom.checkpoint.formats._indexed import Naming, choose, open_index
from moegeom.checkpoint.formats._safetensors_header import SafetensorsHeader, read_header
from moegeom.checkpoint.json_text import parse_object
from moegeom.checkpoint.ranks import open_files
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote.lazy import lazy
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore
from moegeom.checkpoint.slices import Piece, SlicedShard, SlicedTensor, join_pieces
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Shaped
from moegeom.core.text import number_of

# Safetensors files of a distributed save: the same names in several files, a slice in each.
#
# No file says how large a whole tensor is; like torch, this takes the end of its last slice. A gap
# before that end is found here, the absence of the last file only by what the config promises.

#: How ``HuggingFaceStorageWriter(save_distributed=True)`` of torch 2.13 begins its file names.
_PREFIX = "shard-"


class SlicedFile(CheckpointShard, Protocol):
    """A safetensors file; ``slices`` is what stands under DCP_SHARDING_INFO, "" without it."""

    @property
    def slices(self) -> Any: ...


@dataclass(frozen=True)
class _Part:
    """What one file holds of a tensor."""

    shard: CheckpointShard
    name: str

    def read(self) -> Shaped[np.ndarray, "*shape"]:
        return self.shard.read(self.name)

    def read_bytes(self, start: int, size: int) -> bytes:
        return self.shard.read_bytes(self.name, start, size)


def open_slices(folder: Folder, shards: Mapping[str, SlicedFile]) -> ShardedStore:
    """The tensors whose slices the files hold, each checked when it is asked for."""
    files_of: dict[str, list[str]] = {}
    offsets: dict[str, Mapping[str, Any]] = {}
    for file, shard in shards.items():
        if shard.slices != "":
            offsets[file] = _parse(shard.slices, file)
        for name in shard.names():
            files_of.setdefault(name, []).append(file)

    def tensor(name: str) -> SlicedTensor:
        if name not in files_of:
            raise CheckpointError(f"{folder.label}: there is no tensor {name!r}.")
        pieces = [_piece(shards[file], name, offsets.get(file)) for file in files_of[name]]
        num_axes = len(pieces[0].offsets)
        for piece in pieces:
            if not len(piece.offsets) == len(piece.sizes) == num_axes:
                raise CheckpointError(
                    f"{piece.info.file}: tensor {name!r} has the saved_offsets "
                    f"{list(piece.offsets)} and shape {piece.sizes}, expected {num_axes} axes."
                )
        shape = tuple(max(ends) for ends in zip(*(p.ends for p in pieces), strict=True))
        return join_pieces(folder.label, name, pieces[0].info.dtype, shape, pieces)

    def file_sizes() -> Mapping[str, int]:
        return {file: shard.size_bytes for file, shard in shards.items()}

    joined = SlicedShard(folder.label, files_of.keys(), tensor, file_sizes)
    return ShardedStore(folder, {joined.label: joined}, dict.fromkeys(files_of, joined.label))


def check_complete(file: str, folder: Folder) -> None:
    """Raise if a file, to be read alone, is one of several that hold slices."""
    if not file.startswith(_PREFIX):
        return
    others = [n for n in folder.files() if n.startswith(_PREFIX) and n != file]
    if others:
        raise CheckpointError(
            f"{file}: holds row slices of tensors; "
            f"{number_of(len(others), 'more file lies', 'more files lie')} beside it.",
            "Pass the folder.",
        )


def check_whole(file: str, slices: Any) -> None:
    """Raise if a file, to which an index refers, holds slices: an index knows only whole tensors.

    Torch writes offsets into the files of undistributed saves too: zeros.
    """
    offsets = {} if slices == "" else _parse(slices, file)
    is_slice = slices != "" and file.startswith(_PREFIX)
    if is_slice or any(any(_offsets(name, offsets, file)) for name in offsets):
        raise CheckpointError(
            f"{file}: holds row slices of tensors, and an index refers to it as if they "
            "were whole.",
            "Remove the index, which is not that of this save.",
        )


def _piece(shard: CheckpointShard, name: str, offsets: Mapping[str, Any] | None) -> Piece:
    info = shard.info(name)
    corner = (0,) * len(info.shape) if offsets is None else _offsets(name, offsets, shard.label)
    return Piece(corner, info, _Part(shard, name))


def _offsets(name: str, offsets: Mapping[str, Any], file: str) -> tuple[int, ...]:
    entry = offsets.get(name)
    start = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if (
        not isinstance(start, list)
        or len(start) > limits.DIMENSIONS
        or not all(map(_is_count, start))
    ):
        raise CheckpointError(
            f"{file}: holds row slices, and its DCP_SHARDING_INFO has no 'saved_offsets' of "
            f"integers for tensor {name!r}."
        )
    return tuple(start)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= limits.LARGEST_COUNT


def _parse(text: Any, file: str) -> Mapping[str, Any]:
    where = f"{file}: DCP_SHARDING_INFO"
    if not isinstance(text, str):
        raise CheckpointError(f"{where} is a {type(text).__name__}, expected a text.")
    return parse_object(text.encode("utf-8", "surrogatepass"), where)


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
        length = max(min(size, info.size_bytes - start), 0)
        return self.file.read(info.offset + start, length)


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
