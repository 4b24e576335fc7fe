"""Oracle: torch's own writer and reader of distributed checkpoints, with one rank and with two."""

import argparse
import enum
import os
import pickle
import re
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed._shard.sharded_tensor import metadata as before_2_3
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.formats import dcp
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core import limits
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router
from moegeom.router.load import load_routers
from tests.unit.checkpoint.conftest import refusal, why
from tests.unit.checkpoint.save_two_ranks import weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_GATE = "model.gate.weight"
_FILES = ("__0_0.distcp", "__1_0.distcp")


@pytest.fixture
def saved(of_two_ranks: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(of_two_ranks / "dcp", tmp_path / "step-100")


def _save(folder: Path, state: dict[str, Any]) -> Path:
    save_distributed(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def _edit(folder: Path, change: Callable[[Any], None]) -> Path:
    """Change what ``.metadata`` says, as torch would have written it."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    return folder


def _assert_read_as_torch_reads_it(folder: Path) -> None:
    store = open_checkpoint(folder)
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    expected = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, dcp_metadata.TensorStorageMetadata)
    }
    load(expected, storage_reader=FileSystemReader(folder), no_dist=True)
    assert list(store.names()) == list(expected)
    for name, value in expected.items():
        found = store.read(name)
        raw = found.tobytes()
        assert raw == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert (found.shape, store.info(name).shape) == (value.shape, value.shape)
        assert store.info(name).size_bytes == len(raw)
        assert store.read_bytes(name, 3, 90) == raw[3:93]
        if value.is_floating_point():
            wide = torch.float64 if value.dtype == torch.float64 else torch.float32
            np.testing.assert_array_equal(upcast(found), value.to(wide).numpy(), strict=True)


def test_what_ranks_saved_and_one_file_per_tensor_are_read_as_torch_does(of_two_ranks, tmp_path):
    folder = of_two_ranks / "dcp"
    _assert_read_as_torch_reads_it(folder)
    store = open_checkpoint(folder)
    for name, value in weights().items():
        assert store.read(f"model.{name}").shape == value.shape
    assert store.info(_GATE).dtype == "BF16"
    assert "optim.state.gate.weight.exp_avg" in store.names()
    assert "step" not in store.names()
    folder = tmp_path / "c"
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=2)
    save_distributed(weights(), storage_writer=writer, no_dist=True)
    assert len(list(folder.glob("*.distcp"))) == len(weights())
    _assert_read_as_torch_reads_it(folder)


def test_dtypes_parameters_views_shared_storages_and_shapes_are_read_as_torch_does(tmp_path):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    state = {"p": torch.nn.Parameter(values), "v": values[2:5, 1:4], "s": values, "t": values.t()}
    for shape in ((), (0,), (0, 3), (1,), (2, 3, 4)):
        state[str(shape)] = torch.arange(int(np.prod(shape))).reshape(shape)
    every = torch.arange(240, dtype=torch.int32).to(torch.uint8).view(6, 40)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.uint8):
        state[str(dtype)] = {"t": every.view(dtype), "u": every.view(dtype).t()}
    state["bool"] = {"t": every.bool(), "u": every.bool().t()}
    _assert_read_as_torch_reads_it(_save(tmp_path / "c", state))


def test_only_metadata_and_the_pieces_asked_for_are_read(of_two_ranks):
    folder = of_two_ranks / "dcp"
    store: Any = open_checkpoint(folder)
    size = (folder / ".metadata").stat().st_size
    assert [(r.file, r.size) for r in store.log.ranges] == [(".metadata", size)]
    store.info(_GATE)
    assert store.bytes_read == size
    store.read(_GATE)
    storage = FileSystemReader(folder).read_metadata().storage_data
    pieces = [place for index, place in storage.items() if index.fqn == _GATE]
    # one read for each piece: somebody may wait for an answer from far away
    expected = sorted((place.relative_path, place.offset, place.length) for place in pieces)
    assert [(r.file, r.offset, r.size) for r in store.log.ranges[1:]] == expected
    files = [folder / name for name in _FILES]
    assert store.bytes_total == size + sum(f.stat().st_size for f in files)


def test_of_large_pieces_and_archives_only_the_bytes_asked_for_are_read(tmp_path):
    store: Any = open_checkpoint(_save(tmp_path / "large", {"t": torch.arange(10**6)}))
    before = store.bytes_read
    assert store.read_bytes("t", 8 * 5000, 16) == np.array([5000, 5001]).tobytes()
    assert store.bytes_read - before < 4096
    folder = _save(tmp_path / "c", {"t": torch.arange(4)})
    torch.save(torch.arange(10**6)[5:9], folder / "__0_0.distcp")  # its whole storage is saved
    store = open_checkpoint(_edit(folder, lambda metadata: _lengthen(metadata, folder)))
    before = store.bytes_read
    assert store.read("t").tolist() == [5, 6, 7, 8]
    assert store.bytes_read - before < 4096


def _lengthen(metadata: Any, folder: Path) -> None:
    """Every piece is the whole file of the first rank."""
    for place in metadata.storage_data.values():
        place.length = (folder / "__0_0.distcp").stat().st_size


def test_a_config_beside_it_is_read_and_chunks_in_any_order_are_put_in_place(saved):
    assert open_checkpoint(saved).config == {}
    (saved / "config.json").write_text('{"num_experts": 12}')
    assert open_checkpoint(saved).config == {"num_experts": 12}
    for path in (saved, saved / ".metadata"):
        assert open_checkpoint(path).label == "step-100"
        assert open_checkpoint(path).read(_GATE).shape == (12, 64)

    def turn_and_repeat(metadata: Any) -> None:
        metadata.state_dict_metadata[_GATE].chunks *= 2
        metadata.state_dict_metadata[_GATE].chunks.reverse()
        metadata.storage_data = dict(reversed(metadata.storage_data.items()))

    _assert_read_as_torch_reads_it(_edit(saved, turn_and_repeat))


def test_a_folder_of_olmo_core_is_its_config_and_the_weights_in_it(tmp_path):
    inner = _save(tmp_path / "step100" / "model_and_optim", {"model": {"t": torch.arange(4)}})
    (tmp_path / "step100" / "config.json").write_text('{"model": {"d_model": 64}}')
    for path in (inner.parent, inner):
        store = open_checkpoint(path)
        assert store.label == "step100"
        assert store.config == {"model": {"d_model": 64}}
        assert store.read("model.t").tolist() == [0, 1, 2, 3]
        assert store.bytes_total == sum(
            f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()
        )
    (inner / "config.json").write_text('{"of": "itself"}')
    assert open_checkpoint(inner).config == {"of": "itself"}


def test_a_save_that_was_interrupted_is_refused(saved):
    (saved / ".metadata.tmp").touch()
    assert "a save over an older checkpoint was interrupted" in why(saved)
    (saved / ".metadata").rename(saved / "__0.metadata")
    assert "holds __0.metadata and no .metadata: each rank was saved for itself" in why(saved)
    (saved / "__0.metadata").unlink()
    for _ in range(2):
        assert why(saved) == (
            "step-100: holds 2 .distcp files and no .metadata: the save was interrupted before "
            "its metadata was written."
        )
        (saved / ".metadata.tmp").unlink(missing_ok=True)
    (saved / ".metadata").touch()
    assert "is empty: the save was interrupted before its metadata was written." in why(saved)


def test_a_short_or_missing_file_is_named(saved):
    size = (saved / _FILES[1]).stat().st_size
    for shorter in (20_000, 0):
        os.truncate(saved / _FILES[1], shorter)
        sentence = f"{_FILES[1]}: truncated, has {shorter} bytes and .metadata promises {size}."
        assert why(saved, _GATE) == sentence
    (saved / _FILES[0]).unlink()
    sentence = f".metadata: names '{_FILES[0]}', which does not exist (1 of 2 files is missing)."
    assert why(saved, _GATE) == sentence


def test_neither_a_file_of_a_rank_nor_two_checkpoints_in_a_folder_are_one(saved):
    error = refusal(saved / _FILES[0])
    sentence = f"{_FILES[0]}: holds pieces of tensors, and .metadata beside it says which."
    assert error.message == sentence
    assert error.hint == "Pass the folder."
    (saved / "model.safetensors").touch()
    assert "two checkpoints" in why(saved)


def _place(tensor: str, *offsets: int) -> dcp_metadata.MetadataIndex:
    return dcp_metadata.MetadataIndex(tensor, list(offsets))


def _shift(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[_GATE].chunks[1]
    place = metadata.storage_data.pop(dcp_metadata.MetadataIndex(_GATE, chunk.offsets))
    chunk.offsets = torch.Size([5, 0])
    metadata.storage_data[_place(_GATE, 5, 0)] = place


_NOT_WHOLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a chunk less": (
        lambda m: m.state_dict_metadata[_GATE].chunks.pop(),
        f".metadata: tensor '{_GATE}' is not whole: rows 6..12 of 12 are missing.",
    ),
    "a chunk that is stored nowhere": (
        lambda m: m.storage_data.pop(_place(_GATE, 0, 0)),
        "rows 0..6 of 12 are missing",
    ),
    "chunks that overlap": (_shift, "has overlapping pieces"),
}


@pytest.mark.parametrize(("change", "sentence"), _NOT_WHOLE.values(), ids=_NOT_WHOLE)
def test_chunks_that_do_not_make_a_whole_are_refused(change, sentence, saved):
    assert sentence in why(_edit(saved, change), _GATE)


_WRONG_PLACES = {
    "outside": ({"relative_path": "../x"}, "lies in '../x', which is outside"),
    "absolute": ({"relative_path": "/etc/passwd"}, "which is outside the checkpoint's folder"),
    "no text": ({"relative_path": 3}, "has a int as 'relative_path', expected str"),
    "negative": ({"offset": -1}, "lies at byte -1"),
    "huge": ({"length": 2**63}, f"and has {2**63}, which cannot be"),
    "a float": ({"offset": 0.5}, "has a float as 'offset', expected int"),
    "behind the end": ({"offset": 10**6}, "truncated, has "),
    "too short": ({"length": 700}, "has 700 bytes; shape (6, 64) of BF16 takes 768"),
    "a part of it": ({"length": 100}, "takes 768"),
    "compressed": (
        {"transform_descriptors": ["stream.zstd/1"]}, "is compressed or encrypted by an extension"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), _WRONG_PLACES.values(), ids=_WRONG_PLACES)
def test_a_place_that_cannot_be_is_refused(changes, sentence, saved):

    def change(metadata: Any) -> None:
        for key, value in changes.items():
            setattr(metadata.storage_data[_place(_GATE, 0, 0)], key, value)

    assert sentence in why(_edit(saved, change), _GATE)


def test_two_pieces_in_the_same_bytes_are_refused_by_name_and_range(saved):
    def share(metadata: Any) -> None:
        place = metadata.storage_data[_place("model.columns", 0, 0, 0)]
        metadata.storage_data[_place(_GATE, 0, 0)] = place

    assert re.fullmatch(
        rf"\.metadata: __0_0\.distcp: the pieces of 'model\.columns' and '{re.escape(_GATE)}' both "
        r"claim the bytes 5499 to [0-9]+\.",
        why(_edit(saved, share)),
    )


def test_a_list_of_chunks_that_all_tensors_share_is_counted_for_each(saved, monkeypatch):
    monkeypatch.setattr(dcp, "DCP_PIECES", 50)

    def share(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata[_GATE]
        metadata.state_dict_metadata |= {f"t{i}": tensor for i in range(50)}

    open_checkpoint(saved)
    message = why(_edit(saved, share), _GATE)
    assert re.fullmatch(
        r"\.metadata: describes 1[0-9]{2} pieces of tensors, more than the 50 allowed\.", message
    )


#: A pickle that calls OrderedDict with one pair; its key takes 2^64 steps to hash, or as deep a
#: recursion as it is long.
_KEYS = {"laughs": b")" + b"2\x86" * 64, "depth": b")" + b"\x85" * 100_000}


@pytest.mark.parametrize("key", _KEYS)
def test_nothing_that_a_pickle_gives_is_hashed(key, saved):
    raw = b"\x80\x04ccollections\nOrderedDict\n]" + _KEYS[key] + b"N\x86a\x85R."
    (saved / ".metadata").write_bytes(raw)
    assert why(saved, _GATE) == ".metadata: holds a dict, expected a Metadata of torch."


def test_the_archive_of_another_shape_or_dtype_is_refused(saved):
    def swap(metadata: Any) -> None:
        place = metadata.storage_data.pop(_place("model.columns", 0, 0, 0))
        metadata.storage_data[_place(_GATE, 0, 0)] = place

    message = why(_edit(saved, swap), _GATE)
    assert message.startswith(f"__0_0.distcp: the piece of '{_GATE}' at byte 5499")
    assert "F32 of shape (6, 5, 3), expected BF16 of shape (6, 64)" in message


_WRONG_FIELDS: dict[str, tuple[Callable[[Any], None], str]] = {
    "sizes": (lambda t: setattr(t.chunks[0], "sizes", (6,)), "which lie outside"),
    "negative": (lambda t: setattr(t, "size", (-12, 64)), "has 'size' that are not at most 16"),
    "bools": (lambda t: setattr(t, "size", (True, 64)), "has 'size' that are not at most 16"),
    "no chunks": (lambda t: setattr(t, "chunks", None), "has nothing as 'chunks', expected list"),
    "odd chunk": (lambda t: t.chunks.append(3), "has a int among its chunks"),
    "dtype": (lambda t: setattr(t.properties, "dtype", 3), "has no dtype of torch"),
    "larger": (lambda t: setattr(t, "size", (2**40, 2**40)), "is not whole: elements [0.."),
}


@pytest.mark.parametrize("case", _WRONG_FIELDS)
def test_a_description_that_cannot_be_is_refused_by_name(case, saved):
    change, sentence = _WRONG_FIELDS[case]
    message = why(_edit(saved, lambda m: change(m.state_dict_metadata[_GATE])), _GATE)
    assert message.startswith(f".metadata: tensor '{_GATE}' ") or case == "sizes"
    assert sentence in message


def test_an_unreadable_tensor_does_not_hide_the_others(saved):
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[_GATE].properties.dtype = torch.qint8

    store = open_checkpoint(_edit(saved, change))
    assert store.info(_GATE).dtype == "qint8"
    assert store.read("model.norm").shape == (64,)
    assert "has dtype 'qint8', which cannot be read" in why(saved, _GATE)


def test_metadata_as_torch_wrote_it_before_2_3_is_read(saved):
    def age(metadata: Any) -> None:
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "properties"):
                entry.properties = before_2_3.TensorProperties(dtype=entry.properties.dtype)
        del metadata.storage_meta, metadata.version
        for place in metadata.storage_data.values():
            place.__dict__.pop("transform_descriptors", None)

    _assert_read_as_torch_reads_it(_edit(saved, age))


def test_truncated_metadata_and_a_pickle_of_anything_else_are_refused(saved):
    raw = (saved / ".metadata").read_bytes()
    for size in (1, 100, len(raw) - 1):
        (saved / ".metadata").write_bytes(raw[:size])
        assert why(saved).startswith(".metadata: ")
    for value in (3, {"a": 1}, torch.Size([1]), None):
        (saved / ".metadata").write_bytes(pickle.dumps(value))
        assert "expected a Metadata of torch" in why(saved)


class _Touch:
    """Unpickled with ``pickle``, this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_that_metadata_names_is_executed(saved, tmp_path):
    canary = tmp_path / "canary"
    raw = pickle.dumps(_Touch(canary))
    pickle.loads(raw)
    assert canary.exists()  # the trap works
    canary.unlink()
    _edit(saved, lambda m: setattr(m, "planner_data", _Touch(canary)))
    assert "which is not among what a checkpoint holds" in why(saved, _GATE)
    assert not canary.exists()


# ------------------------------------------------------------------------------------ Megatron-Core
LAYERS, EXPERTS, HIDDEN = 3, 6, 16


class Backend(enum.Enum):
    """Arguments hold such things."""

    auto = 1


ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": None, "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss",
    "norm_epsilon": 1e-5, "normalization": "RMSNorm", "apply_layernorm_1p": True,
    "add_bias_linear": False, "attention_backend": Backend.auto, "params_dtype": torch.bfloat16,
    "nested": {"a": [1, 2]},
}  # fmt: skip


def _tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "mlp.router.weight": torch.randn(LAYERS, EXPERTS, HIDDEN, generator=draw),
        "mlp.router.expert_bias": torch.randn(LAYERS, EXPERTS, generator=draw),
        "pre_mlp_layernorm.weight": torch.rand(LAYERS, HIDDEN, generator=draw),
    }


