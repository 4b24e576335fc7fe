"""One pass over tokens that come by themselves, instead of being fetched from a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch, refuse_non_finite
from moegeom.engine.loop import Progress, extent_of
from moegeom.engine.task import Task
from moegeom.kernels.reduction import REDUCTIONS


class Fold:
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
        return replace(self._progress, states=states)
