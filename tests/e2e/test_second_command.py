"""What a person types next: the same again, the same with an option, another model of that name."""

import os
import re
import shlex
import shutil

from tests.e2e.conftest import widest

#: A scan of one router.
SCAN = ("scan", "model", "--tokens", "rec", "--layers", "1")


def results_of(ran) -> str:
    (line,) = (line for line in ran.out.splitlines() if line.startswith("results "))
    return line.split(maxsplit=1)[1]


def without_time(text: str) -> str:
    return re.sub(r"[\d.]+ m?s\b", "", text)


def test_the_same_command_prints_the_results_that_are_there(moegeom, place):
    first = moegeom(place, *SCAN, code=0)
    again = moegeom(place, *SCAN, code=0)
    assert again.out == first.out
    out = results_of(first)
    assert again.err == f"{out}: the results of this very request; --overwrite measures again.\n"
    assert [path.name for path in (place / "runs").iterdir()] == [out.removeprefix("runs/")]
    long = f"{'long-' * 9}name.moegeom"
    (place / out).rename(place / long)
    on_screen = moegeom(place, *SCAN, "--out", long, COLUMNS="80").err
    assert widest(on_screen) <= 80
    assert " ".join(on_screen.split()).endswith("very request; --overwrite measures again.")


def test_the_same_files_are_the_same_request_wherever_and_others_of_their_size_are_not(
    moegeom, refused, place
):
    """As from an archive that gives all files one time: only what is in them differs."""
    own = shutil.copytree(place / "rec", place / "own")
    asked = ("scan", "model", "--tokens", "own", "--unverified", "--out", "out", "--layers", "1")
    moegeom(place, *asked, code=0)
    shutil.copytree(own, place / "copy")  # keeps the times of change
    shutil.rmtree(own)
    shutil.copytree(place / "copy", own)
    assert moegeom(place, *asked, code=0).err.count("very request") == 1
    values = next(path for path in sorted(own.iterdir()) if path.name.startswith("router_input"))
    before = values.stat()
    raw = bytearray(values.read_bytes())
    half = len(raw) // 2 // 4 * 4  # header and first tokens stay
    raw[half:] = raw[-4:] + raw[half:-4]
    values.write_bytes(raw)
    os.utime(values, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert values.stat().st_size == before.st_size
    refused(place, asked, "holds the results of another request: tokens differ", code=2)


def test_results_of_another_request_are_named_and_stay_until_they_are_overwritten(moegeom, place):
    first = moegeom(place, *SCAN, "--out", "out")
    other = moegeom(place, *SCAN, "--out", "out", "--seed", "4", code=2)
    assert other.err == (
        "error: out holds the results of another request: seed differ.\n"
        "  hint: Choose another --out, or replace them with --overwrite.\n"
    )
    before = (place / "out/run.json").stat().st_ino
    again = moegeom(place, *SCAN, "--out", "out", "--overwrite", code=0)
    assert again.err == ""
    assert without_time(again.out) == without_time(first.out)
    assert (place / "out/run.json").stat().st_ino != before
    assert [path.name for path in place.glob("out*")] == ["out"]


def test_every_request_has_a_folder_of_its_own(moegeom, place, world):
    shutil.copytree(world / "model", place / "b" / "model")
    asked = [
        ("scan", "model"),
        SCAN,
        (*SCAN, "--per-token"),
        (*SCAN, "--seed", "3"),
        ("boundary-report", *SCAN[1:], "--arith", "bf16"),
        ("scan", "b/model"),
    ]
    for arguments in asked:
        moegeom(place, *arguments, code=0)
    assert len(list((place / "runs").iterdir())) == len(asked)


def test_what_is_no_results_is_never_replaced(moegeom, place):
    (place / "thesis").mkdir()
    (place / "thesis" / "chapter.tex").write_text("ten years of work")
    for command in (
        ("scan", "model", "--out", "thesis", "--overwrite"),
        (
            "research",
            "cells",
            "model",
            "--layer=0",
            "--subspace=random:2",
            "--out",
            "thesis",
            "--overwrite",
        ),
    ):
        assert "not replaced" in moegeom(place, *command, code=2).err
    assert (place / "thesis" / "chapter.tex").read_text() == "ten years of work"


def test_every_command_after_next_runs_as_it_is_printed(moegeom, place, world):
    """On screens of a damaged model, where findings have something to say next."""
    shown = [
        moegeom(place, *SCAN).out,
        moegeom(place, "scan", "model").out,
        moegeom(place, "check", "model", "--tokens", "rec", "--layers", "1").out,
        moegeom(place, "check", "model").out,
        moegeom(place, "signoff", "model", "model").out,
    ]
    said = {
        found[1]
        for text in shown
        for line in text.splitlines()
        if (found := re.match(r"\s*next:?\s+(moegeom .*)", line))
    }
    assert said, "these screens have something to say next"
    for line in sorted(said):
        assert not re.search(r"\b(CKPT|REC|FILE|TOKENS|OUT)\b", line), line
        ran = moegeom(place, *shlex.split(line)[1:])
        assert ran.code in (0, 1, 4), (line, ran.err)
