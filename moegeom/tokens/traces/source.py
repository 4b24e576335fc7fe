"""A trace as a token source: choices by token, or counts of choices and no token.

Files are read twice: the first pass finds the tokens, and what a scan asks for is read again, piece
by piece, and cleaned in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moegeom.core.digest import is_unchanged
from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.shapes import Int32, Int64, Shaped
from moegeom.core.text import number_of
from moegeom.core.tokens import SourceFacts, TokenColumns
from moegeom.tokens.recording.columns import unknown_columns
from moegeom.tokens.rows import Cache, StoredSource, assign_rows, shard_ranges
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.stages import CHOSEN
from moegeom.tokens.traces.axes import columns_of, main_stack
from moegeom.tokens.traces.cleaning import RequestCleaning, RowSpan, TokenRows
from moegeom.tokens.traces.survey import TokenIndex, id_dtype
from moegeom.tokens.traces.trace import Pieces, Place, RequestTrace, Trace

#: Bytes of cleaned pieces that stay in memory: neighbouring ranges, and the samples of small
#: traces, are read once. The last two stay whatever they take, since a range may end in the next.
CACHE_BYTES = 256_000_000
_LEAST_PIECES = 2


@dataclass(frozen=True, eq=False)
class PieceTokens:
    """The tokens of a piece; ``starts`` has the first token of each part, and the number of all."""

    parts: tuple[TokenRows, ...]
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


def piece_of(index: TokenIndex, number: int, trace: Trace) -> PieceTokens:
    """The tokens of piece ``number``, which was read as ``trace``.

    Raises
    ------
    RecordingError
        When it holds other rows than in the first pass.
    """
    first, last = (int(part) for part in index.first_part[number : number + 2])
    if len(trace.requests) != last - first:
        raise _changed(trace.where)
    parts: list[TokenRows] = []
    documents: list[int] = []
    for part, request in enumerate(trace.requests, start=first):
        if index.document[part] >= 0 and index.part_rows[part]:
            parts.append(_part(index, part, request, trace))
            documents.append(int(index.document[part]))
    lengths = [len(part.ids) for part in parts]
    return PieceTokens(
        tuple(parts),
        (0, *np.cumsum(lengths).tolist()),
        np.repeat(np.array(documents, np.int64), lengths),
        np.concatenate([part.position for part in parts]),
        np.concatenate([part.token_id for part in parts]),
        sum(request.ids.nbytes for request in trace.requests) + 16 * sum(lengths),
    )


def _part(index: TokenIndex, part: int, request: RequestTrace, trace: Trace) -> TokenRows:
    """The tokens of a request in a piece; no copy of ids where rows that follow one another are
    tokens.
    """
    num_rows, span = int(index.part_rows[part]), RowSpan(*index.part_span[part].tolist())
    ids = index.axes.of(request.ids)
    if span.first < 0:  # rows between are no tokens: the request is cleaned again
        # slots were judged at the first pass
        cleaning = RequestCleaning(request, index.axes.routers, trace.where, may_be_empty=True)
        tokens = cleaning.tokens_of(request, ids)
    else:
        start = span.first - request.first_row
        tokens = TokenRows.of_span(request, ids[start : start + num_rows], span)
    if len(tokens.ids) != num_rows:
        raise _changed(trace.where)
    return tokens


def _changed(where: str) -> RecordingError:
    return RecordingError(
        f"{where}: holds other rows than when it was first read.",
        "Did something write to it meanwhile? Begin again when all files are whole.",
    )


class PieceReader:
    """Pieces by number, read again by one thread; the last ones stay in memory.

    So memory is that of these, and of one that is being read. Were they read by each thread that
    needs one, allocators would hold what every thread freed.
    """

    def __init__(self, index: TokenIndex) -> None:
        self.index = index
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moegeom-pieces")
        self._cache = Cache[PieceTokens](CACHE_BYTES, lambda piece: piece.num_bytes, _LEAST_PIECES)
        self._live: tuple[int, Place | None, Pieces] | None = None

    def piece(self, number: int) -> PieceTokens:
        """The tokens of one piece."""
        return self._cache.get(
            number, lambda: self._thread.submit(self._read_piece, number).result()
        )

    def ranges(self, start: int, stop: int) -> Iterator[tuple[PieceTokens, slice, slice]]:
        """Of tokens ``[start, stop)`` each piece, the tokens in it, and their places among all."""
        starts = self.index.starts
        for number, first, last in shard_ranges(starts, start, stop):
            at = starts[number] + first - start
            yield self.piece(number), slice(first, last), slice(at, at + last - first)

    def _read_piece(self, number: int) -> PieceTokens:
        return piece_of(self.index, number, self._read(number))

    def _read(self, number: int) -> Trace:
        """A piece as its file has it; where it follows the last one, the file is not begun anew."""
        file = int(self.index.file[number])
        place: Place = tuple(self.index.place[number].tolist())
        opened, identity = self.index.files[file], self.index.identities[file]
        if not is_unchanged(opened.path, identity):
            raise _changed(opened.label)
        live, self._live = self._live, None
        pieces = live[2] if live is not None and live[:2] == (file, place) else opened.pieces(place)
        piece = next(pieces, None)
        if piece is None:
            raise _changed(opened.label)
        trace, following = piece
        self._live = None if following is None else (file, following, pieces)
        return trace


@dataclass(frozen=True, eq=False)
class _ChosenRows:
    """The choices of one router as rows."""

    reader: PieceReader
    router: int

    @property
    def dtype(self) -> np.dtype:
        return np.promote_types(id_dtype(self.reader.index.axes.routers), np.int8)  # with -1

    @property
    def num_rows(self) -> int:
        return self.reader.index.num_tokens

    @property
    def width(self) -> int:
        return self.reader.index.axes.top_k

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.width,)

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        for piece, tokens, rows in self.reader.ranges(start, start + len(out)):
            piece.read_into(self.router, tokens.start, out[rows])


@dataclass(frozen=True, eq=False)
class _Columns:
    """Document, position and token id."""

    reader: PieceReader
    has_documents: bool

    def read(self, start: int, stop: int) -> TokenColumns:
        """Columns of tokens ``[start, stop)``."""
        columns = unknown_columns(stop - start)
        for piece, tokens, rows in self.reader.ranges(start, stop):
            if self.has_documents:
                columns.document[rows] = piece.document[tokens]
            columns.position[rows] = piece.position[tokens]
            columns.token_id[rows] = piece.token_id[tokens]
        return columns


class TraceSource(StoredSource):
    """Choices by token; a piece of a file holds those of all routers, and is read whole."""


def trace_source(name: str, index: TokenIndex, routers: Sequence[str]) -> TraceSource:
    """The tokens of a trace as a source of ids, at the ``routers`` of these names."""
    reader = PieceReader(index)
    tensors = {
        router.name: {CHOSEN.name: _ChosenRows(reader, number)}
        for number, router in enumerate(index.axes.routers)
        if router.name in routers
    }
    has_documents = index.kind.has_documents
    facts = SourceFacts(
        name=name,
        stage="ids",
        num_tokens=index.num_tokens,
        routers=tuple(tensors),
        domains=(),
        has_documents=has_documents,
        has_chosen=True,
        engine=index.kind.dialect,
        num_documents=index.num_documents if has_documents else None,
        size_bytes=sum(identity[0] for identity in index.identities),
        notes=index.notes,
        oddities=index.oddities,
    )
    return TraceSource(facts, tensors, _Columns(reader, has_documents))


# ------------------------------------------------------------------------------- counts, no tokens


class CountedSource:
    """Slots by step and expert of each router; everything else is refused."""

    def __init__(
        self, facts: SourceFacts, counts: Mapping[str, Int64[np.ndarray, "steps experts"]]
    ) -> None:
        self._facts = facts
        self._counts = counts

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def counts(self, router: str) -> Int64[np.ndarray, "steps experts"]:
        """How often each expert of ``router`` was chosen in each step."""
        if router not in self._counts:
            raise InternalError(f"{self._facts.name} does not count router {router}.")
        return self._counts[router]

    def read_columns(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as is all that is of single tokens."""
        raise RecordingError(
            f"{self._facts.name}: counts only, of {self._facts.num_tokens:,} tokens; it holds "
            "nothing of any token.",
            "Use moegeom scan, which makes load figures of counts.",
        )

    read_values = read_columns
    read_top_logits = read_columns
    read_chosen = read_columns
    read_output = read_columns


