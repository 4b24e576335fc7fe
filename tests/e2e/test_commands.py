"""Every command: help, exit codes, which stream says what, one JSON document, silence, and where it
runs.
"""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from moegeom.results.reader import open_results
from moegeom_cli.app import app
from moegeom_cli.command import BRANCHES, Group, command_names
from moegeom_cli.command import COMMANDS as COMMAND_FILES
from tests.by_day import by_day
from tests.e2e.conftest import environment, widest

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
    "hmoe": ("research", "hmoe"),
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
    (("scan", "model", "--prior", "gaussian"), "isotropic-rms"),
    (("scan", "model", "--prior", "isotropic-rms", "--tokens", "rec"), "--prior"),
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
    finished = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert finished.stdout.splitlines()[-1] == "0", finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_prior_gives_geometry_and_no_load(moegeom, place):
    prior = ("--prior", "isotropic-rms", "--layers", "1", "--out", "prior")
    screen = moegeom(place, "scan", "model", *prior, code=0).out
    assert "geometry only, no load, no entropy" in screen
    (head,) = (line for line in screen.splitlines() if line.startswith("layer "))
    assert "margin" in head
    assert "load" not in head
    assert "busiest" not in head
    rows = open_results(place / "prior").rows("layers")
    (name,) = {row["population"] for row in rows if row["num_tokens"]}
    assert "isotropic-rms" in name
    for column in ("load_cv_ddof0", "load_entropy_nats", "max_vio_global", "num_dead"):
        assert {row[column] for row in rows} == {None}


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
def test_help_is_in_groups_never_cut_and_speaks_of_values_and_not_of_types(
    moegeom, tmp_path, columns
):
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
