"""Ctrl-C: what is kept is said, and the next run says that it goes on. However a command that writes
is ended, what is whole stays, nothing half-written has a name, and the same command completes it. What a person
types next: the same again, the same with an option, another model of that name.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import moegeom as mg
import moegeom.pipeline
from moegeom.results.reader import open_results
from moegeom.tokens.traces import survey
from moegeom_cli import app
from moegeom_cli.command import COMMANDS, built, command_names, typed_words
from tests.by_day import IS_NIGHT, by_day
from tests.e2e.conftest import HEALTHY, run_in, warm_commands, widest
from tests.unit.tokens.dialects.written import Written, write_vllm


@pytest.fixture
def interrupted_at(monkeypatch):
    """Ctrl-C when the n-th router is measured, before it is kept."""

    def arrange(number: int) -> None:
        measure, begun = moegeom.pipeline.measure_in_step, []

        def interrupted(runs):
            for found in measure(runs):
                begun.append(found)
                if len(begun) == number:
                    raise KeyboardInterrupt
                yield found

        monkeypatch.setattr(moegeom.pipeline, "measure_in_step", interrupted)

    return arrange


@pytest.fixture
def run(place, monkeypatch, capsys):
    def scan(*more: str) -> tuple[int, str]:
        monkeypatch.chdir(place)
        tokens = () if "--tokens" in more else ("--tokens", "rec")
        code = app.exit_code(["scan", "model", "--out", "out", *tokens, *more])
        return code, capsys.readouterr().err

    return scan


def test_an_interrupted_scan_says_what_stays_and_the_next_goes_on(
    run, interrupted_at, monkeypatch, place
):
    interrupted_at(3)
    code, said = run()
    assert code == 130
    assert said == (
        "interrupted; 2 of 3 routers, and what was begun, are kept in out.partial; the same "
        "command goes on there.\n"
    )
    monkeypatch.undo()
    code, said = run()
    assert code == 0
    assert said == "going on in out.partial: 2 of 3 routers are done\n"
    assert not (place / "out.partial").exists()


def test_a_scan_that_is_interrupted_before_it_measured_leaves_nothing(run, interrupted_at, place):
    interrupted_at(1)
    code, said = run()
    assert (code, said) == (130, "interrupted; nothing was measured yet.\n")
    assert not list(place.glob("out*"))


# ----------------------------------------------------------------------- traces in many files
@pytest.fixture
def dump(place, run):
    """A trace of the model in four files; and a scan of it."""
    routers, draw = mg.open(place / "model").routers, np.random.default_rng(0)
    (place / "dump").mkdir()
    for number in range(4):
        order = [np.argsort(draw.random((16, r.num_experts)), axis=1) for r in routers]
        ids = np.stack([o[:, : routers[0].rule.top_k] for o in order], axis=1)
        request = Written(str(number), ids, np.arange(17), num_prompt=3)
        write_vllm(place / "dump" / f"{number}.jsonl", [request])
    return lambda *more: run("--tokens", "dump", *more)


@pytest.fixture
def stopped_at_file(monkeypatch):
    """Ctrl-C when a file is to be read; and the files that were."""
    read, survey_of = [], survey.survey_of

    def arrange(name: str) -> list[str]:
        def stopped(file, *given):
            if file.label == name:
                raise KeyboardInterrupt
            read.append(file.label)
            return survey_of(file, *given)

        monkeypatch.setattr(survey, "survey_of", stopped)
        return read

    return arrange


def test_an_interrupted_first_pass_goes_on_and_gives_the_same_results(dump, stopped_at_file, place):
    read = stopped_at_file("2.jsonl")
    code, said = dump()
    assert (code, read) == (130, ["0.jsonl", "1.jsonl"])
    assert "what the first pass found in 2 files is kept in out.partial" in said
    read = stopped_at_file("none")
    read.clear()
    code, said = dump()
    assert (code, read) == (0, ["2.jsonl", "3.jsonl"])
    assert said == "going on in out.partial: the first pass over 2 files is done\n"
    assert not (place / "out.partial").exists()
    read.clear()
    code, said = dump()
    assert (code, read) == (0, [])
    assert said.startswith("out: the results of this very request")
    found = open_results(place / "out").in_memory()
    shutil.rmtree(place / "out")
    assert dump()[0] == 0
    for table in ("layers", "experts", "pairs"):
        assert found.table(table).equals(open_results(place / "out").table(table))


def test_what_was_found_by_another_map_of_experts_is_read_again(dump, stopped_at_file, place):
    experts = [router.num_experts for router in mg.open(place / "model").routers]
    (place / "map.json").write_text(json.dumps([list(range(n))[::-1] for n in experts]))
    stopped_at_file("2.jsonl")
    assert dump("--expert-map", "map.json")[0] == 130
    (place / "map.json").write_text(json.dumps([list(range(n)) for n in experts]))
    read = stopped_at_file("none")
    read.clear()
    assert dump("--expert-map", "map.json")[0] == 0
    assert read == ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]
    mapped = open_results(place / "out").in_memory()
    assert dump("--overwrite")[0] == 0
    assert mapped.table("experts").equals(open_results(place / "out").table("experts"))


def test_a_scan_that_goes_on_does_not_repeat_its_first_pass(dump, stopped_at_file, interrupted_at):
    interrupted_at(2)
    assert dump()[0] == 130
    read = stopped_at_file("none")
    interrupted_at(0)
    code, said = dump()
    assert (code, read) == (0, [])
    assert "going on in out.partial: 1 of 3 routers are done" in said


# ----------------------------------------------------------------------- any command, at any moment
_ON = f"{HEALTHY} --tokens {HEALTHY.replace('/step', '/rec/step')} --layers 0"
_CAPTURE = f"capture {HEALTHY} --text text.jsonl --tokenizer bytes --num-tokens 256 --out out"

#: How commands that write are called.
WRITING = {
    "scan": "scan model --tokens rec --layers 1,2 --out out",
    "scan --part": "scan model --tokens rec --layers 1 --part 1/1 --out out",
    "merge": "merge part --out out",
    "boundary-report": "boundary-report model --tokens rec --arith bf16 --layers 1 --out out",
    "whatif": "whatif model --tokens rec --router topk:1 --layers 1 --out out",
    "track": "track sample_ckpts/olmoe-collapsed/step_[16]00 --out out",
    "capture": _CAPTURE,
    "capture --fold": f"{_CAPTURE} --fold",
    "baseline": "check model --update-baseline --baseline out",
    "check": "check model --out out",
    "diff": "diff model model --tokens rec --layers 1 --out out",
    "cells": f"research cells {_ON} --subspace pca:2 --out out",
    "outputs": f"research outputs {_ON} --out out",
    "regions": f"research regions {_ON} --out out.parquet",
    "perturb": "research perturb model --tokens rec --at 0,5 --layers 1 --out out.parquet",
    "imbalance": "imbalance model --tokens rec --layers 1 --out out.npz",
    "attention": "research attention model --out out.parquet",
    "continuity": f"research continuity {_ON} --out out.parquet",
}

#: What writes several folders of results, each of them whole.
SEVERAL = {"track", "diff"}

#: One way to write each.
BY_DAY = {"results": "merge", "series": "track", "file": "baseline"}

#: A signal, and how a command ends by it.
ENDINGS = {signal.SIGKILL: -9, signal.SIGTERM: -15, signal.SIGINT: 130}

#: Signals that come one after the other, before the command may end by itself.
ROUNDS = [[number] * 2 for number in ENDINGS for _ in range(10)] if IS_NIGHT else [list(ENDINGS)]


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    yield from warm_commands(tmp_path_factory.mktemp("streams"), "moegeom.recorder.run")


@pytest.fixture
def write(request, moegeom, place):
    """Runs a command that writes in a folder of its own; the reports, and what has a name there."""

    def run(name: str, folder: str, **options):
        here = place.parent / f"{place.name}-{folder}"
        if not here.exists():
            shutil.copytree(place, here, symlinks=True)
            text = [json.dumps({"text": f"{n} is a number. " * 4}) for n in range(20)]
            (here / "text.jsonl").write_text("\n".join(text))
        server = request.getfixturevalue("with_torch") if "capture" in name else moegeom
        return server(here, *WRITING[name].split(), **options), contents(here)

    return run


def contents(folder: Path) -> dict[str, object]:
    """What was written there under a name of its own: of JSON what is true of every run."""
    return {
        str(path.relative_to(folder)): lasting(json.loads(path.read_bytes()))
        if path.name in ("run.json", "part.json", "series.json")
        else path.read_bytes()
        for path in folder.rglob("out*")
        for path in (path, *path.rglob("*"))
        if path.is_file() and not re.search(r"\.partial|\.moegeom-\w+\.tmp$", str(path))
    }


#: What is true of a run and not of what it found.
OF_A_RUN = {"seconds", "is_reused"}


def lasting(value: object) -> object:
    if isinstance(value, dict):
        return {key: lasting(one) for key, one in value.items() if key not in OF_A_RUN}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def test_every_command_that_writes_is_ended():
    writing = {
        typed_words(name)
        for name in COMMANDS.names()
        if any("--out" in option.opts for option in built(name).params)
    }
    lines = [f"{call} " for call in WRITING.values()]
    assert writing == {n for line in lines for n in command_names() if line.startswith(f"{n} ")}


@pytest.mark.parametrize("name", by_day(WRITING, BY_DAY))
def test_however_a_command_ends_what_is_whole_stays_and_the_same_command_completes_it(name, write):
    """Killed, terminated and interrupted: at night twenty times each, by day once."""
    moments = random.Random(name)
    first, whole = write(name, "whole")
    assert whole, first.err
    begun = time.monotonic()
    write(name, "timed")
    usual = time.monotonic() - begun
    for number, signals in enumerate(ROUNDS):
        for ending in signals:
            moment = moments.uniform(0, 1.05 * usual)
            ran, left = write(name, f"{number}", ending=(ending, moment))
            case = (name, ending.name, ran)
            assert ran.code in (ENDINGS[ending], first.code) or "exists" in ran.err, case
            assert "Traceback" not in ran.err, case
            assert "Exception ignored" not in ran.err, case
            assert left.items() <= whole.items(), case
            assert name in SEVERAL or not left or left == whole, case
            if ran.code == 130:
                assert ran.err.splitlines()[-1].startswith("interrupted"), case
        if left != whole:
            ran, left = write(name, f"{number}")
            assert (ran.code, left) == (first.code, whole), (*case, ran)
    pair, left = write(name, "both", times=2)
    assert left == whole
    assert {first.code} <= {ran.code for ran in pair} <= {first.code, 2}, pair
    ran, left = write(name, "full", largest=300)
    if left != whole:  # which may be as small as that
        assert (ran.code, left) == (2, {}), ran
        # as far as its own words had room
        assert "cannot be written (" in ran.err or len(ran.err.encode()) >= 300, ran


#: Compiled code turns an interruption into an error of its own, as NumPy does in buffers.
TURNED = """
            try:
                signal.raise_signal(2)
            except KeyboardInterrupt as interruption:
                raise ValueError("no valid buffer") from interruption
