"""Batches, threads, cuts, interruptions and other routers in step change how fast the answer comes,
not a bit of it.
"""

import functools
import threading
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.core.tokens import TILE, TokenColumns
from moegeom.engine import sources
from moegeom.engine.choice import tile_logits
from moegeom.engine.loop import Hooks, Lane, Pace, read_snapshot, scan_in_step, scan_router
from moegeom.engine.plan import MAX_TILES, batch_tokens, on_all_cores, sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.request import ScanRequest
from moegeom.engine.session import Session
from moegeom.engine.task import MAX_DOMAINS, Populations, Task, block_of
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import reductions_for
from moegeom.kernels.table import load_kernels
from moegeom.measure import passes as measure_module
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from moegeom.pipeline import scan, with_tokens
from moegeom.tokens.traces import source as traces
from moegeom.variants.emulated import arithmetic, emulate
from tests.by_day import by_day
from tests.columns import columns_of
from tests.unit.scan import made
from tests.unit.scan.made import merge
from tests.unit.tokens.dialects.written import Written, write_vllm

KINDS = ("softmax", "sigmoid")

#: The last tile is short.
TOKENS = 2 * TILE + 100


@functools.cache
def undisturbed(kind: str) -> dict[str, list[dict]]:
    """Tables from one thread and batches of one tile."""
    return made.measured(made.recording(TOKENS), made.router(kind))


@pytest.mark.parametrize(
    ("kind", "batch_tokens", "num_workers"),
    [("softmax", 10**9, 2), ("sigmoid", TILE + 7, 3), ("softmax", 1, 2)],
    ids=["more workers than batches", "no whole batches", "values in Fortran order"],
)
def test_any_batches_threads_and_order_of_values_give_equal_tables(kind, batch_tokens, num_workers):
    source = made.recording(TOKENS)
    if batch_tokens == 1:
        source.values = np.asfortranarray(source.values)
    pace = {"batch_tokens": batch_tokens, "num_workers": num_workers}
    np.testing.assert_equal(made.measured(source, made.router(kind), **pace), undisturbed(kind))


def test_kernels_only_meet_contiguous_arrays(monkeypatch, tmp_path):
    """They are compiled for those; measure sees to it, whatever a source returns."""
    tokens = TILE + 10
    values = np.asfortranarray(made.inputs(tokens))
    values[3, 2] = np.nan
    source = made.Recorded(
        values, chosen=np.asfortranarray(np.tile(np.arange(3, dtype=np.int32), (tokens, 1)))
    )
    run = made.run(source, non_finite="skip", per_token=True, folder=tmp_path)
    contiguous: dict[str, bool] = {}

    def spy(name, kernel):
        def call(*arguments):
            arrays = [a for a in arguments if isinstance(a, np.ndarray)]
            are = all(a.flags.c_contiguous for a in arrays)
            contiguous[name] = contiguous.get(name, True) and are
            return kernel(*arguments)

        return call

    kernels = {name: spy(name, kernel) for name, kernel in load_kernels("cpu").items()}
    monkeypatch.setattr(measure_module, "load_kernels", lambda backend: kernels)
    measure_router(run)
    assert [name for name, is_so in contiguous.items() if not is_so] == []
    names = {"input_norm", "top_k", "boundary_distance", "same_set", "count_bins"}
    assert names <= contiguous.keys()


@pytest.mark.parametrize(
    ("kind", "tiles_before", "num_workers"), [("sigmoid", 1, 1), ("softmax", 2, 2)]
)
def test_a_scan_goes_on_from_any_snapshot_to_equal_tables(
    monkeypatch, tmp_path, kind, tiles_before, num_workers
):
    snapshot = tmp_path / "snapshot.npz"
    snapshot.write_bytes(b"PK\x03\x04 cut off")  # one that is damaged is begun anew
    pace = Pace(TILE, num_workers, snapshot_seconds=-1.0)
    monkeypatch.setattr(measure_module, "pace_of", lambda run: pace)
    before = []

    def interrupt(tokens: int) -> None:
        before.append(tokens)
        if len(before) > tiles_before:
            raise made.Interrupted

    again = functools.partial(
        made.measured, made.recording(TOKENS), made.router(kind), snapshot=snapshot
    )
    with pytest.raises(made.Interrupted):
        again(advanced=interrupt)
    assert read_snapshot(snapshot).num_tokens == TILE * tiles_before
    after = []
    np.testing.assert_equal(again(advanced=after.append), undisturbed(kind))
    assert after[0] == sum(before[:tiles_before])  # what need not be done again
    assert sum(after) == TOKENS


