"""A scan in the process that runs the model: tokens are folded as they come, none is stored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Float32, Int32
from threadpoolctl import threadpool_limits

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.files import refuse_existing
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TopLogits
from moegeom.engine.batch import LazyBatch, refuse_non_finite
from moegeom.engine.loop import Progress, extent_of
from moegeom.engine.plan import num_workers
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.engine.trust import Trust, examine
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.kernels.table import load_kernels
from moegeom.measure.passes import MeasuredRouter, Pass, RouterRun, finish_passes, plan_passes
from moegeom.metrics import metrics_of_scan
from moegeom.pipeline import ScanRequest, write_folded
from moegeom.recorder.identity import Identity
from moegeom.recorder.shard import NO_ROWS, InputRows, Shard
from moegeom.recorder.taps import Place

_BACKEND = "cpu"


class _Fold:
    """Accumulators of one pass; equal to what ``scan_router`` gives for the same tokens.

    The tokens offered must be readable from ``task.source`` at that moment, and only then.
    """

    def __init__(self, task: Task, tiles: Sequence[int], skip_non_finite: bool) -> None:
        self._task = task
        self._tiles = tiles if isinstance(tiles, range) else frozenset(tiles)
        self._skip_non_finite = skip_non_finite
        extent = extent_of(task)
        self._accumulators = {name: REDUCTIONS[name].start(extent) for name in task.reductions}
        self._progress = Progress()

    def take(self, start: int, stop: int) -> None:
        """Folds tokens ``[start, stop)`` of one tile in, if the pass wants that tile.

        The caller holds BLAS to one thread, as a scan does: a product may depend on their number.

        Raises
        ------
        NonFiniteError
            At a token that is not finite, unless the pass skips them.
        """
        tile = start // TILE
        if tile not in self._tiles:
            return
        batch = LazyBatch(self._task, start, stop)
        self._progress = self._progress.after(tile + 1, stop - start, batch.non_finite)
        if not self._skip_non_finite:
            refuse_non_finite(
                self._task.prepared.router.name,
                self._task.source.facts.name,
                batch.non_finite,
                self._progress.num_tokens,
            )
        for accumulator in self._accumulators.values():
            accumulator.fold(batch, self._task.kernels)

    def progress(self) -> Progress:
        """What has been folded in so far."""
        states = {name: found.state() for name, found in self._accumulators.items()}
        return dataclasses.replace(self._progress, states=states)


class _RouterFold:
    """All passes of one router; they are planned when the first tile has come."""

    def __init__(self, router: Router, source: LiveSource) -> None:
        self._run = RouterRun(router, source, metrics_of_scan())
        self._passes: tuple[Pass, ...] = ()
        self._folds: dict[str, _Fold] = {}
        self._seconds = 0.0

    def take(self, start: int, stop: int) -> None:
        began = time.perf_counter()
        if not self._passes:
            self._passes = plan_passes(self._run)
            self._folds = {p.name: _Fold(p.task, p.tiles, p.skip_non_finite) for p in self._passes}
        for first in range(start, stop, TILE):
            for fold in self._folds.values():
                fold.take(first, min(first + TILE, stop))
        self._seconds += time.perf_counter() - began

    def finish(self) -> MeasuredRouter:
        progress = {name: fold.progress() for name, fold in self._folds.items()}
        return finish_passes(self._run, self._passes, progress, self._seconds)


class FoldSink:
    """Results in the making; a results directory when the block ends well, nothing otherwise."""

    def __init__(
        self,
        out: Path,
        identity: Identity,
        places: Sequence[Place],
        num_tokens: int,
        domains: Sequence[str],
        engine: str,
        has_chosen: bool,
    ) -> None:
        refuse_existing(out, hint="Choose another name.")
        self._out, self._identity = out, identity
        by_name = {router.name: router for router in identity.routers.routers}
        self._routers = [by_name[place.router.name] for place in places]
        self._source = LiveSource(
            SourceFacts(
                name="the running model",
                stage="router_input",
                num_tokens=num_tokens,
                routers=tuple(router.name for router in self._routers),
                domains=tuple(domains),
                has_documents=True,
                has_chosen=has_chosen,
                engine=engine,
                fingerprint=identity.fingerprint,
            )
        )
        self._folds = {r.name: _RouterFold(r, self._source) for r in self._routers}
        self._trust: Trust | None = None
        self._documents: set[int] = set()
        self._left: InputRows | None = None
        self._num_folded = 0

    def __enter__(self) -> FoldSink:
        self._started = time.perf_counter()
        self._pool = ThreadPoolExecutor(num_workers(), thread_name_prefix="moegeom-fold")
        return self

    def append(self, shard: Shard) -> None:
        """Folds the tiles that are complete now; what is left waits for more tokens."""
        rows = InputRows.of(shard)
        self._documents.update(np.unique(rows.columns.document).tolist())
        if self._left is not None:
            rows = self._left.then(rows)
        num_tokens = self._num_folded + len(rows)
        if num_tokens > self._source.facts.num_tokens:
            raise RecordingError(
                f"{number_of(num_tokens, 'token has', 'tokens have')} come; num_tokens said "
                f"{self._source.facts.num_tokens}.",
                "Say how many tokens the passes hold, padding left out.",
            )
        whole = len(rows) // TILE * TILE
        self._left = rows.at(slice(whole, None))
        self._fold(rows.at(slice(0, whole)))

    def _fold(self, rows: InputRows) -> None:
        if not len(rows):
            return
        start, self._num_folded = self._num_folded, self._num_folded + len(rows)
        self._source.show(start, rows)
        with threadpool_limits(1, user_api="blas"):
            if self._trust is None:
                self._trust = self._examine()
            taken = [
                self._pool.submit(fold.take, start, self._num_folded)
                for fold in self._folds.values()
            ]
            for one in taken:
                one.result()

    def _examine(self) -> Trust:
        return examine(
            (prepare(router) for router in self._routers),
            self._source.seen(),
            self._identity.fingerprint,
            load_kernels(_BACKEND),
            {"stale_inputs": False, "unverified": False},
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self) -> None:
        if self._left is not None:
            self._source.ends_at(self._num_folded + len(self._left))
            self._fold(self._left)
        measured = {name: fold.finish() for name, fold in self._folds.items()}
        facts = dataclasses.replace(self._source.facts, num_documents=len(self._documents))
        request = ScanRequest(checkpoint=self._identity.checkpoint, out=self._out)
        write_folded(request, self._identity.routers, facts, self._trust, measured, self._started)


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
