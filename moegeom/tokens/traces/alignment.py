"""Choices of another run for the tokens of a recording, and the proof that tokens match.

Requests are matched to documents by their token ids, rows to tokens by the position. Where both
sides know what was chosen, the match is held against its neighbours: the same rows one or two
tokens earlier or later, one layer up or down. The right place is the one where choices agree, and
a match that fits better elsewhere is refused with that place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Protocol

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.limits import ALIGNED_TOKENS
from moegeom.core.shapes import Bool, Int, Int32, Int64, Integer
from moegeom.core.text import number_of, percent
from moegeom.core.tokens import TokenColumns, TokenSource
from moegeom.tokens.rows import consecutive
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.ids import check_choices

#: Tokens of which all routers are read before the next; and of a reference without choices those
#: that are routed again, to prove the place by what they are.
_ROUTED = 65_536


@dataclass(frozen=True, eq=False)
class RunB:
    """Choices of another run; ``token`` is its token for each of the reference's, -1 for none.

    ``notes`` say how many were matched and what proves the match; ``fits`` are the agreements at
    each shift that was tried, empty where the reference does not know its own choices.
    """

    source: TokenSource
    token: Int64[np.ndarray, "tokens"]
    fits: tuple[OffsetFit, ...]
    notes: tuple[str, ...]

    def is_matched(self, start: int, stop: int) -> Bool[np.ndarray, "tokens"]:
        """Which tokens of the reference the other run has."""
        return self.token[start:stop] >= 0

    def read_chosen(
        self, router: str, token: Int64[np.ndarray, "some"]
    ) -> Int32[np.ndarray, "some top_k"]:
        """What the other run chose for matched tokens of the reference; runs of rows at once."""
        there = self.token[token]
        parts = [self.source.read_chosen(router, *rows) for rows in consecutive(there)]
        choices = [part for part in parts if part is not None]
        return np.concatenate(choices) if choices else np.empty((0, 0), np.int32)


def match_run_b(
    reference: TokenSource,
    other: TokenSource,
    routers: Sequence[KnownRouter],
    must_fit: bool = True,
    own: Callable[[str], Integer[np.ndarray, "tokens slots"]] | None = None,
    may_be_empty: bool = False,
) -> RunB:
    """The tokens of ``other`` that are tokens of ``reference``, by document, position and token id.

    Without ``must_fit`` choices that agree better elsewhere are no error: the fits tell of it.
    ``own`` gives the choices of a router for all tokens of a reference that did not record them.
    Slots of the other side ``may_be_empty`` where the caller looks at the rest of them.

    Raises
    ------
    RecordingError
        When the other side does not say what it chose, chooses another number of experts, shares no
        router or token, or fits better shifted; with counts.
    """
    shared = [
        router
        for router in routers
        if router.name in other.facts.routers and router.name in reference.facts.routers
    ]
    if not shared:
        raise RecordingError(
            f"{other.facts.name} and {reference.facts.name} have no router in common."
        )
    if not other.facts.has_chosen:
        raise RecordingError(
            f"{other.facts.name}: does not say what was chosen; expected choices to compare with.",
            "moegeom capture records them; traces of engines hold them.",
        )
    for source in (reference, other):
        if source.facts.num_tokens > ALIGNED_TOKENS:
            raise RecordingError(
                f"{source.facts.name}: {number_of(source.facts.num_tokens, 'token')}; two runs are "
                f"matched where each has {ALIGNED_TOKENS:,} at most.",
                "Compare fewer documents.",
            )
    trace = rows_of(other, shared, may_be_empty)
    num_tokens, names = reference.facts.num_tokens, [router.name for router in shared]
    columns, chosen = reference.read_columns(0, num_tokens), None
    if reference.facts.has_chosen:
        chosen = _StoredChoices.of(reference, names)
    elif own is not None and num_tokens <= _ROUTED:
        chosen = np.stack([own(name).astype(np.int16) for name in names], axis=1)
    aligned = align(Reference(reference.facts.name, columns, chosen), trace, must_fit)
    token = np.full(num_tokens, -1, np.int64)
    row = np.flatnonzero(aligned.token >= 0)
    token[aligned.token[row]] = row
    unproven = "alignment rests on documents, positions and token ids: no choices to prove it by"
    notes = aligned.notes if chosen is not None else (*aligned.notes, unproven)
    return RunB(other, token, aligned.fits, notes)


def rows_of(
    other: TokenSource, routers: Sequence[KnownRouter], may_be_empty: bool = False
) -> TraceRows:
    """The rows of a source to align; choices are read when indexed.

    Raises
    ------
    RecordingError
        When documents are not known or mixed, or choices are not those of the routers.
    """
    num_tokens = other.facts.num_tokens
    columns = other.read_columns(0, num_tokens)
    if (columns.document < 0).any():
        raise RecordingError(
            f"{other.facts.name}: does not say where its documents begin; nothing can be aligned.",
            DOCUMENTS_HINT,
        )
    documents, request = np.unique(columns.document, return_inverse=True)
    if (np.diff(request) < 0).any():
        raise RecordingError(
            f"{other.facts.name}: tokens of its documents are mixed; expected one after the other.",
            "Merge the recording again (moegeom writes documents in order).",
        )
    starts = np.searchsorted(request, np.arange(len(documents)))
    chosen = _StoredChoices.of(other, [router.name for router in routers])
    wrong = [router for router in routers if router.top_k != chosen.shape[2]]
    if wrong:
        raise RecordingError(
            f"{other.facts.name}: {chosen.shape[2]} experts a token; router {wrong[0].name} "
            f"chooses {wrong[0].top_k}."
        )
    _refuse_strangers(other, routers, may_be_empty)
    return TraceRows(
        chosen=chosen,
        request=request.astype(np.int64),
        row=(np.arange(num_tokens) - starts[request]).astype(np.int32),
        position=columns.position,
        token_id=columns.token_id,
        names=tuple(str(document) for document in documents),
    )


def _refuse_strangers(
    other: TokenSource, routers: Sequence[KnownRouter], may_be_empty: bool
) -> None:
    """Raises RecordingError for experts that the checkpoint does not have."""
    for start in range(0, other.facts.num_tokens, _ROUTED):
        stop = min(start + _ROUTED, other.facts.num_tokens)
        for router in routers:
            ids = other.read_chosen(router.name, start, stop)
            assert ids is not None, "has choices"
            if ids.min() < 0 or ids.max() >= router.num_experts:
                row = np.arange(start, start + len(ids))
                check_choices(ids[:, None], row, (router,), other.facts.name, may_be_empty)


@dataclass(frozen=True, eq=False)
class _StoredChoices:
    """Choices (tokens, routers, slots) of a source, of which rows are read when asked for."""

    source: TokenSource
    routers: Sequence[str]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: TokenSource, routers: Sequence[str]) -> _StoredChoices:
        """Choices of some routers, which must have one top_k."""
        widths = set()
        for name in routers:
            first = source.read_chosen(name, 0, 1)
            if first is None:
                raise RecordingError(f"{source.facts.name}: holds no choices of router {name}.")
            widths.add(first.shape[1])
        if len(widths) > 1:
            raise RecordingError(
                f"{source.facts.name}: {' and '.join(map(str, sorted(widths)))} experts a token, "
                "by router; expected one number."
            )
        return cls(source, routers, (source.facts.num_tokens, len(routers), widths.pop()))

    def __getitem__(
        self, rows: Int64[np.ndarray, "some"]
    ) -> Int32[np.ndarray, "some routers slots"]:
        choices = np.empty((len(rows), *self.shape[1:]), np.int32)
        done = 0
        for start, stop in consecutive(rows):
            for index, name in enumerate(self.routers):
                ids = self.source.read_chosen(name, start, stop)
                assert ids is not None, "read once in `of`"
                choices[done : done + stop - start, index] = ids
            done += stop - start
        return choices


# ---------------------------------------------------------------------------------- alignment

#: Shifts that are tried: rows of the trace against tokens of the reference, and layers.
TOKEN_SHIFTS = (-2, -1, 0, 1, 2)
LAYER_SHIFTS = (-1, 0, 1)

#: Tokens whose choices are compared at each shift.
COMPARED_TOKENS = 20_000

#: Rows that follow one another among them, since files are read in ranges.
_RUN = 32

#: Tokens of a request that make it a continuation of a shorter document.
_BEGINNING = 16

#: Standard errors by which the right place must stand out from the others.
_STANDS_OUT = 4.0

#: Agreement at which the place is believed although others fit as well: choices hardly change.
_SAME_EVERYWHERE = 0.9


class ChosenRows(Protocol):
    """Choices (tokens, routers, slots) in any order of the slots: an array, or what reads rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(
        self, rows: Int64[np.ndarray, "some"], /
    ) -> Integer[np.ndarray, "some routers slots"]: ...


