"""Where a scan runs, and what is said about it."""

from __future__ import annotations

import json

import pytest

COMMANDS = (
    ("scan", "model"),
    ("boundary-report", "model"),
    ("check", "model"),
    ("diff", "model", "model"),
    ("track", "model"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:0,,1", "cpu:0", "auto:1"])
def test_an_unknown_device_is_refused_before_anything_is_written(
    moegeom, world, tmp_path, command, device
):
    folder = world.copy_to(tmp_path, "model", "rec")
    ran = moegeom(folder, *command, "--tokens", "rec", "--out", "out", "--device", device)
    assert ran.code == 2
    assert ran.err == (
        f"error: --device {device}: unknown device.\n"
        "  hint: Expected auto, cpu, cuda, cuda:1 or cuda:0,1.\n"
    )
    assert not list(folder.glob("out*"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("command", "device"),
    [
        *((command, "cuda") for command in COMMANDS),
        (COMMANDS[0], "cuda:0"),
        (COMMANDS[0], "cuda:7"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_a_gpu_that_is_asked_for_and_not_there_ends_every_command_that_scans(
    moegeom_cold, world, tmp_path, monkeypatch, command, device
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a machine with a GPU as well
    folder = world.copy_to(tmp_path, "model", "rec")
    asked = ("--tokens", "rec", "--out", "out", "--device", device)
    ran = moegeom_cold(folder, *command, *asked)
    assert ran.code == 3
    assert ran.err.startswith("error: No GPU was found; CuPy says: ")
    assert "Traceback" not in ran.err
    assert not list(folder.glob("out*/*"))


def test_auto_says_where_the_scan_runs_and_why(moegeom, world, tmp_path):
    folder = world.copy_to(tmp_path, "model", "rec")
    ran = moegeom(folder, "scan", "model", "--tokens", "rec", "--out", "out", "--device", "auto")
    assert ran.code == 0
    assert ran.err.startswith("device: the processor; ")
    assert ran.err.endswith(" are done before a GPU has started\n")
    facts = json.loads((folder / "out/run.json").read_text("utf-8"))["device"]
    assert (facts["kind"], facts["asked"], facts["names"]) == ("cpu", "auto", [])
    assert facts["why"] in ran.err


def test_nothing_is_said_about_the_processor_unless_asked(moegeom, world, tmp_path):
    folder = world.copy_to(tmp_path, "model", "rec")
    ran = moegeom(folder, "scan", "model", "--tokens", "rec", "--out", "out")
    assert (ran.code, ran.err) == (0, "")
    ran = moegeom(
        folder, "scan", "model", "--tokens", "rec", "--out", "b", "--device", "auto", "--quiet"
    )
    assert (ran.code, ran.err) == (0, "")
