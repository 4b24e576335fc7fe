"""Folds: against a scan of the stored recording of the same tokens; ranks of torch.distributed that
fold together, against one process; steps of a Trainer, against a recorder in a loop of the test's own,
and the training itself against the same training without the callback.

As a script it is both ranks: ``test_two_ranks.py FOLDER``.
"""

import copy
import itertools
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.core.tokens import TILE
from moegeom.engine.choice import tile_logits
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder import FoldCallback, RouterRecorder, folding
from moegeom.results.reader import open_results
from moegeom.studies.track.study import TrackRequest, track
from tests.by_day import by_day
from tests.emulator.emulated_device import EmulatedDevice
from tests.records import new_folder, shared
from tests.unit.capture.conftest import NAMES, sample_of
from tests.unit.capture.test_recorder import record
from tests.unit.capture.trained import Batches, OtherPasses, losses, texts, tiny_model, trainer_of


def assert_same_results(mine: Path, theirs: Path) -> None:
    """Every table, bit for bit; what to type next names the tokens, and there are none here."""
    tables = sorted(path.name for path in theirs.glob("*.parquet"))
    assert sorted(path.name for path in mine.glob("*.parquet")) == tables
    for name in tables:
        a, b = (pq.read_table(folder / name) for folder in (mine, theirs))
        if name == "findings.parquet":
            a, b = a.drop_columns("next_command"), b.drop_columns("next_command")
        assert a.equals(b), name


#: Six tiles, the last one short: two more than the smaller samples have.
TOKENS = 5 * TILE + 100


def fold_pieces(model, out, pieces: Iterable[tuple[int, int]], num_tokens, group=None) -> None:
    layers = model.model.layers
    inputs = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    folding = RouterRecorder(model, out, fold=True, num_tokens=num_tokens, group=group)
    with torch.no_grad(), folding as recorder:
        for start, stop in pieces:
            token = torch.arange(start, stop)[None]
            recorder.tokens(
                torch.zeros(1, stop - start, dtype=torch.long),
                documents=token // 100,
                positions=token % 100,
            )
            for layer in layers:
                layer.mlp.gate(layer.post_attention_layernorm(inputs)[start:stop])


#: Documents: less than a tile of tokens, exactly one, and several.
CASES = [(name, num_documents) for name in NAMES for num_documents in (5, 16, 64)]


@pytest.mark.parametrize(
    ("name", "num_documents"), by_day(CASES, {"groups, biases": ("deepseek-tiny", 5)})
)
@torch.no_grad()
def test_folded_results_are_those_of_a_scan_of_the_recording(name, tmp_path, num_documents):
    sample = sample_of(name)
    documents = range(num_documents)
    domains = sample.recording.facts.domains
    record(sample, tmp_path / "rec", documents, keep="hidden", domains=domains)
    announced = {"num_tokens": 64 * num_documents, "domains": domains}
    record(sample, tmp_path / "folded", documents, fold=True, **announced)
    request = ScanRequest(
        checkpoint=str(sample.path), out=tmp_path / "scanned", tokens=str(tmp_path / "rec")
    )
    scan(request)
    assert_same_results(tmp_path / "folded", tmp_path / "scanned")
    run = open_results(tmp_path / "folded").run
    assert run["trust"]["fingerprint"] == "matches"
    assert run["trust"]["share_reproduced"] == 1.0
    assert run["tokens"]["num_tokens"] == 64 * num_documents
    assert run["tokens"]["num_documents"] == num_documents


def _tile_products(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return tile_logits(values, np.ascontiguousarray(rows.T), None)


@pytest.mark.parametrize("num_tokens", [64 * 40, None])
@torch.no_grad()
def test_inputs_folded_where_they_lie_give_the_results_of_the_processor(
    monkeypatch, tmp_path, num_tokens
):
    """On an emulated device, in blocks that end within a tile of the stream and within a shard."""
    sample, devices = sample_of("olmoe-balanced"), []

    def device_of(values: object) -> EmulatedDevice:
        devices.append(EmulatedDevice(seed=len(devices), product=_tile_products))
        return devices[-1]

    options = {"domains": sample.recording.facts.domains, "num_tokens": num_tokens, "fold": True}
    record(sample, tmp_path / "host", range(40), **options)
    monkeypatch.setattr(folding, "device_of", device_of)
    monkeypatch.setattr(folding, "BLOCK_TOKENS", 1500)
    record(sample, tmp_path / "device", range(40), **options)
    # the pass over all tokens and, of a stream of known length, that of the random router
    assert len(devices) == (3 if num_tokens is None else 6)
    assert all(device.products for device in devices)
    for path in sorted((tmp_path / "host").glob("*.parquet")):
        ours, theirs = (pq.read_table(tmp_path / of / path.name) for of in ("device", "host"))
        assert ours.schema == theirs.schema, path.name
        for name in theirs.column_names:
            a, b = (table[name] for table in (ours, theirs))
            if pa.types.is_floating(b.type):  # sums of powers of e are rounded otherwise there
                place = f"{path.name} {name}"
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=place)
            else:
                assert a.to_pylist() == b.to_pylist(), f"{path.name} {name}"


