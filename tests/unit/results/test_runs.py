"""A results directory is whole or absent, belongs to one plan and has one writer. Killed at any
moment, a run leaves no results or whole ones, and the same call completes it.

One kill of each kind, at its moment; tests/e2e/test_interrupted.py kills at random ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import threadpoolctl

from moegeom import pipeline
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import OutputError, UsageError
from moegeom.core.router import Norm, Projection
from moegeom.core.tokens import InputNoise
from moegeom.engine import run_facts
from moegeom.engine.run_facts import plan_facts
from moegeom.metrics import METRICS
from moegeom.pipeline import scan
from moegeom.results import writer as writer_module
from moegeom.results.reader import open_results
from moegeom.results.writer import ResultsWriter
from moegeom.router.load import load_routers
from tests.by_day import by_day
from tests.unit.results.conftest import TOKENS, Killed, killed


@pytest.fixture(scope="module")
def half_done(disk, tmp_path_factory):
    """What a run leaves that ended after its first router."""
    out = killed(disk.request(tmp_path_factory.mktemp("half") / "out"))
    return out.with_name("out.partial")


@pytest.fixture
def interrupted(half_done, tmp_path):
    """A run that ended after its first router."""
    shutil.copytree(half_done, tmp_path / "out.partial")
    return tmp_path / "out"


@pytest.fixture
def begun(monkeypatch) -> list[str]:
    """Routers that are measured in this test, as they are begun."""
    names: list[str] = []
    measure = pipeline.measure_in_step

    def count(runs):
        names.extend(run.router.name for run in runs)
        return measure(runs)

    monkeypatch.setattr(pipeline, "measure_in_step", count)
    return names


def facts_of(out) -> dict:
    """What a run says of itself, without the time that it took."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items() if key != "seconds"}
        return value

    return plain(json.loads((out / "run.json").read_text()))


def test_a_run_goes_on_after_the_routers_that_are_finished(disk, interrupted, begun):
    assert not interrupted.exists()
    out = scan(disk.request(interrupted))
    assert begun == ["text/1"]
    disk.assert_undisturbed(out)
    for file in disk.undisturbed.glob("*.parquet"):  # a part that was read again, one that was not
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert facts_of(out) == facts_of(disk.undisturbed)
    assert not out.with_name("out.partial").exists()


def test_at_no_moment_is_there_a_part_of_the_results(disk, tmp_path):
    """Looked at before every file that is opened, made, moved or removed."""
    out = tmp_path / "out"
    whole = sorted(p.name for p in disk.undisturbed.iterdir())
    seen: set[tuple[str, ...]] = set()
    watching = True

    def look(event: str, arguments: tuple) -> None:
        nonlocal watching
        if watching and (event == "open" or event.startswith(("os.", "shutil."))):
            watching = False  # listing a folder is an event of its own
            seen.add(tuple(sorted(p.name for p in out.iterdir())) if out.exists() else ())
            watching = True

    sys.addaudithook(look)  # stays until the process ends, so it can be told to look away
    try:
        scan(disk.request(out))
    finally:
        watching = False
    assert seen == {(), tuple(whole)}


