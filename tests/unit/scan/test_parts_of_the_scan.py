"""Snapshots, samples, labels, batches and products by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.tokens import TILE, TokenColumns
from moegeom.engine.labels import MAX_DOMAINS, Populations, block_of
from moegeom.engine.loop import Hooks, Pace, Progress, scan_router
from moegeom.engine.plan import MAX_TILES, batch_tokens, sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.products import tile_logits
from moegeom.engine.snapshot import read_snapshot, write_snapshot
from moegeom.engine.task import Task
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.table import load_kernels

#: What these tests fold.
REDUCED = ("token_counts", "expert_sets", "margin_histogram")


def task_of(made, source, router=None) -> Task:
    return Task(prepare(router or made.router()), source, load_kernels("cpu"), REDUCED)


@pytest.fixture
def progress(made):
    return scan_router(task_of(made, made.recording()), range(5), Pace(TILE, 1))


def test_a_snapshot_is_read_as_it_was_written(progress, tmp_path):
    path = tmp_path / "snapshot.npz"
    write_snapshot(path, progress)
    found = read_snapshot(path)
    for field in ("next_tile", "num_tokens", "non_finite", "num_non_finite"):
        assert getattr(found, field) == getattr(progress, field)
    np.testing.assert_equal(found.states, progress.states)
    assert [p.name for p in tmp_path.iterdir()] == ["snapshot.npz"]


def test_without_a_whole_snapshot_there_is_none(progress, tmp_path):
    path = tmp_path / "snapshot.npz"
    assert read_snapshot(path) is None
    write_snapshot(path, progress)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_snapshot(path) is None


def test_going_on_from_the_end_adds_nothing(made, progress):
    task = task_of(made, made.recording())
    again = scan_router(task, range(5), Pace(TILE, 2), begin=progress)
    assert (again.next_tile, again.num_tokens) == (progress.next_tile, progress.num_tokens)
    np.testing.assert_equal(again.states, progress.states)


def test_batches_arrive_in_order_and_never_exceed_the_largest(made):
    tokens = (MAX_TILES + 3) * TILE + 5
    seen = []
    task = task_of(made, made.recording(tokens))
    tiles = range(MAX_TILES + 4)
    found = scan_router(
        task,
        tiles,
        Pace(10**9, 3),
        hooks=Hooks(rows=lambda batch: batch.token, written=seen.append),
    )
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(tokens))
    np.testing.assert_array_less(max(map(len, seen)), MAX_TILES * TILE + 1)
    assert found.num_tokens == tokens


def test_only_the_tiles_asked_for_are_scanned(made):
    seen = []
    task = task_of(made, made.recording())
    hooks = Hooks(rows=lambda batch: batch.token, written=seen.append)
    scan_router(task, [0, 2, 3], Pace(10 * TILE, 1), hooks=hooks)
    np.testing.assert_array_equal(np.unique(np.concatenate(seen) // TILE), [0, 2, 3])


def test_nothing_measured_is_a_progress_of_nothing():
    assert Progress() == Progress(0, 0, (), 0, {})


def test_a_short_stream_is_its_own_sample():
    assert sample_tiles(5 * TILE + 1, 0, wanted=6 * TILE) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("tokens", [20_001, 20_480, 10**6 + 7])
def test_a_sample_is_whole_tiles_ascending_and_no_longer_than_wanted(tokens):
    found = np.array(sample_tiles(tokens, 3))
    np.testing.assert_array_less(len(found) * TILE, 20_001)
    np.testing.assert_array_less(0, np.diff(found))
    np.testing.assert_array_less((found + 1) * TILE, tokens + 1)
    assert sample_tiles(tokens, 3) == found.tolist()


def test_samples_differ_by_seed():
    assert sample_tiles(10**6, 1) != sample_tiles(10**6, 2)


@pytest.mark.parametrize("width", [1, 16, 2048, 7168, 10**6])
def test_batches_are_whole_tiles(width):
    found = batch_tokens(width)
    np.testing.assert_array_equal(found % TILE, 0)
    assert TILE <= found <= MAX_TILES * TILE


def columns(document, domain) -> TokenColumns:
    tokens = len(document)
    return TokenColumns(
        document=np.asarray(document, np.int64),
        position=np.zeros(tokens, np.int32),
        token_id=np.full(tokens, -1, np.int32),
        domain=np.asarray(domain, np.int16),
    )


def test_a_document_is_never_split_between_blocks():
    document = np.repeat(np.arange(100), 13)
    found = block_of(columns(document, document * 0), 5 * TILE)
    np.testing.assert_array_equal(found, (document + document // NUM_BLOCKS) % NUM_BLOCKS)


@pytest.mark.parametrize("period", [1, 2, 4, 8, 16])
def test_domains_that_take_turns_are_in_every_block(period):
    document = np.arange(0, NUM_BLOCKS * NUM_BLOCKS, period)
    found = block_of(columns(document, document * 0), 0)
    counts = np.bincount(found, minlength=NUM_BLOCKS)
    np.testing.assert_array_equal(counts, np.full(NUM_BLOCKS, NUM_BLOCKS // period))


def test_without_documents_a_block_follows_from_the_absolute_token():
    whole = block_of(columns(np.full(4 * TILE, -1), np.zeros(4 * TILE)), 0)
    part = block_of(columns(np.full(TILE, -1), np.zeros(TILE)), 2 * TILE)
    np.testing.assert_array_equal(part, whole[2 * TILE : 3 * TILE])
    np.testing.assert_array_less(1, len(np.unique(whole)))


def test_domains_beyond_the_limit_share_a_population():
    domains = tuple(f"d{i}" for i in range(MAX_DOMAINS + 5))
    populations = Populations(domains)
    found = populations.label(columns(np.zeros(4), [-1, 0, MAX_DOMAINS - 1, MAX_DOMAINS + 3]))
    names = [populations.names[i] for i in found]
    assert names == ["domain=(none)", "domain=d0", f"domain=d{MAX_DOMAINS - 1}", "domain=(others)"]
    np.testing.assert_array_less(len(populations.names), 2**7 + 1)  # bits of an expert set key


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_are_the_product_whatever_tokens_come_with_them(dtype):
    random = np.random.default_rng(0)
    values = random.standard_normal((2 * TILE + 9, 24)).astype(np.float32)
    columns_of_weight = random.standard_normal((24, 7)).astype(dtype)
    bias = random.standard_normal(7).astype(dtype)
    whole = tile_logits(values, columns_of_weight, bias)
    assert whole.dtype == dtype
    exact = values.astype(np.float64) @ columns_of_weight.astype(np.float64) + bias
    np.testing.assert_allclose(whole, exact, atol=1e-5 if dtype == np.float32 else 1e-13)
    np.testing.assert_array_equal(tile_logits(values[TILE:], columns_of_weight, bias), whole[TILE:])
    # a token alone in a tile has the same bits
    np.testing.assert_array_equal(tile_logits(values[:1], columns_of_weight, bias), whole[:1])


def test_a_token_that_is_not_finite_does_not_touch_its_neighbours():
    random = np.random.default_rng(0)
    values = random.standard_normal((40, 24)).astype(np.float32)
    weight = random.standard_normal((24, 7)).astype(np.float32)
    clean = tile_logits(values, weight, None)
    values[11] = np.nan
    kept = np.arange(40) != 11
    np.testing.assert_array_equal(tile_logits(values, weight, None)[kept], clean[kept])