@dataclass(frozen=True, eq=False)
class TraceRows:
    """The rows of a trace that are aligned. Columns are -1 where not known; ``row`` is the row in
    the request, ``names`` are those of requests.
    """

    chosen: ChosenRows
    request: Int64[np.ndarray, "tokens"]
    row: Int32[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]
    names: tuple[str, ...]

    @cached_property
    def places(self) -> Int32[np.ndarray, "tokens"]:
        """Positions in the sequence; the row where the file does not say."""
        return np.where(self.position >= 0, self.position, self.row).astype(np.int32)

    @cached_property
    def spans(self) -> list[slice]:
        """The rows of each request."""
        edges = np.searchsorted(self.request, np.arange(len(self.names) + 1)).tolist()
        return [slice(*pair) for pair in pairwise(edges)]


@dataclass(frozen=True, eq=False)
class Reference:
    """The tokens that a trace is aligned to: columns and, where known, choices."""

    name: str
    columns: TokenColumns
    chosen: ChosenRows | None = None


@dataclass(frozen=True)
class OffsetFit:
    """Share of equal chosen sets when rows are shifted by tokens and layers."""

    token_shift: int
    layer_shift: int
    share: float
    num_compared: int


@dataclass(frozen=True, eq=False)
class Alignment:
    """``token`` is the reference token of each row of the trace, -1 where it has none.

    ``fits`` are in the order of ``TOKEN_SHIFTS`` x ``LAYER_SHIFTS``; empty where the reference
    knows no choices. ``notes`` say what was matched, with counts.
    """

    token: Int[np.ndarray, "rows"]
    fits: tuple[OffsetFit, ...]
    notes: tuple[str, ...]


