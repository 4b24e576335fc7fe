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
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch

State = dict[str, np.ndarray]
Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Extent:
    """Sizes that fix the shape of a state; ``num_tokens`` is the length of the whole stream, None
    while nobody knows it.
    """

    num_populations: int
    num_experts: int
    top_k: int
    hidden_size: int = 1
    num_tokens: int | None = 0

    def zeros(self, *tail: int) -> np.ndarray:
        """A counter array [populations, blocks, *tail]."""
        return np.zeros((self.num_populations, NUM_BLOCKS, *tail), dtype=np.int64)


class Accumulator(Protocol):
    """Takes batches in; gives its state out as arrays at any moment."""

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None: ...

    def state(self) -> State: ...


@dataclass(frozen=True)
class Use:
    """Where a reduction means something, and what it costs.

    ``on_prior``: of synthetic inputs too, which say where boundaries are and not which tokens come.
    ``of_random_router``: of the random router too; else it says nothing there, too much, or costs
    too much. ``is_sampled``: it costs as much as the product, or more, so that a sample of the
    tokens is enough. ``of_flip``: it is about another choice beside that of the router;
    ``of_random_flip``: about that of the random router too.
    """

    on_prior: bool = False
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
    """Names of the reductions whose use is such."""
    return tuple(name for name in REDUCTIONS.names() if is_used(REDUCTIONS[name].use))


def reduction_of(need: str) -> str:
    """The reduction whose state answers ``need``, a reduction or a view."""
    return VIEWS[need].of if need in VIEWS.names() else need


def selector(need: str) -> Callable[[Any, int | None, int | None], Any]:
    """How ``need``, a reduction or a view, is selected from that state."""
    return VIEWS[need].select if need in VIEWS.names() else REDUCTIONS[need].select
