"""What another run chose for the tokens of a recording, matched and held against neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenSource
from moegeom.tokens.ranges import consecutive
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.alignment import DOCUMENTS_HINT, Fit, Reference, TraceRows, align

#: Tokens whose columns are held, of each side: document, position and token id.
MOST_TOKENS = 100_000_000

#: Tokens of a reference without choices that are routed again, to prove the place by what they are.
_ROUTED = 65_536


@dataclass(frozen=True, eq=False)
class RunB:
    """Choices of another run; ``token`` is its token for each of the reference's, -1 for none.

    ``notes`` say how many were matched and what proves the match; ``fits`` are the agreements at
    each shift that was tried, empty where the reference does not know its own choices.
    """

    source: TokenSource
    token: Int64[np.ndarray, "tokens"]
    fits: tuple[Fit, ...]
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
        found = [part for part in parts if part is not None]
        if not found:
            return np.empty((0, 0), np.int32)
        return np.concatenate(found)


def match_run_b(
    reference: TokenSource,
    other: TokenSource,
    routers: Sequence[KnownRouter],
    must_fit: bool = True,
    own: Callable[[str], Integer[np.ndarray, "tokens slots"]] | None = None,
) -> RunB:
    """The tokens of ``other`` that are tokens of ``reference``, by document, position and token id.

    Without ``must_fit`` choices that agree better elsewhere are no error: the fits tell of it.
    ``own`` gives the choices of a router for all tokens of a reference that did not record them.

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
        if source.facts.num_tokens > MOST_TOKENS:
            raise RecordingError(
                f"{source.facts.name}: {number_of(source.facts.num_tokens, 'token')}; two runs are "
                f"matched where each has {MOST_TOKENS:,} at most.",
                "Compare fewer documents.",
            )
    trace = rows_of(other, shared)
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


def rows_of(other: TokenSource, routers: Sequence[KnownRouter]) -> TraceRows:
    """What of a source is aligned; its choices are read when they are looked at.

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
    _refuse_strangers(other, routers)
    return TraceRows(
        chosen=chosen,
        request=request.astype(np.int64),
        row=(np.arange(num_tokens) - starts[request]).astype(np.int32),
        position=columns.position,
        token_id=columns.token_id,
        names=tuple(str(document) for document in documents),
    )


#: Tokens of which all routers are read before the next.
_AT_ONCE = 65_536


def _refuse_strangers(other: TokenSource, routers: Sequence[KnownRouter]) -> None:
    """Raises RecordingError for experts that the checkpoint does not have."""
    for start in range(0, other.facts.num_tokens, _AT_ONCE):
        stop = min(start + _AT_ONCE, other.facts.num_tokens)
        for router in routers:
            ids = other.read_chosen(router.name, start, stop)
            assert ids is not None, "has choices"
            beyond = ((ids < 0) | (ids >= router.num_experts)).any(axis=1)
            if beyond.any():
                token = int(np.argmax(beyond))
                raise RecordingError(
                    f"{other.facts.name}: token {start + token} of router {router.name} names "
                    f"experts {ids[token].tolist()}; the checkpoint has {router.num_experts}.",
                    "It was recorded from another model, or holds padding.",
                )


@dataclass(frozen=True, eq=False)
class _StoredChoices:
    """Choices (tokens, routers, slots) of a source, of which rows are read when asked for."""

    source: TokenSource
    routers: Sequence[str]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: TokenSource, routers: Sequence[str]) -> _StoredChoices:
        """Those of some routers, which choose equally many."""
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
        found = np.empty((len(rows), *self.shape[1:]), np.int32)
        done = 0
        for start, stop in consecutive(rows):
            for index, name in enumerate(self.routers):
                ids = self.source.read_chosen(name, start, stop)
                assert ids is not None, "looked at in `of`"
                found[done : done + stop - start, index] = ids
            done += stop - start
        return found
