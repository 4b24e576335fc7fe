"""Folding in the process that runs the model: shards of router inputs into results of a scan.

What is folded is folded as it comes, on the device where it lies if one can; no token of it is
stored.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.files import refuse_existing
from moegeom.core.router import Router
from moegeom.core.shapes import Float32, Int32
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TopLogits
from moegeom.engine.batch import LazyBatch, refuse_non_finite
from moegeom.engine.devices.choice import DeviceChoice
from moegeom.engine.devices.device_router import refusal
from moegeom.engine.devices.fold import LabelledRows
from moegeom.engine.devices.resident import BLOCK_TOKENS, DeviceFold
from moegeom.engine.loop import Progress, extent_of
from moegeom.engine.parts import merged
from moegeom.engine.plan import (
    SAMPLE_TOKENS,
    SMALL_SAMPLE_TOKENS,
    num_workers,
    one_blas_thread,
    rounds_won,
)
from moegeom.engine.prepared import PreparedRouter, prepare
from moegeom.engine.request import DEFAULTS
from moegeom.engine.task import Task
from moegeom.engine.trust import FIRST_TOKENS, Trust, examine
from moegeom.kernels.cuda.cupy_device import open_device
from moegeom.kernels.cuda.device import Device, DeviceError
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.table import load_kernels
from moegeom.measure.finish import MeasuredRouter
from moegeom.measure.passes import MAIN, RANDOM, Pass, Plan, RouterRun, finish_passes, plan_passes
from moegeom.metrics import metrics_of_scan
from moegeom.pipeline import ScanRequest, write_folded
from moegeom.recorder.keep import NO_ROWS, InputRows, Shard, SinkFacts
from moegeom.recorder.ranks import Ranks
from moegeom.recorder.taps import Identity, Place, as_array

_BACKEND = "cpu"

#: Longer than any stream: its counters would not hold more.
_ENDLESS = 1 << 48

#: Tiles of a sample at most, by the name of the pass, where the length of the stream is not known.
_MOST_TILES = {
    "sampled": SMALL_SAMPLE_TOKENS // TILE,
    RANDOM: -(-SAMPLE_TOKENS // TILE),
    "random sampled": SMALL_SAMPLE_TOKENS // TILE,
}


@dataclass(frozen=True)
class _Part:
    """What a pass has of some tiles."""

    num_tiles: int
    progress: Progress


#: Parts of a pass by how many rounds their tiles have won (``rounds_won``); all are 0 where the
#: tiles were drawn beforehand.
_Parts = Mapping[int, _Part]


class _Accumulators:
    """Those of one part of a pass; equal to what ``scan_router`` gives for the same tokens."""

    def __init__(self, reductions: Sequence[str], extent: Extent) -> None:
        self._accumulators = {name: REDUCTIONS[name].start(extent) for name in reductions}
        self._progress = Progress()
        self.num_tiles = 0

    def take(self, batch: LazyBatch) -> None:
        """Folds one tile in."""
        self.num_tiles += 1
        self._progress = self._progress.after(
            batch.start // TILE + 1, batch.stop - batch.start, batch.non_finite
        )
        for accumulator in self._accumulators.values():
            accumulator.fold(batch, batch.task.kernels)

    def part(self) -> _Part:
        states = {name: accumulator.state() for name, accumulator in self._accumulators.items()}
        return _Part(self.num_tiles, dataclasses.replace(self._progress, states=states))


class _Fold:
    """One pass of one router.

    A pass sees the tiles that were drawn for it; while the length of the stream is not known, tiles
    are halved whenever there are more than ``most``.
    """

    def __init__(self, planned: Pass, most: int | None, extent: Extent) -> None:
        self.planned = planned
        tiles = planned.tiles
        self._tiles = tiles if isinstance(tiles, range) else frozenset(tiles)
        self._most, self._extent = most, extent
        self._least_rounds = 0
        self._of_rounds: dict[int, _Accumulators] = {}
        if most is None:
            self._of_rounds[0] = _Accumulators(planned.task.reductions, extent)

    def begun_anew(self) -> _Fold:
        """The same pass of no tile."""
        return _Fold(self.planned, self._most, self._extent)

    def wants(self, tile: int) -> bool:
        """Whether the pass sees this tile."""
        if self.planned.name == MAIN:
            return True
        if self._most is None:
            return tile in self._tiles
        return self._rounds(tile) >= self._least_rounds

    def take(self, batch: LazyBatch) -> None:
        """Folds one tile in.

        Raises
        ------
        NonFiniteError
            At a token that is not finite, unless the pass skips them.
        """
        rounds = self._rounds(batch.start // TILE)
        if rounds not in self._of_rounds:
            self._of_rounds[rounds] = _Accumulators(self.planned.task.reductions, self._extent)
        self._of_rounds[rounds].take(batch)
        sizes = {rounds: accumulators.num_tiles for rounds, accumulators in self._of_rounds.items()}
        for dropped in _dropped(sizes, self._most):
            del self._of_rounds[dropped]
            self._least_rounds = dropped + 1

    def parts(self) -> dict[int, _Part]:
        """What has been folded in so far."""
        return {rounds: accumulators.part() for rounds, accumulators in self._of_rounds.items()}

    def _rounds(self, tile: int) -> int:
        return 0 if self._most is None else rounds_won(tile, self.planned.task.options.seed)


def _dropped(sizes: Mapping[int, int], most: int | None) -> list[int]:
    """Rounds whose tiles go, so that ``most`` tiles stay: those of the fewest rounds.

    The order in which tiles come, and in which parts are joined, does not matter: what goes from
    some of the tiles goes from all of them.
    """
    left, gone = sum(sizes.values()), []
    for rounds in sorted(sizes)[:-1]:
        if most is None or left <= most:
            break
        left -= sizes[rounds]
        gone.append(rounds)
    return gone


def _joined_parts(first: _Parts, second: _Parts, most: int | None) -> dict[int, _Part]:
    """Parts of one pass in two processes."""
    both = dict(first)
    for rounds, part in second.items():
        mine = both.get(rounds)
        both[rounds] = (
            part
            if mine is None
            else _Part(mine.num_tiles + part.num_tiles, merged([mine.progress, part.progress]))
        )
    for rounds in _dropped({rounds: part.num_tiles for rounds, part in both.items()}, most):
        del both[rounds]
    return both


#: The device of a task and the tokens of one fold, None for the host.
DeviceOfTask = Callable[[Task], tuple[Device, int] | None]


class _RouterFold:
    """All passes of one router; they are planned when the first tile has come."""

    def __init__(
        self, router: Router, source: LiveSource, is_open: bool, device: DeviceOfTask
    ) -> None:
        self._run, self._source = RouterRun(router, source, metrics_of_scan()), source
        self._is_open, self._device = is_open, device
        self._folds: tuple[_Fold, ...] = ()
        self._on_device: DeviceFold | None = None
        self._of_random: tuple[DeviceFold, frozenset[int]] | None = None
        self._planned: Plan | None = None
        #: What threads folded apart while a device did the pass over all tokens.
        self.apart: Mapping[str, _Parts] = {}
        self._seconds = 0.0

    @property
    def is_on_device(self) -> bool:
        """Whether a device does the pass over all tokens, and the host samples alone."""
        return self._on_device is not None

    def wants(self, tile: int) -> bool:
        """Whether a pass of the host sees this tile."""
        return any(fold.wants(tile) for fold in self._folds)

    def take_on_device(
        self, tiles: Sequence[tuple[int, int]], tokens: LabelledRows
    ) -> LabelledRows:
        """Folds the tokens of these ranges into the pass over all tokens, if a device does it.

        What is returned knows the labels that all routers have in common.
        """
        if self._planned is None:
            self._plan(tiles[0])
        fold, rows, name = self._on_device, self._source.rows, self._run.router.name
        if fold is None:
            return tokens
        began = time.perf_counter()
        if tokens.label is None:
            tokens = dataclasses.replace(tokens, label=tokens.labels(fold.task))
        values, chosen = rows.values[name], rows.chosen.get(name)
        fold.take(values, dataclasses.replace(tokens, chosen=chosen))
        refuse_non_finite(name, self._source.facts.name, fold.non_finite, tiles[-1][1])
        if self._of_random is not None:
            random, sampled = self._of_random
            for number, (start, _) in enumerate(tiles):
                if start // TILE in sampled:
                    place = slice(number * TILE, (number + 1) * TILE)
                    random.take(values[place], tokens.at(place.start, min(place.stop, len(tokens))))
        self._seconds += time.perf_counter() - began
        return tokens

    def wait(self) -> None:
        """Waits until a device has read what was taken."""
        for fold in self._device_folds().values():
            fold.wait()

    def _device_folds(self) -> dict[str, DeviceFold]:
        """Folds on a device, by the name of their pass."""
        folds = {MAIN: self._on_device, RANDOM: self._of_random and self._of_random[0]}
        return {name: fold for name, fold in folds.items() if fold is not None}

    def take(self, tiles: Sequence[tuple[int, int]]) -> None:
        """Folds the tokens of these ranges, a tile or the beginning of one each, into the passes
        that no device does.
        """
        self._take(self._folds, tiles)

    def taken_apart(self, tiles: Sequence[tuple[int, int]]) -> dict[str, dict[int, _Part]]:
        """Parts of those passes over some tiles, while other threads fold others."""
        folds = [fold.begun_anew() for fold in self._folds]
        self._take(folds, tiles)
        return {fold.planned.name: fold.parts() for fold in folds}

    def _take(self, folds: Sequence[_Fold], tiles: Sequence[tuple[int, int]]) -> None:
        began = time.perf_counter()
        for start, stop in tiles:
            # one batch for all passes of a router: what one of them computes is there for the next
            batches: dict[PreparedRouter, LazyBatch] = {}
            for fold in folds:
                if fold.wants(start // TILE):
                    task = fold.planned.task
                    if task.prepared not in batches:
                        batches[task.prepared] = LazyBatch(task, start, stop)
                    batch = batches[task.prepared]
                    if not fold.planned.skip_non_finite:
                        name, source = self._run.router.name, self._run.source.facts.name
                        refuse_non_finite(name, source, batch.non_finite, stop)
                    fold.take(batch)
        self._seconds += time.perf_counter() - began

    def _plan(self, first: tuple[int, int]) -> Plan:
        folds = []
        self._planned = plan = plan_passes(self._run, first)
        for planned in plan.passes:
            extent = extent_of(planned.task)
            if self._is_open:
                extent = dataclasses.replace(extent, num_tokens=None)
            is_random = planned.name == RANDOM and self.is_on_device and not self._is_open
            device = None
            if planned.name == MAIN or is_random:
                device = self._device(planned.task)
            if device is None:
                folds.append(_Fold(planned, self._most(planned.name), extent))
            elif is_random:
                tokens = len(planned.tiles) * TILE
                fold = DeviceFold(planned.task, device[0], tokens, extent)
                self._of_random = fold, frozenset(planned.tiles)
            else:
                self._on_device = DeviceFold(planned.task, *device, extent)
        self._folds = tuple(folds)
        return plan

    def _most(self, name: str) -> int | None:
        return _MOST_TILES.get(name) if self._is_open else None

    def parts(self) -> Mapping[str, _Parts]:
        """Parts of every pass, by its name; none while no token has come."""
        if self._on_device is None:
            return {fold.planned.name: fold.parts() for fold in self._folds}
        parts = dict(self.apart)
        for name, fold in self._device_folds().items():
            progress = fold.progress()
            parts[name] = {0: _Part(-(-progress.num_tokens // TILE), progress)}
        router, source, all_of = self._run.router.name, self._source.facts.name, parts[MAIN][0]
        refuse_non_finite(router, source, all_of.progress.non_finite, all_of.progress.num_tokens)
        return parts

    def joined(
        self, first: Mapping[str, _Parts], second: Mapping[str, _Parts]
    ) -> Mapping[str, _Parts]:
        """Those of two processes as of one."""
        if not first or not second:
            return first or second
        return {name: _joined_parts(first[name], second[name], self._most(name)) for name in first}

    def finish(self, parts: Mapping[str, _Parts], num_tokens: int) -> MeasuredRouter:
        """Rows from what all processes folded of the stream of ``num_tokens`` tokens."""
        plan = self._planned or self._plan((0, 0))
        passes = plan.passes
        progress = {
            planned.name: merged([part.progress for part in parts[planned.name].values()])
            for planned in passes
        }
        if self._is_open:
            progress = {
                planned.name: _ended(planned, progress[planned.name], num_tokens)
                for planned in passes
            }
        return finish_passes(self._run, plan, progress, self._seconds)


def _ended(planned: Pass, progress: Progress, num_tokens: int) -> Progress:
    """What is left of samples now that the length of the stream is known."""
    extent = dataclasses.replace(extent_of(planned.task), num_tokens=num_tokens)
    states = {
        name: REDUCTIONS[name].ended(state, extent) for name, state in progress.states.items()
    }
    return dataclasses.replace(progress, states=states)


class _HeldTiles:
    """Tiles of samples in memory of the host.

    While nobody knows how many tokens come, those of the fewest rounds go whenever there are more
    than ``most``, as from the passes that will see them.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._of_rounds: dict[int, list[tuple[int, InputRows]]] = {}
        self._least_rounds = 0

    def add(self, start: int, tile: int, rows: InputRows) -> None:
        """The tile of the stream whose first token is number ``start`` of this process."""
        rounds = 0 if self._most is None else rounds_won(tile, DEFAULTS.seed)
        if rounds < self._least_rounds:
            return
        self._of_rounds.setdefault(rounds, []).append((start, rows.on_host()))
        sizes = {rounds: len(tiles) for rounds, tiles in self._of_rounds.items()}
        for dropped in _dropped(sizes, self._most):
            del self._of_rounds[dropped]
            self._least_rounds = dropped + 1

    def tiles(self) -> tuple[list[int], InputRows]:
        """Where they begin, ascending, and their rows; the last one may be short."""
        tiles = sorted(
            (tile for tiles in self._of_rounds.values() for tile in tiles), key=lambda one: one[0]
        )
        rows = NO_ROWS
        if tiles:
            rows = tiles[0][1].then(*(rows for _, rows in tiles[1:]))
        return [start for start, _ in tiles], rows


