"""Ctrl-C: what is kept is said, and the next run says that it goes on."""

import json
import shutil

import numpy as np
import pytest

import moegeom as mg
import moegeom.pipeline
from moegeom.results.reader import open_results
from moegeom.tokens.traces import first_pass
from moegeom_cli import app
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
        code = app._exit_code(["scan", "model", "--out", "out", *tokens, *more])
        return code, capsys.readouterr().err

    return scan


def test_an_interrupted_scan_says_what_is_kept_and_the_next_goes_on_with_it(
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
    read, facts_of = [], first_pass.facts_of

    def arrange(name: str) -> list[str]:
        def stopped(file, *given):
            if file.label == name:
                raise KeyboardInterrupt
            read.append(file.label)
            return facts_of(file, *given)

        monkeypatch.setattr(first_pass, "facts_of", stopped)
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
