"""However the files are cut: the same routers, the same fingerprint, and no expert byte read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
from tests.unit.router.conftest import loaded


def _cut(folder: Path, target: Path, num_shards: int) -> Path:
    """The same tensors dealt out to shards."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    file_of = {n: f"m-{i % num_shards}.safetensors" for i, n in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({n: tensors[n] for n in tensors if file_of[n] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_sharding_changes_neither_routers_nor_fingerprint(num_shards, make_olmoe, tmp_path):
    whole = loaded(make_olmoe())
    cut = loaded(_cut(tmp_path, tmp_path / "cut", num_shards))
    assert cut.fingerprint == whole.fingerprint
    for a, b in zip(whole.routers, cut.routers, strict=True):
        np.testing.assert_array_equal(a.weight, b.weight, strict=True)
        np.testing.assert_array_equal(a.gain, b.gain, strict=True)


def test_one_changed_bit_of_a_router_and_no_expert_changes_the_fingerprint(make_olmoe):
    before = loaded(make_olmoe()).fingerprint
    assert before.startswith("sha256:")
    assert len(before) == 7 + 64
    for leaf in ("mlp.gate.weight", "post_attention_layernorm.weight"):
        name = f"model.layers.1.{leaf}"
        changed = load_file(make_olmoe() / "model.safetensors")[name].clone()
        changed.view(torch.int32).flatten()[0] ^= 1
        assert loaded(make_olmoe({name: changed})).fingerprint != before
    expert = {"model.layers.1.mlp.experts.0.gate_proj.weight": torch.zeros(8, 16)}
    assert loaded(make_olmoe(expert)).fingerprint == before


def test_of_a_hundred_gigabytes_only_routers_norms_headers_index_and_config_are_read(
    make_olmoe, tmp_path
):
    make_olmoe()
    folder = tmp_path / "large"
    folder.mkdir()
    layers, per_shard, expert_bytes = 8, 4, 3 * 2**30
    weight_map, needed, headers = {}, 0, 0
    for shard in range(layers):
        file = f"m-{shard}.safetensors"
        at = f"model.layers.{shard}"
        shapes = {
            f"{at}.mlp.experts.{e}.up_proj.weight": ("U8", [expert_bytes], expert_bytes)
            for e in range(per_shard)
        }
        shapes[f"{at}.mlp.gate.weight"] = ("F32", [6, 16], 6 * 16 * 4)
        shapes[f"{at}.post_attention_layernorm.weight"] = ("F32", [16], 16 * 4)
        header, end = {}, 0
        for name, (dtype, shape, size) in shapes.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + end)  # sparse: nothing is written
        needed += 6 * 16 * 4 + 16 * 4
        headers += 8 + len(raw)
    # A shard without routers: not even its header is read.
    weight_map["lm_head.weight"] = "m-8.safetensors"
    (folder / "m-8.safetensors").write_bytes(b"never read")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))

    found = loaded(folder)
    assert len(found.routers) == layers
    assert found.bytes_total > 96 * 2**30
    small = index.stat().st_size + (folder / "config.json").stat().st_size
    assert found.bytes_read == needed + headers + small


def test_tensors_are_read_in_the_order_of_the_files(make_olmoe, tmp_path):
    make_olmoe()
    store: Any = open_checkpoint(_cut(tmp_path, tmp_path / "cut", 2))
    planned = len(store.log.ranges)
    load_routers(store)
    reads = [(r.file, r.offset) for r in store.log.ranges[planned:] if r.offset > 8]
    assert reads == sorted(reads)
    assert len(reads) == len(set(reads)) == 6
