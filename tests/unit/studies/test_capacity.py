"""`capacity`: what it counts for sizes and checkpoints, what it writes, and what it refuses."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

import moegeom as mg
from moegeom.core.text import integer_text
from moegeom.geometry.capacity import expected_diagram
from moegeom.research.capacity.study import rows_of
from moegeom.studies.opened import Checkpoint
from tests.unit.studies.samples import BALANCED, GROUPED, few_tokens, sides

CKPT, REC = sides(BALANCED)
SIZES = {"experts": 16, "top_k": 4, "width": 20, "hidden": 64}


def layer_of(*sources, **options):
    (layer,) = mg.capacity(*sources, **options).value.layers
    return layer


def rows(layer, quantity, **where):
    of_quantity = [row for row in rows_of(layer) if row["quantity"] == quantity]
    return [row for row in of_quantity if all(row[key] == value for key, value in where.items())]


def size_of(model: Path, pattern: str) -> int:
    tensors = load_file(model / "model.safetensors")
    return sum(t.size for name, t in tensors.items() if re.search(pattern, name))


def test_sizes_give_the_counts_of_the_formulas_the_whole_input_last():
    layer = layer_of(**SIZES, data_dims=(1, 2), splits=(1, 2))
    assert [at.most_cells for at in layer.at] == [107, 653]
    assert layer.num_sets == 1820
    plane = layer.at[1]
    assert (plane.published.dense, plane.published.top_1) == (3241, 3376)
    assert plane.exceeds
    assert plane.expected_cells == expected_diagram(16, 4, 2, is_central=False).cells
    assert [(split.split, split.width) for split in layer.splits] == [(1, 20), (2, 10)]
    assert [gain.cells for gain in layer.splits[0].gains] == [0.0, 0.0]
    layer = layer_of(**SIZES)
    assert [at.dims for at in layer.at] == [1, 2, 5, 10, 20, 50, 64]
    assert [split.split for split in layer.splits] == [1, 2, 4]
    assert layer.at[-1].expected_cells == math.comb(16, 4)
    report = mg.capacity(**SIZES | {"top_k": 1})
    (layer,) = report.value.layers
    assert not any(at.exceeds for at in layer.at)
    assert "impossible" not in report.text(100)
    assert all(row["note"] is None for row in rows(layer, "regions_top_k"))


def test_a_checkpoint_says_its_sizes_and_no_byte_of_an_expert_is_read():
    opened = Checkpoint(str(CKPT))
    record = mg.capacity(opened).value
    (layer,) = record.layers
    sizes = layer.sizes
    assert (sizes.num_experts, sizes.top_k, sizes.width, sizes.hidden) == (16, 4, 32, 64)
    assert (sizes.is_gated, sizes.shared_width, layer.routers) == (True, 0, "text/0-2")
    assert "'intermediate_size'" in layer.width_origin
    assert "down_proj" in layer.width_origin
    assert record.run["checkpoint"]["bytes_read"] == opened.found.bytes_read
    assert layer.parameters.total == size_of(CKPT, r"layers\.1\.mlp\.(exp|gate)")
    report = mg.capacity(GROUPED / "step_1500")
    (layer,) = report.value.layers
    assert (layer.sizes.width, layer.sizes.shared_width, layer.is_linear) == (16, 16, False)
    assert "not linear" in report.text(100)
    (cells,) = rows(layer, "cells", data_dim=2)
    assert "of a linear router" in cells["note"]
    names = r"layers\.1\.mlp\.(experts|shared_experts|gate)\..*weight"
    assert layer.parameters.total == size_of(GROUPED / "step_1500", names)


def test_tokens_say_on_how_many_dimensions_they_lie():
    tokens = few_tokens(BALANCED.name)
    layer = layer_of(CKPT, tokens, layers=0)
    scanned = mg.scan(CKPT, tokens, layers=0).layers()
    ends = [scanned[f"intrinsic_dimension_{end}"][0].as_py() for end in ("low", "high")]
    assert [at.dims for at in layer.at] == [*(math.ceil(end) for end in ends), 64]
    assert layer.dims_origin.startswith("intrinsic dimension of the tokens")
    one = layer_of(CKPT, tokens, layers=0, data_dims=3)
    assert [at.dims for at in one.at] == [3]


def test_the_file_holds_every_digit_and_its_kinds_are_the_four(tmp_path):
    out = tmp_path / "capacity.parquet"
    report = mg.capacity(experts=64, top_k=8, width=1024, hidden=2048, gated=True, out=out)
    (layer,) = report.value.layers
    table = pq.read_table(out).to_pylist()
    assert {row["kind"] for row in table} == {"exact", "upper_bound", "expected", "document"}
    (dense,) = (r for r in table if (r["quantity"], r["data_dim"]) == ("regions_dense", 2048))
    assert len(dense["value"]) == math.floor(dense["log10"]) + 1 > 1900
    for row in table:
        value = row["value"] or ""
        if value.isdecimal() and len(value) < 300 and int(value) > 0:
            np.testing.assert_allclose(math.log10(int(value)), row["log10"], rtol=1e-12)
    assert table == json.loads(report.json())["layers"][0]["rows"]
    (regions,) = rows(layer, "regions", data_dim=2)
    assert "gate pre-activations" in regions["note"]
    (claim,) = rows(layer, "regions_top_k", data_dim=2)
    assert "times what is possible" in claim["note"]
    assert report.value.written == "capacity.parquet"


def test_whole_numbers_of_any_length_are_written():
    assert integer_text(8) == "8"
    for digits in (4299, 4300, 4301, 12_345):
        count = 10 ** (digits - 1) + 7
        assert integer_text(count) == "1" + "0" * (digits - 2) + "7"
        assert integer_text(-count) == f"-{integer_text(count)}"


def test_a_file_is_replaced_only_when_asked_and_tokens_without_inputs_are_refused(tmp_path):
    out = tmp_path / "counts.parquet"
    out.write_text("mine")
    with pytest.raises(mg.MoeGeomError, match="exists already"):
        mg.capacity(**SIZES, out=out)
    assert out.read_text() == "mine"
    mg.capacity(**SIZES, out=out, overwrite=True)
    assert pq.read_table(out).num_rows > 50
    logits = np.random.default_rng(0).standard_normal((3, 200, 16))
    with pytest.raises(mg.MoeGeomError, match="that takes router inputs") as caught:
        mg.capacity(CKPT, mg.recording(logits, stage="logits"))
    assert caught.value.exit_code == 3


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(CKPT, tmp_path / "model")


def rewrite(model: Path, **settings) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    left = {key: value for key, value in (config | settings).items() if value is not None}
    (model / "config.json").write_text(json.dumps(left), "utf-8")


def test_the_width_is_that_of_config_and_shapes_and_must_be_typed_without_both(copied):
    rewrite(copied, intermediate_size=48)
    with pytest.raises(mg.MoeGeomError) as caught:
        mg.capacity(copied)
    assert caught.value.exit_code == 3
    assert "'intermediate_size' says experts of 48 neurons" in caught.value.message
    assert "down_proj.weight has 32 beside inputs of 64" in caught.value.message
    assert layer_of(copied, width=32).sizes.width == 32
    with pytest.raises(mg.MoeGeomError, match="width says experts of 48"):
        mg.capacity(copied, width=48)
    rewrite(copied, intermediate_size=None)
    assert layer_of(copied).width_origin.startswith("shape of model.layers.0.mlp.experts.0.down")
    tensors = load_file(copied / "model.safetensors")
    rest = {name: t for name, t in tensors.items() if ".experts." not in name}
    save_file(rest, copied / "model.safetensors")
    with pytest.raises(mg.MoeGeomError) as caught:
        mg.capacity(copied)
    assert caught.value.exit_code == 3
    assert "width N" in caught.value.hint
    layer = layer_of(copied, width=32, gated=True)
    assert (layer.sizes.width, layer.sizes.is_gated) == (32, True)
    assert "no tensor of an expert" in layer.width_origin


FUSED = {
    "gate_up": ("experts.gate_up_proj", "experts.down_proj"),
    "linear": ("input_linear.weight", "output_linear.weight"),
}


@pytest.mark.parametrize("names", FUSED)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_in_one_tensor_are_as_wide(copied, names, is_transposed):
    tensors = load_file(copied / "model.safetensors")
    rest = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp."

        def every(leaf: str, at: str = at) -> np.ndarray:
            return np.stack([tensors[f"{at}experts.{e}.{leaf}_proj.weight"] for e in range(16)])

        both = np.concatenate([every("gate"), every("up")], axis=1)
        turned = both.swapaxes(1, 2) if is_transposed else both
        fused, down = FUSED[names]
        rest |= {at + fused: np.ascontiguousarray(turned), at + down: every("down")}
    save_file(rest, copied / "model.safetensors")
    layer = layer_of(copied)
    assert (layer.sizes.width, layer.sizes.is_gated) == (32, True)


def test_layers_of_other_sizes_are_told_apart(copied):
    """A layer whose experts are narrower, as a list in the config says."""
    tensors = load_file(copied / "model.safetensors")
    for name in list(tensors):
        if ".layers.2.mlp.experts." in name:
            part = tensors[name][:, :16] if "down" in name else tensors[name][:16]
            tensors[name] = np.ascontiguousarray(part)
    save_file(tensors, copied / "model.safetensors")
    rewrite(copied, intermediate_size=[32, 32, 16])
    layers = mg.capacity(copied).value.layers
    sizes = [(one.routers, one.sizes.width) for one in layers]
    assert sizes == [("text/0-1", 32), ("text/2", 16)]
