"""Samples of tokens, with the columns that metrics read of each.

How small is fixed by the length of the stream, so that every token is decided by itself: samples of
parts join into that of the whole, however it was cut, and memory does not grow with the stream.
While the length is not known, what the tokens so far would keep is kept: it holds what all will.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.shapes import Bool, Int64
from moegeom.geometry.keys import token_hash
from moegeom.geometry.space import (
    BlockedMoments,
    BlockedScores,
    Moments,
    ScoreMoments,
    blocked_moments,
)
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch, on_host
from moegeom.kernels.reduction import (
    ANY_USE,
    Extent,
    Kernels,
    Reduction,
    State,
    Use,
    run_starts,
    run_sums,
)

#: Quantities of every token of a batch, by the names of the columns that hold them.
ValuesOf = Callable[[TokenBatch], State]


class _Sample:
    """About ``size`` of ``num_tokens`` tokens, their labels and columns; all when there are fewer.

    Where ``num_tokens`` is None, ``Reduction.ended`` takes from the state what belongs to it.
    Tokens of the population ``left_out`` do not count, and where there are ``rows`` no others do.
    """

    def __init__(
        self,
        size: int,
        num_tokens: int | None,
        empty: State,
        values: ValuesOf,
        rows: Callable[[TokenBatch], Int64[np.ndarray, "rows"]] | None,
        left_out: int | None,
    ) -> None:
        self._values, self._rows, self._left_out = values, rows, left_out
        self._size, self._is_open = size, num_tokens is None
        self._largest = _largest_key(size, num_tokens or 0)
        self._seen, self._held = 0, 0
        # by chance the square root of the size more or less, and six of them hardly ever
        self._room = min(size + 6 * math.isqrt(size), num_tokens or 0)
        self._columns = {
            name: np.empty((self._room, *column.shape[1:]), column.dtype)
            for name, column in {"key": np.empty(0, dtype=np.uint64), **empty}.items()
        }

    def sampled_rows(
        self, token: Int64[np.ndarray, "tokens"], num_seen: int
    ) -> Int64[np.ndarray, "rows"]:
        """Rows of the tokens that are kept, ``num_seen`` of the stream having come with them."""
        largest = _largest_key(self._size, num_seen) if self._is_open else self._largest
        return np.flatnonzero(token_hash(token) <= largest)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        token = batch.token
        if self._is_open:
            self._seen += len(token)
            self._largest = _largest_key(self._size, self._seen)
        row = self.sampled_rows(token, self._seen)
        if self._left_out is not None:
            row = row[batch.population[row] != self._left_out]
        if self._rows is not None:
            row = self._rows(batch)
            if not row.size:
                return  # quantities of a whole batch would be computed for nothing
        columns = {"population": batch.population, "block": batch.block, **self._values(batch)}
        self._make_room(self._held + len(row))
        first, self._held = self._held, self._held + len(row)
        self._columns["key"][first : self._held] = on_host(token_hash(token[row]))
        for name, column in columns.items():
            _take(column, row, self._columns[name][first : self._held])
        if self._is_open and self._held > 2 * self._size:
            key = self.state()["key"]
            self._held = int(np.searchsorted(key, self._largest, side="right"))

    def _make_room(self, rows: int) -> None:
        if rows > self._room:
            self._room = max(rows, 2 * self._room)
            for name, column in self._columns.items():
                longer = np.empty((self._room, *column.shape[1:]), column.dtype)
                longer[: self._held] = column[: self._held]
                self._columns[name] = longer

    def state(self) -> State:
        """Columns in ascending order of the hash, which is ``key``."""
        key = self._columns["key"][: self._held]
        if not (key[1:] > key[:-1]).all():
            order = np.argsort(key)
            for name, column in self._columns.items():
                self._columns[name] = np.empty_like(column)
                _take(column, order, self._columns[name][: self._held])
        return {name: column[: self._held] for name, column in self._columns.items()}


def _take(column: np.ndarray, row: Int64[np.ndarray, "kept"], out: np.ndarray) -> None:
    """Rows of a column to where they stay; all of ``row`` are there."""
    if type(column) is np.ndarray and column.dtype == out.dtype:
        np.take(column, row, axis=0, out=out, mode="clip")  # any other mode copies once more
    else:
        out[:] = on_host(column[row])


def _largest_key(size: int, num_tokens: int) -> np.uint64:
    """Tokens whose hash is no larger are kept: about ``size`` of ``num_tokens``, all of fewer."""
    share = min(size / max(num_tokens, 1), 1.0)
    return np.uint64(min(int(share * 2.0**64), 2**64 - 1))


def joined(states: list[State]) -> State:
    """The rows of several states in ascending order of their keys."""
    key = np.concatenate([state["key"] for state in states])
    place = np.empty(len(key), dtype=np.intp)
    place[np.argsort(key)] = np.arange(len(key))
    rows = np.split(place, np.cumsum([len(state["key"]) for state in states])[:-1])
    merged: State = {}
    for name in states[0]:
        columns = [state[name] for state in states]
        # straight to its place: another copy of inputs is megabytes of fresh memory
        merged[name] = np.empty((len(key), *columns[0].shape[1:]), np.result_type(*columns))
        for row, column in zip(rows, columns, strict=True):
            merged[name][row] = column
    return merged


def rows_of(state: State, population: int | None, without: int | None) -> Int64[np.ndarray, "rows"]:
    """Rows of one population (all of them for None), less those of one block."""
    is_selected = np.ones(len(state["block"]), dtype=bool)
    if population is not None:
        is_selected &= state["population"] == population
    if without is not None:
        is_selected &= state["block"] != without
    return np.flatnonzero(is_selected)


@dataclass(frozen=True, eq=False)
class SampleRows:
    """Rows of one population, without those of one block; columns are read where they are used."""

    state: State
    population: int | None
    without: int | None

    def __getitem__(self, name: str) -> np.ndarray:
        return self.state[name][rows_of(self.state, self.population, self.without)]


def _sample(
    name: str,
    needs: tuple[str, ...],
    empty: Callable[[Extent], State],
    values: ValuesOf,
    select: Callable[[Any, int | None, int | None], Any],
    *,
    size: Callable[[Extent], int] | None = None,
    rows: Callable[[TokenBatch], Int64[np.ndarray, "rows"]] | None = None,
    counts_outliers: bool = True,
    settle: Callable[[State], Any] = lambda state: state,
    use: Use = ANY_USE,
) -> Reduction:
    """A reduction that keeps, of ``size`` tokens or else of all that the pass sees, columns that
    begin as ``empty`` and take in ``values``.
    """

    def start(extent: Extent) -> _Sample:
        labels = dict.fromkeys(("population", "block"), np.empty(0, np.int32))
        of_stream = (1, 1) if size is None else (size(extent), extent.num_tokens)
        left_out = None if counts_outliers else extent.num_populations - 1
        return _Sample(*of_stream, {**labels, **empty(extent)}, values, rows, left_out)

    def ended(state: State, extent: Extent) -> State:
        if size is None:
            return state
        largest = _largest_key(size(extent), extent.num_tokens or 0)
        stop = int(np.searchsorted(state["key"], largest, side="right"))
        return {name: column[:stop].copy() for name, column in state.items()}

    def merge(first: State, second: State) -> State:
        return joined([first, second])

    return Reduction(name, needs, start, merge, select, settle, use, ended)


# ------------------------------------------------------------------------------------------- inputs
#: Tokens kept, about, and bytes at most: the table of their distances costs tokens^2 x hidden size.
NUM_INPUTS = 2048
_BYTES = 32 * 2**20


def sample_size(hidden_size: int) -> int:
    """Tokens kept, about, for inputs of this size."""
    return int(min(NUM_INPUTS, max(_BYTES // (4 * hidden_size), 64)))


def _inputs(batch: TokenBatch) -> State:
    assert batch.input is not None and batch.margin is not None
    return {"first": batch.chosen[:, 0], "margin": batch.margin, "input": batch.input}


@dataclass(frozen=True, eq=False)
class InputSample:
    """Inputs without those of one block, read where they are used; none of a single population.

    Every selection is cut from one table of products, that of the moments by block.
    """

    whole: tuple[State, BlockedMoments]
    population: int | None
    without: int | None

    def __getitem__(self, name: str) -> np.ndarray:
        """``input``, ``first`` choice, ``population`` or ``margin`` of each token."""
        state, is_counted = self.whole[0], self._is_counted
        return state[name] if is_counted.all() else state[name][is_counted[state["block"]]]

    @property
    def moments(self) -> Moments:
        return self.whole[1].of_blocks(self._is_counted)

    @property
    def _is_counted(self) -> Bool[np.ndarray, "blocks"]:
        is_counted = np.full(NUM_BLOCKS, self.population is None)
        is_counted[self.without if self.without is not None else []] = False
        return is_counted


def _with_moments(state: State) -> tuple[State, BlockedMoments]:
    return state, blocked_moments(state["input"], state["block"], NUM_BLOCKS)


#: Router inputs of a sample of the tokens, outlier tokens left out.
INPUT_SAMPLE = _sample(
    "input_sample",
    ("input", "chosen", "margin"),
    lambda extent: {
        "first": np.empty(0, np.int32),
        "margin": np.empty(0),
        "input": np.empty((0, extent.hidden_size), np.float32),
    },
    _inputs,
    InputSample,
    size=lambda extent: sample_size(extent.hidden_size),
    counts_outliers=False,
    settle=_with_moments,
    use=Use(of_random_router=False),
)


# ------------------------------------------------------------------------------------------- scores
def _scores(batch: TokenBatch) -> State:
    assert batch.scores is not None
    return {"scores": batch.scores}


@dataclass(frozen=True, eq=False)
class _SettledScores:
    state: State
    _of_population: dict[int | None, BlockedScores]

    def select(self, population: int | None, without: int | None) -> ScoreMoments:
        if population not in self._of_population:
            rows = SampleRows(self.state, population, None)
            blocked = BlockedScores.of(rows["scores"], rows["block"], NUM_BLOCKS)
            self._of_population[population] = blocked
        return self._of_population[population].without(without)


#: Moments of the scores of all experts, without selection bias and mask, of a sample of the tokens.
SCORE_SAMPLE = _sample(
    "score_sample",
    ("scores",),
    lambda extent: {"scores": np.empty((0, extent.num_experts), np.float32)},
    _scores,
    _SettledScores.select,
    counts_outliers=False,
    settle=lambda state: _SettledScores(state, {}),
    use=Use(is_sampled=True),
)


# ------------------------------------------------------------------------------------------ outputs
def _outputs(batch: TokenBatch) -> State:
    assert batch.shared_output is not None and batch.routed_output is not None
    return {"shared": batch.shared_output, "routed": batch.routed_output}


#: Outputs of the shared and the routed experts, of a sample of tokens.
BLOCK_OUTPUTS = _sample(
    "block_outputs",
    ("shared_output", "routed_output"),
    lambda extent: dict.fromkeys(
        ("shared", "routed"), np.empty((0, extent.hidden_size), np.float32)
    ),
    _outputs,
    SampleRows,
    size=lambda extent: sample_size(2 * extent.hidden_size),
    use=Use(of_random_router=False),
)


# ------------------------------------------------------------------------------------- beginnings
#: Tokens of the stream among which whole beginnings of documents are kept, and tokens of each.
FIRST_TOKENS, FIRST_POSITIONS = 4096, 256


def _early(batch: TokenBatch) -> Int64[np.ndarray, "rows"]:
    assert batch.document is not None and batch.position is not None
    if not len(batch.token) or int(batch.token[0]) >= FIRST_TOKENS:  # ascending
        return np.empty(0, np.int64)
    is_early = (batch.position < FIRST_POSITIONS) & (batch.document >= 0)
    return np.flatnonzero((batch.token < FIRST_TOKENS) & is_early)


def _beginnings(batch: TokenBatch) -> State:
    names = ("document", "position", "chosen", "weights")
    return {name: getattr(batch, name) for name in names}


#: What the first tokens of the first documents choose, and with which weights.
BEGINNINGS = _sample(
    "beginnings",
    ("document", "position", "chosen", "weights"),
    lambda extent: {
        "document": np.empty(0, np.int64),
        "position": np.empty(0, np.int32),
        "chosen": np.empty((0, extent.top_k), np.int32),
        "weights": np.empty((0, extent.top_k)),
    },
    _beginnings,
    SampleRows,
    rows=_early,
    use=Use(of_random_router=False),
)


# -------------------------------------------------------------------------------------------- jumps
def _heights(batch: TokenBatch) -> State:
    return dict(vars(batch.jumps))


def _jumps(name: str) -> Reduction:
    """Of tokens that were chosen before their experts were applied: all of them are kept."""
    names = ("height", "relative", "chance")
    empty = {**dict.fromkeys(names, np.empty(0)), "pair": np.empty((0, 2), np.int32)}
    return _sample(name, ("jumps",), lambda extent: empty, _heights, SampleRows)


#: Jumps of a sample of the tokens.
JUMPS = _jumps("jumps")

#: Jumps of tokens that a variant flips.
FLIP_JUMPS = _jumps("flip_jumps")


# --------------------------------------------------------------------------------------------- harm
def _costs(batch: TokenBatch) -> State:
    return dict(vars(batch.harm))


def _no_costs(extent: Extent) -> State:
    costs = dict.fromkeys(("kl", "kl_later", "kl_beside"), np.empty(0))
    return {**costs, "is_other_token": np.empty(0, bool)}


#: What flips cost that were made in the running model: all that a recording tells of.
HARM = _sample("harm", ("harm",), _no_costs, _costs, SampleRows, use=Use(of_random_router=False))


# ----------------------------------------------------------------------------------------- sketches


class PendingJoins:
    """A state, and parts of batches that wait until joining them is worth it."""

    def __init__(self, state: State, join: Callable[[list[State]], State]) -> None:
        self._state, self._join = state, join
        self._pending: list[State] = []
        self._waiting = 0

    def add(self, part: State, rows: int, enough: int) -> None:
        """A part of ``rows`` rows; from ``enough`` of them on, those that wait are joined."""
        self._pending.append(part)
        self._waiting += rows
        if self._waiting >= enough:
            self.state()

    def state(self) -> State:
        self._state = self._join([self._state, *self._pending])
        self._pending, self._waiting = [], 0
        return self._state


# --------------------------------------------------------------------------------------------- sets
#: Entries kept. At most 2^20, so that memory stays flat however long the stream.
CAPACITY = 2**20

#: Tokens gathered before they are sorted into the state.
PENDING = 2**16

_LABEL_BITS = 11
_BLOCK_BITS = 4


class _ExpertSets(PendingJoins):
    """An entry is one expert set in one population and block.

    The composite key holds 53 bits of the expert set's hash, then 7 bits of population and 4 of
    block. Two of n expert sets collide with probability about n^2 / 2^54: 1e-4 at full capacity.
    """

    def __init__(self, extent: Extent) -> None:
        super().__init__(_empty(extent), _compact)
        self._extent = extent

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        hashed = kernels["expert_set_key"](batch.chosen, self._extent.num_experts)
        label = (batch.population.astype(np.uint64) << np.uint64(_BLOCK_BITS)) | (
            batch.block.astype(np.uint64)
        )
        key = (hashed & ~np.uint64(2**_LABEL_BITS - 1)) | label
        # what the sample will drop need not wait for it
        rows = np.flatnonzero(key <= _largest_kept(self._state))
        key = key[rows]
        part = {
            "key": key,
            "count": np.ones_like(key, dtype=np.int64),
            "members": np.sort(batch.chosen[rows], axis=1).astype(np.int16),
            "halvings": np.zeros(1, dtype=np.int64),
        }
        # As many again as the state holds, so that each token is sorted a bounded number of times.
        self.add(part, len(key), max(PENDING, len(self._state["key"])))


def _largest_kept(state: State) -> np.uint64:
    return np.uint64(2 ** (64 - int(state["halvings"][0])) - 1)


def _empty(extent: Extent) -> State:
    return {
        "key": extent.empty(0, dtype=np.uint64),
        "count": extent.empty(0, dtype=np.int64),
        "members": extent.empty(0, extent.top_k, dtype=np.int16),
        "halvings": np.zeros(1, dtype=np.int64),
    }


def _compact(states: list[State]) -> State:
    """Equal keys added up; when over capacity, keys whose upper bits are not 0 are dropped.

    The number of halvings depends on the set of keys alone, not on their order of arrival: it is
    the least that brings the whole set under capacity, and it can only grow with the set.
    """
    # at full capacity a column has megabytes: none is held longer than it is needed
    key = np.concatenate([state["key"] for state in states])
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(run_starts(key))
    halvings = max(int(state["halvings"][0]) for state in states)
    key = key[starts]
    while True:
        limit = int((key <= np.uint64(2 ** (64 - halvings) - 1)).sum())
        if limit <= CAPACITY:
            break
        halvings += 1
    count = np.concatenate([state["count"] for state in states])[order]
    count = run_sums(count, starts)[:limit].copy()
    first = order[starts[:limit]]
    del order, starts
    return {
        "key": key[:limit].copy(),  # a view would keep the longer array alive
        "count": count,
        "members": np.concatenate([state["members"] for state in states])[first],
        "halvings": np.array([halvings], dtype=np.int64),
    }


def _settled_sets(state: State) -> State:
    """Entries with what their keys hold."""
    key = state["key"]
    block = (key & np.uint64(2**_BLOCK_BITS - 1)).astype(np.uint8)
    label = (key >> np.uint64(_BLOCK_BITS)) & np.uint64(2 ** (_LABEL_BITS - 4) - 1)
    labels = {"block": block, "population": label.astype(np.uint8)}
    return {**state, **labels, "set": key >> np.uint64(_LABEL_BITS)}


def _select_sets(
    settled: State, population: int | None, without: int | None
) -> dict[str, np.ndarray]:
    """Count per expert set and the sampling rate, in the order of the hash.

    ``members[row[i]]`` are the experts of expert set i.
    """
    row = rows_of(settled, population, without)
    expert_set, counts = settled["set"][row], settled["count"][row]
    starts = np.flatnonzero(run_starts(expert_set))
    return {
        "count": run_sums(counts, starts),
        "row": row[starts],
        "members": settled["members"],
        "rate": np.array(2.0 ** -float(settled["halvings"][0])),
    }


#: Visited expert sets: exact up to a million entries, then a hash sample of known rate.
EXPERT_SETS = Reduction(
    name="expert_sets",
    needs=("chosen",),
    start=_ExpertSets,
    merge=lambda first, second: _compact([first, second]),
    select=_select_sets,
    settle=_settled_sets,
    use=Use(of_random_router=False),
)