def write_megatron(folder: Path, is_stacked: bool, **arguments: Any) -> Path:
    named = {
        f"decoder.layers.{tail}" if is_stacked else f"decoder.layers.{layer}.{tail}": (
            stacked if is_stacked else stacked[layer].clone()
        )
        for tail, stacked in _tensors().items()
        for layer in range(1 if is_stacked else LAYERS)
        if tail != "mlp.router.expert_bias" or "moe_router_score_function" not in arguments
    }
    torch_dcp.save(named, storage_writer=torch_dcp.FileSystemWriter(folder), no_dist=True)
    args = argparse.Namespace(**(ARGUMENTS | arguments))
    torch.save({"args": args, "iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    return folder


@pytest.mark.parametrize("is_stacked", [True, False])
def test_every_layer_is_a_router_in_both_layouts(is_stacked, tmp_path):
    found = load_routers(open_checkpoint(write_megatron(tmp_path, is_stacked)))
    assert [router.name for router in found.routers] == ["text/0", "text/1", "text/2"]
    stored = _tensors()
    for layer, router in enumerate(found.routers):
        assert router.rule.weights.scale == 2.5
        assert (router.rule.score, router.rule.has_selection_bias) == ("sigmoid", True)
        parts = {
            "mlp.router.weight": router.weight,
            "mlp.router.expert_bias": router.selection_bias,
            "pre_mlp_layernorm.weight": router.gain,
        }
        for tail, values in parts.items():
            offset = 1.0 if tail.startswith("pre_mlp") else 0.0
            np.testing.assert_array_equal(values, stored[tail][layer].numpy() + np.float32(offset))


def test_the_arguments_decide_the_rule_and_layers_are_read_from_their_places(tmp_path):
    store = open_checkpoint(write_megatron(tmp_path, is_stacked=True))
    name = "decoder.layers.2.mlp.router.weight"
    expected = _tensors()["mlp.router.weight"][2].numpy().tobytes()
    assert store.read_bytes(name, 8, 40) == expected[8:48]
    assert store.info(name).shape == (EXPERTS, HIDDEN)
    softmax = {"moe_router_score_function": "softmax"}
    for arguments, expected in (
        (softmax, ("identity", "softmax_of_selected_logits")),
        (softmax | {"moe_router_pre_softmax": True}, ("softmax", "scores")),
        ({}, ("sigmoid", "scores")),
    ):
        rule = _routers(tmp_path, **arguments)[0].rule
        assert (rule.score, rule.weights.source) == expected


def _routers(folder: Path, **arguments: Any) -> Sequence[Router]:
    new = folder / f"{len(list(folder.iterdir()))}"
    return load_routers(open_checkpoint(write_megatron(new, True, **arguments))).routers


def _save_of_ranks(folder: Path, *ranks: str, **arguments: Any) -> Path:
    """As Megatron-LM writes with ``--ckpt-format torch``: routers are whole on every rank."""
    model = {
        f"decoder.layers.{layer}.{tail}": stacked[layer].clone()
        for tail, stacked in _tensors().items()
        for layer in range(LAYERS)
    }
    for rank in ranks:
        (folder / rank).mkdir(parents=True)
        args = argparse.Namespace(**(ARGUMENTS | arguments))
        optimiser = {"state": {0: {"exp_avg": torch.ones(3)}}}
        everything = {"model": model, "args": args, "optimizer": optimiser, "iteration": 7,
                      "rng_state": [{"np_rng_state": np.random.RandomState(1).get_state()}]}  # fmt: skip
        torch.save(everything, folder / rank / "model_optim_rng.pt")
    return folder


def test_a_save_of_ranks_has_its_rule_in_the_file(tmp_path):
    run = tmp_path / "run"
    save = _save_of_ranks(run / "iter_0000007", "mp_rank_00")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    both = _save_of_ranks(tmp_path / "both", "mp_rank_00", "mp_rank_01")
    stacked = load_routers(open_checkpoint(write_megatron(tmp_path / "dcp", True)))
    for place in (save, save / "mp_rank_00", save / "mp_rank_00/model_optim_rng.pt", both):
        read = load_routers(open_checkpoint(place))
        assert [r.rule for r in read.routers] == [r.rule for r in stacked.routers]
        for one, other in zip(read.routers, stacked.routers, strict=True):
            np.testing.assert_array_equal(one.weight, other.weight)
            np.testing.assert_array_equal(one.gain, other.gain)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(run)
    assert "'iter_0000007'" in caught.value.hint
    (run / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(run)
    assert "'iter_0000007'" in caught.value.hint


def test_layers_that_each_rank_counts_for_itself_are_refused_and_a_config_beside_counts(tmp_path):
    cut = _save_of_ranks(tmp_path / "cut", "mp_rank_00", pipeline_model_parallel_size=4)
    with pytest.raises(CheckpointError, match="over 4 pipeline ranks") as caught:
        open_checkpoint(cut)
    assert "torch_dist" in caught.value.hint
    save = _save_of_ranks(tmp_path / "save", "mp_rank_00")
    (save / "config.json").write_text('{"model_type": "mystery"}')
    assert open_checkpoint(save).config == {"model_type": "mystery"}
    torch.save({"model": {"a": torch.ones(1)}}, save / "mp_rank_00/model_optim_rng.pt")
    (save / "config.json").unlink()
    assert open_checkpoint(save).config == {}


def test_nothing_that_the_arguments_of_a_rank_name_is_called(tmp_path):
    canary = tmp_path / "canary"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(canary),)

    save = _save_of_ranks(tmp_path / "save", "mp_rank_00", trap=Trap())
    assert len(load_routers(open_checkpoint(save)).routers) == LAYERS
    assert not canary.exists()


def test_arguments_of_another_rule_and_none_are_refused(tmp_path):
    groups = {"moe_router_topk": 6, "moe_router_num_groups": 3, "moe_router_group_topk": 2}
    for arguments, sentence in (
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        (groups, "sum of their 3 largest"),
    ):
        with pytest.raises(RouterError, match=sentence):
            _routers(tmp_path, **arguments)
    folder = write_megatron(tmp_path, True)
    torch.save({"iteration": 7}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="holds no arguments of the run"):
        load_routers(open_checkpoint(folder))


def test_nothing_that_the_arguments_name_is_called(tmp_path):
    folder = write_megatron(tmp_path, True)
    canary = tmp_path / "canary"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(canary),)

    args = argparse.Namespace(**ARGUMENTS, trap=Trap())
    torch.save({"args": args}, folder / "common.pt")
    assert len(load_routers(open_checkpoint(folder)).routers) == LAYERS
    assert not canary.exists()


def test_names_of_all_layers_are_counted_before_they_are_made(tmp_path, monkeypatch):
    layers, tensors = 500, 61
    monkeypatch.setattr(limits, "TENSORS", 30_000)
    properties = TensorProperties(torch.float32)
    described: Any = {
        f"decoder.layers.a{i}": TensorStorageMetadata(properties, torch.Size([layers, 0]), [])
        for i in range(tensors)
    }
    places = {MetadataIndex("x", torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 0, 10)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(described, {}, places)))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(10))
    args = argparse.Namespace(num_layers=layers, num_experts=4)
    torch.save({"args": args}, tmp_path / "common.pt")
    store = open_checkpoint(tmp_path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"of 500 layers each have more than 30000 names"):
        store.names()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
