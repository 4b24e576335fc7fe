"""States of reductions form a commutative monoid: cuts, threads and resumes cannot change them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.kernels.quantities import NUM_BLOCKS, Quantities
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions import coalitions as sketch
from moegeom.kernels.table import BACKENDS, load_kernels

EXPERTS, TOP_K, POPULATIONS, TOKENS, HIDDEN = 9, 3, 3, 240, 5
EXTENT = Extent(POPULATIONS, EXPERTS, TOP_K, HIDDEN)
KERNELS = {backend: load_kernels(backend) for backend in BACKENDS}


def quantities_of(token: np.ndarray) -> Quantities:
    """Some of the tokens of one fixed stream, in the order given."""
    random = np.random.default_rng(0)
    score = random.standard_normal((TOKENS, EXPERTS)) + np.linspace(0, 3, EXPERTS)
    chosen = np.argsort(-score, axis=1)[:, :TOP_K].astype(np.int32)
    floats = random.exponential(0.5, (5, TOKENS))
    floats[0, ::17] = 0.0
    labels = random.integers(0, [[POPULATIONS], [NUM_BLOCKS]], (2, TOKENS)).astype(np.int32)
    matches = random.random(TOKENS) < 0.3
    direction = random.standard_normal((TOKENS, HIDDEN))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    direction[::29] = 0.0
    return Quantities(
        token=token.astype(np.int64),
        population=labels[0][token],
        block=labels[1][token],
        chosen=chosen[token],
        margin=floats[0][token],
        group_margin=floats[1][token],
        distance=floats[2][token],
        pair=np.stack([chosen[:, -1], (chosen[:, -1] + 1) % EXPERTS], axis=1)[token],
        input_norm=floats[3][token],
        float_bound=0.01 * floats[3][token],
        noise_scale=floats[4][token],
        matches_recording=matches[token],
        direction=direction[token],
        selection=score[token],
    )


def folded(name: str, *parts: np.ndarray, backend: str = "cpu"):
    """State after folding batches one after the other."""
    accumulator = REDUCTIONS[name].start(EXTENT)
    for part in parts:
        accumulator.fold(quantities_of(part), KERNELS[backend])
    return accumulator.state()


EVERY = pytest.mark.parametrize("name", REDUCTIONS.names())
PARTS = st.lists(st.integers(0, 2), min_size=TOKENS, max_size=TOKENS).map(
    lambda owner: [np.flatnonzero(np.array(owner) == part) for part in range(3)]
)


def selected(name: str, state, population, without):
    """What a metric sees; coalitions with their members beside them."""
    found = REDUCTIONS[name].select(state, population, without)
    if name == "coalitions":
        found["members"] = found["members"][found.pop("row")]
    return found


@pytest.fixture
def overflowing(monkeypatch):
    """A sketch of coalitions that holds a fraction of them."""
    monkeypatch.setattr(sketch, "CAPACITY", 20)


@EVERY
def test_merging_is_associative_and_commutative_and_equals_folding(name):
    merge = REDUCTIONS[name].merge

    @settings(max_examples=settings().max_examples // 5)
    @given(PARTS)
    def holds(parts):
        whole = folded(name, np.arange(TOKENS))
        a, b, c = (folded(name, part) for part in parts)
        np.testing.assert_equal(merge(merge(a, b), c), whole)
        np.testing.assert_equal(merge(a, merge(b, c)), whole)
        np.testing.assert_equal(merge(c, merge(b, a)), whole)
        np.testing.assert_equal(folded(name, *parts), whole)

    holds()


def test_merging_overflowing_sketches_is_associative_and_commutative(overflowing):
    test_merging_is_associative_and_commutative_and_equals_folding("coalitions")
    test_the_empty_state_is_neutral("coalitions")


@EVERY
def test_the_empty_state_is_neutral(name):
    reduction = REDUCTIONS[name]
    empty, some = reduction.start(EXTENT).state(), folded(name, np.arange(TOKENS))
    np.testing.assert_equal(reduction.merge(empty, some), some)
    np.testing.assert_equal(reduction.merge(some, empty), some)


@EVERY
def test_asking_for_the_state_twice_changes_nothing(name):
    accumulator = REDUCTIONS[name].start(EXTENT)
    accumulator.fold(quantities_of(np.arange(100)), KERNELS["cpu"])
    np.testing.assert_equal(accumulator.state(), folded(name, np.arange(100)))
    accumulator.fold(quantities_of(np.arange(100, TOKENS)), KERNELS["cpu"])
    np.testing.assert_equal(accumulator.state(), folded(name, np.arange(TOKENS)))
    np.testing.assert_equal(accumulator.state(), folded(name, np.arange(TOKENS)))


@EVERY
def test_leaving_out_each_block_counts_every_other_block(name):
    """What is selected without block b is what folding the other blocks' tokens selects."""
    block = quantities_of(np.arange(TOKENS)).block
    whole = folded(name, np.arange(TOKENS))
    for left_out in (0, 7):
        rest = folded(name, np.flatnonzero(block != left_out))
        for population in (None, 1):
            np.testing.assert_equal(
                selected(name, whole, population, left_out),
                selected(name, rest, population, None),
            )


@EVERY
def test_populations_partition_the_whole(name):
    """Except for directions, which are kept for the whole only and say so by having no token."""
    population = quantities_of(np.arange(TOKENS)).population
    whole = folded(name, np.arange(TOKENS))
    for label in range(POPULATIONS):
        alone = folded(name, np.flatnonzero(population == label))
        if name == "directions":
            alone = folded(name)
        np.testing.assert_equal(
            selected(name, whole, label, None), selected(name, alone, None, None)
        )


@EVERY
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_states_folded_with_any_backend_are_equal(name, backend):
    token = np.arange(TOKENS)
    np.testing.assert_equal(
        folded(name, token[:50], token[50:], backend=backend),
        folded(name, token, backend="reference"),
    )
