"""Torch distributed checkpoints: ``.metadata`` and the ``*.distcp`` files of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from moegeom.checkpoint.folder import Folder, LocalFolder, Location
from moegeom.checkpoint.formats._dcp_metadata import (
    DcpChunk,
    DcpLayout,
    DcpPlace,
    Metadata,
    parse_metadata,
)
from moegeom.checkpoint.formats._megatron import COMMON, MegatronStore
from moegeom.checkpoint.formats._pytorch_archive import TensorView, TorchArchive, read_torch_archive
from moegeom.checkpoint.formats._pytorch_globals import PickledTensor, UnreadableTensor
from moegeom.checkpoint.pickle import pickled
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.shards import ShardedStore, missing_shards
from moegeom.checkpoint.slices import Piece, SlicedShard, SlicedTensor, join_pieces
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Shaped

# One piece of a tensor in a ``.distcp`` file: an archive of ``torch.save`` that holds it alone.

#: Bytes that an archive has beside its tensor: 1500 in torch 2.13.
_BESIDE = 65_536


@dataclass(frozen=True)
class PieceArchive:
    """A piece as ``info`` describes it, in ``length`` bytes of a file; ``what`` names it."""

    file: RangeFile
    info: TensorInfo
    length: int
    what: str

    def read(self) -> Shaped[np.ndarray, "*shape"]:
        """The piece; one read, as long as there is little beside the tensor in its archive."""
        part = self._part
        if self.length > self.info.size_bytes + _BESIDE:
            archive, view = self._open(part)
        else:
            archive, view = self._open(LoadedPart(part.read_all(self.length), self.what))
        return archive.read(view, self.what)

    def read_bytes(self, start: int, size: int) -> bytes:
        """A part of the piece; reads the archive's directory and that part."""
        archive, view = self._open(self._part)
        return archive.read_bytes(view, start, size)

    @property
    def _part(self) -> FilePart:
        return FilePart(self.file, self.info.offset, self.length, self.what)

    def _open(self, part: RangeFile) -> tuple[TorchArchive, TensorView]:
        """The archive, whose tensor has the dtype and the shape that the metadata promises."""
        archive = read_torch_archive(part)
        if not isinstance(archive.root, (PickledTensor, UnreadableTensor)):
            raise CheckpointError(
                f"{self.what} is a {type(archive.root).__name__}, expected one tensor."
            )
        view = archive.view(archive.root, self.what)
        info = self.info
        if (view.dtype, view.shape) != (info.dtype, info.shape):
            raise CheckpointError(
                f"{self.what} is {view.dtype} of shape {view.shape}, expected {info.dtype} of "
                f"shape {info.shape}.",
                "Do the metadata and this file come from the same save?",
            )
        return archive, view


@dataclass(frozen=True)
class FilePart:
    """Bytes ``[offset, offset + length)`` of a file; reads are counted where the file counts."""

    file: RangeFile
    offset: int
    length: int
    label: str

    def size_bytes(self) -> int:
        return self.length

    def read(self, offset: int, size: int) -> bytes:
        _check_inside(self.label, self.length, offset, size)
        return self.file.read(self.offset + offset, size)

    def read_all(self, limit: int) -> bytes:
        _check_limit(self.label, self.length, limit)
        return self.read(0, self.length)


@dataclass(frozen=True)
class LoadedPart:
    """Bytes that were read before, as a file."""

    raw: bytes
    label: str

    def size_bytes(self) -> int:
        return len(self.raw)

    def read(self, offset: int, size: int) -> bytes:
        _check_inside(self.label, len(self.raw), offset, size)
        return self.raw[offset : offset + size]

    def read_all(self, limit: int) -> bytes:
        _check_limit(self.label, len(self.raw), limit)
        return self.raw


