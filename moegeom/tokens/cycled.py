"""A short source repeated: many tokens for tests of memory and speed, without the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from moegeom.core.errors import InternalError
from moegeom.core.tokens import SourceFacts, TokenColumns, TokenSource, TopLogits
from moegeom.tokens.ranges import check_range

#: Tokens looked at together when the documents are counted.
_CHUNK = 65536


class CycledSource:
    """Token t is token ``t % n`` of ``source``; each cycle has documents of its own.

    Facts say "cycled" in the name: the statistics of a repeated source are not evidence.
    """

    def __init__(self, source: TokenSource, num_tokens: int) -> None:
        self._source = source
        self._period = source.facts.num_tokens
        if self._period < 1:
            raise InternalError(f"{source.facts.name} has no tokens to repeat.")
        self._stride = self._largest_document() + 1 if source.facts.has_documents else 0
        self._facts = replace(
            source.facts,
            name=f"{source.facts.name}, cycled",
            num_tokens=num_tokens,
            num_documents=self._num_documents(num_tokens),
        )

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        parts = []
        for cycle, first, last in self._pieces(start, stop):
            part = self._source.read_columns(first, last)
            shifted = np.where(
                part.document >= 0, part.document + cycle * self._stride, part.document
            )
            parts.append(replace(part, document=shifted))
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])
        }
        return TokenColumns(**columns)

    def read_values(self, router: str, start: int, stop: int) -> Shaped[np.ndarray, "tokens width"]:
        pieces = self._pieces(start, stop)
        return np.concatenate([self._source.read_values(router, a, b) for _, a, b in pieces])

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        pieces = self._pieces(start, stop)
        parts = [self._source.read_top_logits(router, a, b) for _, a, b in pieces]
        return TopLogits(
            logits=np.concatenate([part.logits for part in parts]),
            expert=np.concatenate([part.expert for part in parts]),
        )

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        pieces = self._pieces(start, stop)
        parts = [self._source.read_chosen(router, a, b) for _, a, b in pieces]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        pieces = self._pieces(start, stop)
        parts = [self._source.read_output(router, kind, a, b) for _, a, b in pieces]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(cycle, first, last) in tokens of the source; one empty piece for an empty range."""
        check_range(self._facts, start, stop)
        while True:
            cycle, first = divmod(start, self._period)
            last = min(self._period, first + stop - start)
            yield cycle, first, last
            start += last - first
            if start >= stop:
                return

    def _largest_document(self) -> int:
        return max(int(part.max()) for part in self._documents(self._period))

    def _num_documents(self, num_tokens: int) -> int | None:
        whole = self._source.facts.num_documents
        if whole is None or not self._stride:
            return None
        cycles, rest = divmod(num_tokens, self._period)
        begun: set[int] = set()
        for part in self._documents(rest):
            begun.update(np.unique(part).tolist())
        return cycles * whole + len(begun)

    def _documents(self, stop: int) -> Iterator[Shaped[np.ndarray, "tokens"]]:
        for first in range(0, stop, _CHUNK):
            yield self._source.read_columns(first, min(stop, first + _CHUNK)).document
