"""Tokens that a running model has just given, as a token source with a window."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32

from moegeom.core.errors import InternalError
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits
from moegeom.recorder.shard import NO_ROWS, InputRows


class LiveSource:
    """Tokens ``[start, stop)`` of a stream; those before are gone, those after have not come."""

    def __init__(self, facts: SourceFacts) -> None:
        self._facts = facts
        self._start, self._rows = 0, NO_ROWS

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    @property
    def window(self) -> tuple[int, int]:
        """The tokens that can be read now."""
        return self._start, self._start + len(self._rows)

    def show(self, start: int, rows: InputRows) -> None:
        """Moves the window to tokens that begin at ``start``."""
        self._start, self._rows = start, rows

    def ends_at(self, num_tokens: int) -> None:
        """Says that no more tokens will come."""
        self._facts = dataclasses.replace(self._facts, num_tokens=num_tokens)

    def seen(self) -> LiveSource:
        """The window alone, as a stream that ends with it."""
        part = LiveSource(dataclasses.replace(self._facts, num_tokens=self.window[1]))
        part.show(self._start, self._rows)
        return part

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._rows.columns.at(self._places(start, stop))

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        return self._rows.values[router][self._places(start, stop)].astype(np.float32, copy=False)

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        if not self._facts.has_chosen:
            return None
        return self._rows.chosen[router][self._places(start, stop)].astype(np.int32, copy=False)

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        return None

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise InternalError("a running model gives router inputs")

    def _places(self, start: int, stop: int) -> slice:
        first, last = self.window
        if not first <= start <= stop <= last:
            raise InternalError(f"tokens {start} to {stop} of a window {first} to {last}")
        return slice(start - first, stop - first)
