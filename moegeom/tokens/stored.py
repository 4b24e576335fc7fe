"""A token source made of rows on disk; recordings and foreign files are both opened as one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from moegeom.core.errors import RecordingError
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits
from moegeom.tokens.ranges import check_range
from moegeom.tokens.recording.columns import ColumnSource
from moegeom.tokens.recording.outputs import check_output_kind
from moegeom.tokens.rows import Rows
from moegeom.tokens.stages import CHOSEN, TOP_EXPERT, TOP_LOGITS, VALUE_STAGES


class StoredSource:
    """Reads ranges of whatever ``tensors`` (by router, then by tensor name) hold."""

    def __init__(
        self,
        facts: SourceFacts,
        tensors: Mapping[str, Mapping[str, Rows]],
        columns: ColumnSource,
    ) -> None:
        self._facts = facts
        self._tensors = tensors
        self._columns = columns

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        check_range(self._facts, start, stop)
        return self._columns.read(start, stop)

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        if self._facts.stage not in VALUE_STAGES:
            raise self._not_held("hidden states or logits of every expert")
        return self._read(router, self._facts.stage, start, stop, np.float32)

    def stored_dtype(self, router: str) -> np.dtype:
        return self._rows(router, self._facts.stage).dtype

    def read_stored(self, router: str, start: int, out: Shaped[np.ndarray, "tokens width"]) -> None:
        check_range(self._facts, start, start + len(out))
        self._rows(router, self._facts.stage).read_into(start, out)

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        if self._facts.stage != "top_logits":
            raise self._not_held("top logits")
        return TopLogits(
            logits=self._read(router, TOP_LOGITS.name, start, stop, np.float32),
            expert=self._read(router, TOP_EXPERT.name, start, stop, np.int32),
        )

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        if not self._facts.has_chosen:
            return None
        return self._read(router, CHOSEN.name, start, stop, np.int32)

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        check_output_kind(kind)
        if kind not in self._facts.outputs:
            return None
        return self._read(router, kind, start, stop, np.float32)

    def _read(
        self, router: str, tensor: str, start: int, stop: int, dtype: type
    ) -> Shaped[np.ndarray, "tokens *width"]:
        check_range(self._facts, start, stop)
        rows = self._rows(router, tensor)
        out = np.empty((stop - start, rows.width), dtype)
        rows.read_into(start, out)
        return out.reshape(stop - start, *rows.row_shape)

    def _rows(self, router: str, tensor: str) -> Rows:
        if router not in self._tensors:
            error = unknown_name(f"router in {self._facts.name}", router, self._tensors)
            raise RecordingError(error.message, error.hint)
        return self._tensors[router][tensor]

    def _not_held(self, wanted: str) -> RecordingError:
        return RecordingError(
            f"{self._facts.name} was recorded at stage {self._facts.stage}; "
            f"it does not hold {wanted}."
        )
