"""Torch distributed checkpoints: ``.metadata`` and the ``*.distcp`` files of all ranks.

``.metadata`` says which tensors there are, cut where, stored where. It is a pickle of
``torch.distributed.checkpoint.metadata.Metadata``, written by torch 1.13 to 2.13 and by
Megatron-Core. Records stand in for the classes and only keep their state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moegeom.checkpoint import pickled
from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.formats.pytorch import (
    ALLOWED,
    Anything,
    Dropped,
    PickledTensor,
    TensorView,
    TorchArchive,
    TorchDtype,
    UnreadableTensor,
    config_of_run,
    empty_dict,
    read_torch_archive,
)
from moegeom.checkpoint.pickled import Record, unpickle
from moegeom.checkpoint.ranks import Piece, SlicedShard, SlicedTensor, join_pieces
from moegeom.checkpoint.reading import (
    Folder,
    LocalFolder,
    Location,
    RangeFile,
    no_collection,
    read_whole,
)
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore, missing_shards
from moegeom.checkpoint.store import (
    Format,
    TensorInfo,
    check_apart,
    check_names,
    is_count,
    is_inside,
)
from moegeom.checkpoint.zipped import read_archive
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import DCP_PIECES, MEGATRON_ARGUMENT_BYTES, MEGATRON_NAME_CHARACTERS
from moegeom.core.shapes import Shaped

# ----------------------------------------------------------------------------------------- metadata
Offsets = tuple[int, ...]


class _Metadata(Record):
    __slots__ = ()


class _Tensor(Record):
    __slots__ = ()


class _Properties(Record):
    __slots__ = ()


class _Chunk(Record):
    __slots__ = ()


class _Index(Record):
    __slots__ = ()


class _Storage(Record):
    __slots__ = ()


def _size(values: Any = ()) -> Any:
    """``torch.Size``; what is no tuple of counts is refused where it is used."""
    return values


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

#: Everything that a ``.metadata`` may name, and what stands in for it.
_ALLOWED: Mapping[str, Any] = {
    f"{_CHECKPOINT}.Metadata": _Metadata,
    f"{_CHECKPOINT}.TensorStorageMetadata": _Tensor,
    f"{_CHECKPOINT}.BytesStorageMetadata": Dropped,
    f"{_CHECKPOINT}.TensorProperties": _Properties,
    f"{_CHECKPOINT}.ChunkStorageMetadata": _Chunk,
    f"{_CHECKPOINT}.MetadataIndex": _Index,
    f"{_CHECKPOINT}.StorageMeta": Dropped,
    f"{_CHECKPOINT}._MEM_FORMAT_ENCODING": Dropped,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Storage,
    f"{_BEFORE_2_3}.TensorProperties": _Properties,
    f"{_BEFORE_2_3}.MEM_FORMAT_ENCODING": Dropped,
    f"{_MEGATRON}.MCoreMetadata": _Metadata,
    f"{_MEGATRON}.MCoreSavePlan": Dropped,
    "torch.Size": _size,
    "torch.serialization._get_layout": Dropped,
    "collections.OrderedDict": empty_dict,
    # where the checkpoint was written, as Python 3.11 to 3.14 spell it
    **{
        f"{module}.{name}": Dropped
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{name: dtype for name, dtype in ALLOWED.items() if isinstance(dtype, TorchDtype)},
}


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor."""

    offsets: Offsets
    sizes: Offsets


class DcpPlace(NamedTuple):
    """Where the ``torch.save`` archive of one chunk lies; a tuple, since there may be many."""

    file: str
    offset: int
    length: int
    is_transformed: bool


