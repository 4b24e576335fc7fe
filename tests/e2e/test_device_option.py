"""Where a scan runs, and what is said about it."""

from __future__ import annotations

import json

COMMANDS = (
    ("scan", "model"),
    ("boundary-report", "model"),
    ("check", "model"),
    ("diff", "model", "model"),
    ("track", "model"),
)


def test_an_unknown_device_is_refused_before_anything_is_written(moegeom, place):
    for command in COMMANDS:
        for device in ("gpu", "cuda:", "cuda:x", "cuda:0,,1", "cpu:0", "auto:1"):
            typed = (*command, "--tokens", "rec", "--out", "out", "--device", device)
            ran = moegeom(place, *typed)
            assert ran.code == 2
            assert ran.err == (
                f"error: --device {device}: unknown device.\n"
                "  hint: Expected auto, cpu, cuda, cuda:1 or cuda:0,1.\n"
            )
    assert not list(place.glob("out*"))


def test_a_gpu_that_is_asked_for_and_not_there_ends_every_command_that_scans(moegeom, place):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # on a machine with a GPU as well
    for command, device in (*((c, "cuda") for c in COMMANDS), (COMMANDS[0], "cuda:7")):
        typed = (*command, "--tokens", "rec", "--out", "out", "--device", device)
        ran = moegeom(place, *typed, **hidden)
        assert ran.code == 3
        assert ran.err.startswith("error: No GPU was found; CuPy says: ")
        assert "Traceback" not in ran.err
    assert not list(place.glob("out*/*"))


def test_auto_says_where_the_scan_runs_and_why(moegeom, place):
    ran = moegeom(place, "scan", "model", "--tokens", "rec", "--out", "out", "--device", "auto")
    assert ran.code == 0
    assert ran.err.startswith("device: the processor; ")
    assert ran.err.endswith(" are done before a GPU has started\n")
    facts = json.loads((place / "out/run.json").read_text("utf-8"))["device"]
    assert (facts["kind"], facts["asked"], facts["names"]) == ("cpu", "auto", [])
    assert facts["why"] in ran.err


def test_nothing_is_said_about_the_processor_unless_asked(moegeom, place):
    ran = moegeom(place, "scan", "model", "--tokens", "rec", "--out", "out")
    assert (ran.code, ran.err) == (0, "")
    ran = moegeom(
        place, "scan", "model", "--tokens", "rec", "--out", "b", "--device", "auto", "--quiet"
    )
    assert (ran.code, ran.err) == (0, "")
