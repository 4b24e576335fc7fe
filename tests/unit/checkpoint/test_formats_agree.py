"""The same weights give the same tables, whatever format they are stored in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import open_results
from moegeom.router.load import load_routers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_STEP = Path(__file__).parents[3] / "sample_ckpts/olmoe-balanced/step_1500"
_RECORDING = _STEP.parent / "rec/step_1500"

Tensors = dict[str, torch.Tensor]


def _tensors() -> Tensors:
    return load_file(_STEP / "model.safetensors")


def _pytorch(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def _pytorch_shards(tensors: Tensors, folder: Path) -> None:
    names = sorted(tensors)
    shard_of = {name: f"pytorch_model-{1 + i % 3:05}-of-00003.bin" for i, name in enumerate(names)}
    for shard in set(shard_of.values()):
        torch.save({n: tensors[n] for n in names if shard_of[n] == shard}, folder / shard)
    index = {"weight_map": shard_of}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _dcp(tensors: Tensors, folder: Path) -> None:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _nested_dcp(tensors: Tensors, folder: Path) -> None:
    state = {"model": tensors, "step": 7}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


#: Names in GGUF files of what a router needs.
_GGUF_NAMES = {"mlp.gate.weight": "ffn_gate_inp", "post_attention_layernorm.weight": "ffn_norm"}


def _gguf(tensors: Tensors, folder: Path) -> None:
    config = json.loads((_STEP / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "olmoe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for layer in range(config["num_hidden_layers"]):
        for tail, name in _GGUF_NAMES.items():
            values = tensors[f"model.layers.{layer}.{tail}"].float().numpy()
            writer.add_tensor(f"blk.{layer}.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FORMATS: dict[str, Callable[[Tensors, Path], None]] = {
    "bin": _pytorch,
    "bin, sharded": _pytorch_shards,
    "dcp": _dcp,
    "dcp, nested": _nested_dcp,
    "gguf": _gguf,
}


def _tables(checkpoint: Path, out: Path) -> dict[str, Any]:
    scan(ScanRequest(str(checkpoint), out, tokens=str(_RECORDING), stale_inputs=True, layers="1"))
    results = open_results(out)
    return {table: results.rows(table) for table in ("layers", "experts", "margins", "pairs")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _tables(_STEP, tmp_path_factory.mktemp("safetensors") / "out")


#: What names a dtype or a file; GGUF converters write routers in float32.
_OF_STORAGE = {"weight_bits", "weight_bits_kept", "levels_share", "row_levels_share"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FORMATS)
def test_the_tables_are_equal(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(_STEP / "config.json", folder)
    FORMATS[name](_tensors(), folder)
    found = _tables(folder, tmp_path / "out")
    for table, rows in expected.items():
        assert len(found[table]) == len(rows)
        for mine, theirs in zip(found[table], rows, strict=True):
            differing = {
                key
                for key in theirs
                if key not in _OF_STORAGE and not _same(mine[key], theirs[key])
            }
            assert differing == set(), f"{table}: {sorted(differing)}"


def _same(mine: Any, theirs: Any) -> bool:
    return mine == theirs or (mine != mine and theirs != theirs)


def test_a_block_quantised_router_is_decoded(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "olmoe")
    writer.add_embedding_length(64)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_gate_inp.weight", packed, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (router,) = load_routers(open_checkpoint(tmp_path)).routers
    assert router.provenance.stored_dtype == "Q8_0"
    np.testing.assert_array_equal(router.weight, gguf.quants.dequantize(packed, kind))
