"""Tokens that a running model has just given, as a token source with a window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32

from moegeom.core.errors import InternalError
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits


class LiveSource:
    """Tokens ``[start, stop)`` of a stream; those before are gone, those after have not come."""

    def __init__(self, facts: SourceFacts) -> None:
        self._facts = facts
        self._start = 0
        self._columns = _no_columns()
        self._values: Mapping[str, np.ndarray] = {}
        self._chosen: Mapping[str, np.ndarray] = {}

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    @property
    def window(self) -> tuple[int, int]:
        """The tokens that can be read now."""
        return self._start, self._start + len(self._columns.document)

    def show(
        self,
        start: int,
        columns: TokenColumns,
        values: Mapping[str, np.ndarray],
        chosen: Mapping[str, np.ndarray],
    ) -> None:
        """Moves the window to tokens that begin at ``start``."""
        self._start, self._columns, self._values, self._chosen = start, columns, values, chosen

    def ends_at(self, num_tokens: int) -> None:
        """Says that no more tokens will come."""
        self._facts = dataclasses.replace(self._facts, num_tokens=num_tokens)

    def seen(self) -> LiveSource:
        """The window alone, as a stream that ends with it."""
        part = LiveSource(dataclasses.replace(self._facts, num_tokens=self.window[1]))
        part.show(self._start, self._columns, self._values, self._chosen)
        return part

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        rows = self._rows(start, stop)
        return TokenColumns(**{name: column[rows] for name, column in vars(self._columns).items()})

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        return self._values[router][self._rows(start, stop)].astype(np.float32, copy=False)

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        if not self._facts.has_chosen:
            return None
        return self._chosen[router][self._rows(start, stop)].astype(np.int32, copy=False)

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        return None

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise InternalError("a running model gives router inputs")

    def _rows(self, start: int, stop: int) -> slice:
        first, last = self.window
        if not first <= start <= stop <= last:
            raise InternalError(f"tokens {start} to {stop} of a window {first} to {last}")
        return slice(start - first, stop - first)


def _no_columns() -> TokenColumns:
    return TokenColumns(
        document=np.empty(0, np.int64),
        position=np.empty(0, np.int32),
        token_id=np.empty(0, np.int32),
        domain=np.empty(0, np.int16),
    )
