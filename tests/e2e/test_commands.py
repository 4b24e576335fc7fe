"""Every command: help, exit codes, which stream says what, one JSON document, silence, where it runs;
on screens of 80 columns: listings, errors and notes, and what must be copied on one line.
"""

import itertools
import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command

from benchmarks.synthetic import SyntheticModel, write_checkpoint
from moegeom_cli.app import app
from moegeom_cli.command import BRANCHES, Group, command_names
from moegeom_cli.command import COMMANDS as COMMAND_FILES
from moegeom_cli.streams import error_line, folded
from tests.by_day import by_day
from tests.e2e.conftest import environment, run_in, widest

COMMANDS = command_names()


def module_of(name: str) -> str:
    """What a command as it is typed is in Python."""
    return name.rsplit(maxsplit=1)[-1].replace("-", "_")


#: A checkpoint with a recording that says what was chosen.
SAMPLE = "sample_ckpts/olmoe-balanced"
RECORDED = f"{SAMPLE}/rec/step_1500"

#: How each command with ``--format`` is called in a place with model, rec and results.
CALLS = {
    "routers": ("list", "routers", "model"),
    "scan": ("scan", "model", "--out", "weights_only"),
    "capture": (
        *("capture", f"{SAMPLE}/step_1500", "--plan"),
        *("--text", "model/config.json", "--out", "recorded"),
    ),
    "merge": ("merge", "part", "--out", "merged"),
    "report": ("report", "results"),
    "check": ("check", "results"),
    "diff": ("diff", "model", "model"),
    "signoff": ("signoff", "model", "model"),
    "track": ("track", "model", "--out", "followed"),
    "imbalance": ("imbalance", "model", "--tokens", "rec"),
    "perturb": ("research", "perturb", "model", "--tokens", "rec", "--at", "0,5"),
    "boundary-report": ("boundary-report", "model", "--tokens", "rec", "--arith", "bf16"),
    "explain": ("explain", f"{SAMPLE}/step_1500", "--tokens", RECORDED, "--run-b", RECORDED),
    "cells": ("research", "cells", f"{SAMPLE}/step_1500", "--layer", "0"),
    "regions": (
        "research",
        "regions",
        f"{SAMPLE}/step_1500",
        "--tokens",
        RECORDED,
        "--layers",
        "0",
    ),
    "whatif": ("whatif", "model", "--tokens", "rec", "--router", "topk:1"),
    "continuity": (
        "research",
        "continuity",
        f"{SAMPLE}/step_1500",
        "--tokens",
        RECORDED,
        "--layers",
        "0",
    ),
    "outputs": (
        "research",
        "outputs",
        f"{SAMPLE}/step_1500",
        "--tokens",
        RECORDED,
        "--layers",
        "0",
    ),
    "capacity": (
        *("research", "capacity", "--experts", "16", "--top-k", "4"),
        *("--width", "32", "--hidden", "64"),
    ),
    "attention": ("research", "attention", "model"),
    "routes": ("routes", "routes.npy"),
    "arithmetics": ("list", "arithmetics"),
    "families": ("list", "families"),
    "metrics": ("list", "metrics"),
    "checks": ("list", "checks"),
    "doctor": ("doctor",),
}

#: ``check`` finds the duplicate rows, ``signoff`` has no recordings; the others have nothing to complain.
CODES = {"check": 1, "signoff": 4, "track": 1}


#: One command of each way to JSON by day; those of studies are compared with functions elsewhere.
BY_DAY = {
    "verdict of a gate": "check",
    "results": "report",
    "series": "track",
    "listing": "metrics",
    "table of routers": "routers",
    "parts of a scan": "merge",
    "plan": "capture",
    "without a checkpoint": "capacity",
}


@pytest.mark.parametrize("name", by_day(CALLS, BY_DAY))
def test_json_is_one_document_on_stdout(moegeom, place, name):
    ran = moegeom(place, *CALLS[name], "--format", "json", code=CODES.get(name, 0))
    assert ran.err == ""
    assert ran.document


