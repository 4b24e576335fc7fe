"""A trace of choices as a token source: cleaned by one set of rules, whoever wrote it.

What is cut is counted and said in the notes of the source; what does not fit is refused. Files are
read twice: a first pass places the rows, and what a scan asks for is read again, piece by piece.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32, Int64, Integer, Shaped

from moegeom.core.errors import RecordingError
from moegeom.core.identity import is_unchanged
from moegeom.core.tokens import SourceFacts, TokenColumns
from moegeom.tokens.ranges import shard_ranges
from moegeom.tokens.recording.columns import unknown_columns
from moegeom.tokens.rows import assign_rows
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.stages import CHOSEN
from moegeom.tokens.stored import StoredSource
from moegeom.tokens.traces.axes import main_stack
from moegeom.tokens.traces.first_pass import (
    FileOf,
    InMemory,
    Placed,
    first_pass,
    id_dtype,
    placed_ids,
)
from moegeom.tokens.traces.trace import Pieces, Place, Trace

#: Bytes of cleaned pieces that are kept: neighbouring ranges, and the samples of small traces, are
#: read once.
CACHE_BYTES = 256_000_000


@dataclass(frozen=True, eq=False)
class CleanTrace:
    """The tokens of a trace: ``ids`` is (tokens, routers, slots), columns are -1 where not known.

    ``row`` is the row in the request, which is what is left of the position where the file does
    not say it.
    """

    routers: tuple[KnownRouter, ...]
    ids: Integer[np.ndarray, "tokens routers slots"]
    request: Int64[np.ndarray, "tokens"]
    row: Int32[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]
    names: tuple[str, ...]
    notes: tuple[str, ...]


def clean(trace: Trace, known: Sequence[KnownRouter]) -> CleanTrace:
    """The tokens of ``trace``, held against all routers of the checkpoint, in memory.

    Raises
    ------
    RecordingError
        When the trace does not fit, with the numbers; nothing is guessed.
    """
    routers = main_stack(known, trace.where)
    found = first_pass([InMemory(trace)], routers, trace.where)
    piece = piece_of(found, 0, trace, range(len(routers)))
    names = [
        request.name
        for request, document in zip(trace.requests, found.document, strict=True)
        if document >= 0
    ]
    return CleanTrace(
        found.axes.routers,
        piece.ids,
        piece.document,
        piece.row,
        piece.position,
        piece.token_id,
        tuple(names),
        found.notes,
    )


@dataclass(frozen=True, eq=False)
class Piece:
    """The tokens of a piece, at some of the routers."""

    ids: Integer[np.ndarray, "tokens routers slots"]
    document: Int64[np.ndarray, "tokens"]
    row: Int32[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]

    @cached_property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())


def piece_of(found: Placed, number: int, trace: Trace, wanted: Sequence[int]) -> Piece:
    """The tokens of piece ``number``, which was read as ``trace``, at the ``wanted`` routers.

    Raises
    ------
    RecordingError
        When it holds other rows than in the first pass.
    """
    num_tokens = found.starts[number + 1] - found.starts[number]
    routers = found.axes.routers
    ids = np.empty((num_tokens, len(wanted), found.axes.top_k), id_dtype(routers))
    columns = {
        name: np.empty(num_tokens, dtype)
        for name, dtype in (
            ("document", np.int64), ("row", np.int32), ("position", np.int32),
            ("token_id", np.int32),
        )
    }  # fmt: skip
    begin = 0
    for request, one in enumerate(trace.requests, start=int(found.first_request[number])):
        if request >= len(found.document):
            raise _changed(trace.where)
        if found.document[request] < 0:
            continue
        placed, chosen = placed_ids(one, trace, found.axes)
        end = begin + len(chosen)
        if end > num_tokens:
            raise _changed(trace.where)
        ids[begin:end] = chosen[:, wanted] if len(wanted) < len(routers) else chosen
        columns["document"][begin:end] = found.document[request]
        columns["row"][begin:end] = placed.row
        columns["position"][begin:end] = placed.position
        columns["token_id"][begin:end] = placed.token_id
        begin = end
    if begin != num_tokens:
        raise _changed(trace.where)
    return Piece(ids, **columns)


def _changed(where: str) -> RecordingError:
    return RecordingError(
        f"{where}: holds other rows than when it was first read.",
        "Did something write to it meanwhile? Begin again when all files are whole.",
    )


class Reader:
    """Pieces by number, read again; the last ones are kept, and one thread reads at a time.

    So memory is that of the pieces that are kept, and of one that is being read.
    """

    def __init__(self, found: Placed, wanted: Sequence[int]) -> None:
        self.found = found
        self._wanted = tuple(wanted)
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Piece] = OrderedDict()
        self._size = 0
        self._live: tuple[int, Place | None, Pieces] | None = None

    def piece(self, number: int) -> Piece:
        """The tokens of one piece."""
        with self._lock:
            if number not in self._held:
                piece = piece_of(self.found, number, self._read(number), self._wanted)
                self._size += piece.num_bytes
                self._held[number] = piece
                while self._size > CACHE_BYTES and len(self._held) > 1:
                    _, gone = self._held.popitem(last=False)
                    self._size -= gone.num_bytes
            self._held.move_to_end(number)
            return self._held[number]

    def _read(self, number: int) -> Trace:
        """A piece as its file has it; where it follows the last one, the file is not begun anew."""
        file = int(self.found.file[number])
        place: Place = tuple(self.found.place[number].tolist())
        opened, identity = self.found.files[file], self.found.identities[file]
        if isinstance(opened, FileOf) and identity and not is_unchanged(opened.path, identity):
            raise _changed(opened.label)
        live, self._live = self._live, None
        pieces = live[2] if live is not None and live[:2] == (file, place) else opened.pieces(place)
        found = next(pieces, None)
        if found is None:
            raise _changed(opened.label)
        trace, following = found
        self._live = None if following is None else (file, following, pieces)
        return trace


@dataclass(frozen=True, eq=False)
class _ChosenRows:
    """The choices of one router as rows."""

    reader: Reader
    index: int

    @property
    def dtype(self) -> np.dtype:
        return id_dtype(self.reader.found.axes.routers)

    @property
    def num_rows(self) -> int:
        return self.reader.found.num_tokens

    @property
    def width(self) -> int:
        return self.reader.found.axes.top_k

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.width,)

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        starts = self.reader.found.starts
        for number, first, last in shard_ranges(starts, start, start + len(out)):
            at = starts[number] + first - start
            stored = self.reader.piece(number).ids[first:last, self.index]
            assign_rows(out[at : at + last - first], stored, "a trace")


@dataclass(frozen=True, eq=False)
class _Columns:
    """Document, position and token id."""

    reader: Reader
    has_documents: bool

    def read(self, start: int, stop: int) -> TokenColumns:
        """Columns of tokens ``[start, stop)``."""
        found = unknown_columns(stop - start)
        starts = self.reader.found.starts
        for number, first, last in shard_ranges(starts, start, stop):
            at = starts[number] + first - start
            piece, rows = self.reader.piece(number), slice(at, at + last - first)
            if self.has_documents:
                found.document[rows] = piece.document[first:last]
            found.position[rows] = piece.position[first:last]
            found.token_id[rows] = piece.token_id[first:last]
        return found


def trace_source(name: str, found: Placed, wanted: Sequence[str]) -> StoredSource:
    """The tokens that a first pass found as a source of ids, at the ``wanted`` routers."""
    kept = [i for i, router in enumerate(found.axes.routers) if router.name in wanted]
    reader = Reader(found, kept)
    tensors = {
        found.axes.routers[i].name: {CHOSEN.name: _ChosenRows(reader, index)}
        for index, i in enumerate(kept)
    }
    has_documents = found.manner.has_documents
    facts = SourceFacts(
        name=name,
        stage="ids",
        num_tokens=found.num_tokens,
        routers=tuple(tensors),
        domains=(),
        has_documents=has_documents,
        has_chosen=True,
        engine=found.manner.dialect,
        num_documents=found.num_documents if has_documents else None,
        size_bytes=sum(identity[0] for identity in found.identities if identity is not None),
        notes=found.notes,
    )
    return StoredSource(facts, tensors, _Columns(reader, has_documents))
