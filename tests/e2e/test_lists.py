"""Lists that a person reads: by topic, filtered by a word, equal lines only once."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

SAMPLE = Path(__file__).resolve().parents[2] / "sample_ckpts/olmoe-balanced/step_1500"


@pytest.fixture
def listed(moegeom, tmp_path):
    """What a list holds, as JSON."""
    return lambda *typed: moegeom(tmp_path, *typed, "--format", "json").document


def test_metrics_are_a_line_for_each_column_under_their_topic(moegeom, listed, tmp_path):
    screen = moegeom(tmp_path, "metrics", COLUMNS="80").out
    rows = listed("metrics")
    topics = dict(part.split(":", 1) for part in screen.split("\n\n")[:-1])
    assert list(topics) == list(dict.fromkeys(row["metric"] for row in rows))
    for topic, text in topics.items():
        names = list(dict.fromkeys(row["column"] for row in rows if row["metric"] == topic))
        lines = [line for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
        assert [line.split()[0] for line in lines] == names


def test_a_word_filters_the_columns_and_prints_them_in_full(moegeom, listed, tmp_path):
    rows = listed("metrics", "Margin", "quantile")
    assert {"margin_p50", "margin_p01"} <= {row["column"] for row in rows}
    assert all("margin" in str(row).lower() and "quantile" in str(row).lower() for row in rows)
    screen = moegeom(tmp_path, "metrics", "margin_p50", COLUMNS="100").out
    assert (
        screen.splitlines()[1].split()
        == "margin_p50 margins layers selection score 50 % quantile of the margin".split()
    )


def test_a_pattern_is_of_whole_names(listed):
    for list_of, pattern, name in (
        ("metrics", "Margin_p*", "column"),
        ("families", "qwen?_moe", "family"),
    ):
        whole = {row[name] for row in listed(list_of)}
        matching = {one for one in whole if fnmatchcase(one, pattern.lower())}
        assert {row[name] for row in listed(list_of, pattern)} == matching != set()


def test_a_word_that_nothing_has_is_told_with_the_nearest_name(refused, tmp_path):
    for list_of, word, guess in (
        ("metrics", "margin_p5O", "margin_p50"),
        ("families", "mixtrall", "mixtral"),
        ("arithmetics", "bf166", "bf16"),
    ):
        words = (f"with {word}.", f"Did you mean {guess}?")
        refused(tmp_path, (list_of, word), *words, code=2)


def test_families_of_gguf_come_last_and_a_word_filters(moegeom, listed, tmp_path):
    screen = moegeom(tmp_path, "families", COLUMNS="100").out
    names = [line.split()[0] for line in screen.splitlines()[:-2]]
    is_gguf = [name.startswith("gguf_") for name in names]
    assert any(is_gguf)
    assert is_gguf == sorted(is_gguf)
    found = listed("families", "qwen")
    assert {"qwen3_moe", "qwen2_moe"} <= {row["family"] for row in found}
    assert all("qwen" in str(row).lower() for row in found)


def write_layers(folder: Path, num_layers: int, broken: int) -> None:
    """A router like the sample's in every layer, one of them with a number that is not finite."""
    config = json.loads((SAMPLE / "config.json").read_text("utf-8"))
    folder.mkdir()
    text = json.dumps(config | {"num_hidden_layers": num_layers})
    (folder / "config.json").write_text(text, "utf-8")
    shape = (config["num_experts"], config["hidden_size"])
    tensors = {}
    for layer in range(num_layers):
        weight = np.random.default_rng(layer).standard_normal(shape).astype(np.float32)
        weight[0, 0] = np.nan if layer == broken else weight[0, 0]
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = weight
        gain = np.ones(shape[1], np.float32)
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = gain
    save_file(tensors, folder / "model.safetensors")


def test_routers_of_which_the_same_is_said_share_a_line(moegeom, listed, tmp_path):
    write_layers(tmp_path / "model", 48, broken=7)
    screen = moegeom(tmp_path, "routers", "model", COLUMNS="120", code=0).out
    lines = [line.split() for line in screen.splitlines() if line.startswith("text/")]
    assert [line[0] for line in lines] == ["text/0-6,8-47", "text/7"]
    assert ["FINITE" in line for line in lines] == [False, True]
    assert len(listed("routers", "model")["routers"]) == 48
