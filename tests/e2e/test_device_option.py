"""Where a scan runs, and what is said about it."""

import itertools
import json

COMMANDS = (
    ("scan", "model"),
    ("boundary-report", "model"),
    ("check", "model"),
    ("diff", "model", "model"),
    ("track", "model"),
)
UNKNOWN = ("gpu", "cuda:", "cuda:x", "cuda:0,,1", "cpu:0", "auto:1")


TOKENS = ("--tokens", "rec", "--layers", "1", "--out", "out", "--device")


def test_an_unknown_device_is_refused_before_anything_is_written(moegeom, place):
    for command, device in itertools.zip_longest(COMMANDS, UNKNOWN, fillvalue=COMMANDS[0]):
        assert moegeom(place, *command, *TOKENS, device, code=2).err == (
            f"error: --device {device}: unknown device.\n"
            "  hint: Expected auto, cpu, cuda, cuda:1 or cuda:0,1.\n"
        )
    assert not list(place.glob("out*"))


def test_a_gpu_that_is_asked_for_and_not_there_ends_every_command_that_scans(moegeom, place):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # on a machine with a GPU as well
    for command, device in (*((c, "cuda") for c in COMMANDS), (COMMANDS[0], "cuda:7")):
        ran = moegeom(place, *command, *TOKENS, device, code=3, **hidden)
        assert ran.err.startswith("error: No GPU was found; CuPy says: ")
        assert "Traceback" not in ran.err
    assert not list(place.glob("out*/*"))


def test_where_a_scan_runs_is_said_when_it_is_asked_and_why(moegeom, place):
    scan = (place, *COMMANDS[0], *TOKENS)
    ran = moegeom(*scan[:-1], code=0)
    assert ran.err == ""
    ran = moegeom(*scan, "auto", "--overwrite", code=0)
    assert ran.err.startswith("device: the processor; ")
    assert ran.err.endswith(" are done before a GPU has started\n")
    facts = json.loads((place / "out/run.json").read_text("utf-8"))["device"]
    assert (facts["kind"], facts["asked"], facts["names"]) == ("cpu", "auto", [])
    assert facts["why"] in ran.err
    assert moegeom(*scan, "auto", "--overwrite", "--quiet", code=0).err == ""
