"""Counts by document are those of counting by hand, however the stream is cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions import sketches
from moegeom.kernels.reference import token_hash
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
    """Sorted rows of counts, one for each document, as a multiset."""
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


@pytest.mark.parametrize("population", [None, 0, 1])
@pytest.mark.parametrize("without", [None, 0, 9])
def test_selected_counts_are_those_of_counting_by_hand(population, without):
    found = COUNTS.select(folded(np.arange(TOKENS)), population, without)
    assert Counter(map(tuple, found.tolist())) == by_hand(population, without)


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


def test_no_document_gives_no_row():
    found = COUNTS.select(COUNTS.start(EXTENT).state(), None, None)
    assert found.shape == (0, EXPERTS)
