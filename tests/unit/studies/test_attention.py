"""``moegeom attention`` on small files: planted heads, the table, what is left out and why."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

import moegeom as mg
from moegeom.core.errors import RouterError, UsageError
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.geometry.gram import cosines, gram_score
from moegeom.router.attention.family import attention_families, load_attention_family
from moegeom.studies.attention.document import document

HEADS, SHARED, WIDTH, HIDDEN = 4, 2, 8, 32
CONFIG = {"model_type": "afmoe", "head_dim": WIDTH, "layer_types": ["full_attention"] * 2}


def tensors_of(layer: int, seed: int = 0, gate: int = HEADS * WIDTH) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed + layer)
    shapes = {
        "q": (HEADS * WIDTH, HIDDEN),
        "v": (SHARED * WIDTH, HIDDEN),
        "o": (HIDDEN, HEADS * WIDTH),
        "gate": (gate, HIDDEN),
    }
    start = f"model.layers.{layer}.self_attn."
    return {f"{start}{n}_proj.weight": random.standard_normal(s) for n, s in shapes.items()}


def write(folder: Path, *layers: dict[str, np.ndarray], **config: object) -> str:
    folder.mkdir(exist_ok=True)
    save_file({k: v for layer in layers for k, v in layer.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def test_dead_and_doubled_heads_are_those_that_were_planted(tmp_path):
    first, second = tensors_of(0), tensors_of(1)
    output = second["model.layers.1.self_attn.o_proj.weight"]
    output[:, :WIDTH] = 0.5 * output[:, WIDTH : 2 * WIDTH]
    output[:, 3 * WIDTH :] *= 0.001
    healthy, spoilt = mg.attention(write(tmp_path / "a", first, second)).value.layers
    assert (healthy.dead, healthy.alike) == ([], ())
    assert spoilt.dead == [3]
    assert [pair[:2] for pair in spoilt.alike] == [(0, 1)]
    assert [head.value_head for head in spoilt.heads] == [0, 0, 1, 1]


def test_the_gram_score_of_a_gate_is_that_of_the_rows_of_each_head(tmp_path):
    tensors = tensors_of(0)
    (layer,) = mg.attention(write(tmp_path / "a", tensors)).value.layers
    rows = tensors["model.layers.0.self_attn.gate_proj.weight"].reshape(HEADS, WIDTH, HIDDEN)
    expected = [gram_score(cosines(one @ one.T)) for one in rows]
    assert [head.gate_gram for head in layer.heads] == pytest.approx(expected)
    assert layer.gram == pytest.approx(np.mean(expected))
    assert layer.gram_random == pytest.approx(1.0 - HIDDEN**-0.5)
    lengths = np.sqrt((rows**2).sum(axis=2).mean(axis=1))
    assert [head.gate_norm for head in layer.heads] == pytest.approx(lengths)


def test_the_file_has_a_row_for_each_head_as_the_record_has(tmp_path):
    ckpt = write(tmp_path / "a", tensors_of(0), tensors_of(1))
    found = mg.attention(ckpt, out=tmp_path / "heads.parquet").value
    rows = pq.read_table(tmp_path / "heads.parquet").to_pylist()
    assert [(row["layer"], row["head"]) for row in rows] == [
        (layer.layer, head.head) for layer in found.layers for head in layer.heads
    ]
    told = [head for layer in found.layers for head in layer.heads]
    for row, head in zip(rows, told, strict=True):
        assert {name: row[name] for name in vars(head)} == vars(head)


def test_a_gate_that_is_stored_in_eight_bits_is_decoded(tmp_path):
    tensors = tensors_of(0)
    name = "model.layers.0.self_attn.gate_proj.weight"
    whole = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tensors[name] = (2.0 * whole.astype(np.float64)).astype(np.float32)
    (plain,) = mg.attention(write(tmp_path / "a", tensors)).value.layers
    tensors[name] = whole
    tensors[f"{name}_scale_inv"] = np.full((1, 1), 2.0, np.float32)
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (packed,) = mg.attention(write(tmp_path / "b", tensors, quantization_config=how)).value.layers
    assert packed.heads == plain.heads


def test_much_is_read_only_when_asked_for(tmp_path, monkeypatch):
    ckpt = write(tmp_path / "a", tensors_of(0))
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    with pytest.raises(UsageError, match="of attention are to be read"):
        mg.attention(ckpt)
    (layer,) = mg.attention(ckpt, yes=True).value.layers
    assert layer.num_bytes == 8 * HIDDEN * WIDTH * (2 * HEADS + SHARED)  # gate, outputs, values


def test_layers_asked_for_are_looked_at_and_no_others(tmp_path):
    ckpt = write(tmp_path / "a", tensors_of(0), tensors_of(1))
    found = mg.attention(ckpt, layers="1").value
    assert [layer.layer for layer in found.layers] == ["text/1"]


def test_a_gate_of_another_shape_leaves_its_layer_out_and_says_why(tmp_path):
    found = mg.attention(write(tmp_path / "a", tensors_of(0), tensors_of(1, gate=20))).value
    assert [layer.layer for layer in found.layers] == ["text/0"]
    ((name, why),) = found.left_out
    assert name == "text/1"
    assert "has 20 rows, expected 32 for 4 heads" in why
    assert why in " ".join(said(found).split())


def test_values_that_are_not_finite_leave_their_layer_out(tmp_path):
    tensors = tensors_of(0)
    tensors["model.layers.0.self_attn.gate_proj.weight"][3, 3] = np.nan
    found = mg.attention(write(tmp_path / "a", tensors)).value
    assert found.layers == ()
    assert "not finite" in found.left_out[0][1]


def test_a_sink_of_minus_infinity_is_none(tmp_path):
    sinks = {"model.layers.0.self_attn.sinks": np.array([1.0, -np.inf, 0.0, -2.0])}
    ckpt = write(tmp_path / "a", tensors_of(0), sinks, model_type="gpt_oss")
    (layer,) = mg.attention(ckpt).value.layers
    assert [head.sink for head in layer.heads] == [1.0, None, 0.0, -2.0]


def test_no_gate_is_guessed_from_names(tmp_path):
    found = mg.attention(write(tmp_path / "a", tensors_of(0), model_type="olmoe")).value
    assert (found.family, found.layers) == ("", ())
    assert "No gate found: model_type 'olmoe'" in said(found)


def test_a_file_without_attention_is_an_error(tmp_path):
    ckpt = write(tmp_path / "a", {"model.layers.0.mlp.router.gate.weight": np.zeros((4, 8))})
    with pytest.raises(RouterError, match="no attention layer of family afmoe"):
        mg.attention(ckpt)


def test_another_ending_of_the_table_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UsageError, match="parquet"):
        mg.attention(str(tmp_path / "nowhere"), out=tmp_path / "heads.csv")


def test_the_screen_says_that_real_gates_are_not_those_of_theory(tmp_path):
    found = mg.attention(write(tmp_path / "a", tensors_of(0))).value
    text = " ".join(said(found).split())
    assert "such as sigma(W x). Gates that theory is about are phi of the head's own output" in text
    assert "only the scale of each channel, between values and outputs, is free" in text


def test_every_file_of_a_family_says_where_it_was_read():
    for name in attention_families():
        family = load_attention_family(name)
        assert family.source.startswith("transformers 5.23.0 modeling_")
        assert family.gate or family.sink
        assert family.output or family.no_products


def said(found) -> str:
    return render(document(found, View(detail=True)), "table")
