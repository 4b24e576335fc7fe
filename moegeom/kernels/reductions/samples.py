"""Samples of tokens, with the columns that metrics read of each.

How small is fixed by the length of the stream, so that every token is decided by itself: samples of
parts join into that of the whole, however it was cut, and memory does not grow with the stream.
While the length is not known, what the tokens so far would keep is kept: it holds what all will.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float32, Float64, Int32, Int64
from moegeom.geometry.space import (
    BlockedMoments,
    BlockedScores,
    Moments,
    ScoreMoments,
    blocked_moments,
)
from moegeom.kernels.batch import NUM_BLOCKS, ORDERS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reference import token_hash


class TokenSample:
    """About ``size`` of ``num_tokens`` tokens, and columns about them; all when there are fewer.

    Where ``num_tokens`` is None, ``Reduction.ended`` takes from the state what belongs to it.
    """

    def __init__(self, size: int, num_tokens: int | None, empty: State) -> None:
        self._size, self._is_open = size, num_tokens is None
        self._largest = _largest_key(size, num_tokens or 0)
        self._seen, self._held = 0, 0
        # by chance the square root of the size more or less, and six of them hardly ever
        self._room = min(size + 6 * math.isqrt(size), num_tokens or 0)
        self._columns = {
            name: np.empty((self._room, *column.shape[1:]), column.dtype)
            for name, column in {"key": np.empty(0, dtype=np.uint64), **empty}.items()
        }

    def sampled(self, token: Int64[np.ndarray, "tokens"]) -> Int64[np.ndarray, "kept"]:
        """Rows that belong to the sample."""
        if self._is_open:
            self._seen += len(token)
            self._largest = _largest_key(self._size, self._seen)
        return np.flatnonzero(token_hash(token) <= self._largest)

    def add(
        self,
        token: Int64[np.ndarray, "tokens"],
        columns: State,
        row: Int64[np.ndarray, "kept"] | None = None,
    ) -> None:
        """Takes in the rows ``row``, which :meth:`sampled` named; all of them for None."""
        row = np.arange(len(token)) if row is None else row
        self._make_room(self._held + len(row))
        first, self._held = self._held, self._held + len(row)
        self._columns["key"][first : self._held] = token_hash(token[row])
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
    if column.dtype == out.dtype:
        np.take(column, row, axis=0, out=out, mode="clip")  # any other mode copies once more
    else:
        out[:] = column[row]


def _largest_key(size: int, num_tokens: int) -> np.uint64:
    """Tokens whose hash is no larger are kept: about ``size`` of ``num_tokens``, all of fewer."""
    share = min(size / max(num_tokens, 1), 1.0)
    return np.uint64(min(int(share * 2.0**64), 2**64 - 1))


def _up_to(largest: np.uint64, state: State) -> State:
    stop = int(np.searchsorted(state["key"], largest, side="right"))
    return {name: column[:stop].copy() for name, column in state.items()}


def _of_length(size: Callable[[Extent], int]) -> Callable[[State, Extent], State]:
    """What stays of a sample of ``size`` once the length of the stream is known."""

    def ended(state: State, extent: Extent) -> State:
        return _up_to(_largest_key(size(extent), extent.num_tokens or 0), state)

    return ended


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


def _joined_two(first: State, second: State) -> State:
    return joined([first, second])


def rows_of(state: State, population: int | None, without: int | None) -> Int64[np.ndarray, "rows"]:
    """Rows of one population (all of them for None), less those of one block."""
    is_selected = np.ones(len(state["block"]), dtype=bool)
    if population is not None:
        is_selected &= state["population"] == population
    if without is not None:
        is_selected &= state["block"] != without
    return np.flatnonzero(is_selected)


# ---------------------------------------------------------------------------------------------- ids
#: Tokens kept, about.
NUM_IDS = 16_384


class _Ids(TokenSample):
    def __init__(self, extent: Extent) -> None:
        labels = np.empty(0, dtype=np.int32)
        chosen = np.empty((0, extent.top_k), dtype=np.int16)
        names = ("population", "block", "token_id")
        empty = {**dict.fromkeys(names, labels), "chosen": chosen}
        super().__init__(NUM_IDS, extent.num_tokens, empty)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.token_id is not None
        row = self.sampled(q.token)
        columns = {
            "population": q.population,
            "block": q.block,
            "token_id": q.token_id,
            "chosen": q.chosen,
        }
        self.add(q.token, columns, row)


def _select_ids(state: State, population: int | None, without: int | None) -> dict[str, np.ndarray]:
    row = rows_of(state, population, without)
    return {"token_id": state["token_id"][row], "chosen": state["chosen"][row].astype(np.int32)}


#: Token ids and chosen experts of a sample of the tokens.
TOKEN_SAMPLE = Reduction(
    name="token_sample",
    needs=("chosen", "token_id"),
    start=_Ids,
    merge=_joined_two,
    select=_select_ids,
    use=Use(of_random_router=False),
    ended=_of_length(lambda extent: NUM_IDS),
)


# ------------------------------------------------------------------------------------------- inputs
#: Tokens kept, about, and bytes at most: the table of their distances costs tokens^2 x hidden size.
NUM_INPUTS = 2048
_BYTES = 32 * 2**20


def sample_size(hidden_size: int) -> int:
    """Tokens kept, about, for inputs of this size."""
    return int(min(NUM_INPUTS, max(_BYTES // (4 * hidden_size), 64)))


class _Inputs(TokenSample):
    def __init__(self, extent: Extent) -> None:
        labels = np.empty(0, dtype=np.int32)
        empty = {
            **dict.fromkeys(("block", "population", "first"), labels),
            "margin": np.empty(0),
            "input": np.empty((0, extent.hidden_size), dtype=np.float32),
        }
        super().__init__(sample_size(extent.hidden_size), extent.num_tokens, empty)
        self._outliers = extent.num_populations - 1

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.input is not None and q.margin is not None
        row = self.sampled(q.token)
        row = row[q.population[row] != self._outliers]
        columns = {
            "block": q.block,
            "population": q.population,
            "first": q.chosen[:, 0],
            "margin": q.margin,
            "input": q.input,
        }
        self.add(q.token, columns, row)


@dataclass(frozen=True, eq=False)
class InputSample:
    """What metrics see of the sample: its moments, the inputs themselves, what they choose first,
    of which population they are, and their margins.
    """

    moments: Moments
    inputs: Float32[np.ndarray, "tokens hidden"]
    first: Int32[np.ndarray, "tokens"]
    population: Int32[np.ndarray, "tokens"]
    margin: Float64[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class _Settled:
    state: State
    moments: BlockedMoments


def _settle(state: State) -> _Settled:
    """Moments by block: every selection is cut from one table of products."""
    inputs = state["input"]
    moments = blocked_moments(inputs.astype(np.float64), state["block"], NUM_BLOCKS)
    return _Settled(state, moments)


def _select_inputs(settled: _Settled, population: int | None, without: int | None) -> InputSample:
    """The sample without one block; empty for a domain."""
    is_selected = np.full(NUM_BLOCKS, population is None)
    if without is not None:
        is_selected[without] = False
    state = settled.state
    row = slice(None) if is_selected.all() else is_selected[state["block"]]
    columns = (state[name][row] for name in ("input", "first", "population", "margin"))
    return InputSample(settled.moments.of_blocks(is_selected), *columns)


#: Router inputs of a sample of the tokens, outlier tokens left out.
INPUT_SAMPLE = Reduction(
    name="input_sample",
    needs=("input", "chosen", "margin"),
    start=_Inputs,
    merge=_joined_two,
    select=_select_inputs,
    settle=_settle,
    use=Use(of_random_router=False),
    ended=_of_length(lambda extent: sample_size(extent.hidden_size)),
)


# ------------------------------------------------------------------------------------------- scores
class _Scores(TokenSample):
    """The pass sees a sample of the tokens: all of it is kept."""

    def __init__(self, extent: Extent) -> None:
        labels = np.empty(0, dtype=np.int32)
        empty = {
            **dict.fromkeys(("block", "population"), labels),
            "scores": np.empty((0, extent.num_experts), dtype=np.float32),
        }
        super().__init__(1, 1, empty)
        self._outliers = extent.num_populations - 1

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.scores is not None
        row = self.sampled(q.token)
        row = row[q.population[row] != self._outliers]
        columns = {"block": q.block, "population": q.population, "scores": q.scores}
        self.add(q.token, columns, row)


@dataclass(frozen=True, eq=False)
class _SettledScores:
    state: State
    _of_population: dict[int | None, BlockedScores]

    def select(self, population: int | None, without: int | None) -> ScoreMoments:
        blocked = self._of_population.get(population)
        if blocked is None:
            row = rows_of(self.state, population, None)
            scores, block = self.state["scores"][row], self.state["block"][row]
            blocked = BlockedScores.of(scores, block, NUM_BLOCKS)
            self._of_population[population] = blocked
        return blocked.without(without)


#: Moments of the scores of all experts, without selection bias and mask, of a sample of the tokens.
SCORE_SAMPLE = Reduction(
    name="score_sample",
    needs=("scores",),
    start=_Scores,
    merge=_joined_two,
    select=_SettledScores.select,
    settle=lambda state: _SettledScores(state, {}),
    use=Use(is_sampled=True),
)


# ------------------------------------------------------------------------------------------ outputs
class _Outputs(TokenSample):
    def __init__(self, extent: Extent) -> None:
        empty = np.empty((0, extent.hidden_size), dtype=np.float32)
        names = ("input", "shared", "routed")
        columns = {"block": np.empty(0, dtype=np.int32), **dict.fromkeys(names, empty)}
        super().__init__(sample_size(3 * extent.hidden_size), extent.num_tokens, columns)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.input is not None and q.shared_output is not None and q.routed_output is not None
        row = self.sampled(q.token)
        columns = {
            "block": q.block,
            "input": q.input,
            "shared": q.shared_output,
            "routed": q.routed_output,
        }
        self.add(q.token, columns, row)


def _select_outputs(
    state: State, population: int | None, without: int | None
) -> dict[str, np.ndarray]:
    """The sample without one block; empty for a domain, which is too small to fit a map on."""
    rows = rows_of(state, None, without) if population is None else np.empty(0, dtype=np.intp)
    return {name: state[name][rows] for name in ("block", "input", "shared", "routed")}


#: Outputs of the shared and the routed experts beside the router inputs, of a sample of tokens.
BLOCK_OUTPUTS = Reduction(
    name="block_outputs",
    needs=("input", "shared_output", "routed_output"),
    start=_Outputs,
    merge=_joined_two,
    select=_select_outputs,
    use=Use(of_random_router=False),
    ended=_of_length(lambda extent: sample_size(3 * extent.hidden_size)),
)


# ------------------------------------------------------------------------------ distances to orders
class _Brackets(TokenSample):
    """A few hundred tokens of a router were looked at, at most: all are kept."""

    def __init__(self, extent: Extent) -> None:
        labels, ends = np.empty(0, np.int32), np.empty((0, len(ORDERS)))
        columns = {"population": labels, "block": labels, "lower": ends, "upper": ends}
        super().__init__(1, 1, columns | {"stretch": np.empty(0)})

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        brackets = batch.order_distance
        assert brackets is not None
        columns = {
            "population": batch.population[brackets.row],
            "block": batch.block[brackets.row],
            "lower": brackets.lower,
            "upper": brackets.upper,
            "stretch": brackets.stretch,
        }
        self.add(batch.token[brackets.row], columns)


def _select_brackets(
    state: State, population: int | None, without: int | None
) -> dict[str, np.ndarray]:
    row = rows_of(state, population, without)
    return {name: state[name][row] for name in ("lower", "upper", "stretch")}


#: Distances to ties of more than two experts, of the tokens that were looked at more closely.
ORDER_DISTANCES = Reduction(
    name="order_distances",
    needs=("order_distance",),
    start=_Brackets,
    merge=_joined_two,
    select=_select_brackets,
    use=Use(of_random_router=False, is_sampled=True),
)


# ------------------------------------------------------------------------------------- beginnings
#: Tokens of the stream among which whole beginnings of documents are kept, and tokens of each.
FIRST_TOKENS, FIRST_POSITIONS = 4096, 256


class _Beginnings(TokenSample):
    def __init__(self, extent: Extent) -> None:
        slots = np.empty((0, extent.top_k))
        columns = {
            **dict.fromkeys(("population", "block"), np.empty(0, np.int32)),
            "document": np.empty(0, np.int64),
            "position": np.empty(0, np.int32),
            "chosen": slots.astype(np.int32),
            "weights": slots,
        }
        super().__init__(1, 1, columns)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        document, position = batch.document, batch.position
        assert document is not None and position is not None
        is_early = (position < FIRST_POSITIONS) & (document >= 0)
        row = np.flatnonzero((batch.token < FIRST_TOKENS) & is_early)
        if not row.size:
            return  # weights of a whole batch would be computed for nothing
        assert batch.weights is not None
        columns = {
            "population": batch.population,
            "block": batch.block,
            "document": document,
            "position": position,
            "chosen": batch.chosen,
            "weights": batch.weights,
        }
        self.add(batch.token, columns, row)


def _select_beginnings(
    state: State, population: int | None, without: int | None
) -> dict[str, np.ndarray]:
    row = rows_of(state, population, without)
    return {name: state[name][row] for name in ("document", "position", "chosen", "weights")}


#: What the first tokens of the first documents choose, and with which weights.
BEGINNINGS = Reduction(
    name="beginnings",
    needs=("document", "position", "chosen", "weights"),
    start=_Beginnings,
    merge=_joined_two,
    select=_select_beginnings,
    use=Use(of_random_router=False),
)


#: Columns that are kept of each token, beside its labels.
_JUMP_COLUMNS = ("height", "relative", "chance")


class _Jumps(TokenSample):
    """The tokens were chosen before their experts were applied: all of them are kept."""

    def __init__(self, extent: Extent) -> None:
        labels = np.empty(0, dtype=np.int32)
        empty = {
            **dict.fromkeys(("population", "block"), labels),
            **dict.fromkeys(_JUMP_COLUMNS, np.empty(0)),
            "pair": np.empty((0, 2), dtype=np.int32),
        }
        super().__init__(1, 1, empty)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        assert batch.jumps is not None
        columns = {name: getattr(batch.jumps, name) for name in (*_JUMP_COLUMNS, "pair")}
        self.add(batch.token, {"population": batch.population, "block": batch.block, **columns})


def _select_jumps(state: State, population: int | None, without: int | None) -> State:
    row = rows_of(state, population, without)
    return {name: state[name][row] for name in (*_JUMP_COLUMNS, "pair")}


def _jumps(name: str) -> Reduction:
    return Reduction(
        name=name,
        needs=("jumps",),
        start=_Jumps,
        merge=lambda first, second: joined([first, second]),
        select=_select_jumps,
    )


#: Jumps of a sample of the tokens.
JUMPS = _jumps("jumps")

#: Jumps of tokens that a variant flips.
FLIP_JUMPS = _jumps("flip_jumps")