def test_quiet_keeps_the_answer_and_silences_the_rest(moegeom, place):
    weights = (place, "scan", "model", "--out", "silent", "--format", "json")
    first, again = moegeom(*weights), moegeom(*weights, "--quiet", code=0)
    assert "this very request" not in first.err
    assert (again.err, again.document) == ("", first.document)


#: What cannot be meant, and a word of the refusal.
REFUSED = [
    (("scam", "model"), "scam"),
    (("space", "model"), "moegeom imbalance"),
    (("balance", "model"), "moegeom imbalance"),
    (("scan", "model", "--tokns", "rec"), "--tokns"),
    (("scan", "model", "--format", "xml"), "xml"),
    (("scan", "model", "--layers", "one"), "one"),
    (("scan", "model", "--layers", "7-3"), "7-3"),
    (("scan", "model", "--layers", "99"), "0"),
    (("scan", "model", "--tokens", "rec", "--stage", "logitz"), "logits"),
    (("scan", "model", "--tokens", "rec", "--map", "text/0"), "KEY=ROUTER"),
    (("scan", "model", "--tokens", "rec", "--non-finite", "drop"), "skip"),
    (("scan", "model", "--threads", "0"), "--threads"),
    (("list", "routers", "model", "--layers", "99"), "0-2"),
    (("diff", "model"), "Missing argument"),
    (("check",), "check needs a checkpoint or results"),
]


def test_what_cannot_be_meant_is_a_usage_error(moegeom, place):
    before = sorted(place.iterdir())
    for arguments, word in REFUSED:
        ran = moegeom(place, *arguments, code=2)
        assert ran.out == ""
        assert word in ran.err
        assert "Traceback" not in ran.err
    assert sorted(place.iterdir()) == before


def test_no_arguments_show_the_help(moegeom, tmp_path):
    ran = moegeom(tmp_path)
    assert ran.code in (0, 2)
    assert "Usage:" in ran.out + ran.err


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """As in ``moegeom list metrics | head -1``."""
    command = f"{sys.executable} -m moegeom_cli list metrics | head -1; echo ${{PIPESTATUS[0]}}"
    finished = run_in(tmp_path, "bash", "-c", command)
    assert finished.stdout.splitlines()[-1] == "0", finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_example_of_a_command_is_parsed_by_it():
    for name in COMMANDS:
        program, *words = shlex.split(COMMAND_FILES[module_of(name)].example)
        assert program == "moegeom"
        command = get_command(app)
        for word in name.split():
            assert words.pop(0) == word
            command = command.get_command(None, word)  # type: ignore[attr-defined]
        command.make_context(name, words)


@pytest.mark.parametrize("columns", [80, 140])
def test_help_is_in_groups_never_cut_and_speaks_of_values_not_of_types(moegeom, tmp_path, columns):
    screen = moegeom(tmp_path, "--help", COLUMNS=str(columns)).out
    assert len(screen.splitlines()) <= 25
    headings = [group for group in Group if group not in BRANCHES]
    assert [group for group in headings if f"\n{group.value}" not in screen] == []
    listed = [name for name in COMMANDS if f" {name} " in screen]
    for branch in BRANCHES:
        below = moegeom(tmp_path, branch, "-h", COLUMNS=str(columns)).out
        listed += [f"{branch} {w}" for w in re.findall(r"^  ([\w-]+) ", below, re.MULTILINE)]
        assert widest(below) <= columns
    assert sorted(listed) == sorted(COMMANDS)
    assert "..." not in screen.replace("[ARGS]...", "")
    assert widest(screen) <= columns
    for name in COMMANDS:
        ran = moegeom(tmp_path, *name.split(), "--help", COLUMNS=str(columns), code=0)
        example, blank, usage, *rest = ran.out.splitlines()
        assert example == f"Example: {COMMAND_FILES[module_of(name)].example}"
        assert (ran.err, blank, usage[:6]) == ("", "", "Usage:")
        assert "{" not in usage
        assert re.findall(r"<(?:int|str|path|float|list)\b[^>]*>|x[<>]=?[\d.]|<=x", ran.out) == []
        assert max(map(len, rest)) <= columns, name