def test_neither_cuts_of_the_passes_nor_counts_before_change_a_fold(balanced, tmp_path):
    """What the routers read depends on the batch; so the same inputs are fed in other pieces. Up to
    the size of the samples it need not be said how many tokens come.
    """
    for name, cuts, num_tokens in (
        ("whole", (0, 2500), 2500),
        ("pieces", (0, 1, 700, 1024, 2047, 2499, 2500), None),
    ):
        fold_pieces(balanced.model, tmp_path / name, itertools.pairwise(cuts), num_tokens)
    assert_same_results(tmp_path / "whole", tmp_path / "pieces")


def test_fewer_tokens_than_announced_are_counted_and_more_refused(balanced, tmp_path):
    domains = balanced.recording.facts.domains
    with pytest.raises(RecordingError, match="128 tokens have come; num_tokens said 100"):
        record(balanced, tmp_path / "out", range(2), fold=True, num_tokens=100, domains=domains)
    with pytest.raises(UsageError, match="domain 'code' was not announced"):
        record(balanced, tmp_path / "out", range(1), fold=True)
    assert not list(tmp_path.iterdir())
    record(balanced, tmp_path / "folded", range(2), fold=True, num_tokens=4096, domains=domains)
    assert open_results(tmp_path / "folded").run["tokens"]["num_tokens"] == 2 * 64


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_token_that_is_not_finite_stops_the_fold(balanced, tmp_path, monkeypatch, is_on_device):
    if is_on_device:
        monkeypatch.setattr(folding, "device_of", lambda values: EmulatedDevice())
    names = balanced.recording.facts.routers
    inputs = {name: balanced.recording.read_values(name, 0, 64).copy() for name in names}
    inputs["text/1"][7, 3] = np.nan
    with (
        pytest.raises(NonFiniteError, match="text/1"),
        RouterRecorder(balanced.model, tmp_path / "out", fold=True, num_tokens=64) as recorder,
    ):
        recorder.tokens(torch.zeros(1, 64, dtype=torch.long))
        for layer, name in zip(balanced.model.model.layers, names, strict=True):
            layer.mlp.gate(torch.from_numpy(inputs[name]))
    assert not (tmp_path / "out").exists()


#: Results by name, and how many tokens each is told of.
FOLDED = {"told": TOKENS, "open": None}

TILES = [(start, min(start + TILE, TOKENS)) for start in range(0, TOKENS, TILE)]


class InTurn:
    """Ranks that are two threads of which one runs at a time, until it waits for the other."""

    def __init__(self) -> None:
        self.turn, self.boxes = threading.Lock(), (queue.Queue(), queue.Queue())
        self.of_thread = threading.local()

    def get_rank(self, group: Any = None) -> int:
        return self.of_thread.rank

    def get_world_size(self, group: Any = None) -> int:
        return 2

    def is_initialized(self) -> bool:
        return hasattr(self.of_thread, "rank")

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def send_object_list(self, values: list[Any], to: int, group: Any) -> None:
        self.boxes[to].put(pickle.dumps(values[0]))

    def recv_object_list(self, values: list[Any], sender: int, group: Any) -> None:
        self.turn.release()
        values[0] = pickle.loads(self.boxes[self.of_thread.rank].get(timeout=120))
        self.turn.acquire()

    def all_gather_object(self, values: list[Any], value: Any, group: Any) -> None:
        other = 1 - self.of_thread.rank
        self.send_object_list([value], other, group)
        theirs: list[Any] = [None]
        self.recv_object_list(theirs, other, group)
        values[self.of_thread.rank], values[other] = value, theirs[0]

    def run_rank(self, rank: int, call: Callable[[int], None]) -> None:
        with self.turn:
            self.of_thread.rank = rank
            call(rank)