def counted_source(
    path: Path, trace: Trace, all_routers: Sequence[KnownRouter], names: Sequence[str]
) -> CountedSource:
    """Counts at the routers of these ``names``, checked against all routers of the checkpoint.

    Raises
    ------
    RecordingError
        When layers or experts do not fit, or layers did not see the same tokens.
    """
    assert trace.counts is not None, "a log of counts"
    routers = main_stack(all_routers, trace.where)
    counts = trace.counts
    columns, notes = columns_of(counts.shape[1], routers, trace.layers, trace.where)
    filled = np.flatnonzero(counts.any(axis=(0, 2))).tolist()
    if not set(filled) <= set(columns):
        raise RecordingError(
            f"{trace.where}: {number_of(counts.shape[1], 'layer')}, of which {len(filled)} have "
            f"counts; the checkpoint has {number_of(len(routers), 'router')} in layers "
            f"{routers[0].layer} to {routers[-1].layer}.",
            "Is the log of another model?",
        )
    if num_others := counts.shape[1] - len(columns):
        notes = (*notes, f"layers without router, which count nothing: {num_others}")
    by_router = {r.name: counts[:, c] for r, c in zip(routers, columns, strict=True)}
    for router in routers:
        if by_router[router.name].shape[1] != router.num_experts:
            raise RecordingError(
                f"{trace.where}: counts {by_router[router.name].shape[1]} experts; router "
                f"{router.name} has {router.num_experts}.",
                "Is the log of another model, or of one rank of expert parallelism?",
            )
    totals = {router.name: int(by_router[router.name].sum()) for router in routers}
    empty = [name for name, total in totals.items() if not total]
    if empty:
        raise RecordingError(
            f"{trace.where}: no choices are counted at {', '.join(empty[:6])}.",
            "A pipeline stage whose layers were not gathered leaves them empty.",
        )
    top_k, low, high = routers[0].top_k, min(totals.values()), max(totals.values())
    texts = [f"Counts of {trace.dialect}, of no token by itself; steps: {len(trace.counts):,}"]
    if any(total % top_k for total in totals.values()):
        texts.append(
            f"totals are no multiples of k = {top_k}: slots were dropped, or k was another"
        )
    if low < high:
        texts.append(
            f"layers count {low:,} to {number_of(high, 'slot')}: some saw or kept fewer tokens"
        )
    facts = SourceFacts(
        name=path.resolve().name,
        stage="counts",
        num_tokens=high // top_k,
        routers=tuple(router.name for router in routers if router.name in names),
        domains=(),
        has_documents=False,
        has_chosen=False,
        engine=trace.dialect,
        size_bytes=path.stat().st_size,
        notes=(*texts, *trace.notes, *notes),
    )
    return CountedSource(facts, by_router)
