"""Screens of 80 columns: listings by topic, errors and notes; what must be copied stays on one line."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.testing.synthetic import SyntheticModel, write_checkpoint
from moegeom_cli.streams import error_line, folded
from tests.e2e.conftest import widest

LONG = "gate " * 40
PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"
OPTIONS = ("--router-pattern", PATTERN, "--top-k", "4", "--score", "softmax")


def test_a_listing_fits_the_screen(moegeom, place):
    words = ("families", "metrics", "checks", "arithmetics", "routers model")
    for command in (*(f"list {word}" for word in words), "doctor"):
        for columns in (80, 120):
            ran = moegeom(place, *command.split(), COLUMNS=str(columns), code=0)
            assert (ran.err, widest(ran.out) <= columns) == ("", True), command


def test_a_listing_says_the_same_at_every_width(moegeom, place):
    asked = (place, "list", "families", "transformers")
    narrow, wide = ({*moegeom(*asked, COLUMNS=str(c)).out.split()} for c in (80, 120))
    rows = moegeom(*asked, "--format", "json").document
    assert len(rows) > 50
    assert {word for row in rows for cell in row.values() for word in cell.split()} <= narrow
    assert narrow == wide


@pytest.fixture
def strange(tmp_path):
    """A checkpoint of a model type that nobody knows, and of names that are long."""
    write_checkpoint(tmp_path / "strange", SyntheticModel(hidden=64, experts=16, top_k=4, layers=2))
    config = tmp_path / "strange/config.json"
    config.write_text(config.read_text("utf-8").replace('"model_type": "', '"model_type": "un'))
    return tmp_path


def test_an_error_is_folded_on_a_screen_and_whole_in_a_log(moegeom, strange):
    folded_up = moegeom(strange, "list", "routers", "strange", COLUMNS="80")
    whole = moegeom(strange, "list", "routers", "strange")
    assert folded_up.code == whole.code == 3
    assert [line[:8] for line in whole.err.splitlines()] == ["error: s", "  hint: "]
    lines = folded_up.err.splitlines()
    assert [line for line in lines if len(line) > 80 and "--router-pattern" not in line] == []
    assert " ".join(folded_up.err.split()) == " ".join(whole.err.split())
    (hint,) = (line for line in lines if line.startswith("  hint: "))
    assert "--router-pattern" in hint
    assert "--top-k" in hint


def test_a_hint_is_folded_unless_it_holds_options():
    said = error_line(LONG, LONG, LONG, 80).splitlines()
    assert max(map(len, said)) <= 80
    begun = [line for line in said if not line.startswith("       ")]
    assert [line.split(": ")[0].strip() for line in begun] == ["error", "note", "hint"]
    assert error_line("m", f"--score {LONG}", "", 80) == f"error: m\n  hint: --score {LONG}"


def test_a_word_that_is_longer_than_the_screen_stays_whole():
    name = "model.layers." * 12
    assert folded(f"skipped {name}: why", 80, " " * 7).splitlines()[1] == f"       {name}:"
    assert folded(LONG, None, "") == LONG


#: Commands on a model, and how they are typed.
ON_MODEL = (
    "list routers model",
    "scan model --out some",
    "check model",
    "diff model model",
    "imbalance model --tokens rec",
    "research perturb model --tokens rec --at 0,5",
    "research capacity --from model --width 64",
    "track model --out followed",
)


def test_a_layer_that_was_asked_for_in_vain_is_named_by_every_command(moegeom, place):
    said = "ayer 7 was asked for and has no router"
    for typed in ON_MODEL:
        assert said in moegeom(place, *typed.split(), "--layers", "0,7").words, typed
    notes = moegeom(
        place, "list", "routers", "model", "--layers", "0,7", "--format", "json"
    ).document
    assert notes["notes"] == [f"l{said}"]


def test_every_output_says_that_the_rule_is_assumed_and_from_what(moegeom, place):
    said, as_json = "assumed from options", ("--format", "json")
    check = (place, "check", "model", *OPTIONS)
    routers = (place, "list", "routers", "model", *OPTIONS)
    report = (place, "report", "weights")
    for screen in (
        moegeom(*routers),
        moegeom(*check),
        moegeom(place, "scan", "model", *OPTIONS, "--out", "weights"),
        moegeom(*report),
        moegeom(*report, "--format", "md"),
    ):
        assert said in screen.words
    for command in (report, check):
        document = moegeom(*command, *as_json).document
        assert (document["rule_status"], document["rule_trust"]) == ("assumed", said)
    document = moegeom(*routers, *as_json).document
    assert (document["rule_status"], document["rule_origin"]) == ("assumed", "options")


SAMPLE = Path(__file__).resolve().parents[2] / "sample_ckpts/olmoe-balanced/step_1500"


@pytest.fixture
def listed(moegeom, tmp_path):
    """What a list holds, as JSON."""
    return lambda *typed: moegeom(tmp_path, "list", *typed, "--format", "json").document


def test_metrics_are_a_line_for_each_column_under_their_topic(moegeom, listed, tmp_path):
    screen = moegeom(tmp_path, "list", "metrics", COLUMNS="80").out
    rows = listed("metrics")
    topics = dict(part.split(":", 1) for part in screen.split("\n\n")[:-1])
    assert list(topics) == list(dict.fromkeys(row["metric"] for row in rows))
    assert topics["tokens"].startswith(" How many tokens were measured.")
    for topic, text in topics.items():
        names = list(dict.fromkeys(row["column"] for row in rows if row["metric"] == topic))
        lines = [line for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
        assert [line.split()[0] for line in lines] == names


def test_a_word_filters_the_columns_and_prints_them_in_full(moegeom, listed, tmp_path):
    rows = listed("metrics", "Margin", "quantile")
    assert {"margin_p50", "margin_p01"} <= {row["column"] for row in rows}
    assert all("margin" in str(row).lower() and "quantile" in str(row).lower() for row in rows)
    screen = moegeom(tmp_path, "list", "metrics", "margin_p50", COLUMNS="100").out
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
        refused(tmp_path, ("list", list_of, word), *words, code=2)


def test_families_of_gguf_come_last_and_a_word_filters(moegeom, listed, tmp_path):
    screen = moegeom(tmp_path, "list", "families", COLUMNS="100").out
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
    screen = moegeom(tmp_path, "list", "routers", "model", COLUMNS="120", code=0).out
    lines = [line.split() for line in screen.splitlines() if line.startswith("text/")]
    assert [line[0] for line in lines] == ["text/0-6,8-47", "text/7"]
    assert ["FINITE" in line for line in lines] == [False, True]
    assert len(listed("routers", "model")["routers"]) == 48
