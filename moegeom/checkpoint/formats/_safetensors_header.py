"""The header of a safetensors file: 8 bytes of length, then JSON, then the tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import gt
from typing import Any

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.checkpoint.json_text import num_quotes, parse_object, unique_keys
from moegeom.checkpoint.names import check_names
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.store import TensorInfo, check_apart
from moegeom.core import limits
from moegeom.core.errors import CheckpointError

#: What ``HuggingFaceStorageWriter(save_distributed=True)`` of torch writes: row slices.
_ROW_SLICES = "DCP_SHARDING_INFO"

#: Characters; a dtype of a later version may have any name.
_DTYPE_LENGTH = 64

_NO_WRITER = "No writer of safetensors makes such a file: do not use it."

_AGAIN = "Download or copy this file again."


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

    @property
    def names(self) -> Collection[str]:
        return self.entries.keys()

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
        raise _truncated(file.label, end, file_size)
    if end < file_size:
        _check_every_entry(header)  # a range that is turned round says more
        raise CheckpointError(
            f"{file.label}: has {file_size} bytes, and its last tensor ends at {end}: the header "
            "may be that of another file.",
            _AGAIN,
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


def _read_text(file: RangeFile, file_size: int) -> bytes:
    """The JSON of the header, whose length is believed only within the limits."""
    if file_size < 8:
        raise CheckpointError(f"{file.label}: truncated, has {file_size} bytes.", _AGAIN)
    length = int.from_bytes(file.read(0, 8), "little")
    if length > limits.HEADER_BYTES:
        raise CheckpointError(
            f"{file.label}: the header claims {length} bytes, more than the "
            f"{limits.HEADER_BYTES} allowed.",
            "Is this a safetensors file?",
        )
    if 8 + length > file_size:
        raise _truncated(file.label, 8 + length, file_size)
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
    infos = [header.info(name) for name in header.names]
    return max((i.offset + i.size_bytes - header.data_start for i in infos), default=0)


def _counts(numbers: Any, what: str, most: int) -> tuple[int, ...]:
    """A list of at most ``most`` non-negative integers, as a tuple."""
    is_list = isinstance(numbers, list) and len(numbers) <= most
    if not is_list or not all(type(n) is int and 0 <= n <= limits.LARGEST_COUNT for n in numbers):
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


def _truncated(file: str, expected: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: truncated, has {size} bytes and its header promises {expected}.", _AGAIN
    )
