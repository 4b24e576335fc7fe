"""Each function finds what its command prints as JSON, on the sample checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import moegeom as mg
from moegeom.tokens.open import open_tokens
from moegeom_cli import app
from tests.unit.studies.samples import BALANCED, few_tokens, sides

CKPT, BEFORE = BALANCED / "step_1500", BALANCED / "step_1000"

#: What two runs of one request differ in.
CHANGING = frozenset(["seconds", "results", "session"])


def few() -> Path:
    return few_tokens(BALANCED.name)


def command(*arguments: object) -> dict:
    """What the command prints with ``--format json``."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        app.exit_code([*map(str, arguments), "--format", "json", "--quiet"])
    return json.loads(stream.getvalue())


def lasting(value: object) -> object:
    """The same without what changes from run to run."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if k not in CHANGING}
    return [lasting(entry) for entry in value] if isinstance(value, list) else value


@pytest.fixture
def openings(monkeypatch) -> list[str]:
    """Names of checkpoints as they are opened."""
    from moegeom.checkpoint import open as opening

    names, local = [], opening._local
    monkeypatch.setattr(opening, "_local", lambda path: names.append(path.name) or local(path))
    return names


def assert_same(report: mg.Report, *arguments: object) -> None:
    assert lasting(json.loads(report.json())) == lasting(command(*arguments))


#: A command, whose words in capitals are paths, and the function. OUT is a folder for each.
SAME = {
    "list routers CKPT --layers 0,2": lambda: mg.open(CKPT, layers=[0, 2]).report(),
    "scan CKPT --tokens REC --layers 0 --out OUT": lambda: mg.scan(CKPT, few(), layers=0),
    "research perturb CKPT --tokens REC --layers 1 --seed 3 --at 5,77 --noise 0.2": lambda: (
        mg.perturb(CKPT, few(), layers=1, seed=3, at=(5, 77), noise=0.2)
    ),
    "imbalance CKPT --tokens REC --layers 1 --seed 3": lambda: mg.imbalance(
        mg.open(CKPT, layers=1), mg.recording(few()), seed=np.int64(3)
    ),
    "research cells CKPT --tokens REC --layer 0 --subspace pca:2": lambda: mg.cells(
        CKPT, few(), layers=0, subspace="pca:2"
    ),
    "research cells --weights ROWS --top-k 2 --expert-set 0,1": lambda: mg.cells(
        weights=Path("rows.npz"), top_k=2, expert_set=[0, 1]
    ),
    "research regions CKPT --tokens REC --layers 1 --segments 5": lambda: mg.regions(
        CKPT, few(), layers=1, segments=5
    ),
    "research outputs CKPT --tokens REC --layers 1 --sample 40": lambda: mg.outputs(
        CKPT, few(), layers=1, sample=40
    ),
    "research capacity --from CKPT --tokens REC --layers 0 --split 2": lambda: mg.capacity(
        CKPT, few(), layers=0, splits=2
    ),
    "diff BEFORE CKPT": lambda: mg.diff(BEFORE, mg.open(CKPT)),
    "signoff BEFORE CKPT": lambda: mg.signoff(BEFORE, CKPT),
    "explain CKPT --tokens REC --run-b REC --layers 0": lambda: mg.explain(
        CKPT, few(), run_b=mg.recording(few()), layers=0
    ),
    "track BEFORE CKPT --out OUT --layers 0": lambda: mg.track(
        [BEFORE, CKPT], out=Path("own"), layers=0
    ),
}


@pytest.mark.parametrize("words", SAME)
def test_a_function_finds_what_its_command_prints(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", weight=np.random.default_rng(0).standard_normal((6, 2)))
    paths = {"CKPT": CKPT, "BEFORE": BEFORE, "REC": few(), "OUT": "out", "ROWS": "rows.npz"}
    report = SAME[words]()
    assert_same(report, *(paths.get(word, word) for word in words.split()))
    if words.startswith("scan"):
        assert report.value.path is None


def test_a_scan_that_is_kept_is_what_report_prints(tmp_path):
    scan = mg.scan(str(CKPT), out=tmp_path / "kept", layers="0-1")
    assert_same(scan, "report", tmp_path / "kept")
    assert mg.report(tmp_path / "kept").json() == scan.json()
    assert mg.report(scan) is scan
    assert_same(mg.check(scan), "check", tmp_path / "kept")


@pytest.mark.parametrize("has_tokens", [False, True])
def test_check_finds_what_check_prints(has_tokens, openings):
    tokens = few() if has_tokens else None
    given = ["--tokens", tokens] if has_tokens else []
    report = mg.check(CKPT, tokens, select=["MGI", "MGB"], fail_on="warning")
    assert openings == ["step_1500"], "it is opened once"
    assert_same(report, "check", CKPT, *given, "--select", "MGI,MGB", "--fail-on", "warning")


def test_boundary_report_finds_what_boundary_report_prints(tmp_path):
    words = ("--tokens", few(), "--layers", "0", "--arith", "bf16", "--noise", "0.01")
    report = mg.boundary_report(CKPT, few(), layers=0, arithmetics=["bf16"], noise=0.01)
    assert_same(report, "boundary-report", CKPT, *words, "--out", tmp_path / "one")
    assert_same(mg.boundary_report(tmp_path / "one"), "boundary-report", tmp_path / "one")


def test_results_in_memory_are_judged_and_compared_as_those_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memory = [mg.scan(each) for each in (CKPT, BEFORE)]
    files = [mg.scan(each, out=tmp_path / each.name) for each in (CKPT, BEFORE)]
    ours, theirs = (mg.check(results[0]).value.verdict for results in (memory, files))
    assert [o.state for o in ours.outcomes] == [o.state for o in theirs.outcomes]
    written = mg.check(memory[0], update_baseline=True, baseline="here.json").value.written
    assert written is not None
    assert mg.check(files[0], baseline=written)
    assert not mg.check(memory[1], baseline=written, fail_on="warning")
    ours, theirs = (mg.diff(*results).value for results in (memory, files))
    assert [r.kind for r in ours.sides] == ["results", "results"]
    assert ours.routers == theirs.routers
    for refused in (mg.check, lambda *given, **more: mg.diff(*given, memory[1], **more)):
        with pytest.raises(mg.MoeGeomError, match="results in memory holds results"):
            refused(memory[0], tokens=few())
    # a profile beside them counts
    Path("moegeom.toml").write_text('select = ["MGI101"]\n', "utf-8")
    assert len(mg.check(memory[0]).value.verdict.outcomes) == 1


def test_route_chooses_what_was_recorded():
    """The margin is the last chosen logit less the first that is not; distances are positive."""
    source = open_tokens(sides(BALANCED)[1])
    for router in mg.open(CKPT).routers:
        inputs = source.read_values(router.name, 0, 1500)
        routed = mg.route(router, inputs)
        np.testing.assert_array_equal(
            np.sort(routed.chosen), np.sort(source.read_chosen(router.name, 0, 1500))
        )
        logits = -np.sort(-(inputs.astype(np.float64) @ router.weight.T.astype(np.float64)))
        np.testing.assert_allclose(routed.margin, logits[:, 3] - logits[:, 4], atol=1e-5)
        assert (routed.num_chosen == 4).all()
        assert (routed.boundary_distance > 0).all()
        np.testing.assert_array_equal(routed.boundary_distance, routed.boundary_distance_upper)
        assert routed.unknown == {}
        assert len(routed) == 1500


def test_route_takes_the_road_of_a_scan(tmp_path):
    """Rows by token of a scan hold the same bits."""
    mg.scan(CKPT, few(), layers=2, per_token=True, out=tmp_path / "kept")
    rows = pq.read_table(tmp_path / "kept/tokens/text.2.parquet")
    router, source = mg.open(CKPT).routers[2], open_tokens(few())
    routed = mg.route(router, source.read_values(router.name, 0, source.facts.num_tokens))
    np.testing.assert_array_equal(routed.margin, rows["margin"].to_numpy())


def _tensor(array):
    import torch

    return torch.from_numpy(array)


#: The inputs of all routers as people hold them.
HELD = {
    "by name": lambda arrays: arrays,
    "by layer": lambda arrays: dict(enumerate(arrays.values())),
    "in a list": lambda arrays: list(arrays.values()),
    "in one array": lambda arrays: np.stack(list(arrays.values())),
    "as tensors": lambda arrays: {name: _tensor(array) for name, array in arrays.items()},
}


def test_arrays_in_memory_are_measured_as_a_file_of_them_is(tmp_path, monkeypatch):
    source = open_tokens(few())
    arrays = {name: source.read_values(name, 0, 64) for name in source.facts.routers}
    file = mg.imbalance(CKPT, _file(tmp_path / "rec.npz", arrays), stage="router_input").value
    reports = {
        name: mg.imbalance(CKPT, mg.recording(form(arrays), stage="router_input"))
        for name, form in HELD.items()
    }
    routers = {name: report.value.routers for name, report in reports.items()}
    assert [n for n, those in routers.items() if repr(those) != repr(file.routers)] == []


def test_results_of_other_arrays_are_not_the_answer(tmp_path):
    source, router = open_tokens(few()), mg.open(CKPT, layers=0)
    one, other = (source.read_values("text/0", start, start + 256) for start in (0, 256))
    for _ in range(2):
        mg.scan(router, one, stage="router_input", out=tmp_path / "kept")
    with pytest.raises(mg.MoeGeomError, match="another request: tokens differ"):
        mg.scan(router, other, stage="router_input", out=tmp_path / "kept")


def _arrays(step: int, kind: str = "values") -> dict[str, np.ndarray]:
    """Of the first tokens of a recording, with what says which they are."""
    source = open_tokens(sides(BALANCED, step)[1])
    read = {"values": source.read_values, "chosen": source.read_chosen}[kind]
    columns = source.read_columns(0, 512)
    named = {name: getattr(columns, name) for name in ("document", "position", "token_id")}
    return {name: read(name, 0, 512) for name in source.facts.routers} | named


def _file(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **{name.replace("/", "."): array for name, array in arrays.items()})
    return path


def test_two_sides_in_memory_are_compared_as_files_of_them_are(tmp_path, openings):
    memory = [_arrays(step) for step in (1000, 1500)]
    files = [_file(tmp_path / f"{i}.npz", arrays) for i, arrays in enumerate(memory)]
    options = {"stage": "router_input", "layers": 0, "unverified": True}
    of_files = mg.diff(BEFORE, CKPT, files, **options)
    assert openings == ["step_1000", "step_1500"], "each is opened once"
    report = mg.diff(BEFORE, CKPT, memory, **options)
    assert report.value.figures is not None
    assert report.value.figures == of_files.value.figures
    assert [side.num_routers for side in report.value.sides] == [1, 1]
    one = mg.recording(memory[1], stage="router_input")
    both = mg.diff(CKPT, CKPT, one, layers=0, unverified=True)
    assert any("the same inputs" in note for note in both.value.notes)
    assert not any("on the same inputs" in note for note in report.value.notes)


def test_choices_in_memory_are_signed_off_as_files_of_them_are(tmp_path, openings):
    memory = [_arrays(step, "chosen") for step in (1000, 1500)]
    files = [_file(tmp_path / f"{i}.npz", arrays) for i, arrays in enumerate(memory)]
    of_files = mg.signoff(BEFORE, CKPT, files, stage="ids")
    assert openings == ["step_1000", "step_1500"], "each is opened once"
    again = mg.recording(memory[0], stage="ids")
    report = mg.signoff(BEFORE, CKPT, memory, stage="ids")
    assert report.value.lines[-1].state == "not judged"
    assert report.value.lines[-1].sentence == of_files.value.lines[-1].sentence
    report = mg.signoff(BEFORE, CKPT, memory, stage="ids", rerun=again)
    assert any("their arrays are equal" in line for line in report.value.not_looked_at)


def test_steps_in_memory_are_followed_as_files_of_them_are(tmp_path, openings):
    """What is kept is the answer for the same arrays, and for no others."""
    memory = {f"step_{step}": _arrays(step) for step in (1000, 1500)}
    for step, arrays in memory.items():
        _file(tmp_path / f"{step}.npz", arrays)
    options = {"stage": "router_input", "layers": 0, "unverified": True}
    paths = [BEFORE, CKPT]
    of_files = mg.track(paths, tmp_path / "{name}.npz", out=tmp_path / "one", **options)
    assert openings == ["step_1000", "step_1500"], "each is opened once"
    first, again = (mg.track(paths, memory, out=tmp_path / "two", **options) for _ in range(2))
    assert first.value.curves == of_files.value.curves == again.value.curves
    assert [step.is_reused for step in first.value.steps] == [False, False]
    assert [step.is_reused for step in again.value.steps] == [True, True]
    other = memory | {"step_1500": memory["step_1000"]}
    changed = mg.track(paths, other, out=tmp_path / "two", **options)
    assert [step.is_reused for step in changed.value.steps] == [True, False]


class Listener:
    """What ``watch`` hears."""

    def __init__(self) -> None:
        self.total, self.done, self.notes = 0, 0, []

    def start(self, num_tokens: int, unit: str = "") -> None:
        self.total = num_tokens

    def begin(self, what: str) -> None: ...

    def advance(self, num_tokens: int) -> None:
        self.done += num_tokens

    def say(self, text: str) -> None:
        self.notes.append(text)


def test_all_work_that_is_announced_is_told_as_done():
    listener = Listener()
    mg.imbalance(CKPT, few(), layers=0, watch=listener)
    assert listener.done == listener.total >= 512
    for measure in (mg.scan, mg.check):
        listener = Listener()
        measure(CKPT, watch=listener)
        assert (listener.total, listener.done, listener.notes) == (3, 3, []), (
            "a step for each router"
        )
    listener = Listener()
    mg.diff(CKPT, CKPT, experts=True, layers=0, watch=listener)
    assert [text.partition(" ")[0] for text in listener.notes] == ["A:", "B:"]


def test_numbers_have_one_unit_of_chance_however_they_are_held(tmp_path):
    """As [layers, tokens, k], as [tokens, layers, k], which is a trace of one request, and by name."""
    source = open_tokens(few())
    names = source.facts.routers
    chosen = np.stack([source.read_chosen(name, 0, 512) for name in names])
    np.save(tmp_path / "layers.npy", chosen)
    np.save(tmp_path / "tokens.npy", chosen.swapaxes(0, 1).copy())
    np.savez(
        tmp_path / "named.npz", **dict(zip(("layer0", "layer1", "layer2"), chosen, strict=True))
    )
    held = [
        mg.scan(CKPT, tmp_path / "layers.npy", stage="ids"),
        mg.scan(CKPT, tmp_path / "tokens.npy", stage="ids"),
        mg.scan(CKPT, tmp_path / "named.npz", stage="ids", router_map={"layer{i}": "text/{i}"}),
    ]
    for column in ("load_cv_ddof0", "load_cv_ddof0_se", "num_blocks"):
        values = [scan.layers().column(column).to_pylist() for scan in held]
        assert values[0] == values[1] == values[2]
        assert None not in values[0]
