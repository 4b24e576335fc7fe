"""Ranks of torch.distributed that fold together, against one process with the same tokens.

As a script it is both ranks: ``test_two_ranks.py FOLDER``.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from moegeom.core.tokens import TILE
from moegeom.recorder import FoldCallback
from moegeom.results.reader import open_results
from tests.by_day import by_day
from tests.records import new_folder, shared
from tests.unit.capture.conftest import sample_of
from tests.unit.capture.test_fold import TOKENS, assert_same_results, fold_pieces
from tests.unit.capture.trained import losses, texts, tiny_model, trainer_of

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
