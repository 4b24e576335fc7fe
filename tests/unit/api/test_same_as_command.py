"""Each function finds what its command prints as JSON, on the sample checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import moegeom as mg
from moegeom.tokens.open import open_tokens
from moegeom_cli import app

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "sample_ckpts/olmoe-balanced"
CKPT, REC = SAMPLE / "step_1500", SAMPLE / "rec/step_1500"
BEFORE = SAMPLE / "step_1000"

#: What two runs of one request differ in.
CHANGING = frozenset(["seconds", "results", "session"])


def command(*arguments: object) -> dict:
    """What the command prints with ``--format json``."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stream):
        patch.setattr(sys, "argv", ["moegeom", *map(str, arguments), "--format", "json", "--quiet"])
        with pytest.raises(SystemExit):
            app.main()
    return json.loads(stream.getvalue())


def told(value: object) -> object:
    """The same without what changes from run to run."""
    if isinstance(value, dict):
        return {k: told(v) for k, v in value.items() if k not in CHANGING}
    return [told(entry) for entry in value] if isinstance(value, list) else value


@pytest.fixture
def openings(monkeypatch) -> list[str]:
    """Names of checkpoints as they are opened."""
    from moegeom.checkpoint import open as opening

    found, local = [], opening._local
    monkeypatch.setattr(opening, "_local", lambda path: found.append(path.name) or local(path))
    return found


def assert_same(report: mg.Report, *arguments: object) -> None:
    assert told(json.loads(report.json())) == told(command(*arguments))


def test_open_finds_what_routers_prints():
    assert_same(mg.open(CKPT, layers=[0, 2]).report(), "routers", CKPT, "--layers", "0,2")


def test_scan_finds_what_scan_prints(tmp_path):
    found = mg.scan(CKPT, REC, layers=0)
    assert_same(found, "scan", CKPT, "--tokens", REC, "--layers", "0", "--out", tmp_path / "one")
    assert found.value.path is None


def test_a_scan_that_is_kept_is_what_report_prints(tmp_path):
    found = mg.scan(str(CKPT), out=tmp_path / "kept", layers="0-1")
    assert_same(found, "report", tmp_path / "kept")
    assert mg.report(tmp_path / "kept").json() == found.json()
    assert mg.report(found) is found
    assert_same(mg.check(found), "check", tmp_path / "kept")


@pytest.mark.parametrize("tokens", [None, REC])
def test_check_finds_what_check_prints(tokens, openings):
    given = [] if tokens is None else ["--tokens", tokens]
    found = mg.check(CKPT, tokens, select=["MGI", "MGB"], fail_on="warning")
    assert openings == ["step_1500"], "it is opened once"
    assert_same(found, "check", CKPT, *given, "--select", "MGI,MGB", "--fail-on", "warning")


def test_results_in_memory_are_judged_and_compared_as_those_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = SAMPLE / "step_1000"
    held = [mg.scan(each) for each in (CKPT, other)]
    kept = [mg.scan(each, out=tmp_path / each.name) for each in (CKPT, other)]
    ours, theirs = (mg.check(found[0]).value.verdict for found in (held, kept))
    assert [o.state for o in ours.outcomes] == [o.state for o in theirs.outcomes]
    written = mg.check(held[0], update_baseline=True, baseline="here.json").value.written
    assert written is not None
    assert mg.check(kept[0], baseline=written)
    assert not mg.check(held[1], baseline=written, fail_on="warning")
    ours, theirs = (mg.diff(*found).value for found in (held, kept))
    assert [r.kind for r in ours.sides] == ["results", "results"]
    assert ours.routers == theirs.routers
    for refused in (mg.check, lambda *given, **more: mg.diff(*given, held[1], **more)):
        with pytest.raises(mg.MoeGeomError, match="results in memory holds results"):
            refused(held[0], tokens=REC)


def test_a_profile_beside_counts_for_results_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moegeom.toml").write_text('select = ["MGI101"]\n', "utf-8")
    assert len(mg.check(mg.scan(CKPT)).value.verdict.outcomes) == 1


