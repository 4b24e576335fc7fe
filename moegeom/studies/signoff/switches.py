"""How often two recordings of one text hold different choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TokenSource, TopLogits
from moegeom.kernels.reference.same_set import same_set
from moegeom.studies.signoff.record import Switches
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.other_side import other_side

#: Row i of B was row ``place[i]`` of A, by router; only where rows changed places.
Places = Mapping[str, Int64[np.ndarray, "experts"]]

#: With fewer tokens in common the two are taken for recordings of different texts.
_LEAST_MATCHED = 0.5


def switches(
    reference: TokenSource,
    other: TokenSource,
    routers: Sequence[KnownRouter],
    places: Places,
) -> Switches:
    """Sets of experts that differ, token by token, at every router that both record.

    Experts of ``other`` are called what ``reference`` calls them, by ``places``.

    Raises
    ------
    RecordingError
        When one of the two holds no choices, or they are of different texts; with counts.
    """
    for source in (reference, other):
        refuse_without_choices(source.facts)
    side = other_side(reference, _Renumbered(other, places) if places else other, routers)
    num_tokens = reference.facts.num_tokens
    matched = side.is_matched(0, num_tokens)
    num_matched = int(matched.sum())
    if num_matched < _LEAST_MATCHED * num_tokens:
        raise RecordingError(
            f"{other.facts.name} has {num_matched:,} of the {number_of(num_tokens, 'token')} of "
            f"{reference.facts.name}; expected recordings of the same text.",
            "Record both on the same --text with the same --tokens and --length.",
        )
    switched = np.zeros(num_tokens, np.int64)
    by_router = {}
    for router in routers:
        recorded = (reference.facts.routers, other.facts.routers)
        if not all(router.name in names for names in recorded):
            continue
        differs = np.zeros(num_tokens, np.bool_)
        for start in range(0, num_tokens, TILE):
            token = start + np.flatnonzero(matched[start : start + TILE])
            if not len(token):
                continue
            mine = _chosen(reference, router.name, start, min(start + TILE, num_tokens))
            differs[token] = ~same_set(mine[token - start], side.read_chosen(router.name, token))
        by_router[router.name] = float(differs[matched].mean())
        switched += differs
    document = reference.read_columns(0, num_tokens).document[matched]
    return Switches(
        num_recorded=num_tokens,
        num_tokens=num_matched,
        num_documents=len(np.unique(document)),
        share=float(switched[matched].mean()) / len(by_router),
        error=_error(switched[matched], document, len(by_router)),
        tokens_share=float((switched[matched] > 0).mean()),
        by_router=by_router,
        notes=side.notes,
    )


def refuse_without_choices(facts: SourceFacts) -> None:
    """Raises RecordingError for a recording that does not say what was chosen, token by token."""
    if facts.has_chosen and facts.stage != "counts":
        return
    held = facts.stage.replace("_", " ")
    raise RecordingError(
        f"{facts.name}: holds {held} and not what was chosen; expected recorded choices, because "
        "what the router would choose is not what the exported model chose.",
        "moegeom capture records them, --keep ids nothing else; traces of engines hold them.",
    )


def _chosen(
    source: TokenSource, router: str, start: int, stop: int
) -> Int32[np.ndarray, "tokens top_k"]:
    found = source.read_chosen(router, start, stop)
    if found is None:
        raise RecordingError(f"{source.facts.name}: holds no choices of router {router}.")
    return found


def _error(
    switched: Int64[np.ndarray, "tokens"], document: Int64[np.ndarray, "tokens"], routers: int
) -> float | None:
    """Standard error of a ratio whose parts are sums over documents."""
    _, of_token = np.unique(document, return_inverse=True)
    sums = np.bincount(of_token, weights=switched)
    sizes = routers * np.bincount(of_token)
    if len(sizes) < 2:
        return None
    left = sums - sums.sum() / sizes.sum() * sizes
    return float(np.sqrt(len(sizes) / (len(sizes) - 1) * (left**2).sum()) / sizes.sum())


@dataclass(frozen=True, eq=False)
class _Renumbered:
    """A recording whose experts have the numbers that they had before they changed places."""

    source: TokenSource
    places: Places

    @property
    def facts(self) -> SourceFacts:
        return self.source.facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self.source.read_columns(start, stop)

    def read_values(self, router: str, start: int, stop: int) -> Shaped[np.ndarray, "tokens width"]:
        return self.source.read_values(router, start, stop)

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        return self.source.read_top_logits(router, start, stop)

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        found = self.source.read_chosen(router, start, stop)
        place = self.places.get(router)
        if found is None or place is None:
            return found
        # an empty slot is -1 and stays so
        return np.append(place, -1).astype(np.int32)[found]

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        return self.source.read_output(router, kind, start, stop)