@dataclass(frozen=True)
class DcpLayout:
    """A tensor as it was saved."""

    dtype: TorchDtype
    shape: Offsets
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True)
class Metadata:
    """What ``.metadata`` says. Tensors are checked one by one, when they are asked for."""

    where: str
    tensors: Mapping[str, Any]
    places: Mapping[tuple[str, Offsets], DcpPlace]

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    @cached_property
    def file_ends(self) -> Mapping[str, int]:
        """How long each file must be at least."""
        ends: dict[str, int] = {}
        for place in self.places.values():
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
        return ends

    def shape(self, name: str) -> Offsets:
        """The shape of a tensor as it was saved."""
        return _counts(self.tensors[name], "size", f"{self.where}: tensor {name!r}")

    def layout(self, name: str) -> DcpLayout:
        """Dtype, shape and chunks of a tensor; whether the chunks tile it is not checked here."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.where}: there is no tensor {name!r}.")
        what = f"{self.where}: tensor {name!r}"
        tensor = self.tensors[name]
        properties = _field(tensor, "properties", _Properties, what).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, TorchDtype):
            raise CheckpointError(f"{what} has no dtype of torch.")
        chunks = []
        for chunk in _field(tensor, "chunks", list, what):
            if not isinstance(chunk, _Chunk):
                raise CheckpointError(f"{what} has {_kind(chunk)} among its chunks.")
            chunks.append(DcpChunk(_counts(chunk, "offsets", what), _counts(chunk, "sizes", what)))
        # Ranks that hold the same copy describe it once each, and it is stored once.
        return DcpLayout(dtype, self.shape(name), tuple(dict.fromkeys(chunks)))


@no_collection()
def parse_metadata(raw: bytes, where: str) -> Metadata:
    """The contents of a ``.metadata`` file; its places lie inside of the folder."""
    root = unpickle(raw, where, _ALLOWED)
    if not isinstance(root, _Metadata):
        raise CheckpointError(f"{where}: holds {_kind(root)}, expected a Metadata of torch.")
    described = _field(root, "state_dict_metadata", dict, where)
    stored = _field(root, "storage_data", dict, where)
    tensors = {}
    for name, entry in described.items():
        if not isinstance(name, str) or not isinstance(entry, (_Tensor, Dropped)):
            raise CheckpointError(f"{where}: describes {_kind(name)} by {_kind(entry)}.")
        if isinstance(entry, _Tensor):
            tensors[name] = entry
    check_names(tensors, f"{where}:")
    _check_chunks(tensors, where)
    places = {}
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for index, storage in stored.items():
        if not isinstance(index, _Index) or not isinstance(storage, _Storage):
            raise CheckpointError(f"{where}: places {_kind(index)} by {_kind(storage)}.")
        name = _field(index, "fqn", str, where)
        what = f"{where}: {name[: limits.NAME_LENGTH]!r}"
        place = _place(storage, what)
        if place.file not in spans:
            _check_file_inside(place.file, what)
            spans[place.file] = []
        spans[place.file].append((place.offset, place.offset + place.length, name))
        is_tensor = isinstance(index.state.get("offset"), tuple)
        at = _counts(index, "offset", what) if is_tensor else (-1,)
        if (name, at) in places:
            raise CheckpointError(f"{where}: places the piece of {name!r} at {at} twice.")
        places[name, at] = place
    for file, pieces in spans.items():
        check_apart(
            pieces, f"{where}: {file}", "pieces of", "Copy the metadata of this save again."
        )
    return Metadata(where, tensors, places)


def _check_chunks(tensors: Mapping[str, _Tensor], where: str) -> None:
    """Raise if the lists of chunks are long: one long list may be that of every tensor."""
    states = (tensor.state for tensor in tensors.values())
    lists = (state.get("chunks") for state in states if isinstance(state, dict))
    count = sum(len(chunks) for chunks in lists if isinstance(chunks, list))
    if count > DCP_PIECES:
        raise CheckpointError(
            f"{where}: describes {count} pieces of tensors, more than the {DCP_PIECES} allowed."
        )


def _place(storage: _Storage, what: str) -> DcpPlace:
    file = _field(storage, "relative_path", str, what)
    offset = _field(storage, "offset", int, what)
    length = _field(storage, "length", int, what)
    if not (is_count(offset) and is_count(length)):
        raise CheckpointError(f"{what} lies at byte {offset} and has {length}, which cannot be.")
    return DcpPlace(file, offset, length, bool(storage.state.get("transform_descriptors")))


def _check_file_inside(file: str, what: str) -> None:
    if not is_inside(file):
        raise CheckpointError(
            f"{what} lies in {file[:200]!r}, which is outside the checkpoint's folder."
        )


def _field(record: Record, key: str, kind: type, what: str) -> Any:
    state = record.state if isinstance(record.state, dict) else {}
    if not isinstance(state.get(key), kind):
        raise CheckpointError(
            f"{what} has {_kind(state.get(key))} as '{key}', expected {_kind_name(kind)}."
        )
    return state[key]


def _counts(record: Record, key: str, what: str) -> Offsets:
    counts = _field(record, key, tuple, what)
    if len(counts) > limits.DIMENSIONS or not all(map(is_count, counts)):
        raise CheckpointError(
            f"{what} has '{key}' that are not at most {limits.DIMENSIONS} non-negative integers."
        )
    return counts


def _kind(item: Any) -> str:
    return "nothing" if item is None else f"a {_kind_name(type(item))}"


def _kind_name(kind: type) -> str:
    return kind.__name__.lstrip("_")


# ------------------------------------------------------------------------------------ Megatron-Core
#: The file of everything that is the same on all ranks.
COMMON = "common.pt"

#: ``decoder.layers.mlp.router.weight``: homogeneous layers in the older layout are one tensor.
_STACKED = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?P<tail>(?![0-9]+\.).+)")


class MegatronStore(ShardedStore):
    """A ``TensorStore`` whose config are the arguments of the run.

    Where all layers of a part are one tensor, each appears under the name that it has in the newer
    layout, ``layers.{i}.``. ``shape_of`` tells the shape of a stored tensor, at little cost.
    """

    def __init__(
        self,
        folder: Folder,
        shards: Mapping[str, CheckpointShard],
        shard_of: Mapping[str, str],
        index_bytes: int,
        shape_of: Callable[[str], tuple[int, ...]],
    ) -> None:
        super().__init__(folder, shards, shard_of, index_bytes)
        self._shape_of = shape_of

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return megatron_config(self.folder)

    @cached_property
    def _names(self) -> Mapping[str, tuple[str, int] | None]:
        """Stored tensor and layer by name; None for a tensor that is what it is called."""
        names: dict[str, tuple[str, int] | None] = {}
        left = MEGATRON_NAME_CHARACTERS
        for stored in super().names():
            hit = _STACKED.fullmatch(stored)
            count = self._num_layers if hit else 0
            if hit is None or not count or self._shape_of(stored)[:1] != (count,):
                names[stored] = None
                continue
            left -= count * (len(stored) + len(str(count)))
            if left < 0 or len(names) + count > limits.TENSORS:
                raise CheckpointError(
                    f"{self.label}: its tensors of {count} layers each have more than "
                    f"{limits.TENSORS} names, or more than {MEGATRON_NAME_CHARACTERS} characters "
                    "in all."
                )
            for layer in range(count):
                names[f"{hit['head']}.{layer}.{hit['tail']}"] = (stored, layer)
        return names

    @cached_property
    def _num_layers(self) -> int:
        count = self.config.get("num_layers")
        return count if type(count) is int and 0 < count <= 10_000 else 0

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        place = self._names.get(name)
        if place is None:
            return super().info(name)
        stored, layer = place
        whole = super().info(stored)
        size = whole.size_bytes // whole.shape[0]
        offset = whole.offset + layer * size
        return TensorInfo(name, whole.dtype, whole.shape[1:], whole.file, offset, size)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        if self._names.get(name) is None:
            return super().read(name)
        info = self.info(name)
        where = f"{info.file}: tensor {name!r}"
        dtype = numpy_dtype(info.dtype, where)
        return as_array(self.read_bytes(name, 0, info.size_bytes), dtype, info.shape, where)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        place = self._names.get(name)
        if place is None:
            return super().read_bytes(name, start, size)
        info = self.info(name)
        length = max(min(size, info.size_bytes - start), 0)
        return super().read_bytes(place[0], place[1] * info.size_bytes + start, length)


def megatron_config(folder: Folder) -> Mapping[str, Any]:
    """The plain arguments of the run, as a config."""
    archive = read_archive(folder.file(COMMON))
    pickles = [name for name in archive.entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{COMMON}: holds {len(pickles)} pickles of data, expected one.")
    raw = archive.read(pickles[0], MEGATRON_ARGUMENT_BYTES)
    return config_of_run(unpickle(raw, COMMON, Anything(), lambda _: None), COMMON)


# -------------------------------------------------------------------------------------- checkpoints
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
        return read_whole(self, limit)


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
        return read_whole(self, limit)


def _check_inside(label: str, length: int, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > length:
        raise CheckpointError(
            f"{label}: truncated, bytes {offset} to {offset + size} were expected and it has "
            f"{length}."
        )


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
    if type(folder) is not LocalFolder:  # not one that is seen through its ranks
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
