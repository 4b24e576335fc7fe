"""The loop: ranges of tokens through one router, on several threads, interruptible."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moegeom.core.limits import SNAPSHOT_BYTES
from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch, refuse_non_finite
from moegeom.engine.plan import MAX_TILES, one_blas_thread
from moegeom.engine.task import Task
from moegeom.engine.what_if import what_if_batch
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Accumulator, Extent, State
from moegeom.tokens.foreign.npy import read_sealed, write_sealed

T = TypeVar("T")

#: Seconds between two snapshots of a running scan.
SNAPSHOT_SECONDS = 10.0

#: Non-finite tokens that are named by number, the first ones.
NAMED = 8


@dataclass(frozen=True)
class Progress:
    """State of a scan that a resume can begin from: every tile before ``next_tile`` is folded in.

    ``states`` maps reduction -> arrays; ``next_tile`` counts within the sequence of tiles.
    """

    next_tile: int = 0
    num_tokens: int = 0
    non_finite: tuple[int, ...] = ()
    num_non_finite: int = 0
    states: dict[str, State] = field(default_factory=dict)

    def after(self, next_tile: int, num_tokens: int, lost: tuple[int, ...]) -> Progress:
        """What is known once ``num_tokens`` more were measured; the first ``lost`` keep names."""
        return replace(
            self,
            next_tile=next_tile,
            num_tokens=self.num_tokens + num_tokens,
            non_finite=(*self.non_finite, *lost)[:NAMED],
            num_non_finite=self.num_non_finite + len(lost),
        )


_NOTHING = Progress()


@dataclass(frozen=True)
class Hooks:
    """What a caller may listen to.

    ``rows`` makes something of each batch, in the thread that folds it: its inputs lie in memory
    that is used again. ``written`` gets what it made, in token order.
    """

    advanced: Callable[[int], None] | None = None
    snapshot: Callable[[Progress], None] | None = None
    rows: Callable[[TokenBatch], Any] | None = None
    written: Callable[[Any], None] | None = None


NO_HOOKS = Hooks()

#: Batches that a worker has at least, where there are as many tiles.
_BATCHES = 2


@dataclass(frozen=True)
class Pace:
    """How the work is cut; no choice here can change a result."""

    batch_tokens: int
    num_workers: int
    snapshot_seconds: float = SNAPSHOT_SECONDS


@dataclass(frozen=True)
class Lane:
    """One task, and how its tokens are gone through; ``begin`` is what an earlier run folded."""

    task: Task
    skip_non_finite: bool = False
    hooks: Hooks = NO_HOOKS
    begin: Progress = _NOTHING


def scan_router(
    task: Task,
    tiles: Sequence[int],
    pace: Pace,
    skip_non_finite: bool = False,
    hooks: Hooks = NO_HOOKS,
    begin: Progress | None = None,
) -> Progress:
    """All ``tiles`` of the source through one router, folded into the task's reductions.

    Raises
    ------
    NonFiniteError
        At the first batch with a non-finite token, unless ``skip_non_finite``.
    """
    lane = Lane(task, skip_non_finite, hooks, begin or _NOTHING)
    return scan_in_step([lane], tiles, pace)[0]


def scan_in_step(lanes: Sequence[Lane], tiles: Sequence[int], pace: Pace) -> list[Progress]:
    """All ``tiles`` of one source through every lane: a range goes through all of them before the
    next is read.

    Raises
    ------
    NonFiniteError
        At the first batch with a non-finite token, in a lane that does not skip them.
    """
    with Threads(pace.num_workers) as threads:
        # each lane has one set of states, as long as that keeps all threads at work
        groups = _sharing(lanes)
        each = math.ceil(pace.num_workers / len(groups))
        groups_running = [
            [_Running(lane, Workers(lane.task, each, lane.hooks)) for lane in group]
            for group in groups
        ]
        running = [one for group in groups_running for one in group]
        pending: deque[tuple[list[_Running], TokenRange, Future[list[Folded]]]] = deque()
        last_snapshot = time.monotonic()

        def finish_one() -> None:
            group, batch, future = pending.popleft()
            for one, folded in zip(group, future.result(), strict=True):
                one.finish(batch, folded)

        begins = [lane.begin.next_tile for lane in lanes]
        for batch in _ranges_from(begins, tiles, lanes[0].task, pace):
            for group in groups_running:
                # in a lane that is left out an earlier run came further
                here = [one for one in group if batch.next_tile > one.lane.begin.next_tile]
                if not here:
                    continue
                workers = [one.workers for one in here]
                future = threads.submit(_fold_range, workers, batch.start, batch.stop)
                pending.append((here, batch, future))
                if len(pending) > 2 * pace.num_workers:
                    finish_one()
            if time.monotonic() - last_snapshot > pace.snapshot_seconds:
                while pending:
                    finish_one()
                for one in running:
                    if one.lane.hooks.snapshot:
                        one.lane.hooks.snapshot(one.progress_with_states())
                last_snapshot = time.monotonic()
        while pending:
            finish_one()
        return [one.progress_with_states() for one in running]


def _sharing(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Neighbouring lanes whose tasks look at the same batches, together."""
    groups: list[list[Lane]] = []
    for lane in lanes:
        if groups and lane.task.has_batches_of(groups[-1][0].task):
            groups[-1].append(lane)
        else:
            groups.append([lane])
    return groups


