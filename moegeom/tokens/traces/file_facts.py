"""What a first pass finds in one file, read to its end a piece at a time.

What is kept are facts: of each request a hash of its name and one of its choices, of each piece
where it begins and how many rows of it are tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from moegeom.core.digest import sha256_of
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.files import reading
from moegeom.core.identity import Identity, identity_of
from moegeom.core.limits import TRACE_BYTES
from moegeom.tokens.source import KnownRouter, Refused
from moegeom.tokens.traces.axes import Axes, Survey, axes_of, expected_axes, survey_of
from moegeom.tokens.traces.dialect import Dialect, find_dialect
from moegeom.tokens.traces.rows import PlacedRows, RequestRows, RowSpan, undoubted
from moegeom.tokens.traces.trace import BEGINNING, IdsAre, Notes, Pieces, Place, RequestTrace, Trace


class TraceFile(Protocol):
    """What is read piece by piece, and may be read again from where a piece began."""

    @property
    def label(self) -> str: ...

    def pieces(self, place: Place) -> Pieces: ...


@dataclass(frozen=True)
class FileOf:
    """A file in a dialect."""

    path: Path
    dialect: Dialect

    @property
    def label(self) -> str:
        return self.path.name

    def pieces(self, place: Place) -> Pieces:
        """Its pieces from ``place`` on.

        Raises
        ------
        RecordingError
            When it cannot be read, or is damaged.
        """
        try:
            with reading(self.path, RecordingError):
                yield from self.dialect.pieces_from(self.path, place)
        except CheckpointError as error:
            raise RecordingError(error.message, error.hint) from None


@dataclass(frozen=True)
class Manner:
    """What all files of a trace must say alike: whose it is, and what its axes are called."""

    dialect: str
    layers: tuple[int, ...] | None
    has_documents: bool

    @classmethod
    def of(cls, trace: Trace) -> Manner:
        """That of a piece."""
        return cls(trace.dialect, trace.layers, trace.has_documents)


@dataclass(frozen=True, eq=False)
class FileFacts:
    """What is kept of a file.

    ``digest`` is a hash of all choices and of what the batches of a run are called.
    Requests have a hash of the ``name``, one of the ``content``, and whether positions are known.
    ``identity`` is that of the file; None for a trace in memory.
    A part is the rows of a request in a piece: ``part_request`` numbers it in the file,
    ``part_rows`` counts its tokens, and ``part_span`` is the first row and its position, or -1
    where rows between them are no tokens. ``piece_parts`` counts the parts of each piece, ``place``
    is where it begins. ``axes`` are those that rows were placed by, ``told`` is the number of
    layers that flat ids were surveyed with.
    """

    digest: UInt64[np.ndarray, "2"]
    name: UInt64[np.ndarray, "requests 2"]
    content: UInt64[np.ndarray, "requests 2"]
    is_positioned: Bool[np.ndarray, "requests"]
    part_request: Int64[np.ndarray, "parts"]
    part_rows: Int64[np.ndarray, "parts"]
    part_span: Int64[np.ndarray, "parts 2"]
    piece_parts: Int64[np.ndarray, "pieces"]
    place: Int64[np.ndarray, "pieces 2"]
    survey: Survey
    manner: Manner | None
    axes: tuple[tuple[int, int], tuple[int, ...]] | None
    told: int | None
    ids_are: IdsAre
    cut: Counter[str]
    notes: tuple[str, ...]
    identity: Identity | None = None
    refusal: RecordingError | None = None

    @property
    def rows(self) -> Int64[np.ndarray, "requests"]:
        """Tokens of each request."""
        return np.bincount(
            self.part_request, weights=self.part_rows, minlength=len(self.name)
        ).astype(np.int64)


class CountsAlone(RecordingError):
    """A file holds counts of choices and no choice."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(
            f"{trace.where}: holds counts only, which may be of the same tokens as those of "
            "another file; several files are read where they hold choices.",
            "Scan each file of counts by itself.",
        )
        self.trace = trace


class _Digest:
    """A hash of the tokens of one request, whose rows may come in several parts."""

    def __init__(self) -> None:
        self._of = [hashlib.sha256() for _ in range(3)]

    def add(self, placed: PlacedRows, dtype: np.dtype) -> None:
        ids = np.ascontiguousarray(placed.ids.astype(dtype, copy=False))
        for hashed, array in zip(self._of, (ids, placed.position, placed.token_id), strict=True):
            hashed.update(array.data)

    def value(self) -> UInt64[np.ndarray, "2"]:
        whole = hashlib.sha256(b"".join(hashed.digest() for hashed in self._of))
        return np.frombuffer(whole.digest()[:16], "<u8")


