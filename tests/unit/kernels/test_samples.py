"""Samples of documents and tokens are the same however a stream is cut and its length is told."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.engine.plan import rounds_won
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions import sketches
from moegeom.kernels.reductions.samples import NUM_IDS
from moegeom.kernels.reference import token_hash
from moegeom.recorder.sinks import _dropped
from tests.unit.kernels.batches import batch_of

EXPERTS, TOP_K, POPULATIONS, TOKENS = 7, 2, 2, 300
COUNTS = REDUCTIONS["document_counts"]
EXTENT = Extent(POPULATIONS, EXPERTS, TOP_K, num_tokens=TOKENS)


def stream() -> TokenBatch:
    """Documents of 1 to 20 tokens, some unknown, in two populations; some slots empty."""
    random = np.random.default_rng(3)
    document = np.repeat(np.arange(60), random.integers(1, 20, 60))[:TOKENS].astype(np.int64)
    document[random.random(TOKENS) < 0.1] = -1
    chosen = np.argsort(random.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    chosen[random.random(TOKENS) < 0.1, 1] = -1
    return batch_of(
        TOKENS,
        population=random.integers(0, POPULATIONS, TOKENS).astype(np.int32),
        block=(document % NUM_BLOCKS).astype(np.int32),
        chosen=chosen,
        document=document,
    )


def part_of(whole: TokenBatch, token: np.ndarray) -> TokenBatch:
    names = ("token", "population", "block", "chosen", "document")
    return TokenBatch(**{name: getattr(whole, name)[token] for name in names})


def folded(*tokens: np.ndarray):
    accumulator = COUNTS.start(EXTENT)
    for part in tokens:
        accumulator.fold(part_of(stream(), part), {})
    return accumulator.state()


def by_hand(population: int | None, without: int | None) -> Counter:
    whole = stream()
    kept = whole.document >= 0
    if population is not None:
        kept &= whole.population == population
    if without is not None:
        kept &= whole.block != without
    rows = {}
    for document, chosen in zip(whole.document[kept], whole.chosen[kept], strict=True):
        row = rows.setdefault(int(document), [0] * EXPERTS)
        for expert in chosen[chosen >= 0]:
            row[expert] += 1
    return Counter(map(tuple, rows.values()))


def test_selected_counts_are_those_of_counting_by_hand():
    for population, without in itertools.product((None, 0, 1), (None, 0, 9)):
        found = COUNTS.select(folded(np.arange(TOKENS)), population, without)
        assert Counter(map(tuple, found.tolist())) == by_hand(population, without)
    none = COUNTS.select(COUNTS.start(EXTENT).state(), None, None)
    assert none.shape == (0, EXPERTS)


def test_of_many_documents_those_with_the_smallest_hashes_stay_whole(monkeypatch):
    whole = folded(np.arange(TOKENS))
    monkeypatch.setattr(sketches, "DOCUMENTS", 5)
    kept = folded(np.arange(TOKENS))
    documents = np.unique(whole["document"])
    wanted = documents[np.argsort(token_hash(documents))][:5]
    np.testing.assert_array_equal(np.unique(kept["document"]), np.sort(wanted))
    rows = np.isin(whole["document"], wanted)
    np.testing.assert_equal(kept, {name: column[rows] for name, column in whole.items()})


@given(owner=st.lists(st.integers(0, 2), min_size=TOKENS, max_size=TOKENS))
def test_a_sample_of_documents_does_not_depend_on_how_the_stream_is_cut(owner):
    """Documents are cut in pieces, too, and pieces of dropped documents come again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketches, "DOCUMENTS", 5)
        parts = [np.flatnonzero(np.array(owner) == part) for part in range(3)]
        whole = folded(np.arange(TOKENS))
        first, second, third = map(folded, parts)
        np.testing.assert_equal(COUNTS.merge(COUNTS.merge(first, second), third), whole)
        np.testing.assert_equal(COUNTS.merge(third, COUNTS.merge(second, first)), whole)
        np.testing.assert_equal(folded(*parts), whole)


OPEN = Extent(1, 4, 2)


def _batch(start: int, stop: int) -> TokenBatch:
    token = np.arange(start, stop)
    chosen = np.stack([token % 4, (token + 1) % 4], axis=1).astype(np.int32)
    return batch_of(len(token), token=token, token_id=token.astype(np.int32), chosen=chosen)


@pytest.mark.parametrize("total", [100, NUM_IDS, 3 * NUM_IDS + 5])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_sample_does_not_depend_on_when_the_length_is_known(total: int, num_parts: int) -> None:
    reduction = REDUCTIONS["token_sample"]
    told = reduction.start(replace(OPEN, num_tokens=total))
    told.fold(_batch(0, total), {})
    edges = np.linspace(0, total, 20).astype(int)
    parts = [reduction.start(replace(OPEN, num_tokens=None)) for _ in range(num_parts)]
    for part, (start, stop) in zip(itertools.cycle(parts), itertools.pairwise(edges), strict=False):
        part.fold(_batch(start, stop), {})
    states = [part.state() for part in parts]
    assert max(len(state["key"]) for state in states) <= 2 * NUM_IDS + total // 19
    found = states[0] if num_parts == 1 else reduction.merge(*states)
    found = reduction.ended(found, replace(OPEN, num_tokens=total))
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
