"""Nothing that lies in a checkout runs: neither by the action, nor by a command typed there.

What commands do in a folder with hostile files once they have started: every test of this folder,
through ``run_nothing_of`` of warm_commands.py.
"""

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from benchmarks.synthetic import SyntheticModel, write_checkpoint
from moegeom.results.reader import open_results
from tests.by_day import by_day
from tests.columns import columns_of, recording_of
from tests.e2e.conftest import ROOT, changed, plant_code, run_cold, run_in
from tests.e2e.test_commands import CALLS

STEPS = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"]

#: Ways to start a check of ``broken`` in the checkout, with the action's own first.
WAYS = {
    "action": ["bash", "-eu", "-c", STEPS[1]["run"]],
    "python -m": [sys.executable, "-m", "moegeom_cli", "check", "broken"],
}


@pytest.mark.parametrize("way", WAYS)
def test_code_in_the_checkout_does_not_answer_for_the_gate(way, tmp_path):
    changed(tmp_path, "broken", lambda held: {k: np.full_like(v, np.nan) for k, v in held.items()})
    plant_code(tmp_path)
    plant_code(tmp_path / "broken")
    inputs = dict.fromkeys(STEPS[1]["env"], "") | {
        "PYTHON": sys.executable,
        "CHECKPOINT": "broken",
        "JUNIT": "junit.xml",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    ran = run_in(tmp_path, *WAYS[way], **inputs)
    assert "MGI101" in ran.stdout, ran.stderr
    assert ran.returncode == 1
    assert not (tmp_path / "RAN").exists()


def test_what_a_command_decides_is_its_exit_code_whoever_listens(tmp_path):
    changed(tmp_path, "broken", lambda held: {k: np.full_like(v, np.nan) for k, v in held.items()})
    (tmp_path / "good").symlink_to(ROOT / "sample_ckpts/olmoe-balanced/step_1500")
    command = f"{sys.executable} -m moegeom_cli check"
    streams = (">&-", "2>&-", ">&- 2>&- <&-", "| true", "2>&1 >&- | true")
    cases = [("broken", stream, 1) for stream in streams]
    cases += [("good", streams[2], 0), ("nowhere", streams[4], 3), ("good", "&>/dev/full", 2)]
    offenders = []
    # no stream, no reader, a verdict and an error that nobody hears, no room
    for target, stream, code in by_day(cases, [*cases[2:4], *cases[5:]]):
        script = f"{command} {target} {stream}; exit ${{PIPESTATUS[0]}}"
        ran = run_in(tmp_path, "bash", "-c", script)
        if ran.returncode != code:
            offenders.append((target, stream, ran.returncode))
    assert offenders == []


@pytest.mark.parametrize("place", by_day(["model/kernels", "kernels", "rec"], ["model/kernels"]))
def test_kernels_that_a_working_tree_holds_are_refused(place, world, tmp_path):
    for name in ("model", "rec"):
        (tmp_path / name).symlink_to(world / name, target_is_directory=True)
    (tmp_path / ".git").mkdir()
    variable = {"NUMBA_CACHE_DIR": str(tmp_path / place)}
    ran = run_cold(tmp_path, "check", "model", "--tokens", "rec", **variable)
    assert ran.code == 2
    assert "which is judged" in ran.err
    assert "Set NUMBA_CACHE_DIR to a folder outside of it." in ran.err
    assert not (tmp_path / "kernels").exists()


# ----------------------------------------------------------------------- names, and what they name
#: What may stand where a file or a folder is expected, and who makes it.
ODD = {
    "an empty file": lambda path: path.touch(),
    "an empty folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle of links": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "other bytes": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "lines and\n\x1b[31mcolours": lambda path: path.mkdir(),
    "x" * 300: None,
    "y/" * 3000: None,
}

#: Calls with the place of an input, which an odd thing takes.
INPUTS = [
    (name, place)
    for name, call in CALLS.items()
    for place, word in enumerate(call)
    if name != "capture" and (word in ("model", "rec", "results", "part", "routes.npy"))
]


@pytest.mark.parametrize(
    ("call", "odd"),
    by_day(
        [*itertools.product(INPUTS, ODD)],
        [(call, odd) for call, odd in zip(itertools.cycle(INPUTS[1:]), [*ODD, *ODD])],
    ),
)
def test_whatever_stands_in_place_of_an_input_is_refused_in_a_sentence(call, odd, moegeom, place):
    if ODD[odd]:
        ODD[odd](place / odd)
    name, number = call
    ran = moegeom(place, *CALLS[name][:number], odd, *CALLS[name][number + 1 :])
    assert ran.code in (2, 3, 4), ran
    assert ran.err.startswith(("error: ", "Usage: ")) or name == "check", ran
    assert "\x1b" not in ran.out + ran.err


def test_names_that_are_no_utf_8_are_read_and_written(moegeom, place):
    model, rec, out, step = (os.fsdecode(b"\xff\xfe" + name) for name in (b"m", b"r", b"o", b"_1"))
    for name, link in (("model", model), ("rec", rec), ("model", step)):
        (place / link).symlink_to(place / name, target_is_directory=True)
    scan = ("scan", model, "--tokens", rec, "--layers", "1", "--out", out)
    assert moegeom(place, *scan, code=0).out
    pages = (f"--html={out}.html", f"--report=junit={out}.xml", f"--report=json={out}.json")
    assert moegeom(place, "check", out, *pages, code=1).out
    assert (place / f"{out}.xml").read_text("utf-8")
    moegeom(place, "track", step, "--out", f"{out}t", code=1)
    assert "udcff\\udcfe_1" in (place / f"{out}t/series.json").read_text("utf-8")


# ------------------------------------------------------------------------------ files that are none
GATE = "model.layers.{}.mlp.gate.weight"
NORM = "model.layers.{}.post_attention_layernorm.weight"
WEIGHTS = "model/model.safetensors"
SCAN = ("scan", "model", "--tokens", "rec", "--out", "out")
ROUTERS = ("text/0", "text/1", "text/2")


@pytest.fixture
def damaged(world, tmp_path) -> Path:
    """A folder with a checkpoint and a recording that a test may damage."""
    for name in ("model", "rec"):
        shutil.copytree(world / name, tmp_path / name)
    return tmp_path


def values_of(folder: Path, router: str = "text/0") -> Path:
    return folder / f"rec/router_input-{router.replace('/', '.')}-00000.safetensors"


def write_recording(path: Path, values: dict[str, np.ndarray]) -> None:
    tokens = len(next(iter(values.values())))
    recording_of(path, "router_input", columns_of(np.arange(tokens) // 128), values)


# ------------------------------------------------------------------------------ what is damaged
def cut(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)


def more_experts(folder: Path) -> None:
    config = folder / "model/config.json"
    settings = json.loads(config.read_text("utf-8")) | {"num_experts": 32}
    config.write_text(json.dumps(settings), "utf-8")


def nan_in_a_row(folder: Path, layer: int) -> None:
    tensors = load_file(folder / WEIGHTS)
    weight = tensors[GATE.format(layer)].copy()
    weight[7, 3] = np.nan
    save_file(tensors | {GATE.format(layer): weight}, folder / WEIGHTS)


def another_checkpoint(folder: Path) -> None:
    """Its gains differ as well: only the test of the fingerprint comes first."""
    shutil.rmtree(folder / "model")
    other = SyntheticModel(hidden=64, experts=16, top_k=4, layers=3, seed=9)
    write_checkpoint(folder / "model", other)


def a_residual_stream(folder: Path) -> None:
    gain = load_file(folder / WEIGHTS)[NORM.format(0)].astype(np.float32)
    inputs = load_file(values_of(folder))["router_input"]
    length = np.exp(np.random.default_rng(0).normal(0.0, 0.4, (len(inputs), 1)))
    residual = (inputs / gain * 3.0 * length).astype(np.float32)
    shutil.rmtree(folder / "rec")
    write_recording(folder / "rec", dict.fromkeys(ROUTERS, residual))


def tokens_of(names: tuple[str, ...], width: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder / "rec")
        write_recording(folder / "rec", dict.fromkeys(names, np.ones((64, width), np.float32)))

    return damage


def nan_in_a_token(folder: Path, router: str, token: int) -> None:
    file = values_of(folder, router)
    values = load_file(file)["router_input"].copy()
    values[token, 5] = np.nan
    save_file({"router_input": values}, file)


#: What is done to a folder, and words of the refusal.
REFUSED: dict[str, tuple] = {
    "a truncated shard": (lambda folder: cut(folder / WEIGHTS), "model.safetensors: truncated"),
    "experts by config and tensor": (more_experts, "model.safetensors", GATE.format(0), "16", "32"),
    "the residual stream": (a_residual_stream, "router text/0", "RMS", "expected 1", "pre_norm"),
    "the wrong width": (tokens_of(ROUTERS, 48), "text/0", "48", "64", "hint:"),
    "another checkpoint": (another_checkpoint, "rec: recorded from another", "--stale-inputs"),
    "another model": (tokens_of(("audio/0",), 64), "audio/0", "text/0", "hint:"),
    "truncated values": (lambda folder: cut(values_of(folder, "text/2")), "text.2-00000"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_sentence(refused, damaged, what):
    damage, *words = REFUSED[what]
    damage(damaged)
    refused(damaged, SCAN, *words)


def test_nan_in_a_router_row_is_refused_with_tokens_and_found_without(refused, moegeom, damaged):
    nan_in_a_row(damaged, 2)
    words = ("text/2", "expert 7", "1 of 16", GATE.format(2), "--layers")
    refused(damaged, (*SCAN, "--stale-inputs"), *words)
    ran = moegeom(damaged, "scan", "model", "--out", "out", code=0)
    (verdict,) = (line for line in ran.out.splitlines() if line.startswith("VERDICT"))
    assert " 2 errors" in verdict  # the duplicate rows of layer 1, and this
    assert "layer 2" in ran.out


def test_nan_in_a_token_is_refused_with_the_option_that_skips_it(refused, moegeom, damaged):
    layers = (*SCAN, "--layers", "1")
    nan_in_a_token(damaged, "text/1", 137)
    refused(damaged, layers, "rec", "router text/1", "first: token 137", "--non-finite skip")
    moegeom(damaged, *layers, "--non-finite", "skip", "--quiet", code=0)
    results = open_results(damaged / "out")
    assert results.run["parts"]["text/1"]["first_non_finite"] == [137]
    assert results.layers()["num_tokens"].to_pylist() == [1023]
    # the same without the option is another request, whatever lies there
    refused(damaged, layers, "skipped 1 token of router text/1", "--overwrite", code=2)


def test_the_option_of_the_hint_works_after_nan_in_a_later_layer(moegeom, damaged):
    nan_in_a_token(damaged, "text/2", 0)
    typed = (*SCAN, "--layers", "1-2")
    assert "text/2" in moegeom(damaged, *typed, code=3).err
    assert not (damaged / "out").exists()
    moegeom(damaged, *typed, "--non-finite", "skip", "--quiet", code=0)


def test_paths_that_are_not_there_or_taken_are_refused(refused, world, damaged):
    refused(damaged, ("scan", "nowhere", "--out", "out"), "nowhere", "no such file", "hint:")
    np.save(damaged / "text.0.npy", np.ones((8, 64), np.float32))
    foreign = ("scan", "model", "--tokens", "text.0.npy", "--out", "out")
    refused(damaged, foreign, "text.0.npy", "--stage", "router_input", code=2)
    (damaged / "file").write_text("")
    refused(damaged, (*SCAN[:4], "--out", "file/out"), "file", code=2)
    (damaged / "out").mkdir()
    refused(damaged, SCAN, "out exists already and holds no results", "hint:", code=2)


def test_an_error_names_the_folder_that_was_typed(refused, place):
    """Two folders of one name cannot be told apart by a message that has the name alone."""
    refused(place, ("scan", "model", "--tokens", "nowhere/rec"), "nowhere/rec")
    (place / "other/model").mkdir(parents=True)
    refused(place, ("diff", "model", "other/model"), "other/model")
    facts = shutil.copytree(place / "rec", place / "stale/rec") / "recording.json"
    facts.write_text(re.sub(r'("fingerprint": ")[^"]+', r"\1sha256:0", facts.read_text("utf-8")))
    words = ("recorded from another checkpoint", "note: tokens: stale/rec")
    refused(place, ("scan", "model", "--tokens", "stale/rec"), *words)
