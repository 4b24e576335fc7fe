"""The ``.metadata`` of a torch distributed checkpoint: which tensors, cut where, stored where.

It is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, written by torch 1.13 to 2.13
and by Megatron-Core. Records stand in for the classes and only keep their state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moegeom.checkpoint.collection import no_collection
from moegeom.checkpoint.formats._pytorch_globals import ALLOWED, Dropped, TorchDtype, empty_dict
from moegeom.checkpoint.names import check_names, is_inside
from moegeom.checkpoint.pickle.machine import Record
from moegeom.checkpoint.pickle.pickled import unpickle
from moegeom.checkpoint.store import check_apart
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import DCP_PIECES

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


def parse_metadata(raw: bytes, where: str) -> Metadata:
    """The contents of a ``.metadata`` file; its places lie inside of the folder."""
    with no_collection():
        return _parse_metadata(raw, where)


def _parse_metadata(raw: bytes, where: str) -> Metadata:
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
            _check_inside(place.file, what)
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
    if not 0 <= offset <= limits.LARGEST_COUNT or not 0 <= length <= limits.LARGEST_COUNT:
        raise CheckpointError(f"{what} lies at byte {offset} and has {length}, which cannot be.")
    return DcpPlace(file, offset, length, bool(storage.state.get("transform_descriptors")))


def _check_inside(file: str, what: str) -> None:
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
    if len(counts) > limits.DIMENSIONS or not all(map(_is_count, counts)):
        raise CheckpointError(
            f"{what} has '{key}' that are not at most {limits.DIMENSIONS} non-negative integers."
        )
    return counts


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= limits.LARGEST_COUNT


def _kind(item: Any) -> str:
    return "nothing" if item is None else f"a {_kind_name(type(item))}"


def _kind_name(kind: type) -> str:
    return kind.__name__.lstrip("_")