def align(reference: Reference, trace: TraceRows, must_fit: bool = True) -> Alignment:
    """The reference token of every row, by (request, position, token id).

    Without ``must_fit`` a place that fits worse than another is no error: the fits tell of it.

    Raises
    ------
    RecordingError
        When requests cannot be told apart, token ids contradict each other, nothing is common, or
        choices agree better at another place; with counts.
    """
    documents = _documents(reference)
    matched = _match_requests(reference, trace, documents)
    token = np.full(len(trace.request), -1, np.int64)
    for rows, document in zip(trace.spans, matched, strict=True):
        if document is not None:
            place, at = trace.places[rows], documents[document]
            token[rows] = np.where(place < len(at), at[np.minimum(place, len(at) - 1)], -1)
    num_matched = int((token >= 0).sum())
    if not num_matched:
        raise RecordingError(
            f"{reference.name} and the trace have no token in common: {len(trace.names):,} "
            f"requests, {number_of(len(documents), 'document')}.",
            "They are of different texts, or of different orders without token ids.",
        )
    _check_token_ids(reference, trace, token)
    fits = () if reference.chosen is None else _fits(reference.chosen, trace, token, reference)
    num_requests = sum(document is not None for document in matched)
    counted = (
        f"rows matched to {reference.name}: {num_matched:,} of {len(token):,}, in "
        f"{num_requests:,} of {len(matched):,} requests"
    )
    proof = (_judged(fits, reference.name),) if fits and must_fit else ()
    return Alignment(token, fits, (counted, *proof))


#: What to do where documents are not known.
DOCUMENTS_HINT = (
    "Keys document and position, one integer for each token, say it in an npz; moegeom capture "
    "records them."
)


def _documents(reference: Reference) -> list[Int[np.ndarray, "tokens"]]:
    """Tokens of each document, by position; positions must count from 0 without gaps."""
    columns = reference.columns
    if (columns.document < 0).any() or (columns.position < 0).any():
        raise RecordingError(
            f"{reference.name}: does not say where its documents begin; nothing can be aligned.",
            DOCUMENTS_HINT,
        )
    order = np.lexsort((columns.position, columns.document))
    edges = np.flatnonzero(np.diff(columns.document[order])) + 1
    parts = np.split(order, edges)
    for part in parts:
        if not np.array_equal(columns.position[part], np.arange(len(part))):
            raise RecordingError(
                f"{reference.name}: positions of document {columns.document[part[0]]} do not "
                f"count from 0 to {len(part) - 1}."
            )
    return parts


