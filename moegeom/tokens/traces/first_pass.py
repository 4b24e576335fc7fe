"""The first pass over the files of a trace: what is a token, and what is to be said about the rest.

Files are read one after the other, a piece at a time. What is kept of one are its facts: of each
request a hash of its name and one of its choices, of each piece where it begins and how many rows
of it are tokens. Of the facts of all files follow the axes, repeated requests, counts and notes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from jaxtyping import Bool, Int64, UInt64

from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.files import reading
from moegeom.core.identity import Identity, identity_of
from moegeom.tokens.source import Company, KnownRouter, Refused
from moegeom.tokens.traces.axes import Axes, Survey, axes_of, expected_axes, survey_of
from moegeom.tokens.traces.dialect import Dialect, find_dialect
from moegeom.tokens.traces.rows import PlacedRows, RequestRows, Span
from moegeom.tokens.traces.trace import (
    BEGINNING,
    TRACE_BYTES,
    IdsAre,
    Notes,
    Pieces,
    Place,
    RequestTrace,
    Trace,
)


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
class InMemory:
    """A trace that has been read, as a file of one piece."""

    trace: Trace

    @property
    def label(self) -> str:
        return self.trace.where

    def pieces(self, place: Place) -> Pieces:
        """The trace."""
        assert place == BEGINNING, "there is one piece"
        yield self.trace, None


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


ALONE = Company()


class CountsAlone(RecordingError):
    """A file holds counts of choices and no choice."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(
            f"{trace.where}: holds counts only, which may be of the same tokens as those of "
            "another file; several files are read where they hold choices.",
            "Scan each file of counts by itself.",
        )
        self.trace = trace


@dataclass(frozen=True, eq=False)
class Placed:
    """What the first pass over all files found.

    ``identities`` are those of ``files`` when they were read. ``starts`` is the first token of each
    piece, and behind them the number of all; ``file`` and ``place`` say where a piece lies.
    A part is the rows of a request in a piece, those of a piece are from ``first_part`` on:
    ``document`` numbers its request in the order of tokens, -1 where it is left out.
    """

    files: tuple[TraceFile, ...]
    identities: tuple[Identity | None, ...]
    axes: Axes
    manner: Manner
    starts: tuple[int, ...]
    file: Int64[np.ndarray, "pieces"]
    place: Int64[np.ndarray, "pieces 2"]
    first_part: Int64[np.ndarray, "pieces_and_end"]
    part_rows: Int64[np.ndarray, "parts"]
    part_span: Int64[np.ndarray, "parts 2"]
    document: Int64[np.ndarray, "parts"]
    num_documents: int
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


def first_pass(
    files: Sequence[TraceFile],
    routers: Sequence[KnownRouter],
    where: str,
    company: Company = ALONE,
    copies: str = "",
) -> Placed:
    """What of ``files`` is a token, held against all routers of the checkpoint.

    Raises
    ------
    RecordingError
        When they do not fit, with the numbers; nothing is guessed.
    """
    found: list[FileFacts] = []
    survey, manner = Survey(), None
    for number, file in enumerate(files):
        facts = _known(file, company, survey)
        if facts is None:
            facts = _facts_of(file, routers, survey, where, company.refused)
            _keep(file, company, facts)
        manner = _same_manner(manner, facts.manner, files, number, where)
        survey = survey.and_of(facts.survey)
        found.append(facts)
        if company.advanced is not None:
            company.advanced(number + 1, len(files))
    if manner is None:
        raise RecordingError(f"{where}: no request of it holds choices.")
    # what earlier files were read by may be known of later ones alone
    surveys = Survey()
    for number, facts in enumerate(found):
        if survey.is_flat and facts.told != survey.told and facts.survey.num_requests:
            told = Survey(told=survey.told)
            found[number] = _facts_of(files[number], routers, told, where, company.refused)
        surveys = surveys.and_of(found[number].survey)
    axes = axes_of(surveys, routers, manner.layers, where)
    for number, facts in enumerate(found):
        if facts.axes not in (None, (axes.shape, axes.columns)):
            found[number] = _facts_of(files[number], routers, surveys, where, company.refused, axes)
            _keep(files[number], company, found[number])
        if (refusal := found[number].refusal) is not None:
            raise refusal
    return _put_together(files, found, axes, manner, where, copies)


def _known(file: TraceFile, company: Company, before: Survey) -> FileFacts | None:
    """Facts that were kept, if they were found with what is known of flat ids here."""
    if company.kept is None or not isinstance(file, FileOf):
        return None
    facts = company.kept.find(file.path)
    if facts is not None and facts.survey.is_flat and before.told not in (None, facts.told):
        return None
    return facts


