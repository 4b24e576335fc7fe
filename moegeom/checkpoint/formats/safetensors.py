"""Safetensors: one file, a folder with an index, or a folder of files.

A file is 8 bytes of length, then a header in JSON, then the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import gt
from typing import Any, Protocol

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.checkpoint.json_text import num_quotes, parse_object, unique_keys
from moegeom.checkpoint.ranks import Piece, SlicedShard, SlicedTensor, join_pieces, open_files
from moegeom.checkpoint.reading import AGAIN, Folder, Location, RangeFile, truncated
from moegeom.checkpoint.shards import (
    CheckpointShard,
    HeadedShard,
    Naming,
    ShardedStore,
    choose,
    lazy,
    open_index,
)
from moegeom.checkpoint.store import Format, TensorInfo, check_apart, check_names, is_count
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Shaped
from moegeom.core.text import number_of

# ------------------------------------------------------------------------------------------ headers
#: What ``HuggingFaceStorageWriter(save_distributed=True)`` of torch writes: row slices.
_ROW_SLICES = "DCP_SHARDING_INFO"

#: Characters; a dtype of a later version may have any name.
_DTYPE_LENGTH = 64

_NO_WRITER = "No writer of safetensors makes such a file: do not use it."


@dataclass(frozen=True)
class SafetensorsHeader:
    """A parsed header; no tensor in it ends behind the end of the file.

    Entries are checked one by one, when their tensor is asked for. ``slices`` is what torch writes
    where tensors may be slices of larger ones, "" elsewhere.
    """

    file: str
    data_start: int
    entries: dict[str, Any]
    slices: Any = ""

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies; dtype, shape and offsets agree with each other."""
        entry = self.entries.get(name)
        where = f"{self.file}: tensor {name!r}"
        if entry is None:
            raise CheckpointError(f"{where} is not in this file, which holds {len(self.entries)}.")
        if not isinstance(entry, dict):
            raise CheckpointError(
                f"{where} is described by a {type(entry).__name__}, not an object."
            )
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or len(dtype) > _DTYPE_LENGTH:
            raise CheckpointError(f"{where} has dtype {_short(dtype)}, expected a name.")
        shape = _counts(entry.get("shape"), f"{where} has shape", limits.DIMENSIONS)
        offsets = _counts(entry.get("data_offsets"), f"{where} has data_offsets", 2)
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(
                f"{where} has data_offsets {list(offsets)}, expected [begin, end]."
            )
        begin, end = offsets
        expected = _num_bytes(dtype, shape)
        if expected is not None and end - begin != expected:
            raise CheckpointError(
                f"{where} has {end - begin} bytes; shape {shape} of {dtype} takes {expected}."
            )
        return TensorInfo(name, dtype, shape, self.file, self.data_start + begin, end - begin)


def read_header(file: RangeFile) -> SafetensorsHeader:
    """The header of one file; costs its own bytes and little more than parsing its JSON."""
    file_size = file.size_bytes()
    raw = _read_text(file, file_size)
    entries, largest_end = _parse_entries(raw, f"{file.label}: the header")
    metadata = entries.pop("__metadata__", {})
    slices = metadata.get(_ROW_SLICES, "") if isinstance(metadata, dict) else ""
    header = SafetensorsHeader(file.label, 8 + len(raw), entries, slices)
    if largest_end is None:
        largest_end = _check_every_entry(header)
    end = header.data_start + largest_end
    if end > file_size:
        raise truncated(file.label, end, file_size)
    if end < file_size:
        _check_every_entry(header)  # a range that is turned round says more
        raise CheckpointError(
            f"{file.label}: has {file_size} bytes, and its last tensor ends at {end}: the header "
            "may be that of another file.",
            AGAIN,
        )
    _check_apart(header)
    return header


def _check_apart(header: SafetensorsHeader) -> None:
    """Raise if two tensors name the same bytes, which no writer does."""
    begins, ends = _places(list(header.entries.values()))
    # Each begins where all before it have ended; this is on the way of every header.
    if any(map(gt, sorted(ends), sorted(begins)[1:])) or any(map(gt, begins, ends)):
        spans = zip(begins, ends, header.entries, strict=True)
        check_apart(spans, f"{header.file}: behind the header", hint=_NO_WRITER)


