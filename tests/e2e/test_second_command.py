"""What a person types next: the same again, the same with an option, another model of that name."""

import os
import re
import shlex
import shutil

#: A scan of one router.
SCAN = ("scan", "model", "--tokens", "rec", "--layers", "1")


def results_of(ran) -> str:
    (line,) = (line for line in ran.out.splitlines() if line.startswith("results "))
    return line.split(maxsplit=1)[1]


def without_time(text: str) -> str:
    return re.sub(r"[\d.]+ m?s\b", "", text)


def test_the_same_command_prints_the_results_that_are_there(moegeom, place):
    first = moegeom(place, *SCAN)
    again = moegeom(place, *SCAN)
    assert (first.code, again.code) == (0, 0)
    assert again.out == first.out
    out = results_of(first)
    assert again.err == (f"{out}: the results of this very request; --overwrite measures again.\n")
    assert [path.name for path in (place / "runs").iterdir()] == [out.removeprefix("runs/")]


def test_that_results_were_there_is_folded_on_a_screen(moegeom, place):
    asked = (place, *SCAN, "--out", f"{'long-' * 9}name.moegeom")
    moegeom(*asked)
    again = moegeom(*asked, COLUMNS="80")
    assert max(map(len, again.err.splitlines())) <= 80
    assert " ".join(again.err.split()).endswith("very request; --overwrite measures again.")


def _own_recording(place):
    return shutil.copytree(place / "rec", place / "own")


def test_another_recording_of_the_same_size_and_time_is_another_request(moegeom, place):
    """As from an archive that gives all files one time: only what is in them differs."""
    own = _own_recording(place)
    asked = ("scan", "model", "--tokens", "own", "--unverified", "--out", "out", "--layers", "1")
    assert moegeom(place, *asked).code == 0
    values = next(path for path in sorted(own.iterdir()) if path.name.startswith("router_input"))
    before = values.stat()
    raw = bytearray(values.read_bytes())
    half = len(raw) // 2 // 4 * 4  # header and first tokens stay
    raw[half:] = raw[-4:] + raw[half:-4]
    values.write_bytes(raw)
    os.utime(values, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert values.stat().st_size == before.st_size
    again = moegeom(place, *asked)
    assert again.code == 2
    assert "holds the results of another request: tokens differ" in again.err


def test_the_same_files_elsewhere_are_the_same_request(moegeom, place):
    own = _own_recording(place)
    moegeom(place, "scan", "model", "--tokens", "own", "--out", "out", "--layers", "1")
    shutil.copytree(own, place / "copy")  # keeps the times of change
    shutil.rmtree(own)
    shutil.copytree(place / "copy", own)
    again = moegeom(place, "scan", "model", "--tokens", "own", "--out", "out", "--layers", "1")
    assert (again.code, again.err.count("very request")) == (0, 1)


def test_overwrite_measures_again_and_leaves_nothing_else(moegeom, place):
    first = moegeom(place, *SCAN, "--out", "out")
    before = (place / "out/run.json").stat().st_ino
    again = moegeom(place, *SCAN, "--out", "out", "--overwrite")
    assert (again.code, again.err) == (0, "")
    assert without_time(again.out) == without_time(first.out)
    assert (place / "out/run.json").stat().st_ino != before
    assert [path.name for path in place.glob("out*")] == ["out"]


def test_every_request_has_a_folder_of_its_own(moegeom, place, world):
    shutil.copytree(world.folder / "model", place / "b" / "model")
    asked = [
        ("scan", "model"),
        SCAN,
        (*SCAN, "--per-token"),
        (*SCAN, "--seed", "3"),
        ("boundary-report", *SCAN[1:], "--arith", "bf16"),
        ("scan", "b/model"),
    ]
    ran = [moegeom(place, *arguments) for arguments in asked]
    assert [one.code for one in ran] == [0] * len(asked), [one.err for one in ran]
    assert len(list((place / "runs").iterdir())) == len(asked)


def test_results_of_another_request_are_named_and_stay(moegeom, place):
    moegeom(place, *SCAN, "--out", "out")
    other = moegeom(place, *SCAN, "--out", "out", "--seed", "4")
    assert other.code == 2
    assert other.err == (
        "error: out holds the results of another request: seed differ.\n"
        "  hint: Choose another --out, or replace them with --overwrite.\n"
    )
    more = ("--seed", "4", "--overwrite")
    assert moegeom(place, *SCAN, "--out", "out", *more).code == 0


def test_what_is_no_results_is_never_replaced(moegeom, place):
    (place / "thesis").mkdir()
    (place / "thesis" / "chapter.tex").write_text("ten years of work")
    for command in (
        ("scan", "model", "--out", "thesis", "--overwrite"),
        ("cells", "model", "--layer=0", "--subspace=random:2", "--out", "thesis", "--overwrite"),
    ):
        ran = moegeom(place, *command)
        assert ran.code == 2, command
        assert "not replaced" in ran.err
    assert (place / "thesis" / "chapter.tex").read_text() == "ten years of work"


def test_every_command_after_next_runs_as_it_is_printed(moegeom, place, world):
    """On screens of a damaged model, where findings have something to say next."""
    shown = [
        moegeom(place, *SCAN).out,
        moegeom(place, "scan", "model").out,
        moegeom(place, "check", "model", "--tokens", "rec").out,
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