@pytest.mark.parametrize("name", by_day(FOLDED, {"samples are halved": "open"}))
def test_two_threads_fold_what_one_process_does(name, balanced, tmp_path, monkeypatch):
    """More tokens than the samples hold: what is drawn, or halved, is the same as well."""
    ranks, models = InTurn(), [balanced.model, copy.deepcopy(balanced.model)]
    fold_pieces(balanced.model, tmp_path / "alone", [(0, TOKENS)], FOLDED[name])
    for function in (one for one in vars(InTurn) if not one.startswith("_")):
        monkeypatch.setattr(dist, function, getattr(ranks, function), raising=False)

    def fold(rank: int) -> None:
        fold_pieces(models[rank], tmp_path / "ranks", TILES[rank::2], FOLDED[name], ranks)

    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(ranks.run_rank, rank, fold) for rank in (0, 1)]:
            end.result(timeout=300)
    assert_same_results(tmp_path / "ranks", tmp_path / "alone")


@shared
def on_two_ranks() -> Path:
    """A folder of what both make: told and open are results, runs those of a Trainer, and
    losses.json what it lost without and with the callback.
    """
    folder = new_folder()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        # gloo looks up the name of the host else, which need not lead back to it
        "GLOO_SOCKET_IFNAME": next(n for _, n in socket.if_nameindex() if n.startswith("lo")),
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ran.returncode == 0, ran.stdout[-16000:].decode()
    return folder


def _run_ranks(folder: Path) -> None:
    """Both in processes of one that has imported everything: that takes longer than they do."""
    child = os.fork()
    rank = "0" if child else "1"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    try:
        _run_rank(int(rank), folder)
    except BaseException:
        if child:
            os.kill(child, signal.SIGKILL)
        raise
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _run_rank(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    for name, num_tokens in FOLDED.items():
        fold_pieces(sample_of("olmoe-balanced").model, folder / name, TILES[rank::2], num_tokens)
    lost = []
    for folds in (False, True):
        trainer = trainer_of(tiny_model(), folder, texts(24), max_steps=2, ddp_backend="gloo")
        if folds:
            trainer.add_callback(FoldCallback(trainer, folder / "runs"))
        trainer.train()
        lost.append(losses(trainer))
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(lost))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("name", FOLDED)
def test_two_ranks_fold_what_one_process_does(name, balanced, tmp_path):
    """More tokens than the samples hold: what is drawn, or halved, is the same as well."""
    fold_pieces(balanced.model, tmp_path / "alone", [(0, TOKENS)], FOLDED[name])
    assert_same_results(on_two_ranks() / name, tmp_path / "alone")


@pytest.mark.nightly
def test_ranks_of_a_trainer_fold_the_tokens_of_all_and_train_as_without(tmp_path):
    """Two ranks accumulate twice where one process does four times."""
    ran = on_two_ranks()
    without, with_callback = json.loads((ran / "losses.json").read_text())
    assert with_callback == without
    trainer = trainer_of(
        tiny_model(), tmp_path, texts(24), max_steps=1, gradient_accumulation_steps=4
    )
    trainer.add_callback(FoldCallback(trainer, tmp_path / "runs"))
    trainer.train()
    mine, theirs = (open_results(p / "runs" / "step_0") for p in (tmp_path, ran))
    for fact in ("num_tokens", "num_documents"):
        assert mine.run["tokens"][fact] == theirs.run["tokens"][fact]
    for column in ("num_slots", "router", "expert"):
        np.testing.assert_array_equal(*(r.table("experts")[column] for r in (mine, theirs)))


if __name__ == "__main__":
    _run_ranks(Path(sys.argv[1]))


# ------------------------------------------------------------------------------- steps of a Trainer
DATA = texts(16)


#: peft reads a property of transformers by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))


