"""What two ranks of torch save, each in a process of its own."""

import multiprocessing
import warnings
from pathlib import Path

import torch

SHARDED = {"gate.weight": 0, "gate.bias": 0, "one_row": 0, "columns": 1, "long": 0}


def weights() -> dict[str, torch.Tensor]:
    """The same on every rank, and in the test that compares."""
    draw = torch.Generator().manual_seed(3)
    return {
        "gate.weight": torch.randn(12, 64, generator=draw).to(torch.bfloat16),
        "gate.bias": torch.randn(7, generator=draw),  # 4 + 3
        "one_row": torch.randn(1, 5, generator=draw),  # 1 + 0
        "columns": torch.randn(6, 10, 3, generator=draw),
        "long": torch.arange(40).reshape(10, 4),
        "norm": torch.randn(64, generator=draw),
        "turned": torch.randn(5, 8, generator=draw).t(),
        "scalar": torch.tensor(7.5, dtype=torch.float64),
    }


def save(folder: Path) -> Path:
    """Run both ranks: FOLDER/dcp, FOLDER/slices (safetensors by ranks), FOLDER/whole (by rank 0)."""
    forked = multiprocessing.get_context("fork")  # torch is there: nothing is imported again
    ranks = [forked.Process(target=_save_rank, args=(rank, folder)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return folder


def _save_rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(value, mesh, [Shard(SHARDED[name])]) if name in SHARDED else value
        for name, value in weights().items()
    }
    moments = {"state": {"gate.weight": {"exp_avg": state["gate.weight"] * 2}}}
    nested = {"model": state, "optim": moments, "step": 7, "history": [1, {"a": (2, 3)}]}
    save_distributed(nested, storage_writer=FileSystemWriter(folder / "dcp"))
    contiguous = {name: value.contiguous() for name, value in state.items()}
    save_distributed(
        contiguous,
        storage_writer=HuggingFaceStorageWriter(str(folder / "slices"), save_distributed=True),
    )
    if rank == 0:
        whole = {name: value.contiguous() for name, value in weights().items()}
        writer = HuggingFaceStorageWriter(str(folder / "whole"))
        save_distributed(whole, storage_writer=writer, no_dist=True)
    dist.barrier()
    dist.destroy_process_group()
