"""What another run chose for the tokens of a recording, matched and held against neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.ranges import consecutive
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.alignment import DOCUMENTS_HINT, Fit, Reference, align
from moegeom.tokens.traces.source import CleanTrace
from moegeom.tokens.traces.trace import TRACE_BYTES

#: Tokens whose choices prove the place of all.
_PROVING = 65_536


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
    trace = _as_trace(other, shared)
    proving = min(reference.facts.num_tokens, _PROVING)
    names = [router.name for router in shared]
    columns = reference.read_columns(0, reference.facts.num_tokens)
    chosen = None
    if proving == reference.facts.num_tokens:
        # proof needs the choices of all matched tokens, and only a part is held in memory
        if reference.facts.has_chosen:
            chosen = _stacked(reference, names, proving)
        elif own is not None:
            chosen = np.stack([own(name).astype(np.int16) for name in names], axis=1)
    aligned = align(Reference(reference.facts.name, columns, chosen), trace, must_fit)
    token = np.full(reference.facts.num_tokens, -1, np.int64)
    row = np.flatnonzero(aligned.token >= 0)
    token[aligned.token[row]] = row
    unproven = "alignment rests on documents, positions and token ids: no choices to prove it by"
    notes = aligned.notes if chosen is not None else (*aligned.notes, unproven)
    return RunB(other, token, aligned.fits, notes)


def _as_trace(other: TokenSource, routers: Sequence[KnownRouter]) -> CleanTrace:
    num_tokens = other.facts.num_tokens
    columns = other.read_columns(0, num_tokens)
    if (columns.document < 0).any():
        raise RecordingError(
            f"{other.facts.name}: does not say where its documents begin; nothing can be aligned.",
            DOCUMENTS_HINT,
        )
    documents, request = np.unique(columns.document, return_inverse=True)
    order = np.argsort(request, kind="stable")
    if (order != np.arange(num_tokens)).any():
        raise RecordingError(
            f"{other.facts.name}: tokens of its documents are mixed; expected one after the other.",
            "Merge the recording again (moegeom writes documents in order).",
        )
    starts = np.searchsorted(request, np.arange(len(documents)))
    ids = _stacked(other, [router.name for router in routers], num_tokens)
    wrong = [router for router in routers if router.top_k != ids.shape[2]]
    if wrong:
        raise RecordingError(
            f"{other.facts.name}: {ids.shape[2]} experts a token; router {wrong[0].name} chooses "
            f"{wrong[0].top_k}."
        )
    for index, router in enumerate(routers):
        beyond = (ids[:, index] < 0) | (ids[:, index] >= router.num_experts)
        if beyond.any():
            token = int(np.argmax(beyond.any(axis=1)))
            raise RecordingError(
                f"{other.facts.name}: token {token} of router {router.name} names experts "
                f"{ids[token, index].tolist()}; the checkpoint has {router.num_experts}.",
                "It was recorded from another model, or holds padding.",
            )
    return CleanTrace(
        routers=tuple(routers),
        ids=ids,
        request=request.astype(np.int64),
        row=(np.arange(num_tokens) - starts[request]).astype(np.int32),
        position=columns.position,
        token_id=columns.token_id,
        names=tuple(str(document) for document in documents),
        notes=other.facts.notes,
    )


def _stacked(source: TokenSource, routers: Sequence[str], num_tokens: int) -> np.ndarray:
    """Choices [tokens, routers, slots], as small as the numbers of experts allow."""
    parts = []
    for name in routers:
        chosen = source.read_chosen(name, 0, num_tokens)
        if chosen is None:
            raise RecordingError(f"{source.facts.name}: holds no choices of router {name}.")
        parts.append(chosen.astype(np.int16))
        if sum(part.nbytes for part in parts) > TRACE_BYTES:
            raise RecordingError(
                f"{source.facts.name}: more than {TRACE_BYTES:,} bytes of choices.",
                "Compare fewer documents, or fewer layers (--layers).",
            )
    return np.stack(parts, axis=1)
