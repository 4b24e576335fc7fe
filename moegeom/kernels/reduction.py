"""What a reduction is: an accumulator whose state is a flat dict of arrays with a merge.

All counts and sums are integers, so that a merge is exactly associative and commutative: threads,
batches, cuts of the files and resume points cannot change a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moegeom.core.errors import ResultsError
from moegeom.core.registry import Rooms
from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.geometry.histogram import NUM_BINS
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch

State = dict[str, np.ndarray]
Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Extent:
    """Sizes that fix the shape of a state; ``num_tokens`` is the length of the whole stream, None
    while nobody knows it. Counters lie where the array ``like`` does, on the host by default.
    """

    num_populations: int
    num_experts: int
    top_k: int
    hidden_size: int = 1
    num_tokens: int | None = 0
    like: Any = None

    def zeros(self, *tail: int) -> np.ndarray:
        """A counter array [populations, blocks, *tail]."""
        return self.empty(self.num_populations, NUM_BLOCKS, *tail, dtype=np.int64)

    def empty(self, *shape: int, dtype: Any) -> np.ndarray:
        """An array of zeros, beside ``like``."""
        return np.zeros(shape, dtype, like=self.like)


class Accumulator(Protocol):
    """Folds batches into a state of arrays, which can be read at any moment."""

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None: ...

    def state(self) -> State: ...


@dataclass(frozen=True)
class Use:
    """Where a reduction means something, and what it costs.

    ``of_random_router``: of the random router too; else it says nothing there, too much, or costs
    too much. ``is_sampled``: it costs as much as the product, or more, so that a sample of the
    tokens is enough. ``of_flip``: it is about another choice beside that of the router;
    ``of_random_flip``: about that of the random router too.
    """

    of_random_router: bool = True
    is_sampled: bool = False
    of_flip: bool = False
    of_random_flip: bool = False


#: Of recorded tokens, for the router and the random one.
ANY_USE = Use()


@dataclass(frozen=True)
class Reduction:
    """One way of folding batches of tokens.

    ``needs`` names quantities of :class:`TokenBatch`. ``select(state, populations, without)`` sums
    over populations (None = all) and over all blocks but ``without`` (None = no block left out).
    ``settle`` is work done once on the final state; what it returns is what ``select`` gets.
    ``ended(state, extent)`` is the state of a stream whose length was not known, as if it had been.
    """

    name: str
    needs: tuple[str, ...]
    start: Callable[[Extent], Accumulator]
    merge: Callable[[State, State], State]
    select: Callable[[Any, int | None, int | None], Any]
    settle: Callable[[State], Any] = lambda state: state
    use: Use = ANY_USE
    ended: Callable[[State, Extent], State] = lambda state, extent: state


@dataclass(frozen=True)
class StateView:
    """Another way of selecting from the settled state of the reduction ``of``."""

    name: str
    of: str
    select: Callable[[Any, int | None, int | None], Any]


def total_of(counts: np.ndarray) -> np.ndarray:
    """Counts summed over the first axis.

    Raises
    ------
    ResultsError
        Where a sum is beyond 64 bits: as a float64 it is known to 2^-53, far from wrapping around.
    """
    if np.abs(counts.sum(axis=0, dtype=np.float64)).max(initial=0.0) > _MOST_SUM:
        raise ResultsError(
            "sums of so many tokens do not fit into 64 bits.",
            "Measure parts of the text apart, each into results of its own.",
        )
    return np.asarray(counts.sum(axis=0))


#: Sums that a float64 tells from those beyond 64 bits.
_MOST_SUM = 2.0**63 * (1.0 - 2.0**-40)


@dataclass(frozen=True, eq=False)
class SettledCounts:
    """Counts [populations, blocks, *tail] and, added up once, those of all populations."""

    counts: np.ndarray
    of_all: np.ndarray
    _totals: dict[int | None, np.ndarray]

    @classmethod
    def of(cls, state: State) -> SettledCounts:
        return cls(state["counts"], total_of(state["counts"]), {})

    def blocks(self, population: int | None) -> np.ndarray:
        """[blocks, *tail]."""
        return self.of_all if population is None else self.counts[population]

    def select(self, population: int | None, without: int | None) -> np.ndarray:
        """Summed to [*tail]."""
        chosen = self.blocks(population)
        total = self._totals.get(population)
        if total is None:
            total = self._totals[population] = total_of(chosen)
        return total if without is None else total - chosen[without]


#: Reductions of the modules of ``moegeom/kernels/reductions``, by name.
REDUCTIONS = Rooms("reduction", "moegeom.kernels.reductions", Reduction)

#: Views of their states, in the same modules.
VIEWS = Rooms("view", "moegeom.kernels.reductions", StateView)


def reductions_for(is_used: Callable[[Use], bool]) -> tuple[str, ...]:
    """Names of the reductions whose ``use`` passes the test."""
    return tuple(name for name in REDUCTIONS.names() if is_used(REDUCTIONS[name].use))


def reduction_of(need: str) -> str:
    """The reduction whose state answers ``need``, a reduction or a view."""
    return VIEWS[need].of if need in VIEWS.names() else need


def selector(need: str) -> Callable[[Any, int | None, int | None], Any]:
    """How ``need``, a reduction or a view, is selected from that state."""
    return VIEWS[need].select if need in VIEWS.names() else REDUCTIONS[need].select


#: Probabilities, shares, cosines and coordinates, at most 1, are summed as integers of 2^-36: the
#: sum of a batch of 2^14 tokens is below 2^53, so exact in float64, and 2^27 tokens fit into one
#: counter.
FIXED_POINT = 2.0**36

#: Tokens of one population and block, and tokens in all where one expert has everything.
MOST_TOKENS = 2**27

#: Adds a batch to the counters [populations, blocks, ...], or [blocks, ...].
Fold = Callable[[np.ndarray, TokenBatch, Kernels], None]


def counters(
    name: str,
    needs: tuple[str, ...],
    shape: Callable[[Extent], tuple[int, ...]],
    fold: Fold,
    use: Use = ANY_USE,
) -> Reduction:
    """A reduction that keeps counters of ``shape`` for each population and block."""
    return Reduction(
        name=name,
        needs=needs,
        start=_counting(lambda extent: extent.zeros(*shape(extent)), fold),
        merge=added,
        select=SettledCounts.select,
        settle=SettledCounts.of,
        use=use,
    )


def block_counters(
    name: str,
    needs: tuple[str, ...],
    shape: Callable[[Extent], tuple[int, ...]],
    fold: Fold,
    read: Callable[[np.ndarray], Any],
    use: Use = ANY_USE,
) -> Reduction:
    """Counters of ``shape`` by block; ``read`` takes their total, which is 0 for a population."""

    def select(settled: SettledCounts, population: int | None, without: int | None) -> Any:
        total = settled.select(None, without)
        return read(total if population is None else np.zeros_like(total))

    def start(extent: Extent) -> np.ndarray:
        return extent.empty(NUM_BLOCKS, *shape(extent), dtype=np.int64)

    settle = lambda state: SettledCounts(state["counts"][None], state["counts"], {})
    return Reduction(name, needs, _counting(start, fold), added, select, settle, use)


def added(first: State, second: State) -> State:
    """The sum of two states, array by array."""
    return {name: first[name] + second[name] for name in first}


def run_starts(values: np.ndarray) -> Bool[np.ndarray, "values"]:
    """Whether a value differs from the one before it; the first one does."""
    is_first = np.ones_like(values, dtype=bool)
    is_first[1:] = values[1:] != values[:-1]
    return is_first


def run_sums(
    count: Int64[np.ndarray, "values"], start: Int64[np.ndarray, "runs"]
) -> Int64[np.ndarray, "runs"]:
    """Sums of the runs that begin at ``start``, the first at 0."""
    below = np.cumsum(count)
    total = below[start] - count[start]
    total[:-1], total[-1:] = total[1:] - total[:-1], below[-1:] - total[-1:]
    return total


def _counting(start: Callable[[Extent], np.ndarray], fold: Fold) -> Callable[[Extent], Accumulator]:
    class Counters:
        def __init__(self, extent: Extent) -> None:
            self._counts = start(extent)

        def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
            fold(self._counts, batch, kernels)

        def state(self) -> State:
            return {"counts": self._counts}

    return Counters


def histogram_of(
    name: str,
    needs: tuple[str, ...],
    values: Callable[[TokenBatch], np.ndarray],
    use: Use = ANY_USE,
) -> Reduction:
    """Counts of ``values`` (at least 0) in the bins of ``geometry.histogram``."""

    def fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
        kernels["count_bins"](counts, values(batch), batch.population, batch.block)

    return counters(name, needs, lambda extent: (NUM_BINS,), fold, use)


def histogram(quantity: str, use: Use = ANY_USE) -> Reduction:
    """Counts of a quantity of the tokens by bin."""
    return histogram_of(
        f"{quantity}_histogram", (quantity,), lambda batch: getattr(batch, quantity), use
    )


# --------------------------------------------------------------------------------------------- sums
#: Numbers are summed as integers of 2^-32: up to 2^7 = 128 each, the sum of a batch of 2^14 tokens
#: is below 2^53, so exact in float64, and 2^24 tokens of that size fit into one counter.
_SUM_UNIT = 2.0**32
_LARGEST = 2.0**7

#: Numbers of each token, [tokens, columns], at most 128 in size.
Numbers = Callable[[TokenBatch], Float64[np.ndarray, "tokens columns"]]


def sums(
    name: str, needs: tuple[str, ...], num_columns: int, numbers: Numbers, use: Use = ANY_USE
) -> Reduction:
    """Tokens in the first counter, then sums of each column; see :func:`means`."""

    def fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
        values = np.rint(np.clip(numbers(batch), -_LARGEST, _LARGEST) * _SUM_UNIT)
        counts[..., 0] += batch.count_labels(len(counts))
        for column in range(num_columns):
            counts[..., column + 1] += batch.count_labels(len(counts), values[:, column])

    return counters(name, needs, lambda extent: (num_columns + 1,), fold, use)


def means(selected: np.ndarray) -> list[float | None]:
    """Mean of each column of a selected state; None without tokens."""
    tokens, *totals = selected.tolist()
    return [total / _SUM_UNIT / tokens if tokens else None for total in totals]
