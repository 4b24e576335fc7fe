"""Samples of a stream whose length comes last, against those of one whose length came first."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.engine.plan import rounds_won
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions.samples import NUM_IDS
from moegeom.recorder.fold import _dropped
from tests.unit.kernels.batches import batch_of

EXTENT = Extent(1, 4, 2)


def _batch(start: int, stop: int) -> TokenBatch:
    token = np.arange(start, stop)
    chosen = np.stack([token % 4, (token + 1) % 4], axis=1).astype(np.int32)
    return batch_of(len(token), token=token, token_id=token.astype(np.int32), chosen=chosen)


@pytest.mark.parametrize("total", [100, NUM_IDS, 3 * NUM_IDS + 5])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_sample_does_not_depend_on_when_the_length_is_known(total: int, num_parts: int) -> None:
    reduction = REDUCTIONS["token_sample"]
    told = reduction.start(replace(EXTENT, num_tokens=total))
    told.fold(_batch(0, total), {})
    edges = np.linspace(0, total, 20).astype(int)
    parts = [reduction.start(replace(EXTENT, num_tokens=None)) for _ in range(num_parts)]
    for part, (start, stop) in zip(itertools.cycle(parts), itertools.pairwise(edges), strict=False):
        part.fold(_batch(start, stop), {})
    states = [part.state() for part in parts]
    assert max(len(state["key"]) for state in states) <= 2 * NUM_IDS + total // 19
    found = states[0] if num_parts == 1 else reduction.merge(*states)
    found = reduction.ended(found, replace(EXTENT, num_tokens=total))
    np.testing.assert_equal(found, told.state())


def test_of_neighbours_one_wins_each_round() -> None:
    won = np.array([rounds_won(tile, seed=3) for tile in range(256)])
    for rounds in range(1, 9):
        in_each = (won.reshape(-1, 2**rounds) >= rounds).sum(axis=1)
        np.testing.assert_array_equal(in_each, 1)
    other = [rounds_won(tile, seed=4) for tile in range(256)]
    assert (won != other).any()


@given(
    st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1),
    st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1),
    st.integers(1, 12),
)
@settings(max_examples=60)
def test_what_goes_from_a_part_goes_from_the_whole(
    first: dict[int, int], second: dict[int, int], most: int
) -> None:
    both = {r: first.get(r, 0) + second.get(r, 0) for r in {*first, *second}}
    gone = set(_dropped(both, most))
    left = {r: size for r, size in both.items() if r not in gone}
    assert sum(left.values()) <= most or len(left) == 1
    assert not gone or max(gone) < min(left)
    for part in (first, second):
        assert set(_dropped(part, most)) <= gone
