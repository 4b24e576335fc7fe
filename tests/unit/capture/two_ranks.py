"""What two ranks of torch fold and train; once per rank as ``two_ranks.py RANK FOLDER``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from moegeom.core.tokens import TILE
from moegeom.recorder import FoldCallback, RouterRecorder

#: Six tiles, the last one short: two more than the smaller samples have.
TOKENS = 5 * TILE + 100

#: Results by name, and how many tokens each is told of.
FOLDED = {"told": TOKENS, "open": None}


def fold_pieces(
    model: Any, out: Path, pieces: Iterable[tuple[int, int]], num_tokens: int | None
) -> None:
    """Folds tokens ``[start, stop)`` of one stream of inputs, a piece at a time."""
    layers = model.model.layers
    inputs = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), RouterRecorder(model, out, fold=True, num_tokens=num_tokens) as recorder:
        for start, stop in pieces:
            token = torch.arange(start, stop)[None]
            recorder.tokens(
                torch.zeros(1, stop - start, dtype=torch.long),
                documents=token // 100,
                positions=token % 100,
            )
            for layer in layers:
                layer.mlp.gate(layer.post_attention_layernorm(inputs)[start:stop])


def on_two_ranks(folder: Path) -> Path:
    """Runs both: FOLDER/told and FOLDER/open are results, FOLDER/runs those of a Trainer, and
    FOLDER/losses.json what it lost without and with the callback.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        # gloo looks up the name of the host else, which need not lead back to it
        "GLOO_SOCKET_IFNAME": _loopback(),
    }
    said = [folder / f"rank-{rank}.log" for rank in (0, 1)]
    ranks = []
    for rank, log in enumerate(said):
        with log.open("w") as out:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, str(rank), str(folder)],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], "\n".join(
        f"rank {rank} ended with {code}:\n{log.read_text()[-8000:]}"
        for rank, (code, log) in enumerate(zip(codes, said, strict=True))
    )
    return folder


def _loopback() -> str:
    """The name of the interface that leads nowhere else."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _run_rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    from tests.unit.capture.conftest import sample_of
    from tests.unit.capture.trained import losses, texts, tiny_model, trainer_of

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    tiles = [(start, min(start + TILE, TOKENS)) for start in range(0, TOKENS, TILE)]
    for name, told in FOLDED.items():
        fold_pieces(sample_of("olmoe-balanced").model, folder / name, tiles[rank::2], told)
    found = []
    for folds in (False, True):
        trainer = trainer_of(tiny_model(), folder, texts(24), max_steps=2, ddp_backend="gloo")
        if folds:
            trainer.add_callback(FoldCallback(trainer, folder / "runs"))
        trainer.train()
        found.append(losses(trainer))
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), Path(sys.argv[2]))