def _match_requests(
    reference: Reference, trace: TraceRows, documents: Sequence[np.ndarray]
) -> list[int | None]:
    """The document of each request: by content where token ids are known, else by order."""
    token_ids = reference.columns.token_id
    if (trace.token_id < 0).any() or (token_ids < 0).any():
        return _match_by_order(reference, trace, documents)
    texts = _Texts([token_ids[part] for part in documents])
    taken: set[int] = set()
    matched: list[int | None] = []
    for rows in trace.spans:
        equal = texts.with_tokens(trace.places[rows], trace.token_id[rows])
        # equal texts are the same tokens: which of them does not matter
        free = [document for document in equal if document not in taken] or equal
        matched.append(free[0] if free else None)
        taken.update(free[:1])
    if not taken:
        # no token in common is a finding of its own, with examples
        return _match_by_order(reference, trace, documents)
    return matched


class _Texts:
    """Documents by the tokens in a span of them."""

    def __init__(self, token_ids: Sequence[np.ndarray]) -> None:
        self._token_ids = [ids.astype(np.int64) for ids in token_ids]
        self._by_span: dict[tuple[int, int], dict[bytes, list[int]]] = {}

    def with_tokens(self, position: np.ndarray, token_id: np.ndarray) -> list[int]:
        """Documents that have these tokens at these positions; else those with their beginning.

        A document that ends before the request does has the beginning.
        """
        token_ids = token_id.astype(np.int64)
        first, last = int(position[0]), int(position[-1])
        if last - first + 1 == len(position):
            for length in (len(position), min(_BEGINNING, len(position))):
                begun = self._in_span(first, length).get(token_ids[:length].tobytes(), [])
                if begun:
                    whole = [d for d in begun if _has(self._token_ids[d], position, token_ids)]
                    return whole or begun
            return []
        return [d for d, ids in enumerate(self._token_ids) if _has(ids, position, token_ids)]

    def _in_span(self, first: int, length: int) -> dict[bytes, list[int]]:
        if (first, length) not in self._by_span:
            by_content: dict[bytes, list[int]] = {}
            for document, ids in enumerate(self._token_ids):
                if len(ids) >= first + length:
                    content = ids[first : first + length].tobytes()
                    by_content.setdefault(content, []).append(document)
            self._by_span[first, length] = by_content
        return self._by_span[first, length]


def _has(ids: np.ndarray, position: np.ndarray, token_ids: np.ndarray) -> bool:
    inside = position < len(ids)
    return bool(inside.any() and (ids[position[inside]] == token_ids[inside]).all())


def _match_by_order(
    reference: Reference, trace: TraceRows, documents: Sequence[np.ndarray]
) -> list[int | None]:
    rows = np.bincount(trace.request, minlength=len(trace.names))
    lengths = np.array([len(part) for part in documents])
    if len(rows) != len(lengths):
        raise RecordingError(
            f"{reference.name} has {number_of(len(lengths), 'document')} and the trace "
            f"{number_of(len(rows), 'request')}, and token ids are not known on both sides.",
            "Store the token ids in the trace (vLLM: return_token_ids).",
        )
    behind = np.zeros(len(rows), np.int64)
    np.maximum.at(behind, trace.request, trace.places.astype(np.int64) + 1)
    fits = (behind == lengths) | (behind == lengths - 1)
    if not fits.all():
        bad = int(np.argmin(fits))
        raise RecordingError(
            f"{reference.name}: document {bad} has {number_of(lengths[bad], 'token')} and request "
            f"{trace.names[bad]} {number_of(behind[bad], 'row')}; expected as many or one less "
            f"({int((~fits).sum())} of {len(fits)} do not fit).",
            "Another order of the requests, or another text.",
        )
    return list(range(len(rows)))