def _check_inside(label: str, length: int, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > length:
        raise CheckpointError(
            f"{label}: truncated, bytes {offset} to {offset + size} were expected and it has "
            f"{length}."
        )


def _check_limit(label: str, length: int, limit: int) -> None:
    if length > limit:
        raise CheckpointError(f"{label}: has {length} bytes, more than the {limit} allowed.")


_METADATA = ".metadata"
_UNFINISHED = ".metadata.tmp"
_SUFFIX = ".distcp"
_CONFIG = "config.json"

#: The folder of the weights in a checkpoint of OLMo-core, beside the config.
_INNER = "model_and_optim"

_OTHER_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

_EARLIER = "Pass an earlier checkpoint of the run."


def recognises(location: Location) -> bool:
    """True for ``.metadata``, a ``.distcp`` file, or a folder that holds either.

    Or a folder of OLMo-core, which holds them in another one.
    """
    files = location.files
    if any(name.endswith(_SUFFIX) for name in files):
        return True
    is_of_others = any(name.endswith(_OTHER_WEIGHTS) for name in files)
    return not is_of_others and any(name in (_METADATA, _UNFINISHED, _INNER) for name in files)


def open_dcp(location: Location) -> ShardedStore:
    """The checkpoint at a location that ``recognises`` accepts; reads ``.metadata`` alone."""
    whole, folder = _folders(location)
    if location.file is None:
        _check_alone(folder)
    elif location.file.endswith(_SUFFIX):
        raise CheckpointError(
            f"{location.file}: holds pieces of tensors, and {_METADATA} beside it says which.",
            "Pass the folder.",
        )
    _check_finished(folder)
    raw = folder.file(_METADATA).read_all(pickled.PICKLE_BYTES)
    if not raw:
        raise CheckpointError(
            f"{_METADATA}: is empty: the save was interrupted before its metadata was written.",
            _EARLIER,
        )
    metadata = parse_metadata(raw, _METADATA)
    # Unlike a shard, the file of a rank has a part of most tensors: without it, all is in doubt.
    for missing in missing_shards(folder, _METADATA, metadata.file_ends.keys()).values():
        raise missing.error()
    pieces = _Pieces(folder, metadata)
    shard = SlicedShard(_METADATA, metadata.names, pieces.tensor, pieces.sizes)
    is_megatron = whole.has(COMMON) and not whole.has(_CONFIG)
    shard_of = dict.fromkeys(metadata.names, _METADATA)
    if is_megatron:
        return MegatronStore(whole, {_METADATA: shard}, shard_of, len(raw), metadata.shape)
    return ShardedStore(whole, {_METADATA: shard}, shard_of, len(raw))


def _folders(location: Location) -> tuple[Folder, Folder]:
    """The folder of the config and that of the weights: the same, or one in the other."""
    folder = location.folder
    if not isinstance(folder, LocalFolder):
        return folder, folder
    if location.file is None and not folder.has(_METADATA) and folder.has(_INNER):
        return folder, folder.beside(_INNER)
    parent = folder.beside("..")
    is_inner = folder.label == _INNER and not folder.has(_CONFIG) and parent.has(_CONFIG)
    return parent if is_inner else folder, folder


def _check_alone(folder: Folder) -> None:
    others = [name for name in folder.files() if name.endswith(_OTHER_WEIGHTS[:2])]
    if others:
        raise CheckpointError(
            f"{folder.label}: holds {_SUFFIX} files and {others[0]}: two checkpoints.",
            f"Pass the file to read: {_METADATA}, or the other.",
        )


def _check_finished(folder: Folder) -> None:
    """Raise unless the save reached its last step, at which ``.metadata.tmp`` gets its name."""
    is_there = {name: folder.has(name) for name in (_METADATA, _UNFINISHED)}
    if is_there[_METADATA] and is_there[_UNFINISHED]:
        raise CheckpointError(
            f"{folder.label}: holds both {_METADATA} and {_UNFINISHED}: a save over an older "
            "checkpoint was interrupted, and the files may be of either.",
            _EARLIER,
        )
    if is_there[_METADATA]:
        return
    of_ranks = [name for name in folder.files() if name.endswith(_METADATA)]
    if of_ranks:
        raise CheckpointError(
            f"{folder.label}: holds {of_ranks[0]} and no {_METADATA}: each rank was saved for "
            "itself, which is not read.",
            "Save with use_collectives=True.",
        )
    num_files = sum(name.endswith(_SUFFIX) for name in folder.files())
    raise CheckpointError(
        f"{folder.label}: holds {num_files} {_SUFFIX} files and no {_METADATA}: the save was "
        "interrupted before its metadata was written.",
        f"{_EARLIER} If the save did end, copy {_METADATA} too: it is a hidden file, on one node.",
    )


@dataclass(frozen=True)
class _Pieces:
    """The chunks of all tensors in the files of a folder."""

    folder: Folder
    metadata: Metadata

    def tensor(self, name: str) -> SlicedTensor:
        layout = self.metadata.layout(name)
        pieces = [
            self._piece(name, layout, chunk, self.metadata.places[name, chunk.offsets])
            for chunk in layout.chunks
            # what is described and not stored is missing when the pieces are joined
            if (name, chunk.offsets) in self.metadata.places and prod(chunk.sizes)
        ]
        return join_pieces(self.metadata.where, name, layout.dtype.name, layout.shape, pieces)

    def sizes(self) -> Mapping[str, int]:
        return {file: self._files[file].size_bytes for file in self.metadata.file_ends}

    @cached_property
    def _files(self) -> Mapping[str, _PieceFile]:
        return {
            name: _PieceFile(self.folder.file(name), end)
            for name, end in self.metadata.file_ends.items()
        }

    def _piece(self, name: str, layout: DcpLayout, chunk: DcpChunk, place: DcpPlace) -> Piece:
        what = f"{place.file}: the piece of {name!r} at byte {place.offset}"
        if place.is_transformed:
            raise CheckpointError(
                f"{what} is compressed or encrypted by an extension of torch.",
                "Save without extensions.",
            )
        dtype = layout.dtype.name
        size = prod(chunk.sizes) * layout.dtype.size
        if size > place.length:
            raise CheckpointError(
                f"{what} has {place.length} bytes; shape {chunk.sizes} of {dtype} takes {size}."
            )
        file = self._files[place.file]
        file.check_length()
        info = TensorInfo(name, dtype, chunk.sizes, place.file, place.offset, size)
        return Piece(chunk.offsets, info, PieceArchive(file.file, info, place.length, what))


@dataclass(frozen=True)
class _PieceFile:
    """A file of a rank, whose length is asked for once."""

    file: RangeFile
    expected: int

    @cached_property
    def size_bytes(self) -> int:
        return self.file.size_bytes()

    def check_length(self) -> None:
        if self.size_bytes < self.expected:
            raise CheckpointError(
                f"{self.file.label}: truncated, has {self.size_bytes} bytes and {_METADATA} "
                f"promises {self.expected}.",
                f"Copy this file again; if the save was interrupted: {_EARLIER.lower()}",
            )


FORMAT = Format("dcp", recognises, open_dcp)