#: What a training may be like: what is done to the model, and arguments of the Trainer.
TRAININGS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "compiled, accumulating, padded, with evaluations": (
        lambda model: model,
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "logging_strategy": "no",
            "torch_compile": True,
            "torch_compile_backend": "eager",
        },
    ),
    "of adapters, checkpointing activations": (_lora, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize(("make", "arguments"), TRAININGS.values(), ids=TRAININGS)
def test_a_model_trains_bit_for_bit_as_without_and_its_own_passes_are_folded(
    make, arguments, tmp_path
):
    trainers = []
    for folds in (False, True):
        model = make(tiny_model())
        before = deepcopy(model)
        trainer = trainer_of(model, tmp_path, DATA, **arguments)
        trainer.add_callback(OtherPasses())
        batches = Batches(model)
        if folds:
            trainer.add_callback(FoldCallback(trainer, tmp_path / "runs", every=2))
        trainer.train()
        trainers.append(trainer)
    alone, folded = trainers
    assert losses(folded) == losses(alone)
    assert len(losses(alone)) == 3
    torch.testing.assert_close(
        folded.model.state_dict(), alone.model.state_dict(), rtol=0.0, atol=0.0
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["step_0", "step_2"]
    with torch.no_grad(), RouterRecorder(before, tmp_path / "own", fold=True) as recorder:
        for batch in batches.found[:2]:
            recorder.tokens(batch["input_ids"], batch["attention_mask"])
            before.train()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert_same_results(tmp_path / "runs" / "step_0", tmp_path / "own")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_of(tiny_model(), folder, texts(16, with_mask=False))
    trainer.add_callback(FoldCallback(trainer, folder / "runs", every=2, layer_groups=1))
    trainer.train()
    return trainer, folder / "runs"


def test_the_trainer_logs_the_worst_router_of_a_group(run):
    trainer, runs = run
    logged = [e for e in trainer.state.log_history if any(k.startswith("routers/") for k in e)]
    assert [entry["step"] for entry in logged] == [0, 2]
    for entry in logged:
        rows = open_results(runs / f"step_{entry['step']}").layers().to_pylist()
        for figure, pick in (("max_vio_global", max), ("routing_entropy_normalised", min)):
            worst = pick(rows, key=lambda row: row[figure])
            assert entry[f"routers/text.0-1/{figure}"] == worst[figure]
            assert entry[f"routers/text.0-1/{figure}_layer"] == worst["layer"]
    assert all(isinstance(v, int | float) for entry in logged for v in entry.values())
    assert len(losses(trainer)) == 3


def test_without_a_mask_padding_is_what_bears_no_label_and_a_series_reads_the_steps(run, tmp_path):
    """The padding token inside a text has a label."""
    num_tokens = sum(label != -100 for text in DATA[:4] for label in text["labels"])
    assert open_results(run[1] / "step_0").run["tokens"]["num_tokens"] == num_tokens
    series = track(TrackRequest((f"{run[1]}/step_*",), out=tmp_path / "series"))
    assert [step.step for step in series.steps] == [0, 2]
    assert {curve.router for curve in series.of_column("max_vio_global")} == {"text/0", "text/1"}


def test_packed_documents_are_told_by_their_positions(tmp_path):
    positions = [*range(10), *range(14)]
    data = [text | {"position_ids": positions} for text in texts(16, with_mask=False)]
    trainer = trainer_of(tiny_model(), tmp_path, data, max_steps=1)
    trainer.add_callback(FoldCallback(trainer, tmp_path / "runs"))
    trainer.train()
    tokens = open_results(tmp_path / "runs" / "step_0").run["tokens"]
    long = sum(text["labels"][10] != -100 for text in DATA[:4])
    assert tokens["num_documents"] == 4 + long


class _Breaks(RouterRecorder):
    steps: tuple[str, ...] = ()

    def tokens(self, *arguments: Any, **named: Any) -> None:
        if self._out.name in self.steps:
            raise RecordingError("broken.")
        super().tokens(*arguments, **named)


def test_a_measurement_that_fails_ends_no_training_and_no_step_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("moegeom.recorder.callback.RouterRecorder", _Breaks)
    monkeypatch.setattr(_Breaks, "steps", ("step_1",))
    trainer = trainer_of(tiny_model(), tmp_path, DATA, max_steps=3)
    trainer.add_callback(FoldCallback(trainer, tmp_path / "runs", every=1))
    with pytest.warns(RuntimeWarning, match=r"step_1 was not measured: broken"):
        trainer.train()
    assert [p.name for p in sorted((tmp_path / "runs").iterdir())] == ["step_0", "step_2"]
    assert len(losses(trainer)) == 3
    monkeypatch.setattr(_Breaks, "steps", ("step_0",))
    trainer = trainer_of(tiny_model(), tmp_path, DATA, max_steps=1)
    trainer.add_callback(FoldCallback(trainer, tmp_path / "other", every=1))
    with pytest.raises(RecordingError, match="broken"):
        trainer.train()
    trainer = trainer_of(tiny_model(), tmp_path, DATA)
    with pytest.raises(UsageError, match="every=0"):
        FoldCallback(trainer, tmp_path, every=0)