def test_every_command_stands_in_a_place_of_its_own():
    places = [(command.group, command.place) for command in COMMAND_FILES.all()]
    assert len(set(places)) == len(places)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_behind_the_output_is_no_bug():
    command = [sys.executable, "-m", "moegeom_cli", "list", "checks"]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: standard output: cannot be written (No space left on device).\n"
        "  hint: Make room there, or name another place.\n"
    )


def test_what_is_typed_often_is_short_or_stands_in_the_environment(moegeom, place):
    spoken = moegeom(place, "scan", "model", "-o", "spoken", "-v", "-q", code=0).err.splitlines()
    assert [line.split()[1] for line in spoken] == ["s"] * len(spoken)
    assert any(line.endswith("spoken: written") for line in spoken)
    assert moegeom(place, "report", "spoken", MOEGEOM_FORMAT="json", code=0).document
    assert moegeom(place, "list", "routers", "-h", code=0).out.startswith("Example: ")
    wrong = moegeom(place, "scan", "model", MOEGEOM_THREADS="many", code=2)
    assert "MOEGEOM_THREADS" in wrong.err
    for name in ("space", "cells", "checks"):
        assert "Did you mean moegeom " in moegeom(place, name, code=2).err


# ------------------------------------------------------------------------------------------ devices
SCANNING = (
    ("scan", "model"),
    ("boundary-report", "model"),
    ("check", "model"),
    ("diff", "model", "model"),
    ("track", "model"),
)
UNKNOWN = ("gpu", "cuda:", "cuda:x", "cuda:0,,1", "cpu:0", "auto:1")


TOKENS = ("--tokens", "rec", "--layers", "1", "--out", "out", "--device")


def test_an_unknown_device_is_refused_before_anything_is_written(moegeom, place):
    for command, device in itertools.zip_longest(SCANNING, UNKNOWN, fillvalue=SCANNING[0]):
        assert moegeom(place, *command, *TOKENS, device, code=2).err == (
            f"error: --device {device}: unknown device.\n"
            "  hint: Expected auto, cpu, cuda, cuda:1 or cuda:0,1.\n"
        )
    assert not list(place.glob("out*"))


def test_a_gpu_that_is_asked_for_and_not_there_ends_every_command_that_scans(moegeom, place):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # on a machine with a GPU as well
    for command, device in (*((c, "cuda") for c in SCANNING), (SCANNING[0], "cuda:7")):
        ran = moegeom(place, *command, *TOKENS, device, code=3, **hidden)
        assert ran.err.startswith("error: No GPU was found; CuPy says: ")
        assert "Traceback" not in ran.err
    assert not list(place.glob("out*/*"))


def test_where_a_scan_runs_is_said_when_it_is_asked_and_why(moegeom, place):
    scan = (place, *SCANNING[0], *TOKENS)
    ran = moegeom(*scan[:-1], code=0)
    assert ran.err == ""
    ran = moegeom(*scan, "auto", "--overwrite", code=0)
    assert ran.err.startswith("device: the processor; ")
    assert ran.err.endswith(" are done before a GPU has started\n")
    facts = json.loads((place / "out/run.json").read_text("utf-8"))["device"]
    assert (facts["kind"], facts["asked"], facts["names"]) == ("cpu", "auto", [])
    assert facts["why"] in ran.err
    assert moegeom(*scan, "auto", "--overwrite", "--quiet", code=0).err == ""


# ----------------------------------------------------------------------------------- narrow screens
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


STEP = Path(__file__).resolve().parents[2] / "sample_ckpts/olmoe-balanced/step_1500"


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
    config = json.loads((STEP / "config.json").read_text("utf-8"))
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