#: Metrics that count: parity tests hold distances.
COUNTS = [m for m in METRICS.all() if {"experts", "expert_sets"} & set(m.columns)]


@pytest.mark.parametrize("kind", by_day(KINDS, ["sigmoid"]))
def test_the_order_of_documents_does_not_matter_for_counts(kind):
    """Labels move with the tokens; products are of other tiles, so ties may round otherwise."""
    source = made.recording(TOKENS)
    order = np.random.default_rng(4).permutation(source.columns.document.max() + 1)
    token = np.argsort(order[source.columns.document], kind="stable")
    source.columns = TokenColumns(**{n: a[token] for n, a in vars(source.columns).items()})
    source.values = source.values[token]
    tables = made.measured(source, made.router(kind), metrics=[*COUNTS, METRICS["tokens"]])
    for table, columns in {
        "experts": ("num_slots", "load", "load_se"),
        "layers": ("num_tokens", "load_cv_ddof0", "load_cv_ddof0_se", "num_expert_sets"),
    }.items():
        for column in columns:
            expected = [row[column] for row in undisturbed(kind)[table]]
            assert [row[column] for row in tables[table]] == expected, column


@pytest.mark.parametrize("kind", by_day(KINDS, ["sigmoid"]))
def test_the_reference_backend_counts_the_same(kind):
    options = {"backend": "reference", "metrics": COUNTS}
    tables, expected = (
        made.measured(made.recording(TOKENS), made.router(kind), **options),
        undisturbed(kind),
    )
    np.testing.assert_equal(tables["expert_sets"], expected["expert_sets"])
    for ours, theirs in zip(tables["experts"], expected["experts"], strict=True):
        counted = [n for n in theirs if not n.startswith("score_share")]
        np.testing.assert_equal([ours[n] for n in counted], [theirs[n] for n in counted])
        # scores are float32 in one backend and float64 in the other
        np.testing.assert_allclose(ours["score_share"], theirs["score_share"], rtol=1e-6)


MODEL = SyntheticModel(hidden=16, experts=8, top_k=2, layers=3)

#: What lanes fold.
REDUCED = ("token_counts", "expert_sets", "margin_histogram")

#: Files, each a piece, of tokens that end in no tile.
FILES, TRACE_TOKENS = 3, 2 * TILE + 77

#: Documents that another run answered, and the ids of each; its last token was never routed.
DOCUMENTS, TEXT = 3, np.arange(128)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_step")
    write_checkpoint(folder / "model", MODEL)
    (folder / "dump").mkdir()
    random = np.random.default_rng(0)
    for number in range(FILES):
        chosen = random.random((TRACE_TOKENS, MODEL.layers, MODEL.experts)).argsort(axis=2)
        np.save(folder / "dump" / f"{number}.npy", chosen[:, :, : MODEL.top_k].astype(np.uint8))
    write_tokens(folder / "rec", MODEL, DOCUMENTS * 128)
    requests = [
        Written(str(number), chosen[127 * number : 127 * (number + 1), :, : MODEL.top_k], TEXT, 5)
        for number in range(DOCUMENTS)
    ]
    write_vllm(folder / "other.jsonl", requests)
    return folder


