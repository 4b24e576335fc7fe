"""States of reductions form a commutative monoid: cuts, threads and resumes cannot change them."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_equal

from moegeom.core.tokens import TILE
from moegeom.kernels import batch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions import samples
from moegeom.kernels.reductions import samples as sketch
from moegeom.kernels.table import BACKENDS, load_kernels

EXPERTS, TOP_K, POPULATIONS, TOKENS, HIDDEN, RUN = 9, 3, 3, 240, 5, 8
EXTENT = Extent(POPULATIONS, EXPERTS, TOP_K, HIDDEN)
ALL = np.arange(TOKENS)
KERNELS = {backend: load_kernels(backend) for backend in BACKENDS}


def quantities_of(token: np.ndarray) -> batch.TokenBatch:
    """Some of the tokens of one fixed stream, in the order given."""
    random = np.random.default_rng(0)
    score = random.standard_normal((TOKENS, EXPERTS)) + np.linspace(0, 3, EXPERTS)
    chosen = np.argsort(-score, axis=1)[:, :TOP_K].astype(np.int32)
    floats = random.exponential(0.5, (7, TOKENS))
    probability = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
    inputs = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    floats[0, ::17] = 0.0
    # a run of 8 tokens is a document, and a tile: what looks at neighbours stays within both
    document = np.arange(TOKENS) // RUN
    labels = np.stack([document % POPULATIONS, document % batch.NUM_BLOCKS]).astype(np.int32)
    matches = random.random(TOKENS) < 0.3
    direction = random.standard_normal((TOKENS, HIDDEN))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    direction[::29] = 0.0
    return batch.TokenBatch(
        token=token.astype(np.int64) * (TILE // RUN),
        document=document[token],
        position=(np.arange(TOKENS) % RUN).astype(np.int32)[token],
        probability=probability[token],
        entropy=floats[5][token],
        log_sum_exp=1e3 * (floats[5][token] - 0.5),
        angle=floats[6][token],
        rounding_sigmas=floats[6][token],
        input=inputs[token],
        shared_output=inputs[token] + np.float32(1.0),
        routed_output=inputs[token] ** 2,
        expert_output=random.standard_normal((TOKENS, EXPERTS, 4)).astype(np.float32)[token],
        population=labels[0][token],
        block=labels[1][token],
        chosen=chosen[token],
        weights=floats[4][token, None] / np.arange(1, chosen.shape[1] + 1),
        margin=floats[0][token],
        group_margin=floats[1][token],
        distance=floats[2][token],
        distance_upper=(floats[2] * (1.0 + np.where(matches, 0.0, floats[3])))[token],
        pair=np.stack([chosen[:, -1], (chosen[:, -1] + 1) % EXPERTS], axis=1)[token],
        input_norm=floats[3][token],
        float_bound=0.01 * floats[3][token],
        noise_scale=floats[4][token],
        num_chosen=random.integers(0, EXPERTS + 1, TOKENS).astype(np.int32)[token],
        matches_recording=matches[token],
        direction=direction[token],
        selection=score[token],
        scores=score[token],
        fill_decides=matches[token],
        weight_sum=np.minimum(floats[2], 1.0)[token],
        flip=flip_of(chosen[token], floats[:, token], matches[token]),
        noise=noise_of(token, floats),
        harm=batch.Harm(*floats[2:5, token], matches[token]),
        jumps=batch.Jumps(
            height=np.where(matches, np.nan, floats[2])[token],
            relative=floats[3][token],
            chance=floats[5][token],
            pair=np.stack([chosen[:, -1], (chosen[:, -1] + 1) % EXPERTS], axis=1)[token],
        ),
    )


def noise_of(token: np.ndarray, floats: np.ndarray) -> batch.NoisyFlip:
    """Probabilities of all tokens, a simulation and exit times of the first of every run."""
    low = np.minimum(floats[4], 0.5)[token]
    row = np.flatnonzero(token % RUN == 0)
    return batch.NoisyFlip(
        lower=low,
        estimate=1.1 * low,
        upper=np.minimum(2.0 * low, 1.0),
        row=row,
        flipped=token[row] % 5,
        draws=8,
        exit_early=floats[5][token][row],
        exit_late=2.0 * floats[5][token][row],
    )


def flip_of(chosen: np.ndarray, floats: np.ndarray, matches: np.ndarray) -> batch.Flip:
    """A variant that leaves the last chosen expert of some tokens for its neighbour."""
    row = np.flatnonzero(matches)
    last = chosen[row, -1]
    return batch.Flip(
        differs=matches,
        surely=matches & (floats[3] > 0.5),
        perhaps=matches | (floats[3] < 0.1),
        reordered=~matches & (floats[4] > 0.5),
        tied=floats[0] == 0.0,
        proved=~matches & (floats[5] > 0.2),
        weight_moved=np.where(matches, np.minimum(floats[1], 1.0), 0.0),
        swaps=np.stack([row, last, (last + 1) % EXPERTS], axis=1).astype(np.int32),
        predicted=np.minimum(floats[2], 1.0),
    )


def extent_of(name: str) -> Extent:
    """A bit for each token needs their number."""
    return replace(EXTENT, num_tokens=TOKENS * TILE // RUN) if name == "flip_bits" else EXTENT


def folded(name: str, *parts: np.ndarray, backend: str = "cpu"):
    """State after folding batches one after the other."""
    accumulator = REDUCTIONS[name].start(extent_of(name))
    for part in parts:
        accumulator.fold(quantities_of(part), KERNELS[backend])
    return accumulator.state()


EVERY = pytest.mark.parametrize("name", REDUCTIONS.names())
PARTS = st.lists(st.integers(0, 2), min_size=TOKENS // RUN, max_size=TOKENS // RUN).map(
    lambda owner: [np.flatnonzero(np.repeat(owner, RUN) == part) for part in range(3)]
)

#: Reductions of the whole only, which say so by holding nothing for a population.
WHOLE_ONLY = set("directions expert_pairs input_sample output_cosines flip_bits".split())

#: The one that is not by block either, and says so in the same way.
WITHOUT_BLOCKS = "flip_bits"


def rounded(value):
    """To ten digits: a part of the table of the whole is rounded otherwise than that of the part."""
    digits = np.vectorize(lambda number: float(f"{number:.9e}"), otypes=[float])
    return digits(np.atleast_1d(value))


def selected(name: str, state, population, without):
    """What a metric sees; expert sets with their members beside them."""
    reduction = REDUCTIONS[name]
    seen = reduction.select(reduction.settle(state), population, without)
    if name == "expert_sets":
        seen["members"] = seen["members"][seen.pop("row")]
    if name == "score_sample":
        return [rounded(seen.mean), rounded(seen.square)]
    if name == "input_sample":
        moments = (seen.moments.squared_distance, seen.moments.square_sum, seen.moments.mean)
        return [seen["input"], *(rounded(value) for value in moments if len(seen["input"]))]
    if isinstance(seen, samples.SampleRows):
        return {column: seen[column] for column in seen.state}
    return seen


@EVERY
def test_merging_is_associative_and_commutative_and_equals_folding(name):
    reduction, whole = REDUCTIONS[name], folded(name, ALL)
    merge, empty = reduction.merge, reduction.start(extent_of(name)).state()
    assert_equal(merge(empty, whole), whole)
    assert_equal(merge(whole, empty), whole)

    @settings(max_examples=settings().max_examples // 10)
    @given(PARTS)
    def holds(parts):
        a, b, c = (folded(name, part) for part in parts)
        assert_equal(merge(merge(a, b), c), whole)
        assert_equal(merge(a, merge(b, c)), whole)
        assert_equal(merge(c, merge(b, a)), whole)
        assert_equal(folded(name, *parts), whole)

    holds()


def test_merging_overflowing_sketches_is_associative_and_commutative(monkeypatch):
    """A sketch of expert sets that holds a fraction of them."""
    monkeypatch.setattr(sketch, "CAPACITY", 20)
    test_merging_is_associative_and_commutative_and_equals_folding("expert_sets")


@pytest.mark.parametrize("name", ["input_sample", "block_outputs"])
def test_merging_samples_of_a_longer_stream_is_associative_and_commutative(name, monkeypatch):
    """Samples that hold a part of the stream."""
    monkeypatch.setattr(samples, "NUM_INPUTS", 100)
    # the stream numbers its tokens up to 128 times as high: the sample is by number, not by place
    monkeypatch.setattr(sys.modules[__name__], "EXTENT", replace(EXTENT, num_tokens=TOKENS))
    test_merging_is_associative_and_commutative_and_equals_folding(name)
    assert 30 < len(folded(name, ALL)["key"]) < 130


@EVERY
def test_neither_a_state_in_between_nor_the_backend_changes_what_is_folded(name):
    accumulator, cut, whole = REDUCTIONS[name].start(extent_of(name)), 12 * RUN, folded(name, ALL)
    accumulator.fold(quantities_of(ALL[:cut]), KERNELS["cpu"])
    assert_equal(accumulator.state(), folded(name, ALL[:cut]))
    accumulator.fold(quantities_of(ALL[cut:]), KERNELS["cpu"])
    assert_equal(accumulator.state(), whole)
    assert_equal(accumulator.state(), whole)
    for backend in BACKENDS:
        assert_equal(folded(name, ALL[:cut], ALL[cut:], backend=backend), whole)


@EVERY
def test_what_is_selected_is_what_folding_the_tokens_of_the_rest_selects(name):
    """Without a block, of a population; except for what is for the whole only."""
    stream, whole = quantities_of(ALL), folded(name, ALL)
    for left_out in (0, 7):
        rest = [] if name == WITHOUT_BLOCKS else [np.flatnonzero(stream.block != left_out)]
        other = folded(name, *rest)
        for part in (None, 1):
            assert_equal(selected(name, whole, part, left_out), selected(name, other, part, None))
    for label in range(POPULATIONS):
        alone = [] if name in WHOLE_ONLY else [np.flatnonzero(stream.population == label)]
        other = folded(name, *alone)
        assert_equal(selected(name, whole, label, None), selected(name, other, None, None))
