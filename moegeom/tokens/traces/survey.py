"""The first pass over the files of a trace: a ``Survey`` of each, and a ``TokenIndex`` of them all.

Files are read one after the other, to their ends, a piece at a time. Of each request a survey keeps
a hash of its name and one of its choices, of each piece where it begins and how many rows of it are
tokens. Axes, repeated requests, counts and notes follow from the surveys of all files.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from msgspec import convert, to_builtins

from moegeom.core.digest import Identity, digest_of, identity_of, sha256_of
from moegeom.core.errors import RecordingError
from moegeom.core.files import reading
from moegeom.core.limits import SURVEY_BYTES, TRACE_BYTES
from moegeom.core.shapes import Bool, Int64, UInt64
from moegeom.core.text import number_of
from moegeom.core.tokens import Oddity
from moegeom.tokens.foreign.npy import read_sealed, write_sealed
from moegeom.tokens.rows import as_recording_error
from moegeom.tokens.source import Company, KnownRouter
from moegeom.tokens.traces.axes import Axes, AxisEvidence, axes_of, evidence_of, expected_axes
from moegeom.tokens.traces.cleaning import RequestCleaning, RowSpan, TokenRows
from moegeom.tokens.traces.oddities import (
    Gap,
    IdRange,
    dense,
    gap_oddities,
    rank_oddity,
    runs_oddity,
    runs_of_experts,
    sparse,
    without_ids,
)
from moegeom.tokens.traces.trace import (
    BEGINNING,
    WITHOUT_IDS,
    Dialect,
    IdsAre,
    Notes,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    find_dialect,
)

#: A first pass that nobody listens to, without a journal.
ALONE = Company()


@dataclass(frozen=True)
class FileOf:
    """A file in a dialect, which is read piece by piece, again from where a piece began."""

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
        with as_recording_error(), reading(self.path, RecordingError):
            yield from self.dialect.pieces_from(self.path, place)


class CountsAlone(RecordingError):
    """A file holds counts of choices and no choice."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(
            f"{trace.where}: holds counts only, which may be of the same tokens as those of "
            "another file; several files are read where they hold choices.",
            "Scan each file of counts by itself.",
        )
        self.trace = trace


# --------------------------------------------------------------------------------- the records


@dataclass(frozen=True)
class TraceKind:
    """What all files of a trace must share: their writer, and the names of the axes."""

    dialect: str
    layers: tuple[int, ...] | None
    has_documents: bool


