"""``moegeom attention`` on small files: planted heads, the table, what is left out and why."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

import moegeom as mg
from moegeom.core.errors import RouterError, UsageError
from moegeom.geometry.gram import cosines, gram_score
from moegeom.research.attention.document import document
from moegeom.router.attention.tensors import attention_families, load_attention_family
from tests.unit.studies.samples import unwrapped, worded

#: The gate of layer 0.
GATE = "model.layers.0.self_attn.gate_proj.weight"

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


@pytest.fixture
def looked_at(tmp_path):
    def look(*layers: dict[str, np.ndarray], config: dict | None = None, **options) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return mg.attention(write(folder, *layers, **(config or {})), **options).value

    return look


def test_dead_and_doubled_heads_are_those_that_were_planted(looked_at):
    first, second = tensors_of(0), tensors_of(1)
    output = second["model.layers.1.self_attn.o_proj.weight"]
    output[:, :WIDTH] = 0.5 * output[:, WIDTH : 2 * WIDTH]
    output[:, 3 * WIDTH :] *= 0.001
    healthy, spoilt = looked_at(first, second).layers
    assert (healthy.dead, healthy.alike) == ([], ())
    assert spoilt.dead == [3]
    assert [pair[:2] for pair in spoilt.alike] == [(0, 1)]
    assert [head.value_head for head in spoilt.heads] == [0, 0, 1, 1]
    assert looked_at(first, second, layers="1").layers == (spoilt,)


def test_the_gram_score_of_a_gate_is_that_of_the_rows_of_each_head_also_in_eight_bits(looked_at):
    (layer,) = looked_at(tensors_of(0)).layers
    rows = tensors_of(0)[GATE].reshape(HEADS, WIDTH, HIDDEN)
    expected = [gram_score(cosines(one @ one.T)) for one in rows]
    assert [head.gate_gram for head in layer.heads] == pytest.approx(expected)
    assert layer.gram == pytest.approx(np.mean(expected))
    assert layer.gram_random == pytest.approx(1.0 - HIDDEN**-0.5)
    lengths = np.sqrt((rows**2).sum(axis=2).mean(axis=1))
    assert [head.gate_norm for head in layer.heads] == pytest.approx(lengths)
    tensors = tensors_of(0)
    whole = tensors[GATE].astype(ml_dtypes.float8_e4m3fn)
    tensors[GATE] = (2.0 * whole.astype(np.float64)).astype(np.float32)
    (plain,) = looked_at(tensors).layers
    packed = {GATE: whole, f"{GATE}_scale_inv": np.full((1, 1), 2.0, np.float32)}
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (decoded,) = looked_at(tensors | packed, config={"quantization_config": how}).layers
    assert decoded.heads == plain.heads


def test_the_file_has_a_row_for_each_head_as_the_record_has(looked_at, tmp_path):
    record = looked_at(tensors_of(0), tensors_of(1), out=tmp_path / "heads.parquet")
    rows = pq.read_table(tmp_path / "heads.parquet").to_pylist()
    heads = [(layer.layer, head) for layer in record.layers for head in layer.heads]
    for row, (layer, head) in zip(rows, heads, strict=True):
        assert {name: row[name] for name in vars(head)} == vars(head)
        assert row["layer"] == layer


def test_what_is_too_much_or_not_there_is_an_error(looked_at, monkeypatch, tmp_path):
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    with pytest.raises(UsageError, match="of attention are to be read"):
        looked_at(tensors_of(0))
    (layer,) = looked_at(tensors_of(0), yes=True).layers
    assert layer.num_bytes == 8 * HIDDEN * WIDTH * (2 * HEADS + SHARED)  # gate, outputs, values
    with pytest.raises(RouterError, match="no attention layer of family afmoe"):
        looked_at({"model.layers.0.mlp.router.gate.weight": np.zeros((4, 8))})
    with pytest.raises(UsageError, match="parquet"):  # before anything is read
        mg.attention(str(tmp_path / "nowhere"), out=tmp_path / "heads.csv")


def test_a_gate_of_another_shape_or_not_finite_leaves_its_layer_out_and_says_why(looked_at):
    record = looked_at(tensors_of(0), tensors_of(1, gate=20))
    assert [layer.layer for layer in record.layers] == ["text/0"]
    ((name, why),) = record.left_out
    assert name == "text/1"
    assert "has 20 rows, expected 32 for 4 heads" in why
    assert why in text_of(record)
    tensors = tensors_of(0)
    tensors[GATE][3, 3] = np.nan
    broken = looked_at(tensors)
    assert broken.layers == ()
    assert "not finite" in broken.left_out[0][1]


def test_a_sink_of_minus_infinity_is_none_and_no_gate_is_guessed_from_names(looked_at):
    sinks = {"model.layers.0.self_attn.sinks": np.array([1.0, -np.inf, 0.0, -2.0])}
    (layer,) = looked_at(tensors_of(0), sinks, config={"model_type": "gpt_oss"}).layers
    assert [head.sink for head in layer.heads] == [1.0, None, 0.0, -2.0]
    record = looked_at(tensors_of(0), config={"model_type": "olmoe"})
    assert (record.family, record.layers) == ("", ())
    assert "No gate found: model_type 'olmoe'" in text_of(record)


def test_every_file_of_a_family_says_where_it_was_read():
    for name in attention_families():
        family = load_attention_family(name)
        assert family.source.startswith("transformers 5.23.0 modeling_")
        assert family.gate or family.sink
        assert family.output or family.no_products


def text_of(record) -> str:
    return unwrapped(worded(document, record, detail=True))
