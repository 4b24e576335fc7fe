"""Tokens of one task on a device: routed there, and folded where they are.

The definitions of quantities and reductions are programs over arrays of either machine
(``TokenBatch``, ``moegeom.kernels.reductions``). Those that cost most are counters of the kernel
that routes; the others are folded from what it leaves of each token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from moegeom.core.errors import InternalError
from moegeom.core.shapes import Bool, Float32, Int32, Int64, UInt16
from moegeom.core.tokens import TokenColumns
from moegeom.engine.batch import LazyBatch
from moegeom.engine.choice import recorded_choice
from moegeom.engine.devices.device_router import (
    DeviceRouter,
    kept_on_device,
    start_counters,
    states_of,
)
from moegeom.engine.loop import NO_HOOKS, Folded, Hooks, extent_of
from moegeom.engine.task import Task, block_of
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch, on_host
from moegeom.kernels.cuda.device import Device, DeviceArray, Queue
from moegeom.kernels.cuda.program import NOT_COUNTED
from moegeom.kernels.cuda.route import RouteCounters
from moegeom.kernels.cuda.tally import TALLIED, TallyCounters, TallyRule, launch_tally
from moegeom.kernels.reduction import REDUCTIONS, Accumulator, Extent, State

#: What the kernel leaves of each token.
_ANSWERS = {
    "is_lost": np.uint8,
    "label": np.uint16,
    "logits": np.float32,
    "chosen": np.int32,
    "margin": np.float64,
    "group_margin": np.float64,
    "distance": np.float64,
    "pair": np.int32,
    "last_score": np.float64,
    "near_tie": np.uint8,
    "input_norm": np.float64,
}


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Tokens whose rows follow each other on a device, by their numbers in the stream.

    ``inputs`` are those of them that a sample wants, ``chosen`` what the model chose where it is
    not read from a recording, ``label`` what ``labels`` gives, where that is known.
    """

    token: Int64[np.ndarray, "tokens"]
    columns: TokenColumns
    is_counted: Bool[np.ndarray, "tokens"]
    inputs: GatheredRows | None = None
    chosen: Any = None
    label: UInt16[np.ndarray, "tokens"] | None = None

    def __len__(self) -> int:
        return len(self.token)

    def at(self, start: int, stop: int) -> LabelledRows:
        """Rows ``[start, stop)`` of them."""
        rows = slice(start, stop)
        chosen = None if self.chosen is None else self.chosen[rows]
        inputs = None if self.inputs is None else self.inputs.at(start, stop)
        token, is_counted = self.token[rows], self.is_counted[rows]
        return LabelledRows(token, self.columns.at(rows), is_counted, inputs, chosen)

    def labels(self, task: Task) -> UInt16[np.ndarray, "tokens"]:
        """Population and block of each as one number, or that it does not count."""
        if self.label is not None:
            return self.label
        first = int(self.token[0]) if len(self) else 0
        block = block_of(self.columns, first, task.source.facts.num_documents)
        label = task.populations.label(self.columns) * NUM_BLOCKS + block
        return np.where(self.is_counted, label, NOT_COUNTED).astype(np.uint16)


@dataclass(frozen=True, eq=False)
class GatheredRows:
    """Router inputs of some tokens, by the ascending numbers of their rows in a batch."""

    row: Int64[np.ndarray, "rows"]
    values: DeviceArray

    def at(self, start: int, stop: int) -> GatheredRows:
        """Those of rows ``[start, stop)``."""
        first, last = np.searchsorted(self.row, (start, stop)).tolist()
        return GatheredRows(self.row[first:last] - start, self.values[first:last])

    def __getitem__(self, row: Int64[np.ndarray, "some"]) -> Float32[np.ndarray, "some hidden"]:
        row = on_host(row)
        place = np.minimum(np.searchsorted(self.row, row), max(len(self.row) - 1, 0))
        if len(row) and not np.array_equal(self.row[place], row):
            raise InternalError("inputs of tokens are wanted that no sample had drawn")
        values = on_host(self.values)[place]
        if values.dtype == np.uint16:  # the bits of bfloat16
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values


