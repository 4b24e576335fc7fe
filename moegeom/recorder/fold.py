"""A scan in the process that runs the model: tokens are folded as they come, none is stored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.core.errors import RecordingError
from moegeom.core.files import refuse_existing
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts
from moegeom.engine.fold import Fold
from moegeom.engine.plan import num_workers
from moegeom.engine.prepared import prepare
from moegeom.engine.trust import Trust, examine
from moegeom.kernels.table import load_kernels
from moegeom.metrics import (
    MeasuredRouter,
    Pass,
    RouterRun,
    finish_passes,
    metrics_of_scan,
    plan_passes,
)
from moegeom.pipeline import ScanRequest, write_folded
from moegeom.recorder.identity import Identity
from moegeom.recorder.live_source import LiveSource
from moegeom.recorder.shard import InputRows, Shard
from moegeom.recorder.taps import Place

_BACKEND = "cpu"


class _RouterFold:
    """All passes of one router; they are planned when the first tile has come."""

    def __init__(self, router: Router, source: LiveSource) -> None:
        self._run = RouterRun(router, source, load_kernels(_BACKEND), metrics_of_scan())
        self._passes: tuple[Pass, ...] = ()
        self._folds: dict[str, Fold] = {}
        self._seconds = 0.0

    def take(self, start: int, stop: int) -> None:
        began = time.perf_counter()
        if not self._passes:
            self._passes = plan_passes(self._run)
            self._folds = {
                p.name: Fold(p.task, p.reductions, p.tiles, p.skip_non_finite) for p in self._passes
            }
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
            (prepare(router, with_distances=False) for router in self._routers),
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