class _Running:
    """A lane on its way."""

    def __init__(self, lane: Lane, workers: Workers) -> None:
        self.lane, self.workers, self._progress = lane, workers, lane.begin
        self._refuse(lane.begin.non_finite)  # what another run skipped is refused now

    def finish(self, batch: TokenRange, folded: Folded) -> None:
        """Counts a range that was folded, and tells of it."""
        num_tokens, hooks = batch.stop - batch.start, self.lane.hooks
        self._progress = self._progress.after(batch.next_tile, num_tokens, folded.non_finite)
        self._refuse(folded.non_finite)
        if hooks.written:
            hooks.written(folded.rows)
        if hooks.advanced:
            hooks.advanced(num_tokens)

    def progress_with_states(self) -> Progress:
        """What is folded by now; only while no thread is working."""
        return with_states(self._progress, self.workers.states())

    def _refuse(self, lost: tuple[int, ...]) -> None:
        if not self.lane.skip_non_finite:
            router, source = self.lane.task.prepared.router, self.lane.task.source
            refuse_non_finite(router.name, source.facts.name, lost, self._progress.num_tokens)


def _ranges_from(
    begins: Sequence[int], tiles: Sequence[int], task: Task, pace: Pace
) -> Iterator[TokenRange]:
    """Ranges of the tiles from the least of ``begins`` on, cut at the others too."""
    # of few tokens every worker has some
    each = math.ceil(len(tiles) / (_BATCHES * pace.num_workers))
    longest = min(max(pace.batch_tokens // TILE, 1), MAX_TILES, max(each, 1))
    if task.what_if is not None and task.what_if.batch > TILE:
        longest = task.what_if.batch // TILE
    for first, last in itertools.pairwise(sorted({*begins, len(tiles)})):
        yield from token_ranges(tiles[:last], first, task.source.facts.num_tokens, longest)


def extent_of(task: Task) -> Extent:
    """The sizes that fix the states of the task's reductions."""
    router = task.prepared.router
    return Extent(
        len(task.populations.names),
        router.num_experts,
        router.num_slots if task.what_if is None else task.what_if.router.num_slots,
        router.hidden_size,
        task.source.facts.num_tokens,
    )


@dataclass(frozen=True)
class TokenRange:
    """Tokens ``[start, stop)``; the sequence of tiles goes on with ``next_tile``."""

    start: int
    stop: int
    next_tile: int


def token_ranges(
    tiles: Sequence[int], first: int, num_tokens: int, longest: int
) -> Iterator[TokenRange]:
    """Runs of at most ``longest`` neighbouring tiles, from the one of number ``first`` on."""
    index = first
    while index < len(tiles):
        length = 1
        while (
            length < longest
            and index + length < len(tiles)
            and tiles[index + length] == tiles[index] + length
        ):
            length += 1
        start = tiles[index] * TILE
        yield TokenRange(start, min(start + length * TILE, num_tokens), index + length)
        index += length


class Folded(NamedTuple):
    """What is left of a batch that was folded: non-finite tokens by number, and rows made of it."""

    non_finite: tuple[int, ...]
    rows: Any


class Threads:
    """Threads that fold ranges, each with one thread of BLAS: the result of a product must not
    depend on how many there are.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="moegeom-scan")
        self._limits = ExitStack()
        self._limits.enter_context(one_blas_thread())

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._limits.close()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """What ``work`` makes of what is given, once a thread is free."""
        return self._pool.submit(work, *arguments)


class Workers:
    """What threads fold ranges of one task into: ``count`` sets of accumulators, one for each
    thread that is at it.
    """

    def __init__(self, task: Task, count: int, hooks: Hooks = NO_HOOKS) -> None:
        self.task: Task = task
        self._rows = hooks.rows
        extent = extent_of(task)
        self._reductions = {name: REDUCTIONS[name] for name in task.reductions}
        self._free: SimpleQueue[dict[str, Accumulator]] = SimpleQueue()
        self._all = [
            {name: reduction.start(extent) for name, reduction in self._reductions.items()}
            for _ in range(count)
        ]
        for accumulators in self._all:
            self._free.put(accumulators)

    def batch(self, start: int, stop: int) -> TokenBatch:
        """Tokens ``[start, stop)``."""
        of_task = LazyBatch if self.task.what_if is None else what_if_batch
        return of_task(self.task, start, stop)

    def fold(self, batch: TokenBatch) -> Folded:
        """Folds a batch, in the thread that it belongs to."""
        accumulators = self._free.get()
        try:
            for accumulator in accumulators.values():
                accumulator.fold(batch, self.task.kernels)
        finally:
            self._free.put(accumulators)
        return Folded(vars(batch)["non_finite"], self._rows(batch) if self._rows else None)

    def states(self) -> dict[str, State]:
        """The states of all threads merged; only while none is working."""
        merged: dict[str, State] = {}
        for name, reduction in self._reductions.items():
            total = self._all[0][name].state()
            for other in self._all[1:]:
                total = reduction.merge(total, other[name].state())
            merged[name] = total
        return merged


def _fold_range(workers: Sequence[Workers], start: int, stop: int) -> list[Folded]:
    """Folds tokens ``[start, stop)`` for tasks that look at the same batches."""
    batch = workers[0].batch(start, stop)
    folded = [workers[0].fold(batch)]
    for one in workers[1:]:
        assert isinstance(batch, LazyBatch), "a what-if shares no batch"
        batch = batch.beside(one.task)
        folded.append(one.fold(batch))
    return folded


def with_states(progress: Progress, merged: Mapping[str, State]) -> Progress:
    """The progress with ``merged`` added to the states that it began from."""
    before = progress.states
    states = {
        name: REDUCTIONS[name].merge(before[name], state) if name in before else state
        for name, state in merged.items()
    }
    return replace(progress, states=states)


#: Fields of a progress that stand beside its states in a file.
_FACTS = ("next_tile", "num_tokens", "non_finite", "num_non_finite")


def write_snapshot(path: Path, progress: Progress) -> None:
    """Writes ``path`` whole or not at all."""
    arrays = {
        f"{reduction}/{name}": array
        for reduction, state in progress.states.items()
        for name, array in state.items()
    }
    facts = {name: getattr(progress, name) for name in _FACTS}
    write_sealed(path, facts, arrays)


def read_snapshot(path: Path) -> Progress | None:
    """The progress in ``path``; None when there is none, or when it is not as it was written.

    The scan of the router then begins anew: nothing is believed of a file that was cut off or
    changed.
    """
    sealed = read_sealed(path, SNAPSHOT_BYTES)
    if sealed is None or {*sealed[0]} != {*_FACTS}:
        return None
    facts, arrays = sealed
    states: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        reduction, _, name = key.partition("/")
        states.setdefault(reduction, {})[name] = array
    facts["non_finite"] = tuple(facts["non_finite"])
    return Progress(**facts, states=states)