class DeviceBatch(LazyBatch):
    """What the kernel left of tokens, in memory of the device; a batch like any other.

    Rows are counted tokens alone. It is made, and everything of it computed, while the queue that
    its task's kernels belong to is the current one.
    """

    def __init__(
        self, task: Task, answers: Mapping[str, DeviceArray], parts: Sequence[LabelledRows]
    ) -> None:
        self.task: Task = task
        self.non_finite: tuple[int, ...] = ()
        self._parts = parts
        label = answers["label"]
        is_counted = label != np.uint16(NOT_COUNTED)
        self._row = None if bool(is_counted.all()) else np.flatnonzero(is_counted)
        columns = {"token": [one.token for one in parts]}
        for name in {"document", "position"} & task.needs:
            columns[name] = [getattr(one.columns, name) for one in parts]
        read = {
            name: np.asarray(np.concatenate(each), like=label) for name, each in columns.items()
        }
        kept_rows = {name: self._kept(rows) for name, rows in (read | dict(answers)).items()}
        label = kept_rows.pop("label").astype(np.int32)
        vars(self).update(kept_rows, population=label // NUM_BLOCKS, block=label % NUM_BLOCKS)
        if "distance" in answers:
            vars(self)["distance_upper"] = vars(self)["distance"]  # boundaries are linear: exact
        vars(self)["input"] = self._gathered()

    def _gathered(self) -> GatheredRows | None:
        before = np.cumsum([0, *map(len, self._parts)]).tolist()
        inputs = [(n, p.inputs) for n, p in zip(before, self._parts, strict=False) if p.inputs]
        if not inputs:
            return None
        row = np.concatenate([rows.row + first for first, rows in inputs])
        values = np.concatenate([rows.values for _, rows in inputs])
        if self._row is None:
            return GatheredRows(row, values)
        here = on_host(self._row)  # rows of tokens that do not count are gone
        is_here = np.isin(row, here)
        return GatheredRows(np.searchsorted(here, row[is_here]), on_host(values)[is_here])

    def _recorded_choice(self) -> Int32[np.ndarray, "tokens k"] | None:
        recorded = [
            recorded_choice(self.task, int(one.token[0]), int(one.token[-1]) + 1)
            if one.chosen is None
            else one.chosen
            for one in self._parts
        ]
        if any(one is None for one in recorded):
            return None
        label = vars(self)["block"]
        choices = [np.asarray(one, np.int32, like=label) for one in recorded]
        return self._kept(np.concatenate(choices))

    def count_labels(self, num_populations: int, weights: np.ndarray | None = None) -> np.ndarray:
        """As for any batch; sums are those of integers below 2^63 here."""
        counts = np.zeros((num_populations, NUM_BLOCKS), np.int64, like=self.block)
        weights = np.ones_like(self.token) if weights is None else weights.astype(np.int64)
        self.task.kernels["count_labels"](counts, weights, self.population, self.block)
        return counts

    def is_near_tie(self) -> Bool[np.ndarray, "tokens"]:
        """As for any batch; the kernel has compared the two."""
        return vars(self)["near_tie"] != 0

    def on_host(self) -> TokenBatch:
        """The same with arrays of the host, each copied when it is asked for."""
        return _OnHost(self)


class _OnHost(TokenBatch):
    def __init__(self, batch: DeviceBatch) -> None:
        vars(self)["_batch"] = batch

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        return on_host(getattr(self._batch, name))


class NumberedSample(Protocol):
    """What draws tokens by their numbers alone."""

    def sampled_rows(
        self, token: Int64[np.ndarray, "tokens"], num_seen: int
    ) -> Int64[np.ndarray, "rows"]: ...


class Reduced:
    """What a task's tokens are folded into on one device, by whichever queue."""

    def __init__(
        self,
        task: Task,
        device: Device,
        router: DeviceRouter,
        queue: Queue,
        extent: Extent | None = None,
    ) -> None:
        self.task: Task = task
        self.router: DeviceRouter = router
        self._device = device
        fused = kept_on_device(task)
        tallied = [name for name in TALLIED if name in task.reductions]
        self.counters: RouteCounters = RouteCounters(**start_counters(task, device, fused))
        self._tallies = TallyCounters(**start_counters(task, device, tallied))
        own, behind = task.prepared.router, None
        if own.rule.is_affine and own.selection_bias is not None:
            behind = device.put(own.selection_bias.astype(np.float32))
        self._tally = TallyRule(own.num_experts, own.rule, behind is not None), behind
        self._is_tallied = bool(tallied)
        device.compile([router.rule.program, *([self._tally[0].program] if tallied else [])])
        self._accumulators: dict[str, Accumulator] = {}
        with queue.current():
            extent = dataclasses.replace(extent or extent_of(task), like=router.tables.number)
            for name in task.reductions:
                if name not in (*fused, *tallied):
                    self._accumulators[name] = REDUCTIONS[name].start(extent)
        queue.finish()

    @property
    def folds(self) -> bool:
        """Whether anything is folded but the counters of the kernel."""
        return bool(self._accumulators) or self._is_tallied

    def outputs(self, tokens: int, with_rows: bool = False) -> dict[str, DeviceArray]:
        """Room for what is to be left of so many tokens."""
        names, rule = ["is_lost"], self.router.rule
        if self.folds or with_rows:
            names += ["label", "logits", "chosen", "margin", "last_score"]
            if "matches_recording" in self.task.needs:
                names.append("near_tie")
            if rule.groups is not None:
                names.append("group_margin")
            if self.router.tables.inverse is not None:
                names += ["distance", "pair"]
        if self.router.needs_norm:
            names.append("input_norm")
        columns = {"logits": (rule.num_experts,), "chosen": (rule.top_k,), "pair": (2,)}
        return {
            name: self._device.empty((tokens, *columns.get(name, ())), np.dtype(_ANSWERS[name]))
            for name in names
        }

    def sampled_rows(
        self, token: Int64[np.ndarray, "tokens"], num_seen: int
    ) -> Int64[np.ndarray, "rows"]:
        """Rows of the tokens whose inputs a sample may want, the last of ``num_seen``."""
        samples = [
            cast(NumberedSample, accumulator).sampled_rows(token, num_seen)
            for name, accumulator in self._accumulators.items()
            if "input" in REDUCTIONS[name].needs
        ]
        return np.unique(np.concatenate(samples)) if samples else np.empty(0, np.int64)

    def fold(
        self,
        task: Task,
        queue: Queue,
        answers: Mapping[str, DeviceArray],
        parts: Sequence[LabelledRows],
        hooks: Hooks = NO_HOOKS,
    ) -> Folded:
        """Folds what was left of the tokens of ``parts``, and waits.

        ``task`` has kernels of the queue.
        """
        with queue.current():
            is_lost = on_host(answers["is_lost"]) != 0
            is_lost &= np.concatenate([one.is_counted for one in parts])
            token = np.concatenate([one.token for one in parts])
            rows = None
            if self.folds or hooks.rows:
                left = {name: array for name, array in answers.items() if name != "is_lost"}
                batch = DeviceBatch(task, left, parts)
                if self._is_tallied:
                    rule, behind = self._tally
                    hidden, counters = task.prepared.router.hidden_size, self._tallies
                    launch_tally(queue, rule, batch, behind, hidden, counters)
                for accumulator in self._accumulators.values():
                    accumulator.fold(batch, task.kernels)
                rows = hooks.rows(batch.on_host()) if hooks.rows else None
        queue.finish()
        return Folded(tuple(token[is_lost].tolist()), rows)

    def states(self, queue: Queue) -> dict[str, State]:
        """The states of all reductions, on the host; once every fold has ended."""
        states = states_of(self._device, vars(self.counters) | vars(self._tallies))
        with queue.current():
            for name, accumulator in self._accumulators.items():
                state = accumulator.state()
                states[name] = {key: on_host(array) for key, array in state.items()}
        return states