def test_boundary_report_finds_what_boundary_report_prints(tmp_path):
    given = ("--tokens", REC, "--layers", "0", "--arith", "bf16", "--noise", "0.01")
    found = mg.boundary_report(CKPT, REC, layers=0, arithmetics=["bf16"], noise=0.01)
    assert_same(found, "boundary-report", CKPT, *given, "--out", tmp_path / "one")
    assert_same(mg.boundary_report(tmp_path / "one"), "boundary-report", tmp_path / "one")


def test_space_finds_what_space_prints():
    found = mg.space(CKPT, REC, layers=1, seed=3)
    assert_same(found, "space", CKPT, "--tokens", REC, "--layers", "1", "--seed", "3")


def test_perturb_finds_what_perturb_prints():
    found = mg.perturb(CKPT, REC, layers=1, seed=3, at=(5, 77), noise=0.2)
    given = ("--layers", "1", "--seed", "3", "--at", "5,77", "--noise", "0.2")
    assert_same(found, "perturb", CKPT, "--tokens", REC, *given)


def test_balance_finds_what_balance_prints():
    found = mg.balance(mg.open(CKPT, layers=1), mg.recording(REC), seed=np.int64(3))
    assert_same(found, "balance", CKPT, "--tokens", REC, "--layers", "1", "--seed", "3")


def test_cells_finds_what_cells_prints():
    found = mg.cells(CKPT, REC, layers=0, subspace="pca:2")
    assert_same(found, "cells", CKPT, "--tokens", REC, "--layer", "0", "--subspace", "pca:2")


def test_regions_finds_what_regions_prints():
    found = mg.regions(CKPT, REC, layers=1, segments=20)
    assert_same(found, "regions", CKPT, "--tokens", REC, "--layers", "1", "--segments", "20")


def test_outputs_finds_what_outputs_prints():
    found = mg.outputs(CKPT, REC, layers=1, sample=40)
    assert_same(found, "outputs", CKPT, "--tokens", REC, "--layers", "1", "--sample", "40")


def test_cells_of_a_bare_matrix(tmp_path):
    file = tmp_path / "router.npz"
    np.savez(file, weight=np.random.default_rng(0).standard_normal((6, 2)))
    found = mg.cells(weights=file, top_k=2, expert_set=[0, 1])
    given = ("--weights", file, "--top-k", "2", "--expert-set", "0,1")
    assert_same(found, "cells", *given)


def test_capacity_finds_what_capacity_prints():
    found = mg.capacity(CKPT, REC, layers=0, splits=2)
    given = ("--from", CKPT, "--tokens", REC, "--layers", "0", "--split", "2")
    assert_same(found, "capacity", *given)


def test_diff_finds_what_diff_prints():
    assert_same(mg.diff(BEFORE, mg.open(CKPT)), "diff", BEFORE, CKPT)


def test_signoff_finds_what_signoff_prints():
    found = mg.signoff(BEFORE, CKPT)
    assert_same(found, "signoff", BEFORE, CKPT)
    assert not found
    assert found.exit_code == 1


def test_explain_finds_what_explain_prints():
    found = mg.explain(CKPT, REC, run_b=mg.recording(REC), layers=0)
    assert_same(found, "explain", CKPT, "--tokens", REC, "--run-b", REC, "--layers", "0")


def test_track_finds_what_track_prints(tmp_path):
    steps = [BEFORE, CKPT]
    found = mg.track(steps, out=tmp_path / "one", layers=0)
    assert_same(found, "track", *steps, "--out", tmp_path / "two", "--layers", "0")


