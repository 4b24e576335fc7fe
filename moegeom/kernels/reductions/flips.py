"""Flips under another arithmetic or under noise on the input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moegeom.core.shapes import Int64
from moegeom.geometry.rounding import flip_probability
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import (
    ANY_USE,
    FIXED_POINT,
    Extent,
    Kernels,
    Reduction,
    State,
    Use,
    counters,
    run_starts,
    run_sums,
    sums,
)
from moegeom.kernels.reductions.samples import PENDING, PendingJoins


# ----------------------------------------------------------------------------------------- expected
def _count_expected(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.distance is not None and batch.noise_scale is not None
    probability = flip_probability(batch.distance, batch.noise_scale)
    counts[..., 0] += batch.count_labels(len(counts))
    counts[..., 1] += batch.count_labels(len(counts), np.rint(probability * FIXED_POINT))


#: Expected number of tokens that rounding the router input to bfloat16 flips.
BF16_SWITCH = counters(
    "bf16_flip", ("distance", "noise_scale", "input_norm"), lambda extent: (2,), _count_expected
)


def _probabilities(batch: TokenBatch) -> np.ndarray:
    sigmas = batch.rounding_sigmas
    assert sigmas is not None
    return flip_probability(sigmas, np.ones_like(sigmas))[:, None]


#: Expected flips under rounding of each coordinate of the input; for a sample.
ROUNDING_SWITCH = sums(
    "rounding_flip", ("rounding_sigmas",), 1, _probabilities, use=Use(is_sampled=True)
)


# ----------------------------------------------------------------------------------------- emulated
#: Sums, those of weight and of probability in units of 1 / FIXED_POINT.
TOKENS, FLIPPED, SURELY, PERHAPS, REORDERED, TIED, PROVED, DISPROVED, MOVED, PREDICTED = range(10)

#: Last axis of the counters: a sum, and the tokens of which its part is known.
SUM, KNOWN = range(2)


def _count_flips(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    flip = batch.flip
    assert flip is not None
    counted = {
        FLIPPED: flip.differs,
        SURELY: flip.surely,
        PERHAPS: flip.perhaps,
        REORDERED: flip.reordered,
        TIED: flip.tied,
        PROVED: flip.proved,
        DISPROVED: None if flip.proved is None else flip.proved & flip.differs,
        MOVED: np.rint(np.nan_to_num(flip.weight_moved) * FIXED_POINT),
        PREDICTED: None if flip.predicted is None else np.rint(flip.predicted * FIXED_POINT),
    }
    tokens = batch.count_labels(len(counts))
    counts[..., TOKENS, :] += tokens[..., None]
    for column, values in counted.items():
        if values is not None:
            counts[..., column, SUM] += batch.count_labels(len(counts), values)
            counts[..., column, KNOWN] += tokens


#: Counts of what a variant changes about the choice.
SWITCHES = counters(
    "flips",
    ("flip",),
    lambda extent: (10, 2),
    _count_flips,
    use=Use(of_flip=True, of_random_flip=True),
)


class _Bits:
    def __init__(self, extent: Extent) -> None:
        assert extent.num_tokens is not None, "flips are looked for in stored streams"
        size = -(-extent.num_tokens // 8)
        self._flipped, self._seen = np.zeros((2, size), np.uint8)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        assert batch.flip is not None
        _set(self._seen, batch.token)
        _set(self._flipped, batch.token[batch.flip.differs])

    def state(self) -> State:
        return {"flipped": self._flipped, "seen": self._seen}


def _set(bits: np.ndarray, token: np.ndarray) -> None:
    np.bitwise_or.at(bits, token >> 3, (1 << (token & 7)).astype(np.uint8))


def _select_bits(state: State, population: int | None, without: int | None) -> State:
    """Bits are kept for the whole: nothing is known of a part of it."""
    if population is None and without is None:
        return state
    return {name: np.zeros_like(bits) for name, bits in state.items()}


#: Which tokens a variant flips: a bit for each, so that layers can be joined on the token.
SWITCH_BITS = Reduction(
    name="flip_bits",
    needs=("flip",),
    start=_Bits,
    merge=lambda first, second: {name: first[name] | second[name] for name in first},
    select=_select_bits,
    use=Use(of_flip=True, of_random_flip=True),
)


# -------------------------------------------------------------------------------------------- noise
#: Columns of the counter array; probabilities are summed in units of 1 / FIXED_POINT.
NOISY_TOKENS, LOWER, ESTIMATE, UPPER, SIMULATED, DRAWN = range(6)


def _count_noise(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    noise = batch.noise
    assert noise is not None
    counts[..., NOISY_TOKENS] += batch.count_labels(len(counts))
    columns = {LOWER: noise.lower, ESTIMATE: noise.estimate, UPPER: noise.upper}
    for column, probability in columns.items():
        if probability is not None:
            units = np.rint(probability * FIXED_POINT)
            counts[..., column] += batch.count_labels(len(counts), units)
    flipped, draws = np.zeros((2, len(batch.token)))
    flipped[noise.row], draws[noise.row] = noise.flipped, noise.draws
    counts[..., SIMULATED] += batch.count_labels(len(counts), flipped)
    counts[..., DRAWN] += batch.count_labels(len(counts), draws)


#: What noise on the router input does: sums of probabilities, and counts of a simulation.
NOISE_SWITCHES = counters(
    "noise_flips", ("noise",), lambda extent: (6,), _count_noise, use=Use(is_sampled=True)
)


# -------------------------------------------------------------------------------------------- pairs
#: (row of the batch, expert out, expert in) of everything to be counted.
PairsOf = Callable[[TokenBatch], tuple[np.ndarray, np.ndarray, np.ndarray]]


class _Pairs(PendingJoins):
    """Most pairs never occur: the state lists those that do, by a key in ascending order."""

    def __init__(self, extent: Extent, pairs_of: PairsOf) -> None:
        self._extent, self._pairs_of = extent, pairs_of
        shape = np.array([extent.num_populations, extent.num_experts], dtype=np.int64)
        empty = dict.fromkeys(("key", "count"), extent.empty(0, dtype=np.int64))
        super().__init__({**empty, "shape": shape}, _counted)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        row, out, into = self._pairs_of(batch)
        key = out.astype(np.int64) * self._extent.num_experts + into
        key = key * self._extent.num_populations + batch.population[row]
        key = key * NUM_BLOCKS + batch.block[row]
        part = {"key": key, "count": np.ones_like(key)}
        self.add(part, len(key), max(PENDING, len(self._state["key"])))


def _counted(states: list[State]) -> State:
    """Equal keys added up; the first state says the shape."""
    key, count = (np.concatenate([state[name] for state in states]) for name in ("key", "count"))
    order = np.argsort(key, kind="stable")
    key, start = key[order], np.flatnonzero(run_starts(key[order]))
    return {"key": key[start], "count": run_sums(count[order], start), "shape": states[0]["shape"]}


def _select_pairs(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "experts experts"]:
    populations, experts = state["shape"]
    pair, label = np.divmod(state["key"], populations * NUM_BLOCKS)
    is_in = np.ones(len(label), dtype=bool) if without is None else label % NUM_BLOCKS != without
    if population is not None:
        is_in &= label // NUM_BLOCKS == population
    counts = np.zeros(experts * experts, dtype=np.int64)
    np.add.at(counts, pair[is_in], state["count"][is_in])
    return counts.reshape(experts, experts)


def pair_counts(
    name: str, needs: tuple[str, ...], pairs_of: PairsOf, use: Use = ANY_USE
) -> Reduction:
    """A reduction that counts pairs of experts."""
    return Reduction(
        name=name,
        needs=needs,
        start=lambda extent: _Pairs(extent, pairs_of),
        merge=lambda first, second: _counted([first, second]),
        select=_select_pairs,
        use=use,
    )


def _swaps(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert batch.flip is not None
    row, out, into = batch.flip.swaps.T
    return row, out, into


#: Pairs of experts that trade tokens when a variant chooses.
TRADED_PAIRS = pair_counts("swapped_pairs", ("flip",), _swaps, use=Use(of_flip=True))


def _nearest(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert batch.pair is not None
    row = np.flatnonzero(batch.pair[:, 0] >= 0)
    return row, batch.pair[row, 0], batch.pair[row, 1]


#: Which boundary is nearest: tokens by (expert out, expert in), population and block.
BOUNDARY_PAIRS = pair_counts(
    "boundary_pairs", ("distance", "pair"), _nearest, use=Use(of_random_router=False)
)
