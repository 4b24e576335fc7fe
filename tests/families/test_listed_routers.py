"""Routers whose choice does not follow from their input: what the model chose is counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, RouterError
from moegeom.core.tokens import Stage, TokenColumns
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder.run import CaptureRequest, plan_capture
from moegeom.recorder.text import TextFile
from moegeom.results.reader import open_results
from moegeom.router.load import load_routers
from moegeom.tokens.recording.writer import RecordingWriter
from tests.families.observed import Observed, observe
from tests.families.test_families_against_transformers import model_of
from tests.unit.tokens.dialects.written import Written, write_vllm

#: Product keys, a state across layers, a table of experts by token, experts drawn by lot.
NAMES = ["doge", "zaya", "deepseek_v4", "nllb_moe"]

LENGTH = 16


def _checkpoint(name: str, folder: Path) -> tuple[Observed, ...]:
    model_of(name).save_pretrained(folder)
    if name == "nllb_moe":
        file = folder / "config.json"
        policy = {"second_expert_policy": "sampling"}
        file.write_text(json.dumps(json.loads(file.read_text()) | policy))
    return observe(model_of(name), name)


def _recording(seen: tuple[Observed, ...], out: Path, stage: Stage = "ids") -> Path:
    tokens = min(len(router.chosen) for router in seen)
    rows = np.arange(tokens)
    columns = TokenColumns(
        document=rows // LENGTH,
        position=(rows % LENGTH).astype(np.int32),
        token_id=np.zeros(tokens, np.int32),
        domain=np.zeros(tokens, np.int16),
    )
    by_name = {f"{router.stack}/{router.layer}": router for router in seen}
    values = {} if stage == "ids" else {n: r.inputs[:tokens] for n, r in by_name.items()}
    chosen = {n: r.chosen[:tokens].astype(np.int32) for n, r in by_name.items()}
    with RecordingWriter(out, stage, tuple(by_name), domains=("text",)) as writer:
        writer.append(columns, values, chosen if stage == "ids" else None)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_pairs_of_listed_routers_are_those_that_were_recorded(
    name: str, tmp_path: Path
) -> None:
    seen = _checkpoint(name, tmp_path / "model")
    recording = _recording(seen, tmp_path / "rec")
    out = scan(ScanRequest(str(tmp_path / "model"), tmp_path / "out", tokens=str(recording)))
    results = open_results(out)
    experts = results.rows("experts")
    layers = {row["router"]: row for row in results.rows("layers") if row["population"] == "all"}
    assert len(layers) == len(seen)
    for router in seen:
        key = f"{router.stack}/{router.layer}"
        own = [r for r in experts if r["router"] == key and r["population"] == "all"]
        slots = [row["num_slots"] for row in sorted(own, key=lambda row: row["expert"])]
        expected = np.bincount(router.chosen.ravel(), minlength=len(own))
        np.testing.assert_array_equal(slots, expected)
        share = expected[expected > 0] / expected.sum()
        row = layers[key]
        np.testing.assert_allclose(row["load_entropy_nats"], -(share * np.log(share)).sum())
        sets = {tuple(sorted(chosen)) for chosen in router.chosen.tolist()}
        assert row["num_expert_sets"] == len(sets)
        if name != "deepseek_v4":
            assert row.get("margin_p50") is None
            assert row.get("gram_score_raw") is None


@pytest.mark.parametrize("name", ["doge", "zaya"])
def test_what_capture_refuses_is_counted_from_what_its_refusal_proposes(
    name: str, tmp_path: Path
) -> None:
    """A trace of an engine, which lacks the last token; ids of one's own loop are tested above."""
    seen = _checkpoint(name, tmp_path / "model")
    (tmp_path / "a.txt").write_text("ab")
    asked = CaptureRequest(tmp_path / "model", (TextFile(tmp_path / "a.txt"),), tmp_path / "rec")
    with pytest.raises(RouterError, match="cannot be measured: it") as caught:
        plan_capture(asked)
    for way in ("--tokens REC, a trace of an engine", "RecordingWriter", "capture does not record"):
        assert way in caught.value.hint
    ids = np.stack([router.chosen[:LENGTH] for router in seen], axis=1)
    tokens = np.arange(LENGTH, dtype=np.int64)
    write_vllm(tmp_path / "trace.jsonl", [Written("a", ids[:-1], tokens, 5)])
    trace = str(tmp_path / "trace.jsonl")
    out = scan(ScanRequest(str(tmp_path / "model"), tmp_path / "out", tokens=trace))
    experts = open_results(out).rows("experts")
    for number, router in enumerate(seen):
        own = [r for r in experts if r["router"] == f"{router.stack}/{router.layer}"]
        slots = [r["num_slots"] for r in sorted(own, key=lambda r: r["expert"])]
        expected = np.bincount(ids[:-1, number].ravel(), minlength=len(own))
        np.testing.assert_array_equal(slots, expected)


def test_a_listed_router_is_measured_beside_loaded_ones(tmp_path: Path) -> None:
    """Weights of the others are measured, and of this one nothing but the choices."""
    seen = _checkpoint("deepseek_v4", tmp_path / "model")
    recording = _recording(seen, tmp_path / "rec")
    out = scan(ScanRequest(str(tmp_path / "model"), tmp_path / "out", tokens=str(recording)))
    found = open_results(out).rows("layers")
    rows = {row["router"]: row for row in found if row["population"] == "all"}
    assert {name: row["num_zero_rows"] is None for name, row in rows.items()} == {
        "text/0": True,
        **dict.fromkeys(("text/1", "text/2", "text/3"), False),
    }


def test_a_recording_that_leaves_a_listed_router_out_is_scanned_without_it(tmp_path: Path) -> None:
    seen = _checkpoint("deepseek_v4", tmp_path / "model")
    recording = _recording(seen[1:], tmp_path / "rec")
    out = scan(ScanRequest(str(tmp_path / "model"), tmp_path / "out", tokens=str(recording)))
    run = open_results(out).run
    assert [router["name"] for router in run["routers"]] == ["text/1", "text/2", "text/3"]
    assert run["checkpoint"]["num_routers"] == run["checkpoint"]["num_expected"] == 3


def test_inputs_without_choices_do_not_measure_a_listed_router(tmp_path: Path) -> None:
    seen = _checkpoint("doge", tmp_path / "model")
    recording = _recording(seen, tmp_path / "rec", "router_input")
    with pytest.raises(RecordingError, match="does not say what router text/0 chose") as caught:
        scan(ScanRequest(str(tmp_path / "model"), tmp_path / "out", tokens=str(recording)))
    assert "stage ids" in caught.value.hint


def test_without_tokens_the_hint_leads_to_a_scan_of_choices(tmp_path: Path) -> None:
    _checkpoint("zaya", tmp_path / "model")
    with pytest.raises(RouterError, match="cannot be measured") as caught:
        scan(ScanRequest(str(tmp_path / "model"), tmp_path / "out"))
    assert "moegeom scan CKPT --tokens REC" in caught.value.hint


def test_weights_of_a_listed_router_tell_its_checkpoint(tmp_path: Path) -> None:
    prints = set()
    for name in ("doge", "zaya"):
        _checkpoint(name, tmp_path / name)
        found = load_routers(open_checkpoint(tmp_path / name), with_listed=True)
        assert all(router.listed and router.hidden_size == 0 for router in found.routers)
        prints.add(found.fingerprint)
    assert len(prints) == 2
