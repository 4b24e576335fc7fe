"""Tokens held in memory, for tests and for benchmarks that must not measure a disk."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moegeom.core.errors import InternalError
from moegeom.core.shapes import Float, Float32, Int32, Shaped
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits
from moegeom.tokens.stages import check_output_kind


class ArraySource:
    """Router inputs from arrays; documents are runs of ``document_tokens`` tokens.

    Arrays of bfloat16 (the dtype of ml_dtypes) are widened where they are read as values.

    ``chosen`` has one array by router, ``outputs`` by kind and then by router.

    A token beyond the arrays is the one that many rows earlier again, so that a small buffer serves
    any number of tokens; reads within one turn of the buffer copy nothing.
    """

    def __init__(
        self,
        values: Mapping[str, Float[np.ndarray, "tokens hidden"]],
        num_tokens: int | None = None,
        document_tokens: int = 512,
        chosen: Mapping[str, Int32[np.ndarray, "tokens top_k"]] | None = None,
        outputs: Mapping[str, Mapping[str, Float32[np.ndarray, "_tokens ..."]]] | None = None,
    ) -> None:
        self._values, self._chosen = dict(values), dict(chosen or {})
        self._outputs = {kind: dict(arrays) for kind, arrays in (outputs or {}).items()}
        for kind in self._outputs:
            check_output_kind(kind)
        self._rows = len(next(iter(self._values.values())))
        self._document_tokens = document_tokens
        total = self._rows if num_tokens is None else num_tokens
        self._facts = SourceFacts(
            name="arrays",
            stage="router_input",
            num_tokens=total,
            routers=tuple(self._values),
            domains=(),
            has_documents=True,
            has_chosen=bool(self._chosen),
            num_documents=-(-total // document_tokens),
            outputs=tuple(self._outputs),
        )

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        token = np.arange(start, stop)
        return TokenColumns(
            document=token // self._document_tokens,
            position=(token % self._document_tokens).astype(np.int32),
            token_id=np.full(len(token), -1, dtype=np.int32),
            domain=np.full(len(token), -1, dtype=np.int16),
        )

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens hidden"]:
        return self._turn(self._values[router], start, stop).astype(np.float32, copy=False)

    def stored_dtype(self, router: str) -> np.dtype:
        return self._values[router].dtype

    def read_stored(
        self, router: str, start: int, out: Shaped[np.ndarray, "tokens hidden"]
    ) -> None:
        stored = self._turn(self._values[router], start, start + len(out))
        if stored.dtype == out.dtype:  # as bits: NumPy holds its lock while it copies bfloat16
            bits = f"u{out.itemsize}"
            stored, out = stored.view(bits), out.view(bits)
        out[...] = stored

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        return self._turn(self._chosen[router], start, stop) if self._chosen else None

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        check_output_kind(kind)
        arrays = self._outputs.get(kind)
        return None if arrays is None else self._turn(arrays[router], start, stop)

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise InternalError("an array source holds router inputs")

    def _turn(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        first = start % self._rows
        if first + stop - start <= self._rows:
            return values[first : first + stop - start]
        return values[np.arange(start, stop) % self._rows]