def test_route_chooses_what_was_recorded():
    """The margin is the last chosen logit less the first that is not; distances are positive."""
    source = open_tokens(REC)
    for router in mg.open(CKPT).routers:
        inputs = source.read_values(router.name, 0, 1500)
        found = mg.route(router, inputs)
        np.testing.assert_array_equal(
            np.sort(found.chosen), np.sort(source.read_chosen(router.name, 0, 1500))
        )
        logits = -np.sort(-(inputs.astype(np.float64) @ router.weight.T.astype(np.float64)))
        np.testing.assert_allclose(found.margin, logits[:, 3] - logits[:, 4], atol=1e-5)
        assert (found.num_chosen == 4).all()
        assert (found.boundary_distance > 0).all()
        np.testing.assert_array_equal(found.boundary_distance, found.boundary_distance_upper)
        assert found.unknown == {}
        assert len(found) == 1500


def test_route_takes_the_road_of_a_scan(tmp_path):
    """Rows by token of a scan hold the same bits."""
    mg.scan(CKPT, REC, layers=2, per_token=True, out=tmp_path / "kept")
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "kept/tokens/text.2.parquet")
    router = mg.open(CKPT).routers[2]
    source = open_tokens(REC)
    found = mg.route(router, source.read_values(router.name, 0, source.facts.num_tokens))
    np.testing.assert_array_equal(found.margin, rows["margin"].to_numpy())


#: The inputs of all routers as people hold them.
HELD = {
    "by name": lambda arrays: arrays,
    "by layer": lambda arrays: dict(enumerate(arrays.values())),
    "in a list": lambda arrays: list(arrays.values()),
    "in one array": lambda arrays: np.stack(list(arrays.values())),
    "as tensors": lambda arrays: {name: _tensor(array) for name, array in arrays.items()},
}


def _tensor(array):
    import torch

    return torch.from_numpy(array)


@pytest.mark.parametrize("held", sorted(HELD))
def test_arrays_in_memory_are_measured_as_a_file_of_them_is(tmp_path, held):
    source = open_tokens(REC)
    arrays = {name: source.read_values(name, 0, 1024) for name in source.facts.routers}
    np.savez(tmp_path / "rec.npz", **{n.replace("/", "."): a for n, a in arrays.items()})
    kept = mg.balance(CKPT, tmp_path / "rec.npz", stage="router_input")
    found = mg.balance(CKPT, mg.recording(HELD[held](arrays), stage="router_input"))
    assert found.value.routers == kept.value.routers


def test_results_of_other_arrays_are_not_the_answer(tmp_path):
    source = open_tokens(REC)
    router = mg.open(CKPT, layers=0)
    for start in (0, 1024):
        values = source.read_values("text/0", start, start + 1024)
        if start == 0:
            mg.scan(router, values, stage="router_input", out=tmp_path / "kept")
            mg.scan(router, values, stage="router_input", out=tmp_path / "kept")
        else:
            with pytest.raises(mg.MoeGeomError, match="another request: tokens differ"):
                mg.scan(router, values, stage="router_input", out=tmp_path / "kept")


def _arrays(step: str, kind: str = "values") -> dict[str, np.ndarray]:
    """Of the first tokens of a recording, with what says which they are."""
    source = open_tokens(SAMPLE / "rec" / step)
    read = {"values": source.read_values, "chosen": source.read_chosen}[kind]
    columns = source.read_columns(0, 512)
    named = {name: getattr(columns, name) for name in ("document", "position", "token_id")}
    return {name: read(name, 0, 512) for name in source.facts.routers} | named


def _file(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **{name.replace("/", "."): array for name, array in arrays.items()})
    return path


def test_two_sides_in_memory_are_compared_as_files_of_them_are(tmp_path, openings):
    held = [_arrays("step_1000"), _arrays("step_1500")]
    files = [_file(tmp_path / f"{i}.npz", arrays) for i, arrays in enumerate(held)]
    options = {"stage": "router_input", "layers": 0, "unverified": True}
    kept = mg.diff(BEFORE, CKPT, files, **options)
    assert openings == ["step_1000", "step_1500"], "each is opened once"
    found = mg.diff(BEFORE, CKPT, held, **options)
    assert found.value.figures is not None
    assert found.value.figures == kept.value.figures
    assert [side.num_routers for side in found.value.sides] == [1, 1]
    one = mg.recording(held[1], stage="router_input")
    both = mg.diff(CKPT, CKPT, one, layers=0, unverified=True)
    assert any("on the same inputs" in note for note in both.value.notes)
    assert not any("on the same inputs" in note for note in found.value.notes)