@pytest.fixture
def pieces_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces that were read again after the first pass, where no more than one is kept."""
    read: list[int] = []
    piece_of = traces.piece_of

    def noted(found, number, trace):
        read.append(number)
        return piece_of(found, number, trace)

    monkeypatch.setattr(traces, "piece_of", noted)
    monkeypatch.setattr(traces, "CACHE_BYTES", 0)
    return read


def scanned(world: Path, out: Path, **options) -> dict[str, bytes]:
    options = {"tokens": "dump", "dialect": "vllm", "num_workers": 1} | options
    for name in {"tokens", "run_b"} & options.keys():
        options[name] = str(world / options[name])
    return tables(scan(ScanRequest(str(world / "model"), out=out, **options)))


def tables(results: Path) -> dict[str, bytes]:
    files = sorted(results.rglob("*.parquet"))
    return {str(path.relative_to(results)): path.read_bytes() for path in files}


#: What is scanned, and what is asked of it.
CASES: dict[str, dict[str, object]] = {
    "a trace": {},
    "rows by token": {"per_token": True, "num_workers": 2},
    "the trace of another run": {
        "layers": "0-1",
        "tokens": "rec",
        "dialect": None,
        "run_b": "other.jsonl",
        "arithmetics": ("bf16",),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_read_once_and_routers_measured_as_alone(
    case, world, tmp_path, pieces_read, monkeypatch
):
    options = CASES[case]
    together = scanned(world, tmp_path / "together", **options)
    if case == "a trace":
        assert pieces_read == list(range(FILES))
    pieces_read.clear()
    monkeypatch.setattr(sources, "_MOST_BYTES", 0)
    assert scanned(world, tmp_path / "alone", **options) == together
    if case != "the trace of another run":  # which is one piece
        assert len(pieces_read) >= MODEL.layers * FILES


def test_parts_are_folded_in_step_as_their_sums_have_room(
    world, tmp_path, pieces_read, monkeypatch
):
    whole = scanned(world, tmp_path / "whole")
    pieces_read.clear()
    for number in (1, 2):
        scanned(world, tmp_path / str(number), part=f"{number}/2")
    assert len(pieces_read) == FILES + 1  # the piece that both have a share of
    merged = merge([tmp_path / "1", tmp_path / "2"], tmp_path / "merged")
    assert isinstance(merged, Path)
    assert tables(merged) == whole
    request = ScanRequest(str(world / "model"), tokens=str(world / "dump"), dialect="vllm")
    opened = with_tokens(request, Session.of(request.checkpoint, request))
    assert opened.source is not None
    needed = sources._state_bytes(opened.chosen[0], opened.source.facts.num_tokens)
    monkeypatch.setattr(sources, "_MOST_BYTES", 2 * needed)
    groups = sources.in_step(opened.chosen, [opened.source])
    assert [[router.layer for router in group] for group in groups] == [[0, 1], [2]]


def test_a_router_and_its_arithmetics_are_measured_as_if_alone_of_one_reading(monkeypatch):
    source, tiles, router = made.recording(5 * TILE - 9), range(5), prepare(made.router("softmax"))
    kernels, flips = load_kernels("cpu"), reductions_for(lambda use: use.of_flip)
    tasks = [
        Task(router, source, kernels, REDUCED),
        *(
            Task(router, source, kernels, flips, variant=emulate(router.router, arithmetic(name)))
            for name in ("tf32", "bf16", "bf16-logits", "float32-sequential")
        ),
    ]
    expected = [scan_router(task, tiles, Pace(TILE, 1)) for task in tasks]
    begun = scan_router(tasks[0], tiles[:2], Pace(TILE, 1))
    read, read_values = [], source.read_values

    def noted(name, start, stop):
        read.append(start)
        return read_values(name, start, stop)

    monkeypatch.setattr(source, "read_values", noted)
    lanes = [Lane(tasks[0], begin=begun), *map(Lane, tasks[1:])]
    scanned = scan_in_step(lanes, tiles, Pace(2 * TILE, 2))
    assert sorted(read) == [0, 2 * TILE, 4 * TILE]
    for one, other in zip(scanned, expected, strict=True):
        assert one.num_tokens == other.num_tokens == source.facts.num_tokens
        np.testing.assert_equal(one.states, other.states)


# -------------------------------------------------------------------------------- parts of the scan
#: What these tests fold.
FOLDED = ("token_counts", "expert_sets", "margin_histogram")


def task_of(source) -> Task:
    return Task(prepare(made.router()), source, load_kernels("cpu"), FOLDED)


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


def test_blocks_follow_documents_or_tokens_and_domains_beyond_the_limit_share_one():
    document = np.repeat(np.arange(100), 13)
    expected = (document + document // NUM_BLOCKS) % NUM_BLOCKS
    np.testing.assert_array_equal(block_of(columns_of(document), 5 * TILE), expected)
    for period in (1, 2, 4, 8, 16):
        document = np.arange(0, NUM_BLOCKS * NUM_BLOCKS, period)
        counts = np.bincount(block_of(columns_of(document), 0), minlength=NUM_BLOCKS)
        np.testing.assert_array_equal(counts, NUM_BLOCKS // period)
    whole = block_of(columns_of(np.full(4 * TILE, -1)), 0)
    part = block_of(columns_of(np.full(TILE, -1)), 2 * TILE)
    np.testing.assert_array_equal(part, whole[2 * TILE : 3 * TILE])
    np.testing.assert_array_less(1, len(np.unique(whole)))
    domains = tuple(f"d{i}" for i in range(MAX_DOMAINS + 5))
    populations = Populations(domains)
    labels = populations.label(
        columns_of(np.zeros(4), domain=[-1, 0, MAX_DOMAINS - 1, MAX_DOMAINS + 3])
    )
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
