"""Snapshots, samples, labels, batches and products by themselves."""

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from moegeom.core.tokens import TILE, TokenColumns
from moegeom.engine.choice import tile_logits
from moegeom.engine.loop import Hooks, Pace, Progress, scan_router
from moegeom.engine.plan import MAX_TILES, batch_tokens, on_all_cores, sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.task import MAX_DOMAINS, Populations, Task, block_of
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.table import load_kernels
from tests.unit.scan import made

#: What these tests fold.
REDUCED = ("token_counts", "expert_sets", "margin_histogram")


def task_of(source) -> Task:
    return Task(prepare(made.router()), source, load_kernels("cpu"), REDUCED)


@pytest.fixture(scope="module")
def progress():
    return scan_router(task_of(made.recording()), range(5), Pace(TILE, 1))


def test_going_on_from_the_end_adds_nothing_and_nothing_measured_is_nothing(progress):
    again = scan_router(task_of(made.recording()), range(5), Pace(TILE, 2), begin=progress)
    assert (again.next_tile, again.num_tokens) == (progress.next_tile, progress.num_tokens)
    np.testing.assert_equal(again.states, progress.states)
    assert Progress() == Progress(0, 0, (), 0, {})


def batches_of(tokens, tiles, pace) -> list[np.ndarray]:
    """Numbers of the tokens of each batch."""
    batches = []
    hooks = Hooks(rows=lambda batch: batch.token, written=batches.append)
    scanned = scan_router(task_of(made.recording(tokens)), tiles, pace, hooks=hooks)
    assert scanned.num_tokens == sum(map(len, batches))
    return batches


def test_batches_of_the_tiles_asked_for_arrive_in_order_and_never_exceed_the_largest():
    tokens = (MAX_TILES + 3) * TILE + 5
    batches = batches_of(tokens, range(MAX_TILES + 4), Pace(10**9, 3))
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(tokens))
    assert max(map(len, batches)) <= MAX_TILES * TILE
    some = batches_of(made.TOKENS, [0, 2, 3], Pace(10 * TILE, 1))
    np.testing.assert_array_equal(np.unique(np.concatenate(some) // TILE), [0, 2, 3])


def test_samples_and_batches_are_whole_tiles_and_no_longer_than_wished():
    for tokens in (20_001, 20_480, 10**6 + 7):
        tiles = sample_tiles(tokens, 3)
        assert len(tiles) * TILE <= 20_000
        assert (np.diff(tiles) > 0).all() and (tiles[-1] + 1) * TILE <= tokens
        assert sample_tiles(tokens, 3) == tiles
    assert sample_tiles(10**6, 1) != sample_tiles(10**6, 2)
    assert sample_tiles(5 * TILE + 1, 0, most=6 * TILE) == [0, 1, 2, 3, 4, 5]
    for width in (1, 16, 2048, 7168, 10**6):
        tokens = batch_tokens(width)
        assert tokens % TILE == 0 and TILE <= tokens <= MAX_TILES * TILE


def columns(document, domain=0) -> TokenColumns:
    tokens = len(document)
    zeros = np.zeros(tokens, np.int32)
    domains = np.broadcast_to(np.int16(domain), tokens)
    return TokenColumns(np.asarray(document, np.int64), zeros, zeros - 1, domains)


def test_blocks_follow_documents_or_tokens_and_domains_beyond_the_limit_share_one():
    document = np.repeat(np.arange(100), 13)
    expected = (document + document // NUM_BLOCKS) % NUM_BLOCKS
    np.testing.assert_array_equal(block_of(columns(document), 5 * TILE), expected)
    for period in (1, 2, 4, 8, 16):
        document = np.arange(0, NUM_BLOCKS * NUM_BLOCKS, period)
        counts = np.bincount(block_of(columns(document), 0), minlength=NUM_BLOCKS)
        np.testing.assert_array_equal(counts, NUM_BLOCKS // period)
    whole = block_of(columns(np.full(4 * TILE, -1)), 0)
    part = block_of(columns(np.full(TILE, -1)), 2 * TILE)
    np.testing.assert_array_equal(part, whole[2 * TILE : 3 * TILE])
    np.testing.assert_array_less(1, len(np.unique(whole)))
    domains = tuple(f"d{i}" for i in range(MAX_DOMAINS + 5))
    populations = Populations(domains)
    labels = populations.label(columns(np.zeros(4), [-1, 0, MAX_DOMAINS - 1, MAX_DOMAINS + 3]))
    names = [populations.names[i] for i in labels]
    assert names == ["domain=(none)", "domain=d0", f"domain=d{MAX_DOMAINS - 1}", "domain=(others)"]
    np.testing.assert_array_less(len(populations.names), 2**7 + 1)  # bits of an expert set key


@pytest.mark.parametrize(("dtype", "atol"), [(np.float32, 1e-5), (np.float64, 1e-13)])
def test_logits_are_the_product_whatever_tokens_come_with_them(dtype, atol):
    random = np.random.default_rng(0)
    values = random.standard_normal((2 * TILE + 9, 24)).astype(np.float32)
    rows = random.standard_normal((24, 7)).astype(dtype)
    bias = random.standard_normal(7).astype(dtype)
    whole = tile_logits(values, rows, bias)
    assert whole.dtype == dtype
    exact = values.astype(np.float64) @ rows.astype(np.float64) + bias
    np.testing.assert_allclose(whole, exact, atol=atol)
    np.testing.assert_array_equal(tile_logits(values[TILE:], rows, bias), whole[TILE:])
    # a token alone in a tile has the same bits
    np.testing.assert_array_equal(tile_logits(values[:1], rows, bias), whole[:1])
    # one that is not finite does not touch its neighbours
    values[11] = np.nan
    others = np.delete(np.arange(len(values)), 11)
    np.testing.assert_array_equal(tile_logits(values, rows, bias)[others], whole[others])


# -------------------------------------------------------------------------------- work on all cores
def _blas_threads() -> list[int]:
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


def test_results_come_in_the_order_of_the_items_whichever_is_done_first() -> None:
    second_is_done = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert second_is_done.wait(60)
        else:
            second_is_done.set()
        return number

    assert list(on_all_cores(work, range(8), 2)) == list(range(8))


def test_each_piece_of_work_has_one_thread_of_blas() -> None:
    with threadpool_limits(2, user_api="blas"):
        found = list(on_all_cores(lambda _: _blas_threads(), range(2), 2))
    assert found[0]
    assert all(threads == 1 for one in found for threads in one)


def test_an_error_is_told_and_what_has_not_begun_is_left_out() -> None:
    begun, never = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError("the first")
        never.wait(0.05)  # time for the error to arrive

    with pytest.raises(ValueError, match="the first"):
        list(on_all_cores(work, range(100), 1))
    assert len(begun) < 100