def _places(entries: list[Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Begins and ends of the tensors; 0 where an entry has none, which is an error for who asks."""
    try:
        pairs = [entry["data_offsets"] for entry in entries]
        if set(map(type, pairs)) <= {list} and set(map(len, pairs)) <= {2}:
            begins, ends = ([pair[side] for pair in pairs] for side in (0, 1))
            if {*map(type, begins), *map(type, ends)} <= {int}:
                return begins, ends
    except (TypeError, KeyError):
        pass
    spans = [_begin_and_end(entry) for entry in entries]
    return [begin for begin, _ in spans], [end for _, end in spans]


def _begin_and_end(entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and list(map(type, offsets)) == [int, int]:
        return offsets[0], offsets[1]
    return 0, 0


#: How a file begins that stands for another in a repository.
_LFS = b"version https://git-lfs"[:8]


def _read_text(file: RangeFile, file_size: int) -> bytes:
    """The JSON of the header, whose length is believed only within the limits."""
    if file_size < 8:
        raise CheckpointError(f"{file.label}: truncated, has {file_size} bytes.", AGAIN)
    first = file.read(0, 8)
    if first == _LFS:
        raise CheckpointError(
            f"{file.label}: is a pointer of Git LFS, and the file itself was not fetched.",
            "git lfs pull",
        )
    length = int.from_bytes(first, "little")
    if length > limits.HEADER_BYTES:
        raise CheckpointError(
            f"{file.label}: the header claims {length} bytes, more than the "
            f"{limits.HEADER_BYTES} allowed.",
            "Is this a safetensors file?",
        )
    if 8 + length > file_size:
        raise truncated(file.label, 8 + length, file_size)
    return file.read(8, length)


def _parse_entries(raw: bytes, where: str) -> tuple[dict[str, Any], int | None]:
    """The header as a dict, and the largest end of a tensor (None if the header is odd).

    Refusing duplicate keys with a hook would double the parsing time: only a header whose strings
    are not those of its text, or are not where they belong, is parsed a second time.
    """
    entries = parse_object(raw, where, pairs_hook=None)
    check_names(entries, where)
    strings, largest_end = _count_strings(entries)
    if 2 * strings == num_quotes(raw):
        return entries, largest_end
    del entries
    return parse_object(raw, where, pairs_hook=unique_keys), None


def _count_strings(entries: dict[str, Any]) -> tuple[int, int]:
    """Strings of a header in which every entry is plain, and the largest end; else (-1, 0)."""
    metadata = entries.get("__metadata__")
    num_metadata = 0
    if "__metadata__" in entries:
        if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
            return -1, 0
        num_metadata = 1 + 2 * len(metadata)
    tensors = [e for e in entries.values() if e is not metadata]
    try:
        # Lists and sets of types, not a loop of tests: this is on the way of every header.
        is_plain = set(map(len, tensors)) <= {3}
        is_plain &= {type(e["dtype"]) for e in tensors} <= {str}
        ends = [e["data_offsets"][1] for e in tensors]
    except (TypeError, KeyError, IndexError):
        return -1, 0
    if not is_plain or not set(map(type, ends)) <= {int}:
        return -1, 0
    largest_end = max(ends, default=0)
    return num_metadata + 5 * len(tensors), largest_end


def _check_every_entry(header: SafetensorsHeader) -> int:
    infos = [header.info(name) for name in header.entries]
    return max((i.offset + i.size_bytes - header.data_start for i in infos), default=0)


def _counts(numbers: Any, what: str, most: int) -> tuple[int, ...]:
    """A list of at most ``most`` non-negative integers, as a tuple."""
    is_list = isinstance(numbers, list) and len(numbers) <= most
    if not is_list or not all(map(is_count, numbers)):
        raise CheckpointError(
            f"{what} {_short(numbers)}, expected at most {most} non-negative 64-bit integers."
        )
    return tuple(numbers)


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor (Python integers do not overflow); None for a dtype of a later version."""
    if dtype not in DTYPES:
        return None
    bits = DTYPES[dtype].bits
    for size in shape:
        bits *= size
    return -(-bits // 8)


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else text[:77] + "..."


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
            offsets[file] = _parse_slices(shard.slices, file)
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
    offsets = {} if slices == "" else _parse_slices(slices, file)
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
        or not all(map(is_count, start))
    ):
        raise CheckpointError(
            f"{file}: holds row slices, and its DCP_SHARDING_INFO has no 'saved_offsets' of "
            f"integers for tensor {name!r}."
        )
    return tuple(start)


def _parse_slices(text: Any, file: str) -> Mapping[str, Any]:
    where = f"{file}: DCP_SHARDING_INFO"
    if not isinstance(text, str):
        raise CheckpointError(f"{where} is a {type(text).__name__}, expected a text.")
    return parse_object(text.encode("utf-8", "surrogatepass"), where)


_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_NAMING = Naming(_INDEX_SUFFIX, "model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True)
class SafetensorsFile(HeadedShard):
    """One file; the header is read on first use. Behind an index, its tensors must be whole."""

    is_indexed: bool = False

    @lazy
    def header(self) -> SafetensorsHeader:
        header = read_header(self.file)
        if self.is_indexed:
            check_whole(header.file, header.slices)
        return header

    @property
    def slices(self) -> Any:
        return self.header.slices

    def kind_of(self, names: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
        first, entries = self.info(names[0]), self.header.entries
        like, size = (first.dtype, list(first.shape)), first.size_bytes
        try:
            for name in names:  # of ten thousand experts one is checked, and the others compared
                entry = entries[name]
                begin, end = entry["data_offsets"]
                if (entry["dtype"], entry["shape"]) != like or end - begin != size:
                    return None
        except (TypeError, KeyError, ValueError):
            return None
        return first.dtype, first.shape


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