"""


#: Others ignore it, as a destructor does.
IGNORED = "type('Last', (), {'__del__': lambda last: signal.raise_signal(2)})()"


@pytest.mark.parametrize(
    "way", ["signal.raise_signal(2)", "exec('signal.raise_signal(2)')", TURNED.strip(), IGNORED]
)
@pytest.mark.parametrize("package", ["typer", "moegeom.checks"])
def test_ctrl_c_while_moegeom_is_loaded_ends_with_130_and_a_sentence(way, package, tmp_path):
    script = f"""
import signal, sys
from moegeom_cli import __main__

class Finder:
    def find_spec(self, name, *rest):
        if name == {package!r}:
            {way}

sys.meta_path.insert(0, Finder())
sys.argv = ["moegeom", "list", "checks"]
__main__.main()
"""
    (tmp_path / "as_module.py").write_text(script)  # so runs python -m moegeom_cli
    ran = run_in(tmp_path, sys.executable, "-m", "as_module")
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted.\n")


# --------------------------------------------------------------------------- the same command again
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


def test_the_same_files_are_the_same_request_anywhere_and_others_are_not(moegeom, refused, place):
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
    for command in ("scan model", "research cells model --layer=0 --subspace=random:2"):
        typed = (*command.split(), "--out", "thesis", "--overwrite")
        assert "not replaced" in moegeom(place, *typed, code=2).err
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
