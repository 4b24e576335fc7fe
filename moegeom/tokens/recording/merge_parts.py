"""Recordings to be merged: that they are of one run, and their rows one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.shapes import Int64, Shaped
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import open_tensor_file
from moegeom.tokens.recording.facts import RecordingFacts, read_facts, tensor_file_name
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.rows import FileRows, ShardedRows
from moegeom.tokens.stages import StoredTensor, stored_tensors

#: What parts of one run have in common.
_COMMON = (
    "stage",
    "dtype",
    "routers",
    "has_chosen",
    "outputs",
    "checkpoint.fingerprint",
    "engine",
    "checkpoint.name",
    "created_by",
)

#: Bytes read at a time. Rows that lie scattered cost as many bytes each, at worst.
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, eq=False)
class Part:
    """One recording, opened."""

    path: Path
    facts: RecordingFacts
    source: TokenSource


def open_part(path: Path) -> Part:
    """The recording at ``path``, every file of it checked."""
    return Part(path, read_facts(path), open_recording(path))


def check_agreement(parts: Sequence[Part]) -> None:
    """RecordingError when a part cannot be of the same run as the first."""
    first = parts[0]
    for part in parts[1:]:
        for name in _COMMON:
            mine, its = map(attrgetter(name), (first.facts, part.facts))
            if mine != its:
                raise RecordingError(
                    f"{part.path.name}: {name} is {its!r:.100}; that of {first.path.name} is "
                    f"{mine!r:.100}.",
                    "Merge parts of one run.",
                )


@dataclass(frozen=True, eq=False)
class MergedRows:
    """One tensor of one router in all parts, as it is stored; experts in integers that fit all."""

    rows: ShardedRows
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.rows.width * self.dtype.itemsize

    def gather(self, index: Int64[np.ndarray, "tokens"]) -> Shaped[np.ndarray, "tokens *row"]:
        """The rows ``index``, in that order."""
        out = np.empty((len(index), self.rows.width), self.dtype)
        sequence = np.argsort(index, kind="stable")
        ascending = index[sequence]
        step = max(1, _BLOCK_BYTES // self.row_bytes)
        start = 0
        while start < len(ascending):
            first = int(ascending[start])
            stop = int(np.searchsorted(ascending, first + step))
            block = np.empty((int(ascending[stop - 1]) + 1 - first, self.rows.width), self.dtype)
            self.rows.read_into(first, block)
            out[sequence[start:stop]] = block[ascending[start:stop] - first]
            start = stop
        return out.reshape(len(index), *self.rows.row_shape)


#: By router, then by name of the tensor.
PartRows = dict[str, dict[str, MergedRows]]


def part_rows(parts: Sequence[Part]) -> PartRows:
    """The rows of all parts one after the other; RecordingError when they differ in width."""
    facts = parts[0].facts
    tensors = stored_tensors(facts.stage, facts.has_chosen, facts.outputs)
    return {
        router: {tensor.name: _tensor_rows(parts, router, tensor) for tensor in tensors}
        for router in facts.routers
    }


def _tensor_rows(parts: Sequence[Part], router: str, tensor: StoredTensor) -> MergedRows:
    pieces: list[FileRows] = []
    for part in parts:
        for shard in range(len(part.facts.shards)):
            name = tensor_file_name(tensor.file_prefix, router, shard)
            file = open_tensor_file(part.path / name)
            rows = file.rows(tensor.name, tensor.dtypes.values(), tensor.row)
            if rows.row_shape != (pieces or [rows])[0].row_shape:
                raise RecordingError(
                    f"{part.path.name}/{name}: rows of shape {rows.row_shape}; those of "
                    f"{parts[0].path.name} have {pieces[0].row_shape}.",
                    "Merge parts of one run.",
                )
            pieces.append(rows)
    return MergedRows(ShardedRows.of(tuple(pieces)), _common_dtype([rows.dtype for rows in pieces]))


def _common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """Floats have one dtype already; beyond two bytes experts are stored as int32 anyway."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    narrow = all(dtype.itemsize < 4 for dtype in dtypes)
    return np.result_type(*dtypes) if narrow else np.dtype(np.int32)