def _check_token_ids(reference: Reference, trace: TraceRows, token: np.ndarray) -> None:
    """Raises RecordingError where matched rows are of different token ids."""
    rows = np.flatnonzero((token >= 0) & (trace.token_id >= 0))
    other = reference.columns.token_id[token[rows]]
    rows, other = rows[other >= 0], other[other >= 0]
    wrong = trace.token_id[rows] != other
    if wrong.any():
        row = rows[int(np.argmax(wrong))]
        raise RecordingError(
            f"{reference.name}: {int(wrong.sum()):,} of {len(rows):,} matched rows are of another "
            f"token; first in request {trace.names[int(trace.request[row])]} at position "
            f"{int(trace.places[row])}: token {int(trace.token_id[row])} here, "
            f"{int(other[int(np.argmax(wrong))])} there.",
            "The trace is of another text, or its positions are shifted.",
        )


def _fits(
    chosen: ChosenRows, trace: TraceRows, token: np.ndarray, reference: Reference
) -> tuple[OffsetFit, ...]:
    """Agreement at every shift, on evenly spaced runs of rows."""
    if chosen.shape[1:] != trace.chosen.shape[1:]:
        raise RecordingError(
            f"{reference.name}: choices of {chosen.shape[1]} routers x {chosen.shape[2]} experts; "
            f"the trace has {trace.chosen.shape[1]} x {trace.chosen.shape[2]}."
        )
    some = _spread(np.flatnonzero(token >= 0))
    rows = np.sort(trace.chosen[some].astype(np.int64), axis=2)
    num_layers, document = rows.shape[1], reference.columns.document
    last_token = len(document) - 1
    # every token that some shift meets, read once
    near = np.unique(token[some, None] + np.array(TOKEN_SHIFTS))
    near = near[(near >= 0) & (near <= last_token)]
    there = np.sort(chosen[near].astype(np.int64), axis=2)
    fits = []
    for by_tokens, by_layers in product(TOKEN_SHIFTS, LAYER_SHIFTS):
        at = token[some] + by_tokens
        inside = (at >= 0) & (at <= last_token)
        inside &= document[np.clip(at, 0, last_token)] == document[token[some]]
        first, last = max(0, -by_layers), num_layers - max(0, by_layers)
        if not inside.any() or first >= last:
            continue
        shifted = there[np.searchsorted(near, at[inside]), first + by_layers : last + by_layers]
        equal = (rows[inside, first:last] == shifted).all(axis=2)
        fits.append(OffsetFit(by_tokens, by_layers, float(equal.mean()), int(equal.size)))
    return tuple(fits)


def _spread(rows: Int64[np.ndarray, "rows"]) -> Int64[np.ndarray, "some"]:
    """All rows if they are few, else runs of them, evenly spaced."""
    every = len(rows) // COMPARED_TOKENS
    if every < 2:
        return rows
    return rows[np.arange(len(rows)) // _RUN % every == 0]


def _judged(fits: Sequence[OffsetFit], name: str) -> str:
    """The verdict of the shifts; RecordingError when they prove another place, or nothing."""
    here = next(fit for fit in fits if fit.token_shift == fit.layer_shift == 0)
    best = max((fit for fit in fits if fit is not here), key=lambda fit: fit.share, default=here)
    noise = np.sqrt(sum(fit.share * (1 - fit.share) / fit.num_compared for fit in (here, best)))
    ahead = here.share - best.share
    # in standard errors
    lead = float(np.sign(ahead) * np.inf if noise == 0.0 and ahead else ahead / (noise or 1.0))
    shares = [percent(fit.share, ".1f") for fit in (here, best)]
    measured = (
        f"{shares[0]} of {here.num_compared:,} sets are equal as placed, {shares[1]} "
        f"{_spoken(best)} ({name})"
    )
    if lead > _STANDS_OUT:
        return f"alignment proven by the choices: {measured}"
    if lead < -_STANDS_OUT:
        raise RecordingError(
            f"Trace misaligned: {measured}.", f"Shift it: {_spoken(best)} it fits better."
        )
    if here.share >= _SAME_EVERYWHERE:
        return f"choices hardly change from token to token and prove no alignment: {measured}"
    raise RecordingError(
        f"Trace not aligned: {measured}; no place stands out among "
        f"{number_of(len(fits), 'shift')}.",
        "Another text, another checkpoint, or too few tokens to tell.",
    )


def _spoken(fit: OffsetFit) -> str:
    shifts = [
        f"{shift:+d} {unit}{'' if abs(shift) == 1 else 's'}"
        for shift, unit in ((fit.token_shift, "token"), (fit.layer_shift, "layer"))
        if shift
    ]
    return f"shifted by {' and '.join(shifts)}" if shifts else "as placed"