def test_another_plan_is_refused_and_named_and_the_old_one_goes_on_at_any_pace(
    disk, interrupted, tmp_path
):
    """The parts that are finished were measured under the rule that config.json gave then."""
    model = shutil.copytree(disk.model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    key = next(key for key in ("num_experts_per_tok", "moe_k", "top_k") if key in config)
    (model / "config.json").write_text(json.dumps(config | {key: config[key] + 1}))
    for change, words in (
        ({"seed": 5}, "seed differ"),
        ({"layers": "0"}, "layers.* differ"),
        ({"checkpoint": str(model)}, "rules differ"),
    ):
        with pytest.raises(UsageError, match=words):
            scan(disk.request(interrupted, **change))
    # refusing has destroyed nothing
    disk.assert_undisturbed(scan(disk.request(interrupted, num_workers=2, batch_tokens=300)))


#: Another value for every field of a request that stands in the plan: of the tokens, of another run
#: of them, and of what is measured.
TOKENS_OF = {"stage": "pre_norm", "dialect": "vllm", "expert_map": "other"}
RUN_B = {"run_b": "other", "stage_b": "ids", "dialect_b": "vllm", "expert_map_b": "other"}
MEASURED = {"layers": "0", "seed": 5, "per_token": True, "experts": True, "exclude_first": 3}
ARITHMETIC = {"backend": "reference", "arithmetics": ("tf32",), "reference": "tf32"}
WHAT_IFS = {"what_ifs": ("random",), "what_if_batch": 64, "noise": InputNoise(0.25)}
MAPS = {"router_map": {"a": "text/0"}, "map_b": {"a": "text/0"}}
OTHER_VALUES = TOKENS_OF | RUN_B | MEASURED | ARITHMETIC | WHAT_IFS | MAPS


def test_every_field_of_a_request_is_in_the_plan_or_named_with_a_reason(disk, tmp_path):
    (tmp_path / "other").mkdir()
    request = disk.request(tmp_path / "out")
    routers = load_routers(open_checkpoint(request.checkpoint))
    plan = lambda request: json.dumps(plan_facts(request, routers, None, "cpu", {}))
    fields = dataclasses.fields(request)
    assert OTHER_VALUES.keys() == {f.name for f in fields if "outside_plan" not in f.metadata}
    assert all(f.metadata.get("outside_plan", "a reason") for f in fields)
    for name, value in OTHER_VALUES.items():
        is_path = name in ("run_b", "expert_map", "expert_map_b")
        changed = {name: str(tmp_path / value) if is_path else value}
        assert plan(dataclasses.replace(request, **changed)) != plan(request), name


def test_every_number_and_rule_of_a_router_is_in_the_plan(disk, tmp_path):
    """Each field of a router is exchanged for something else."""
    request = disk.request(tmp_path / "out")
    routers = load_routers(open_checkpoint(request.checkpoint))
    first = routers.routers[0]
    ones = np.ones(first.num_experts, np.float32)
    places = {"name": "text/9", "stack": "vision", "layer": 9, "slot": "mtp", "listed": "a state"}
    rows = {"weight": first.weight + 1, "shared_rows": first.weight[:1]}
    experts = dict.fromkeys(("logit_bias", "selection_bias", "expert_scale"), ones)
    inputs = dict.fromkeys(("gain", "norm_bias", "shared_gate"), np.full(first.hidden_size, 2.0))
    inputs |= {"norm": Norm("layer", 1e-3, "other"), "projection": Projection(np.eye(16))}
    rule = {"rule": dataclasses.replace(first.rule, top_k=first.rule.top_k + 1)}
    others = places | rows | experts | inputs | rule
    assert others.keys() == {field.name for field in dataclasses.fields(first)} - {"provenance"}
    plan = lambda routers: plan_facts(request, routers, None, "cpu", {})
    for name, value in others.items():
        router = dataclasses.replace(first, **{name: value})
        changed = dataclasses.replace(routers, routers=(router, *routers.routers[1:]))
        assert plan(changed) != plan(routers), name


def test_the_linear_algebra_of_a_run_is_named_in_one_order(monkeypatch):
    libraries = threadpoolctl.threadpool_info()
    expected = run_facts.arithmetic_facts("cpu")
    assert expected["blas"]
    foreign = {**libraries[0], "filepath": "/opt/torch/lib/libmkl.so", "version": "9.9"}
    for listed in (libraries[::-1], libraries[1:] + libraries[:1], [foreign, *libraries]):
        monkeypatch.setattr(run_facts, "threadpool_info", lambda listed=listed: listed)
        assert run_facts.arithmetic_facts("cpu") == expected


def test_restart_discards(disk, interrupted, begun):
    killed(disk.request(interrupted, seed=5, restart=True))
    assert "text/0" in begun


def test_two_writers_at_once_are_one_too_many_and_a_folder_of_others_is_left_alone(disk, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        scan(disk.request(tmp_path / "theirs"))
    assert [p.name for p in tmp_path.rglob("*")] == ["theirs", "mine.txt"]
    out = tmp_path / "out"
    with ResultsWriter(out, {}, METRICS.all()):
        refused = pytest.raises(UsageError, match="being written by another process")
        with refused, ResultsWriter(out, {}, METRICS.all()):
            pass
        assert (tmp_path / "out.partial" / "plan.json").exists()


def test_a_run_that_fails_before_measuring_leaves_nothing(disk, tmp_path, monkeypatch):
    def stop(*arguments):
        raise Killed

    monkeypatch.setattr(pipeline, "measure", stop)
    with pytest.raises(Killed):
        scan(disk.request(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_cut_off_in_the_middle_is_begun_anew(disk, interrupted):
    plan = interrupted.with_name("out.partial") / "plan.json"
    plan.write_text(plan.read_text()[:40])
    out = scan(disk.request(interrupted, seed=5))  # of no known plan: discarded
    assert json.loads((out / "run.json").read_text())["seed"] == 5


@pytest.mark.parametrize(
    ("file", "damage"),
    by_day(
        itertools.product(
            ["layers.parquet", "experts.parquet", "facts.json", "digest"],
            ["a bit", "the end", "gone", "a folder"],
        ),
        {"a part": ("layers.parquet", "a bit"), "its digest": ("digest", "a folder")},
    ),
)
def test_a_part_that_a_disk_damaged_is_measured_again(disk, interrupted, begun, file, damage):
    path = interrupted.with_name("out.partial") / "parts" / "text.0" / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "gone":
        path.write_bytes(raw if damage == "a bit" else raw[: len(raw) // 2])
    out = scan(disk.request(interrupted))
    assert begun == ["text/0", "text/1"]
    disk.assert_undisturbed(out)


@pytest.mark.parametrize("when", ["restarting", "tidying up"])
def test_parts_that_were_half_removed_are_not_taken_for_whole(disk, interrupted, monkeypatch, when):
    """The process may end while it removes what it no longer needs."""
    partial = interrupted.with_name("out.partial")
    rmtree = shutil.rmtree

    def half(path, **options):
        if path in (partial, partial / "parts"):
            (partial / "parts" / "text.0" / "layers.parquet").unlink()
            raise Killed
        rmtree(path, **options)

    monkeypatch.setattr(writer_module.shutil, "rmtree", half)
    with pytest.raises(Killed):
        scan(disk.request(interrupted, restart=when == "restarting"))
    monkeypatch.setattr(writer_module.shutil, "rmtree", rmtree)
    if interrupted.exists():  # complete; somebody removes it and scans again
        disk.assert_undisturbed(interrupted)
        rmtree(interrupted)
    out = scan(disk.request(interrupted))
    disk.assert_undisturbed(out)


def test_neither_the_cut_of_a_recording_nor_files_of_tokens_change_the_tables(disk, tmp_path):
    tokens = disk.record(tmp_path / "rec", (1, 1024, TOKENS - 1025))
    out = scan(disk.request(tmp_path / "out", tokens=str(tokens), per_token=True))
    disk.assert_undisturbed(out)
    files = sorted(p.name for p in (out / "tokens").iterdir())
    assert files == ["text.0.parquet", "text.1.parquet"]


def test_a_full_disk_is_said_and_what_is_whole_stays(disk, interrupted):
    """Files of the second router do not fit; the first one is there when there is room again."""
    resource = pytest.importorskip("resource", reason="limits of POSIX")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot be written \(.*too large") as caught:
            scan(disk.request(interrupted))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 2
    assert not interrupted.exists()
    out = scan(disk.request(interrupted))
    disk.assert_undisturbed(out)


#: Forks a child for each line and prints, once the child is gone, how it ended.
LOOP = """
import os, sys
for line in sys.stdin:
    child = os.fork()
    if not child:
        work(*line.split())
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forker:
    """``code`` defines ``work``, which a child of its own does with the words of each line.

    Children are forked from one that has imported everything, so that the time is spent in the work.
    SIGKILL runs no handler.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + LOOP, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def run(self, *words: object) -> int:
        """0, or how the child ended."""
        print(*words, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


#: A scan into ``out`` that is killed at a moment. This is a word of a path, and the kill comes
#: before the first touch of the file system that names it.
SCAN = """
import os, signal, sys
from pathlib import Path
from moegeom import pipeline
from moegeom.core.tokens import TILE
from moegeom.kernels.table import load_kernels
from moegeom.metrics import METRICS
from moegeom.measure import passes as _measure
from moegeom.engine.loop import Pace

METRICS.all(), load_kernels("cpu")
_measure.pace_of = lambda run: Pace(TILE, run.options.num_workers, snapshot_seconds=-1.0)  # after each tile
checkpoint, tokens, own_out = sys.argv[1:]

def work(out, moment=None):
    def look(event, arguments):
        if event == "open" or event.startswith(("os.", "shutil.")) and event != "os.kill":
            is_named = any(moment in str(argument) for argument in arguments)
            if os.path.exists(out) if moment == "moved" else is_named:
                os.kill(os.getpid(), signal.SIGKILL)
    if moment:
        sys.addaudithook(look)
    pipeline.scan(pipeline.ScanRequest(
        checkpoint, Path(out), tokens=tokens, unverified=True, stale_inputs=True, num_workers=2
    ))

work(own_out)  # from here on every loop is compiled
"""


@pytest.fixture
def forker(disk, tmp_path):
    forker = Forker(SCAN, disk.model, disk.tokens, tmp_path / "imports")
    yield forker
    forker.close()


def test_a_kill_of_each_kind_leaves_no_results_or_whole_ones(disk, forker, tmp_path):
    """One run, killed again and again; each time it goes on with what was kept."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    for moment, pattern in {
        "snapshots": "plan.json",
        "new.text.0/facts.json": "snapshots/text.0.*.npz",
        "new.text.1": "parts/text.0/digest",
        "whole/run.json": "whole/layers.parquet",
        "moved": "parts/text.1/digest",
    }.items():
        assert forker.run(out, moment) == signal.SIGKILL, moment
        assert list(partial.glob(pattern)), moment
        assert out.exists() == (moment == "moved")
    assert open_results(out).run["schema"] == 2
    disk.assert_undisturbed(out)