def id_dtype(routers: Sequence[KnownRouter]) -> np.dtype:
    """The smallest integers that name all experts."""
    return np.min_scalar_type(max(router.num_experts for router in routers) - 1)


def facts_of(
    file: TraceFile,
    routers: Sequence[KnownRouter],
    before: Survey,
    where: str,
    refused: Refused | None,
    axes: Axes | None = None,
) -> FileFacts:
    """What a file holds, read from beginning to end.

    ``axes`` are taken to be what ``before`` and the first piece make expect, unless they are given.
    """
    try:
        facts = _Gathered(file, routers, before, axes, where, refused).facts()
    except RecordingError:
        _refuse_other_dialect(file, where)
        raise
    if not facts.survey.num_requests:
        _refuse_other_dialect(file, where)
    return facts


def _refuse_other_dialect(file: TraceFile, where: str) -> None:
    """Raises RecordingError where a file that cannot be read is one of another dialect."""
    if not isinstance(file, FileOf):
        return
    found = find_dialect(file.path, None)
    if found is not None and found.name != file.dialect.name and where != file.label:
        raise RecordingError(
            f"{where}: {file.label} is a trace of dialect {found.name}, those before it are of "
            f"{file.dialect.name}; expected one dialect.",
            "Give the files of each by themselves.",
        )