def _keep(file: TraceFile, company: Company, facts: FileFacts) -> None:
    if company.kept is not None and isinstance(file, FileOf) and facts.refusal is None:
        company.kept.keep(file.path, facts)


def _same_manner(
    manner: Manner | None,
    found: Manner | None,
    files: Sequence[TraceFile],
    number: int,
    where: str,
) -> Manner | None:
    """That of all files so far; RecordingError where this one differs."""
    if manner is None or found is None or manner == found:
        return found if manner is None else manner
    one, other = files[0].label, files[number].label
    if manner.dialect != found.dialect:
        raise RecordingError(
            f"{where}: {one} is a trace of {manner.dialect}, {other} of {found.dialect}; "
            "expected one dialect.",
            "Give the files of each by themselves.",
        )
    raise RecordingError(
        f"{where}: {number + 1} files have 2 different sets of layers: {_listed(manner.layers)} "
        f"in {one}, {_listed(found.layers)} in {other}.",
        "A line is missing (dropped or padded tokens are not traced), the run was cut off, or "
        "ranks are of different stages of a pipeline.",
    )


def _listed(layers: tuple[int, ...] | None) -> str:
    return ", ".join(map(str, (layers or ())[:8])) + (" ..." if len(layers or ()) > 8 else "")


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


def _facts_of(
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
                f"{_listed(self._manner.layers)}, and {_listed(manner.layers)}.",
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
            for request in trace.requests:
                self._place(request, trace, self._axes)
        except RecordingError as error:
            # says more, where it refuses
            axes_of(so_far, self._routers, trace.layers, where, is_whole=False)
            if not so_far.is_flat or so_far.told is not None:
                raise
            self._refusal = error

    def _place(self, request: RequestTrace, trace: Trace, axes: Axes) -> None:
        if request.ids.size % (axes.shape[0] * axes.shape[1]):
            raise RecordingError(f"{trace.where}: request {request.name} has another shape.")
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
            placed = rows.placed(request, axes.of(request.ids))
        except RecordingError as error:
            self._leave_out(error)
            self._parts.append((len(self._names) - 1, 0, -1, -1))
            return
        digest.add(placed, self._dtype)
        self._positioned[-1] &= bool((placed.position >= 0).all())
        span = placed.span or Span(-1, -1)
        self._parts.append((len(self._names) - 1, len(placed.ids), span.first, span.position))

    def _name_of(self, request: RequestTrace) -> bytes:
        """A hash of the name: of a place in the file together with the file."""
        scope = ""
        if request.is_place:
            file = self._file
            scope = str(file.path.resolve()) if isinstance(file, FileOf) else file.label
        return xxhash.xxh3_128_digest(f"{scope}\0{request.name}".encode(errors="surrogatepass"))

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


#: What is said about each kind of decision, with its count.
_SENTENCES: dict[str, str] = {
    "last": "requests whose last token was never routed: {n:,}",
    "masked": "rows cut by the file's own mask: {n:,}",
    "surplus": "padding rows cut behind the last routed token: {n:,}",
    "leading": "rows without choices cut at the beginning (prefix not captured): {n:,}",
    "trailing": "rows without choices cut at the end (padding): {n:,}",
    "inside": "rows without choices left out between others: {n:,}",
    "unrecorded": "rows left out with requests that hold no choice: {n:,}",
    "unrecorded requests": "requests that hold no choice: {n:,}",
    "told start": "leading positions omitted, as the file says: {n:,}",
    "cached": "leading positions omitted, as many as the engine had cached: {n:,}",
    "generation": "positions of prompts omitted, only generated tokens were recorded: {n:,}",
    "generation, and the last token of the prompt": (
        "positions of prompts omitted, recorded are the rows that generated a token: {n:,}"
    ),
    "stale": "rows equal to the row before them in every layer, in runs of 10 (stale?): {n:,}",
    "repeated": "requests left out because they stand there twice: {n:,}",
    "equal": "requests equal to another in every token and choice, kept: {n:,}",
}


def _put_together(
    files: Sequence[TraceFile],
    found: list[FileFacts],
    axes: Axes,
    manner: Manner,
    where: str,
    copies: str,
) -> Placed:
    """What follows of the facts of all files together."""
    notes, cut = Notes(), Counter[str]()
    num_copies = _without_copies(found) if copies else 0
    for facts in found:
        notes.add(facts.notes)
        cut += facts.cut
    if num_copies:
        notes.add([f"{copies}: {num_copies:,}"])
    rows = np.concatenate([facts.rows for facts in found])
    is_kept = _without_repetitions(found, rows, files, where, cut)
    document = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
    of_files = np.cumsum([0, *(len(facts.name) for facts in found)])
    parts = np.concatenate([f.part_request + n for f, n in zip(found, of_files[:-1], strict=True)])
    part_rows = np.concatenate([facts.part_rows for facts in found])
    of_pieces = np.cumsum([0, *np.concatenate([facts.piece_parts for facts in found])])
    sums = np.concatenate([[0], np.cumsum(np.where(is_kept[parts], part_rows, 0))])
    starts = tuple(sums[of_pieces].tolist())
    if not starts[-1]:
        raise RecordingError(f"{where}: no row of {len(rows)} requests holds choices.")
    positioned = np.concatenate([facts.is_positioned for facts in found])
    said = [f"Trace of {manner.dialect}" + (f" in {len(files):,} files" if len(files) > 1 else "")]
    if any(facts.ids_are == "unknown" for facts in found):
        said.append("the file does not say whether ids are logical (without expert load balancing)")
    if manner.has_documents and not positioned[is_kept].all():
        said.append(
            "no token ids and no counts of tokens: positions, and rows missing at an end, are "
            "not known"
        )
    said += [*notes.texts, *axes.notes]
    said += [text.format(n=cut[kind]) for kind, text in _SENTENCES.items() if cut[kind]]
    return Placed(
        tuple(files),
        tuple(facts.identity for facts in found),
        axes,
        manner,
        starts,
        np.repeat(np.arange(len(found)), [len(facts.piece_parts) for facts in found]),
        np.concatenate([facts.place for facts in found]),
        of_pieces,
        part_rows,
        np.concatenate([facts.part_span for facts in found]),
        document[parts],
        int(is_kept.sum()),
        tuple(said),
    )


def _without_copies(found: list[FileFacts]) -> int:
    """Empties the facts of files that hold the choices of an earlier one; how many there are."""
    seen: set[bytes] = set()
    num_copies = 0
    for number, facts in enumerate(found):
        digest = facts.digest.tobytes()
        if digest in seen and len(facts.name):
            num_copies += 1
            none = np.zeros_like(facts.part_rows)
            found[number] = replace(facts, part_rows=none, cut=Counter())
        seen.add(digest)
    return num_copies


def _without_repetitions(
    found: Sequence[FileFacts],
    rows: Int64[np.ndarray, "requests"],
    files: Sequence[TraceFile],
    where: str,
    cut: Counter[str],
) -> Bool[np.ndarray, "requests"]:
    """Every request once; one name for two contents is refused.

    Two names for one content are kept, since equal prompts may be answered equally, and counted.
    """
    candidate = np.flatnonzero(rows)
    name = np.concatenate([facts.name for facts in found])[candidate]
    content = np.concatenate([facts.content for facts in found])[candidate]
    first = _first_equal(name)
    is_first = first == np.arange(len(candidate))
    differs = (content != content[first]).any(axis=1)
    if differs.any():
        at = int(candidate[np.argmax(differs)])
        said, one, other = _named(found, files, at, int(candidate[first[np.argmax(differs)]]))
        both = f"in it, in {one} and {other}" if one != other else "in it"
        raise RecordingError(
            f"{where}: request {said} stands twice {both}, with different choices.",
            "Are these files of two runs? Give them one by one.",
        )
    cut["repeated"] += int((~is_first).sum())
    kept = content[is_first]
    # a single token has nothing that could tell it from others
    again = _first_equal(kept) != np.arange(len(kept))
    cut["equal"] += int((again & (rows[candidate[is_first]] > 1)).sum())
    is_kept = np.zeros(len(rows), bool)
    is_kept[candidate[is_first]] = True
    return is_kept


def _first_equal(hashes: UInt64[np.ndarray, "some 2"]) -> Int64[np.ndarray, "some"]:
    """The first of those that each is equal to."""
    pairs = np.ascontiguousarray(hashes).view([("a", "u8"), ("b", "u8")])[:, 0]
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)]


def _named(
    found: Sequence[FileFacts], files: Sequence[TraceFile], at: int, first: int
) -> tuple[str, str, str]:
    """The name of a request, which is read again, and the files of it and of another."""
    ends = np.cumsum([len(facts.name) for facts in found])
    number, other = (int(np.searchsorted(ends, n, side="right")) for n in (at, first))
    within = at - int(ends[number] - len(found[number].name))
    requests: Iterator[RequestTrace] = (
        request
        for trace, _ in files[number].pieces(BEGINNING)
        for request in trace.requests
        if not request.first_row
    )
    name = next((r.name for n, r in enumerate(requests) if n == within), "")
    return name, files[other].label, files[number].label
