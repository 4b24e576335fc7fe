"""A trace of choices as a token source: cleaned by one set of rules, whoever wrote it.

What is cut is counted and said in the notes of the source; what does not fit is refused. Files are
read twice: a first pass places the rows, and what a scan asks for is read again, piece by piece.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Integer, Shaped

from moegeom.core.errors import RecordingError
from moegeom.core.identity import is_unchanged
from moegeom.core.tokens import SourceFacts, TokenColumns
from moegeom.tokens.ranges import shard_ranges
from moegeom.tokens.recording.columns import unknown_columns
from moegeom.tokens.rows import assign_rows
from moegeom.tokens.stages import CHOSEN
from moegeom.tokens.stored import StoredSource
from moegeom.tokens.traces.file_facts import FileOf, id_dtype
from moegeom.tokens.traces.first_pass import PlacedFiles
from moegeom.tokens.traces.rows import RequestRows, RowSpan, token_ids_at
from moegeom.tokens.traces.trace import Pieces, Place, RequestTrace, Trace

#: Bytes of cleaned pieces that are kept: neighbouring ranges, and the samples of small traces, are
#: read once. The last two are kept whatever they take, since a range may end in the next one.
CACHE_BYTES = 256_000_000
_KEPT = 2


@dataclass(frozen=True, eq=False)
class PlacedPart:
    """The tokens of a request in a piece; ids as they are stored, without a copy where rows that
    follow one another are tokens.
    """

    ids: Integer[np.ndarray, "tokens routers slots"]
    row: Int64[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class PlacedPiece:
    """The tokens of a piece; ``starts`` has the first token of each part, and the number of all."""

    parts: tuple[PlacedPart, ...]
    starts: tuple[int, ...]
    document: Int64[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]
    num_bytes: int

    def read_into(self, router: int, start: int, out: Shaped[np.ndarray, "rows slots"]) -> None:
        """Fills ``out`` with what the router chose from token ``start`` on."""
        for number, first, last in shard_ranges(self.starts, start, start + len(out)):
            at = self.starts[number] + first - start
            stored = self.parts[number].ids[first:last, router]
            assign_rows(out[at : at + last - first], stored, "a trace")


def piece_of(found: PlacedFiles, number: int, trace: Trace) -> PlacedPiece:
    """The tokens of piece ``number``, which was read as ``trace``.

    Raises
    ------
    RecordingError
        When it holds other rows than in the first pass.
    """
    first, last = (int(part) for part in found.first_part[number : number + 2])
    if len(trace.requests) != last - first:
        raise _changed(trace.where)
    parts: list[PlacedPart] = []
    documents: list[int] = []
    for index, request in enumerate(trace.requests, start=first):
        if found.document[index] >= 0 and found.part_rows[index]:
            parts.append(_part(found, index, request, trace))
            documents.append(int(found.document[index]))
    lengths = [len(part.row) for part in parts]
    return PlacedPiece(
        tuple(parts),
        (0, *np.cumsum(lengths).tolist()),
        np.repeat(np.array(documents, np.int64), lengths),
        np.concatenate([part.position for part in parts]),
        np.concatenate([part.token_id for part in parts]),
        sum(request.ids.nbytes for request in trace.requests) + 16 * sum(lengths),
    )


def _part(found: PlacedFiles, index: int, request: RequestTrace, trace: Trace) -> PlacedPart:
    num_rows, span = int(found.part_rows[index]), RowSpan(*found.part_span[index].tolist())
    if span.first < 0:  # rows between are no tokens: they are told apart again
        rows = RequestRows(request, found.axes.routers, trace.last_is_routed, trace.where)
        placed = rows.placed(request, found.axes.of(request.ids))
        part = PlacedPart(placed.ids, placed.row.astype(np.int64), placed.position, placed.token_id)
    else:
        start = span.first - request.first_row
        ids = found.axes.of(request.ids)[start : start + num_rows]
        row = np.arange(span.first, span.first + len(ids))
        position = np.full(len(ids), -1) if span.position < 0 else span.position + row - row[:1]
        part = PlacedPart(
            ids, row, position.astype(np.int32), token_ids_at(request, position).astype(np.int32)
        )
    if len(part.ids) != num_rows:
        raise _changed(trace.where)
    return part


def _changed(where: str) -> RecordingError:
    return RecordingError(
        f"{where}: holds other rows than when it was first read.",
        "Did something write to it meanwhile? Begin again when all files are whole.",
    )


class PieceReader:
    """Pieces by number, read again by one thread; the last ones are kept.

    So memory is that of the pieces that are kept, and of one that is being read. Were they read by
    each thread that needs one, allocators would hold what every thread freed.
    """

    def __init__(self, found: PlacedFiles) -> None:
        self.found = found
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moegeom-pieces")
        self._held: OrderedDict[int, PlacedPiece] = OrderedDict()
        self._size = 0
        self._live: tuple[int, Place | None, Pieces] | None = None

    def piece(self, number: int) -> PlacedPiece:
        """The tokens of one piece."""
        with self._lock:
            if number not in self._held:
                piece = self._thread.submit(self._read_piece, number).result()
                self._size += piece.num_bytes
                self._held[number] = piece
                while self._size > CACHE_BYTES and len(self._held) > _KEPT:
                    _, gone = self._held.popitem(last=False)
                    self._size -= gone.num_bytes
            self._held.move_to_end(number)
            return self._held[number]

    def _read_piece(self, number: int) -> PlacedPiece:
        return piece_of(self.found, number, self._read(number))

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

    reader: PieceReader
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
            piece = self.reader.piece(number)
            piece.read_into(self.index, first, out[at : at + last - first])


@dataclass(frozen=True, eq=False)
class _Columns:
    """Document, position and token id."""

    reader: PieceReader
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


class TraceSource(StoredSource):
    """Choices of which a piece of a file holds those of every router: it is read whole for one."""


def trace_source(name: str, found: PlacedFiles, wanted: Sequence[str]) -> TraceSource:
    """The tokens that a first pass found as a source of ids, at the ``wanted`` routers."""
    reader = PieceReader(found)
    tensors = {
        router.name: {CHOSEN.name: _ChosenRows(reader, index)}
        for index, router in enumerate(found.axes.routers)
        if router.name in wanted
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
    return TraceSource(facts, tensors, _Columns(reader, has_documents))