#: Bytes of what waits on devices to be folded, at all routers together, and those of a token beside
#: its logits, about.
_BLOCKS_BYTES, _ANSWER_BYTES = 1 << 30, 128


def device_of(values: Any) -> Device | None:
    """The device that inputs lie on, where they are folded there; None for the host."""
    if not isinstance(values, torch.Tensor) or values.device.type != "cuda":
        return None
    return open_device(values.device.index)


def folding_device(facts: SinkFacts, values: torch.Tensor | None) -> torch.device | None:
    """Where the first inputs lie that are folded where they are; None for inputs of the host.

    A GPU that cannot be used is told of, and its inputs are folded on the processor.
    """
    if not facts.fold or values is None or values.device.type != "cuda":
        return None
    try:
        open_device(values.device.index)
    except DeviceError as error:
        message = f"folding on the processor, which takes longer: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return values.device


class FoldSink:
    """Results in the making; a results directory when the block ends well, nothing otherwise.

    ``num_tokens`` is how many tokens all ranks will have at most, None where nobody knows. On
    several ranks tile ``t`` of rank ``r`` of ``n`` is tile ``t n + r`` of the stream, and rank 0
    writes the results of all.
    """

    def __init__(
        self, facts: SinkFacts, identity: Identity, places: Sequence[Place], has_chosen: bool
    ) -> None:
        ranks, num_tokens = facts.ranks, facts.num_tokens
        if ranks.rank == 0:
            refuse_existing(facts.out, hint="Choose another name.")
        self._out, self._identity, self._ranks = facts.out, identity, ranks
        by_name = {router.name: router for router in identity.routers.routers}
        self._routers = [by_name[place.router.name] for place in places]
        self._num_tokens = num_tokens
        self._source = LiveSource(
            SourceFacts(
                name="the running model",
                stage="router_input",
                num_tokens=_ENDLESS if num_tokens is None else num_tokens,
                routers=tuple(router.name for router in self._routers),
                domains=facts.domains,
                has_documents=True,
                has_chosen=has_chosen,
                engine=facts.engine,
                fingerprint=identity.fingerprint,
            ),
            ranks,
        )
        self._folds = {
            r.name: _RouterFold(r, self._source, num_tokens is None, self._device_of)
            for r in self._routers
        }
        self._trust: Trust | None = None
        self._first: InputRows | None = None
        self._held = _HeldTiles(None if num_tokens is not None else max(_MOST_TILES.values()))
        self._devices: list[Device] = []
        self._documents: set[int] = set()
        self._left: InputRows | None = None
        self._num_folded = 0

    def _device_of(self, task: Task) -> tuple[Device, int] | None:
        """The device where a task's inputs are folded, and tokens of a fold; None for the host."""
        values = self._source.rows.values.get(task.prepared.router.name)
        device = None if values is None else device_of(values)
        if device is None:
            return None
        if reason := refusal(task):
            name = task.prepared.router.name
            warnings.warn(
                f"router {name} is folded on the processor, since {reason}.", stacklevel=2
            )
            return None
        if device not in self._devices:  # by itself: several may have one name
            self._devices.append(device)
        row_bytes = sum(4 * one.num_experts + _ANSWER_BYTES for one in self._routers)
        tokens = 1 << (_BLOCKS_BYTES // row_bytes).bit_length() - 1
        return device, min(max(tokens, 4 * TILE), BLOCK_TOKENS)

    def __enter__(self) -> FoldSink:
        self._started = time.perf_counter()
        self._pool = ThreadPoolExecutor(num_workers(), thread_name_prefix="moegeom-fold")
        return self

    def append(self, shard: Shard) -> None:
        """Folds the tiles that are complete now; what is left waits for more tokens."""
        rows = InputRows.of(shard)
        self._documents.update(np.unique(rows.columns.document).tolist())
        left, self._left = self._left, None
        self._refuse_more(self._num_folded + (0 if left is None else len(left)) + len(rows))
        if left is not None:
            # no more than the tile that is filled up is copied, but for the first tokens, which
            # are examined together
            filled = TILE - len(left) if self._num_folded else len(rows)
            self._take(left.then(rows.at(slice(0, filled))))
            rows = rows.at(slice(filled, None))
        if len(rows):
            self._take(rows)

    def _take(self, rows: InputRows) -> None:
        """Folds whole tiles of rows of which none are left from before."""
        whole = len(rows) // TILE * TILE
        self._left = rows.at(slice(whole, None)) if whole < len(rows) else None
        self._fold(rows.at(slice(0, whole)))

    def _refuse_more(self, num_tokens: int) -> None:
        if self._num_tokens is not None and num_tokens > self._num_tokens:
            raise RecordingError(
                f"{number_of(num_tokens, 'token has', 'tokens have')} come; num_tokens said "
                f"{self._num_tokens}.",
                "Say how many tokens the passes hold, padding left out, or leave num_tokens out.",
            )

    def _fold(self, rows: InputRows) -> None:
        if not len(rows):
            return
        start, self._num_folded = self._num_folded, self._num_folded + len(rows)
        self._source.show(range(start, start + len(rows), TILE), rows)
        tiles, folds = self._source.tiles(), self._folds.values()
        token = np.concatenate([np.arange(*tile, dtype=np.int64) for tile in tiles])
        tokens = LabelledRows(token, rows.columns, np.ones(len(rows), bool))
        with one_blas_thread():
            for fold in folds:
                tokens = fold.take_on_device(tiles, tokens)
            deferred = [fold for fold in folds if fold.is_on_device]
            if deferred:
                self._hold(start, rows, tiles, deferred)
            elif self._trust is None:
                self._trust = self._examine(self._source.seen())
            # the model's thread and these share one interpreter: what can wait does
            at_once = [fold for fold in folds if not fold.is_on_device]
            for one in [self._pool.submit(fold.take, tiles) for fold in at_once]:
                one.result()
            for fold in deferred:
                fold.wait()

    def _hold(
        self,
        start: int,
        rows: InputRows,
        tiles: Sequence[tuple[int, int]],
        folds: Sequence[_RouterFold],
    ) -> None:
        """Copies what is looked at on the host once the model has ended: the first tokens, and the
        tiles of samples.
        """
        if self._first is None:
            self._first = rows.at(slice(0, FIRST_TOKENS)).on_host()
        for place, (first, _) in zip(range(0, len(rows), TILE), tiles, strict=True):
            if any(fold.wants(first // TILE) for fold in folds):
                one = rows.at(slice(place, place + TILE))
                self._held.add(start + place, first // TILE, one)

    def _take_held(self) -> None:
        """What was left to the host while the model ran."""
        if self._first is None:
            return
        self._source.show(range(0, len(self._first), TILE), self._first)
        trust = self._pool.submit(self._examine, self._source.seen())
        starts, rows = self._held.tiles()
        self._source.show(starts, rows)
        tiles = self._source.tiles()
        deferred = [fold for fold in self._folds.values() if fold.is_on_device]
        each = -(-len(tiles) * len(deferred) // num_workers())
        cuts = [tiles[at : at + each] for at in range(0, len(tiles), max(each, 1))] or [[]]
        parts = [
            (fold, self._pool.submit(fold.taken_apart, cut)) for cut in cuts for fold in deferred
        ]
        self._trust = trust.result()
        for fold, part in parts:
            fold.apart = fold.joined(fold.apart, part.result())

    def _examine(self, source: LiveSource) -> Trust:
        return examine(
            (prepare(router) for router in self._routers),
            source,
            self._identity.fingerprint,
            load_kernels(_BACKEND),
            {"stale_inputs": False, "unverified": False},
        )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self) -> None:
        if self._left is not None:
            if self._num_tokens is not None and self._ranks.num_ranks == 1:
                self._source.ends_at(self._num_folded + len(self._left))
            self._fold(self._left)
        facts, num_tokens = self._all_facts()
        with one_blas_thread():
            self._take_held()
            # around all threads, each of which sets a limit of its own and lifts it
            finished = {}
            for name, fold in self._folds.items():
                parts = self._ranks.reduced(fold.parts(), fold.joined)
                if parts is not None:
                    finished[name] = self._pool.submit(fold.finish, parts, num_tokens)
            measured = {name: one.result() for name, one in finished.items()}
        if self._ranks.rank == 0:
            request = ScanRequest(checkpoint=self._identity.checkpoint, out=self._out)
            trust, routers = self._trust, self._identity.routers
            device = DeviceChoice(tuple(self._devices), "fold", "the inputs lie there")
            write_folded(request, routers, facts, trust, measured, self._started, device)

    def _all_facts(self) -> tuple[SourceFacts, int]:
        """Facts about the tokens of all ranks, and their number.

        Raises
        ------
        RecordingError
            When ranks do not run the same routers, or there are no tokens or too many.
        """
        own = dataclasses.replace(self._source.facts, num_tokens=0)
        mine = (own, self._num_tokens, self._num_folded, self._documents)
        reports = self._ranks.everywhere(mine)
        for rank, report in enumerate(reports):
            if isinstance(report, str):
                raise RecordingError(f"rank {rank} has no tokens to fold: {report}")
        for rank, (theirs, limit, _, _) in enumerate(reports):
            if (theirs, limit) != reports[0][:2]:
                raise RecordingError(
                    f"ranks 0 and {rank} fold other routers, domains or numbers of tokens.",
                    "Every rank folds the same model and says the same.",
                )
        num_tokens = sum(folded for _, _, folded, _ in reports)
        self._refuse_more(num_tokens)
        if not num_tokens:
            raise RecordingError(
                "every token was padding: nothing was folded.",
                "The attention mask is 0 where a token is padding.",
            )
        num_documents = len(set().union(*(documents for *_, documents in reports)))
        facts = dataclasses.replace(own, num_tokens=num_tokens, num_documents=num_documents)
        return facts, num_tokens


class LiveSource:
    """The tokens of a stream that are there now; those before are gone, the others have not come.

    Of several ranks each has every n-th tile of the stream.
    """

    def __init__(self, facts: SourceFacts, ranks: Ranks) -> None:
        self._facts, self._ranks = facts, ranks
        self._offsets: dict[int, int] = {}
        self._rows = NO_ROWS

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def show(self, starts: Sequence[int], rows: InputRows) -> None:
        """Moves the window to tiles whose first tokens are number ``starts`` of this process."""
        self._offsets = {start: number * TILE for number, start in enumerate(starts)}
        self._rows = rows

    @property
    def rows(self) -> InputRows:
        """What can be read now."""
        return self._rows

    def tiles(self) -> list[tuple[int, int]]:
        """Where in the stream the tiles lie that can be read now; the last one may be short."""
        tiles = []
        for first, offset in self._offsets.items():
            start = (first // TILE * self._ranks.num_ranks + self._ranks.rank) * TILE
            tiles.append((start, start + min(TILE, len(self._rows) - offset)))
        return tiles

    def ends_at(self, num_tokens: int) -> None:
        """Says that no more tokens will come."""
        self._facts = dataclasses.replace(self._facts, num_tokens=num_tokens)

    def seen(self) -> LiveSource:
        """What can be read now, as a stream of its own."""
        part = LiveSource(dataclasses.replace(self._facts, num_tokens=len(self._rows)), Ranks())
        part.show(range(0, len(self._rows), TILE), self._rows)
        return part

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._rows.columns.at(self._places(start, stop))

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        rows = self._rows.values[router][self._places(start, stop)]
        if isinstance(rows, torch.Tensor):
            rows = as_array(rows)
        return rows.astype(np.float32, copy=False)

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
        """Where the tokens lie in the window, neighbours in this process too."""
        if start == stop:
            return slice(0, 0)
        tile, place = divmod(start, TILE)
        first = self._offsets.get(tile // self._ranks.num_ranks * TILE, -1) + place
        if not 0 <= first <= first + stop - start <= len(self._rows):
            raise InternalError(f"tokens {start} to {stop} are not there")
        return slice(first, first + stop - start)
