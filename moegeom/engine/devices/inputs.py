"""Router inputs from a source into memory that a device copies from, as narrow as they are kept."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Shaped
from moegeom.core.tokens import TILE, StoredValues, TokenSource
from moegeom.engine.prepared import check_width
from moegeom.engine.task import Task

#: Bytes that one thread copies at a time, a tile of wide rows: many pieces in a batch. Whole tiles,
#: because sources draw and decode some rows together.
_PIECE_BYTES = 2**22


@dataclass(frozen=True)
class InputReader:
    """Reads inputs of one router; ``kind`` is ``bfloat16`` if they are kept so, else ``float32``.

    bfloat16 is handed on as its bits: a device multiplies them as they are, and half as much is
    copied.
    """

    task: Task
    kind: str
    width: int

    @property
    def dtype(self) -> np.dtype:
        """Of the memory that is read into."""
        return np.dtype(np.uint16 if self.kind == "bfloat16" else np.float32)

    def numbers(
        self, rows: Shaped[np.ndarray, "tokens width"]
    ) -> Shaped[np.ndarray, "tokens width"]:
        """What was read, as numbers."""
        if self.kind == "float32":
            return rows
        import ml_dtypes

        return rows.view(ml_dtypes.bfloat16)

    def start(
        self, start: int, stop: int, out: Shaped[np.ndarray, "tokens width"], pool: Executor
    ) -> list[Future[None]]:
        """Fills ``out`` with tokens ``[start, stop)``, in pieces that are to be waited for."""
        step = max(_PIECE_BYTES // (TILE * self.width * self.dtype.itemsize), 1) * TILE
        pieces = [(first, min(first + step, stop)) for first in range(start, stop, step)]
        return [pool.submit(self._read, *piece, out[piece[0] - start :]) for piece in pieces]

    def _read(self, first: int, last: int, out: np.ndarray) -> None:
        source, name = self.task.source, self.task.prepared.router.name
        part = out[: last - first]
        if self.kind == "bfloat16":
            assert isinstance(source, StoredValues)
            source.read_stored(name, first, self.numbers(part))
        else:
            part[...] = source.read_values(name, first, last)


def input_reader(task: Task) -> InputReader:
    """How the inputs of the task's router are read; reads one row, to see that it fits."""
    router, source = task.prepared.router, task.source
    stage, name = source.facts.stage, source.facts.name
    width = router.num_experts if stage == "logits" else router.hidden_size
    if source.facts.num_tokens:
        check_width(router, stage, source.read_values(router.name, 0, 1).shape[1], name)
    kind = "float32"
    if stage == "router_input" and _stored_dtype(source, router.name) == "bfloat16":
        kind = "bfloat16"
    return InputReader(task, kind, width)


def _stored_dtype(source: TokenSource, router: str) -> str:
    return source.stored_dtype(router).name if isinstance(source, StoredValues) else ""