@dataclass(frozen=True, eq=False)
class Survey:
    """What the first pass recorded about one file.

    ``digest`` is a hash of all choices and of what the batches of a run are called.
    Requests have a hash of the ``name``, one of the ``content``, a ``gap``, and whether positions
    are known. ``runs`` and ``span`` sum up the ids of all of them.
    A part is the rows of a request in a piece: ``part_request`` numbers it in the file,
    ``part_rows`` counts its tokens, and ``part_span`` is the first row and its position, or -1
    where rows between them are no tokens. ``piece_parts`` counts the parts of each piece, ``place``
    is where it begins. ``axes`` are shape and columns of those that rows were cleaned by; None
    without requests.
    """

    digest: UInt64[np.ndarray, "2"]
    name: UInt64[np.ndarray, "requests 2"]
    content: UInt64[np.ndarray, "requests 2"]
    gap: Int64[np.ndarray, "requests 6"]
    runs: Int64[np.ndarray, "counts 4"]
    span: Int64[np.ndarray, "4"]
    is_positioned: Bool[np.ndarray, "requests"]
    part_request: Int64[np.ndarray, "parts"]
    part_rows: Int64[np.ndarray, "parts"]
    part_span: Int64[np.ndarray, "parts 2"]
    piece_parts: Int64[np.ndarray, "pieces"]
    place: Int64[np.ndarray, "pieces 2"]
    evidence: AxisEvidence
    kind: TraceKind | None
    axes: tuple[tuple[int, int], tuple[int, ...]] | None
    ids_are: IdsAre
    cut: Mapping[str, int]
    notes: tuple[str, ...]
    identity: Identity

    @property
    def rows(self) -> Int64[np.ndarray, "requests"]:
        """Tokens of each request."""
        return np.bincount(
            self.part_request, weights=self.part_rows, minlength=len(self.name)
        ).astype(np.int64)


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Where each token of a trace lies, in the order of files, pieces and rows.

    ``identities`` are those of ``files`` when they were read. ``starts`` is the first token of each
    piece, and behind them the number of all; ``file`` and ``place`` say where a piece lies.
    A part is the rows of a request in a piece, those of a piece are from ``first_part`` on:
    ``document`` numbers its request in the order of tokens, -1 where it is left out.
    """

    files: tuple[FileOf, ...]
    identities: tuple[Identity, ...]
    axes: Axes
    kind: TraceKind
    starts: tuple[int, ...]
    file: Int64[np.ndarray, "pieces"]
    place: Int64[np.ndarray, "pieces 2"]
    first_part: Int64[np.ndarray, "pieces_and_end"]
    part_rows: Int64[np.ndarray, "parts"]
    part_span: Int64[np.ndarray, "parts 2"]
    document: Int64[np.ndarray, "parts"]
    num_documents: int
    notes: tuple[str, ...]
    oddities: tuple[Oddity, ...]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


# ------------------------------------------------------------------------------------- all files


def first_pass(
    files: Sequence[FileOf],
    routers: Sequence[KnownRouter],
    where: str,
    company: Company = ALONE,
    copies: str = "",
) -> TokenIndex:
    """Which rows of ``files`` are tokens, held against all routers of the checkpoint.

    Raises
    ------
    RecordingError
        When they do not fit, with the numbers; nothing is guessed.
    """
    terms = PassTerms(files, routers, where, company)
    surveys: list[Survey] = []
    evidence, kind = AxisEvidence(), None
    if company.begun is not None:
        company.begun(sum(file.path.stat().st_size for file in files))
    for number, file in enumerate(files):
        survey = _from_journal(file, terms)
        if survey is None:
            survey = survey_of(file, terms, evidence)
            if company.journal is not None:
                company.journal.keep(file.path, survey)
        kind = _common_kind(kind, survey.kind, files, number, where)
        evidence = evidence.and_of(survey.evidence)
        surveys.append(survey)
        if company.advanced is not None:
            company.advanced(number + 1, len(files))
    if kind is None:
        raise RecordingError(
            f"{where}: no request of it holds choices where its engine writes them.",
            "docs/capture/engines.md shows a line of each engine; --dialect names the engine.",
        )
    axes = axes_of(evidence, routers, kind.layers, where)
    if any(survey.axes not in (None, axes.key) for survey in surveys):
        raise RecordingError(
            f"{where}: ids without a shape fit {axes.shape[0]} layers as a whole, and their "
            "beginning another number.",
            "Give the requests that count their tokens by themselves.",
        )
    return _index_of(files, surveys, axes, kind, where, copies)


@dataclass(frozen=True)
class PassTerms:
    """What surveys of all files have in common; ``where`` is the trace in messages."""

    files: Sequence[FileOf]
    routers: Sequence[KnownRouter]
    where: str
    company: Company = ALONE

    @cached_property
    def flat_evidence(self) -> AxisEvidence:
        """Of the requests up to the first whose count of tokens declares how many layers flat ids
        have; of all requests where none does. The files are read once more for it.
        """
        evidence = AxisEvidence()
        for file in self.files:
            for trace, _ in file.pieces(BEGINNING):
                _refuse_piece(trace)
                evidence = evidence.and_of(evidence_of(trace.requests, self.routers))
                if evidence.declared_layers is not None:
                    return evidence
        return evidence


def _from_journal(file: FileOf, terms: PassTerms) -> Survey | None:
    """The survey of an earlier pass, if flat ids had the same axes in it."""
    journal = terms.company.journal
    survey = None if journal is None else journal.find(file.path)
    if survey is None or survey.kind is None or not survey.evidence.is_flat:
        return survey
    flat = terms.flat_evidence
    axes = expected_axes(flat, terms.routers, survey.kind.layers, terms.where)
    is_alike = survey.evidence.declared_layers == flat.declared_layers
    return survey if is_alike and survey.axes == axes.key else None


def _common_kind(
    common: TraceKind | None,
    kind: TraceKind | None,
    files: Sequence[FileOf],
    number: int,
    where: str,
) -> TraceKind | None:
    """The kind of all files so far; RecordingError where this one differs."""
    if common is None or kind is None or common == kind:
        return kind if common is None else common
    one, other = files[0].label, files[number].label
    if common.dialect != kind.dialect:
        raise RecordingError(
            f"{where}: {one} is a trace of {common.dialect}, {other} of {kind.dialect}; "
            "expected one dialect.",
            "Give the files of each by themselves.",
        )
    raise RecordingError(
        f"{where}: files have different sets of layers: {_first_layers(common)} "
        f"in {one}, {_first_layers(kind)} in {other}.",
        "A line is missing (dropped or padded tokens are not traced), the run was cut off, or "
        "ranks are of different stages of a pipeline.",
    )


def _first_layers(kind: TraceKind) -> str:
    layers = kind.layers or ()
    return ", ".join(map(str, layers[:8])) + (" ..." if len(layers) > 8 else "")


#: The note about each kind of decision, with its count.
_SENTENCES: dict[str, str] = {
    "last": "requests whose last token was never routed: {n:,}",
    "masked": "rows cut by the file's own mask: {n:,}",
    "surplus": "padding rows cut behind the last routed token: {n:,}",
    "leading": "rows without choices cut at the beginning (prefix not captured): {n:,}",
    "trailing": "rows without choices cut at the end (padding): {n:,}",
    "inside": "rows without choices left out between others: {n:,}",
    "unrecorded": "rows left out with requests that hold no choice: {n:,}",
    "unrecorded requests": "requests that hold no choice: {n:,}",
    "stated start": "leading positions omitted, as the file says: {n:,}",
    "cached": "leading positions omitted, as many as the engine had cached: {n:,}",
    "generation": "positions of prompts omitted, only generated tokens were recorded: {n:,}",
    "generation, and the last token of the prompt": (
        "positions of prompts omitted, recorded are the rows that generated a token: {n:,}"
    ),
    "stale": "rows equal to the row before them in every layer, in runs of 10 (stale?): {n:,}",
    "repeated": "requests left out because they stand there twice: {n:,}",
    "equal": "requests equal to another in every token and choice, kept: {n:,}",
}


def _index_of(
    files: Sequence[FileOf],
    surveys: list[Survey],
    axes: Axes,
    kind: TraceKind,
    where: str,
    copies: str,
) -> TokenIndex:
    """What follows from the surveys of all files together."""
    notes, cut = Notes(), Counter[str]()
    num_copies = _empty_copies(surveys) if copies else 0
    for survey in surveys:
        notes.add(survey.notes)
        cut.update(survey.cut)
    if num_copies:
        notes.add([f"{copies}: {num_copies:,}"])
    oddities = tuple(_oddities_of(surveys, axes, kind, notes, cut))
    rows = np.concatenate([survey.rows for survey in surveys])
    is_read = _first_occurrences(surveys, rows, files, where, cut)
    document = np.where(is_read, np.cumsum(is_read) - 1, -1)
    first_request = np.cumsum([0, *(len(survey.name) for survey in surveys)])
    parts = np.concatenate(
        [one.part_request + n for one, n in zip(surveys, first_request[:-1], strict=True)]
    )
    part_rows = np.concatenate([survey.part_rows for survey in surveys])
    first_part = np.cumsum([0, *np.concatenate([survey.piece_parts for survey in surveys])])
    first_token = np.concatenate([[0], np.cumsum(np.where(is_read[parts], part_rows, 0))])
    starts = tuple(first_token[first_part].tolist())
    if not starts[-1]:
        raise RecordingError(f"{where}: no row of {len(rows)} requests holds choices.")
    positioned = np.concatenate([survey.is_positioned for survey in surveys])
    in_files = f" in {number_of(len(files), 'file')}" if len(files) > 1 else ""
    texts = [f"Trace of {kind.dialect}{in_files}"]
    if any(survey.ids_are == "unknown" for survey in surveys):
        texts.append(
            "the file does not say whether ids are logical (without expert load balancing)"
        )
    if kind.has_documents and not positioned[is_read].all():
        texts.append(
            "no token ids and no counts of tokens: positions, and rows missing at an end, are "
            "not known"
        )
    texts += [*notes.texts, *axes.notes]
    texts += [text.format(n=cut[name]) for name, text in _SENTENCES.items() if cut[name]]
    return TokenIndex(
        tuple(files),
        tuple(survey.identity for survey in surveys),
        axes,
        kind,
        starts,
        np.repeat(np.arange(len(surveys)), [len(survey.piece_parts) for survey in surveys]),
        np.concatenate([survey.place for survey in surveys]),
        first_part,
        part_rows,
        np.concatenate([survey.part_span for survey in surveys]),
        document[parts],
        int(is_read.sum()),
        tuple(texts),
        oddities,
    )


def _oddities_of(
    surveys: Sequence[Survey], axes: Axes, kind: TraceKind, notes: Notes, cut: Mapping[str, int]
) -> Iterator[Oddity]:
    """What the trace as a whole lacks, or holds in place of choices."""
    gaps = np.concatenate([survey.gap for survey in surveys])
    experts = max(router.num_experts for router in axes.routers)
    runs = dense(np.concatenate([s.runs for s in surveys]), len(axes.routers) + 1, experts, 4)
    for words, number in notes.ending(WITHOUT_IDS):
        yield without_ids(words, number, len(gaps))
    yield from gap_oddities(gaps, kind.has_documents, cut, axes.routers[0].num_experts)
    yield from rank_oddity(np.stack([survey.span for survey in surveys]), axes.routers)
    num_tokens = sum(int(survey.part_rows.sum()) for survey in surveys)
    yield from runs_oddity(runs, axes.routers, num_tokens)


def _empty_copies(surveys: list[Survey]) -> int:
    """Empties the surveys of files that hold the choices of an earlier one; how many there are."""
    digests: set[bytes] = set()
    num_copies = 0
    for number, survey in enumerate(surveys):
        digest = survey.digest.tobytes()
        if digest in digests and len(survey.name):
            num_copies += 1
            none = np.zeros_like(survey.part_rows)
            gap = np.tile(np.array(Gap(length=-1), np.int64), (len(survey.name), 1))
            surveys[number] = replace(survey, part_rows=none, gap=gap, cut={})
        digests.add(digest)
    return num_copies


def _first_occurrences(
    surveys: Sequence[Survey],
    rows: Int64[np.ndarray, "requests"],
    files: Sequence[FileOf],
    where: str,
    cut: Counter[str],
) -> Bool[np.ndarray, "requests"]:
    """Every request with tokens once; one name for two contents is refused.

    Two names for one content both stay, since equal prompts may be answered equally; they are
    counted.
    """
    candidate = np.flatnonzero(rows)
    name = np.concatenate([survey.name for survey in surveys])[candidate]
    content = np.concatenate([survey.content for survey in surveys])[candidate]
    first = _first_equal(name)
    is_first = first == np.arange(len(candidate))
    differs = (content != content[first]).any(axis=1)
    if differs.any():
        at = int(np.argmax(differs))
        request, one, other = _named(surveys, files, int(candidate[at]), int(candidate[first[at]]))
        both = f"in it, in {one} and {other}" if one != other else "in it"
        raise RecordingError(
            f"{where}: request {request} stands twice {both}, with different choices.",
            "Are these files of two runs? Give them one by one.",
        )
    cut["repeated"] += int((~is_first).sum())
    once = content[is_first]
    # a single token has nothing that could tell it from others
    again = _first_equal(once) != np.arange(len(once))
    cut["equal"] += int((again & (rows[candidate[is_first]] > 1)).sum())
    is_read = np.zeros(len(rows), bool)
    is_read[candidate[is_first]] = True
    return is_read


def _first_equal(hashes: UInt64[np.ndarray, "some 2"]) -> Int64[np.ndarray, "some"]:
    """The first of those that each is equal to."""
    pairs = np.ascontiguousarray(hashes).view([("a", "u8"), ("b", "u8")])[:, 0]
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)]


def _named(
    surveys: Sequence[Survey], files: Sequence[FileOf], at: int, first: int
) -> tuple[str, str, str]:
    """The name of a request, which is read again, and the files of it and of another."""
    ends = np.cumsum([len(survey.name) for survey in surveys])
    number, other = (int(np.searchsorted(ends, n, side="right")) for n in (at, first))
    within = at - int(ends[number] - len(surveys[number].name))
    requests: Iterator[RequestTrace] = (
        request
        for trace, _ in files[number].pieces(BEGINNING)
        for request in trace.requests
        if not request.first_row
    )
    name = next((r.name for n, r in enumerate(requests) if n == within), "")
    return name, files[other].label, files[number].label


# -------------------------------------------------------------------------------------- one file


def survey_of(file: FileOf, terms: PassTerms, before: AxisEvidence) -> Survey:
    """The survey of a file, which is read from beginning to end.

    Axes are taken to be what the evidence of the files ``before`` and the first piece make expect.
    """
    try:
        survey = _Surveyor(file, terms, before).survey()
    except RecordingError:
        _refuse_other_dialect(file, terms.where)
        raise
    if not survey.evidence.num_requests:
        _refuse_other_dialect(file, terms.where)
    return survey


def _refuse_other_dialect(file: FileOf, where: str) -> None:
    """Raises RecordingError where a file that cannot be read is one of another dialect."""
    dialect = find_dialect(file.path, None)
    if dialect is not None and dialect.name != file.dialect.name and where != file.label:
        raise RecordingError(
            f"{where}: {file.label} is a trace of dialect {dialect.name}, those before it are of "
            f"{file.dialect.name}; expected one dialect.",
            "Give the files of each by themselves.",
        )


def id_dtype(routers: Sequence[KnownRouter]) -> np.dtype:
    """The smallest integers that name all experts."""
    return np.min_scalar_type(max(router.num_experts for router in routers) - 1)


class _Digest:
    """A hash of the tokens of one request, whose rows may come in several parts."""

    def __init__(self) -> None:
        self._hashes = [hashlib.sha256() for _ in range(3)]

    def add(self, tokens: TokenRows, dtype: np.dtype) -> None:
        ids = np.ascontiguousarray(tokens.ids.astype(dtype, copy=False))
        for one, array in zip(self._hashes, (ids, tokens.position, tokens.token_id), strict=True):
            one.update(array.data)

    def value(self) -> UInt64[np.ndarray, "2"]:
        whole = hashlib.sha256(b"".join(one.digest() for one in self._hashes))
        return np.frombuffer(whole.digest()[:16], "<u8")


#: A part without tokens: rows, first row and its position.
_NO_TOKENS = (0, -1, -1)


class _Surveyor:
    """The survey of one file while it is read.

    ``_open`` is the request whose rows may go on in the next piece; None behind its end, and where
    it is left out.
    """

    def __init__(self, file: FileOf, terms: PassTerms, before: AxisEvidence) -> None:
        self._file, self._terms, self._before = file, terms, before
        self._axes: Axes | None = None
        self._dtype = id_dtype(terms.routers)
        self._evidence = AxisEvidence()
        self._kind: TraceKind | None = None
        self._ids_are: IdsAre = "logical"
        self._notes, self._cut = Notes(), Counter[str]()
        self._names: list[bytes] = []
        self._contents: list[np.ndarray] = []
        self._positioned: list[bool] = []
        self._gaps: list[Gap] = []
        experts = max(router.num_experts for router in terms.routers)
        self._runs = np.zeros((len(terms.routers) + 1, experts, 4), np.int64)
        self._ids = IdRange(min(router.num_experts for router in terms.routers))
        self._parts: list[tuple[int, int, int, int]] = []
        self._pieces: list[tuple[int, int, int]] = []
        self._open: tuple[RequestCleaning, _Digest] | None = None
        self._open_name = ""
        self._whole = hashlib.sha256()

    def survey(self) -> Survey:
        place = BEGINNING
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
        return Survey(
            digest=np.frombuffer(self._whole.digest()[:16], "<u8"),
            name=np.frombuffer(b"".join(self._names), "<u8").reshape(-1, 2),
            content=np.array(self._contents, np.uint64).reshape(-1, 2),
            gap=np.array(self._gaps, np.int64).reshape(-1, len(Gap._fields)),
            runs=sparse(self._runs),
            span=self._ids.span,
            is_positioned=np.array(self._positioned, bool),
            part_request=parts[:, 0],
            part_rows=parts[:, 1],
            part_span=parts[:, 2:],
            piece_parts=pieces[:, 2],
            place=pieces[:, :2],
            evidence=self._evidence,
            kind=self._kind,
            axes=None if self._axes is None else self._axes.key,
            ids_are=self._ids_are,
            cut=self._cut,
            notes=self._notes.texts,
            identity=identity,
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
        kind = TraceKind(trace.dialect, trace.layers, trace.has_documents)
        if self._kind not in (None, kind):
            raise RecordingError(
                f"{trace.where}: pieces of it have 2 different sets of layers: "
                f"{_first_layers(self._kind)}, and {_first_layers(kind)}.",
                "The file was cut off, lines are missing, or it is of several runs.",
            )
        self._kind = kind
        terms, declared = self._terms, None
        has_flat = any(request.ids.ndim == 1 for request in trace.requests)
        if has_flat:
            declared = terms.flat_evidence.declared_layers
        self._evidence = self._evidence.and_of(evidence_of(trace.requests, terms.routers, declared))
        so_far = self._before.and_of(self._evidence)
        where = terms.where if self._before.num_requests else trace.where
        if self._axes is None or not so_far.is_flat:
            basis = terms.flat_evidence if has_flat else so_far
            expected = expected_axes(basis, terms.routers, trace.layers, where)
            self._axes = self._axes or expected
        try:
            for request in trace.requests:
                self._clean(request, trace, self._axes)
        except RecordingError:
            # says more, where it refuses
            axes_of(so_far, terms.routers, trace.layers, where, is_whole=False)
            raise

    def _clean(self, request: RequestTrace, trace: Trace, axes: Axes) -> None:
        if request.ids.size % math.prod(axes.shape):
            raise RecordingError(f"{trace.where}: request {request.name} has another shape.")
        if not request.first_row:
            self._end_request()
            may_be_empty = self._terms.company.may_be_empty
            cleaning = RequestCleaning(request, axes.routers, trace.where, may_be_empty)
            self._open = cleaning, _Digest()
            self._names.append(self._name_of(request))
            self._whole.update(f"{request.batch}\n".encode())
            self._positioned.append(True)
            self._open_name = request.name
        part: tuple[int, int, int] = _NO_TOKENS
        if self._open is not None:
            cleaning, digest = self._open
            try:
                tokens = cleaning.tokens_of(request, axes.of(request.ids))
            except RecordingError as error:
                self._leave_out(error)
            else:
                digest.add(tokens, self._dtype)
                self._runs += runs_of_experts(tokens.ids, self._runs.shape[1])
                self._ids.add(tokens.ids)
                self._positioned[-1] &= bool((tokens.position >= 0).all())
                span = tokens.span or RowSpan(-1, -1)
                part = (len(tokens.ids), span.first, span.position)
        num_rows, first_row, position = part
        self._parts.append((len(self._names) - 1, num_rows, first_row, position))

    def _name_of(self, request: RequestTrace) -> bytes:
        """A hash of the name: of a place in the file together with the file."""
        scope = str(self._file.path.resolve()) if request.is_place else ""
        return sha256_of(scope, request.name).digest()[:16]

    def _end_request(self) -> None:
        if self._open is None:
            return
        cleaning, digest = self._open
        try:
            cleaning.finish()
        except RecordingError as error:
            self._leave_out(error)
            return
        self._open = None
        self._cut += cleaning.cut
        self._gaps.append(cleaning.gap)
        self._contents.append(digest.value())
        self._whole.update(self._contents[-1].tobytes())

    def _leave_out(self, error: RecordingError) -> None:
        """Empties the request that is being read, where somebody listens; else raises."""
        if self._terms.company.refused is None:
            raise error
        self._terms.company.refused(self._open_name, error)
        self._open = None
        self._gaps.append(Gap())
        self._contents.append(np.zeros(2, np.uint64))
        last = len(self._names) - 1
        for index in reversed(range(len(self._parts))):
            if self._parts[index][0] != last:
                break
            self._parts[index] = (last, *_NO_TOKENS)


def _refuse_piece(trace: Trace) -> None:
    """Raises RecordingError where ids are physical places, no integers, or too many."""
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


# --------------------------------------------------------------------------------- the journal


@dataclass(frozen=True)
class FileJournal:
    """Surveys in ``folder``, a file for each, so that an interrupted first pass goes on.

    ``terms`` is what else they depend on.
    """

    folder: Path
    terms: str

    def find(self, path: Path) -> Survey | None:
        """The survey of an earlier pass; None where there is nothing to believe.

        Raises
        ------
        RecordingError
            When the file is not what it was then.
        """
        sealed = read_sealed(self._path(path), SURVEY_BYTES)
        if sealed is None or sealed[0].pop("terms") != self.terms:
            return None
        survey = _unsealed(*sealed)
        if survey.identity != identity_of(path):
            raise RecordingError(
                f"{path.name}: changed since the first pass over it, which was interrupted.",
                "--restart reads all files again.",
            )
        return survey

    def keep(self, path: Path, survey: Survey) -> None:
        """Writes the survey of a file, whole or not at all."""
        values = {field.name: getattr(survey, field.name) for field in fields(survey)}
        arrays = {name: v for name, v in values.items() if isinstance(v, np.ndarray)}
        header = {name: to_builtins(v) for name, v in values.items() if name not in arrays}
        write_sealed(self._path(path), header | {"terms": self.terms}, arrays)

    @property
    def num_kept(self) -> int:
        """Files with a survey."""
        return sum(1 for _ in self.folder.glob("*.npz"))

    def _path(self, path: Path) -> Path:
        return self.folder / f"{digest_of(path.resolve())}.npz"


def _unsealed(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Survey:
    """The survey of what has the hash that was written with it."""
    kinds = get_type_hints(Survey)
    values = {name: convert(value, kinds[name]) for name, value in header.items()}
    contents: dict[str, Any] = {**values, **arrays}
    return Survey(**contents)
