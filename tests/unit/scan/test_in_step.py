"""Routers in step: a trace is read once for all of them, and each is measured as if alone."""

from pathlib import Path

import numpy as np
import pytest

from moegeom.core.tokens import TILE
from moegeom.engine import first_pass
from moegeom.engine.loop import Lane, Pace, scan_in_step, scan_router
from moegeom.engine.prepared import prepare
from moegeom.engine.request import ScanRequest
from moegeom.engine.session import Session
from moegeom.engine.task import Task
from moegeom.kernels.reduction import reductions_for
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import scan, with_tokens
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.tokens.traces import source as traces
from moegeom.variants.arithmetic import arithmetic
from moegeom.variants.emulated import emulate
from tests.unit.scan import made
from tests.unit.scan.made import merge
from tests.unit.tokens.dialects.written import Written, write_vllm

MODEL = SyntheticModel(hidden=16, experts=8, top_k=2, layers=3)

#: What lanes fold.
REDUCED = ("token_counts", "expert_sets", "margin_histogram")

#: Files, each a piece, of tokens that end in no tile.
FILES, TOKENS = 3, 2 * TILE + 77

#: Documents that another run answered, and the ids of each; its last token was never routed.
DOCUMENTS, TEXT = 3, np.arange(128)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_step")
    write_checkpoint(folder / "model", MODEL)
    (folder / "dump").mkdir()
    random = np.random.default_rng(0)
    for number in range(FILES):
        chosen = random.random((TOKENS, MODEL.layers, MODEL.experts)).argsort(axis=2)
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
def test_a_trace_is_read_once_and_each_router_measured_as_if_alone(
    case, world, tmp_path, pieces_read, monkeypatch
):
    options = CASES[case]
    together = scanned(world, tmp_path / "together", **options)
    if case == "a trace":
        assert pieces_read == list(range(FILES))
    pieces_read.clear()
    monkeypatch.setattr(first_pass, "_MOST_BYTES", 0)
    assert scanned(world, tmp_path / "alone", **options) == together
    if case != "the trace of another run":  # which is one piece
        assert len(pieces_read) >= MODEL.layers * FILES


def test_parts_are_folded_in_step_and_as_many_as_their_sums_have_room_for(
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
    needed = first_pass._state_bytes(opened.chosen[0], opened.source.facts.num_tokens)
    monkeypatch.setattr(first_pass, "_MOST_BYTES", 2 * needed)
    groups = first_pass.in_step(opened.chosen, [opened.source])
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