def test_choices_in_memory_are_signed_off_as_files_of_them_are(tmp_path, openings):
    held = [_arrays("step_1000", "chosen"), _arrays("step_1500", "chosen")]
    files = [_file(tmp_path / f"{i}.npz", arrays) for i, arrays in enumerate(held)]
    kept = mg.signoff(BEFORE, CKPT, files, stage="ids")
    assert openings == ["step_1000", "step_1500"], "each is opened once"
    found = mg.signoff(BEFORE, CKPT, held, stage="ids")
    assert found.value.lines[-1].state == "not judged"
    assert found.value.lines[-1].sentence == kept.value.lines[-1].sentence
    again = mg.recording(held[0], stage="ids")
    found = mg.signoff(BEFORE, CKPT, held, stage="ids", rerun=again)
    assert any("their arrays are equal" in line for line in found.value.not_looked_at)


def test_steps_in_memory_are_followed_as_files_of_them_are(tmp_path, openings):
    """What is kept is the answer for the same arrays, and for no others."""
    steps = ("step_1000", "step_1500")
    held = {step: _arrays(step) for step in steps}
    for step, arrays in held.items():
        _file(tmp_path / f"{step}.npz", arrays)
    options = {"stage": "router_input", "layers": 0, "unverified": True}
    paths = [SAMPLE / step for step in steps]
    kept = mg.track(paths, tmp_path / "{name}.npz", out=tmp_path / "one", **options)
    assert openings == ["step_1000", "step_1500"], "each is opened once"
    first, again = (mg.track(paths, held, out=tmp_path / "two", **options) for _ in range(2))
    assert first.value.curves == kept.value.curves
    assert [step.is_reused for step in first.value.steps] == [False, False]
    assert [step.is_reused for step in again.value.steps] == [True, True]
    assert again.value.curves == first.value.curves
    other = held | {"step_1500": _arrays("step_1000")}
    changed = mg.track(paths, other, out=tmp_path / "two", **options)
    assert [step.is_reused for step in changed.value.steps] == [True, False]


class Listener:
    """What is told to ``watch``."""

    def __init__(self) -> None:
        self.total, self.done, self.said = 0, 0, []

    def start(self, num_tokens: int) -> None:
        self.total = num_tokens

    def begin(self, what: str) -> None: ...

    def advance(self, num_tokens: int) -> None:
        self.done += num_tokens

    def say(self, text: str) -> None:
        self.said.append(text)


def test_all_work_that_is_announced_is_told_as_done():
    listener = Listener()
    mg.balance(CKPT, REC, layers=0, watch=listener)
    assert listener.done == listener.total == 4096
    for measure in (mg.scan, mg.check):
        listener = Listener()
        measure(CKPT, watch=listener)
        assert (listener.total, listener.done, listener.said) == (3, 3, []), (
            "a step for each router"
        )
    listener = Listener()
    mg.diff(CKPT, CKPT, experts=True, layers=0, watch=listener)
    assert [text.partition(" ")[0] for text in listener.said] == ["A:", "B:"]


def test_a_series_is_exported_from_python(tmp_path):
    listener, entry = Listener(), f"csv:{tmp_path / 's.csv'}"
    mg.track(CKPT, out=tmp_path / "one", layers=0, export=entry, watch=listener)
    assert (tmp_path / "s.csv").read_text("utf-8").startswith("router,step")
    assert listener.said == [f"written: {tmp_path / 's.csv'}"]
    with pytest.raises(mg.MoeGeomError, match=r"^export csv: expected csv:PATH"):
        mg.track(CKPT, out=tmp_path / "one", export="csv")