class _Gathered:
    """The facts of one file while it is read."""

    def __init__(
        self,
        file: TraceFile,
        routers: Sequence[KnownRouter],
        before: Survey,
        axes: Axes | None,
        where: str,
        refused: Refused | None,
    ) -> None:
        self._file, self._routers, self._where = file, routers, where
        self._before, self._axes, self._refused = before, axes, refused
        self._dtype = id_dtype(routers)
        self._survey = Survey()
        self._told: int | None = None
        self._manner: Manner | None = None
        self._ids_are: IdsAre = "logical"
        self._notes, self._cut = Notes(), Counter[str]()
        self._refusal: RecordingError | None = None
        self._names: list[bytes] = []
        self._contents: list[np.ndarray] = []
        self._positioned: list[bool] = []
        self._parts: list[tuple[int, int, int, int]] = []
        self._pieces: list[tuple[int, int, int]] = []
        self._open: tuple[RequestRows, _Digest] | None = None
        self._open_name = ""
        self._whole = hashlib.sha256()

    def facts(self) -> FileFacts:
        """All of them."""
        place, identity = BEGINNING, None
        if isinstance(self._file, FileOf):
            with reading(self._file.path, RecordingError):
                identity = identity_of(self._file.path)
        for trace, following in self._file.pieces(BEGINNING):
            before = len(self._parts)
            self._add(trace)
            if len(self._parts) > before or not self._pieces:
                self._pieces.append((*place, len(self._parts) - before))
            if following is None:
                break
            place = following
        self._end_request()
        parts = np.array(self._parts, np.int64).reshape(-1, 4)
        pieces = np.array(self._pieces, np.int64).reshape(-1, 3)
        return FileFacts(
            np.frombuffer(self._whole.digest()[:16], "<u8"),
            np.frombuffer(b"".join(self._names), "<u8").reshape(-1, 2),
            np.array(self._contents, np.uint64).reshape(-1, 2),
            np.array(self._positioned, bool),
            parts[:, 0],
            parts[:, 1],
            parts[:, 2:],
            pieces[:, 2],
            pieces[:, :2],
            self._survey,
            self._manner,
            None if self._axes is None else (self._axes.shape, self._axes.columns),
            self._told,
            self._ids_are,
            self._cut,
            self._notes.texts,
            identity,
            self._refusal,
        )

    def _add(self, trace: Trace) -> None:
        if trace.counts is not None:
            raise CountsAlone(trace)
        _refuse_piece(trace)
        if trace.ids_are == "unknown":
            self._ids_are = "unknown"
        self._notes.add(trace.notes)
        if not trace.requests:
            return
        manner = Manner.of(trace)
        if self._manner not in (None, manner):
            raise RecordingError(
                f"{trace.where}: pieces of it have 2 different sets of layers: "
                f"{listed(self._manner.layers)}, and {listed(manner.layers)}.",
                "The file was cut off, lines are missing, or it is of several runs.",
            )
        known = self._before.and_of(self._survey)
        surveyed = survey_of(trace.requests, self._routers, known)
        if self._manner is None:
            self._told = known.and_of(surveyed).told
        self._manner = manner
        self._survey = self._survey.and_of(surveyed)
        so_far = known.and_of(surveyed)
        where = self._where if self._before.num_requests else trace.where
        if self._axes is None:
            self._axes = expected_axes(so_far, self._routers, trace.layers, where)
        elif not so_far.is_flat:
            expected_axes(so_far, self._routers, trace.layers, where)
        if self._refusal is not None:
            return
        try:
            self._place_all(trace, self._axes)
        except RecordingError as error:
            # says more, where it refuses
            axes_of(so_far, self._routers, trace.layers, where, is_whole=False)
            if not so_far.is_flat or so_far.told is not None:
                raise
            self._refusal = error

    def _place_all(self, trace: Trace, axes: Axes) -> None:
        size = math.prod(axes.shape)
        odd = next((one for one in trace.requests if one.ids.size % size), None)
        fitting = trace.requests[: trace.requests.index(odd) if odd else None]
        ids = [axes.of(request.ids) for request in fitting]
        doubts = undoubted(fitting, ids, axes.routers)
        for request, of_request, is_undoubted in zip(fitting, ids, doubts, strict=True):
            self._place(request, of_request, trace, axes, is_undoubted)
        if odd:
            raise RecordingError(f"{trace.where}: request {odd.name} has another shape.")

    def _place(
        self,
        request: RequestTrace,
        ids: Integer[np.ndarray, "rows routers slots"],
        trace: Trace,
        axes: Axes,
        is_undoubted: bool,
    ) -> None:
        if not request.first_row:
            self._end_request()
            rows = RequestRows(request, axes.routers, trace.last_is_routed, trace.where)
            self._open = rows, _Digest()
            self._names.append(self._name_of(request))
            self._whole.update(f"{request.batch}\n".encode())
            self._positioned.append(True)
            self._open_name = request.name
        if self._open is None:  # left out
            self._parts.append((len(self._names) - 1, 0, -1, -1))
            return
        rows, digest = self._open
        try:
            placed = rows.placed(request, ids, is_undoubted)
        except RecordingError as error:
            self._leave_out(error)
            self._parts.append((len(self._names) - 1, 0, -1, -1))
            return
        digest.add(placed, self._dtype)
        self._positioned[-1] &= bool((placed.position >= 0).all())
        span = placed.span or RowSpan(-1, -1)
        self._parts.append((len(self._names) - 1, len(placed.ids), span.first, span.position))

    def _name_of(self, request: RequestTrace) -> bytes:
        """A hash of the name: of a place in the file together with the file."""
        scope = ""
        if request.is_place:
            file = self._file
            scope = str(file.path.resolve()) if isinstance(file, FileOf) else file.label
        return sha256_of(scope, request.name).digest()[:16]

    def _end_request(self) -> None:
        if self._open is None:
            return
        rows, digest = self._open
        try:
            rows.finish()
        except RecordingError as error:
            self._leave_out(error)
            return
        self._open = None
        self._cut += rows.cut
        self._contents.append(digest.value())
        self._whole.update(self._contents[-1].tobytes())

    def _leave_out(self, error: RecordingError) -> None:
        """Empties the request that is being read, where refusals are heard; else raises them."""
        if self._refused is None:
            raise error
        self._refused(self._open_name, error)
        self._open = None
        self._contents.append(np.zeros(2, np.uint64))
        last = len(self._names) - 1
        for index in reversed(range(len(self._parts))):
            if self._parts[index][0] != last:
                break
            self._parts[index] = (last, 0, -1, -1)


def _refuse_piece(trace: Trace) -> None:
    """Raises RecordingError for what no cleaning can make a trace of tokens of."""
    if trace.ids_are == "physical":
        raise RecordingError(
            f"{trace.where}: ids are physical places of experts, which move with load balancing.",
            "Give the map of places (--expert-map), or record with expert load balancing off.",
        )
    dtypes = {request.ids.dtype for request in trace.requests if request.ids.dtype.kind not in "iu"}
    if dtypes:
        raise RecordingError(f"{trace.where}: ids are {dtypes.pop()}; expected integers.")
    size = sum(request.ids.nbytes for request in trace.requests)
    if size > TRACE_BYTES:
        raise RecordingError(
            f"{trace.where}: {size:,} bytes of ids in one block, more than the {TRACE_BYTES:,} "
            "allowed.",
            "Give the requests in several files.",
        )


def listed(layers: tuple[int, ...] | None) -> str:
    """The first layers of a trace, for a message."""
    return ", ".join(map(str, (layers or ())[:8])) + (" ..." if len(layers or ()) > 8 else "")
