"""Routers whose choice does not follow from their input: what the model chose is counted."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, RouterError
from moegeom.core.tokens import Stage, TokenColumns
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder.run import CaptureRequest, TextFile, plan_capture
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.tokens.recording.writer import RecordingWriter
from tests.families.observed import Observed, observe
from tests.families.tiny_models import model_of, saved
from tests.unit.tokens.dialects.written import Written, write_vllm

#: Product keys, a state across layers, a table of experts by token, experts drawn by lot.
NAMES = ["doge", "zaya", "deepseek_v4", "nllb_moe"]

LENGTH = 16


def _checkpoint(name: str, folder: Path) -> Path:
    shutil.copytree(saved(name), folder / "model")
    if name == "nllb_moe":
        file = folder / "model/config.json"
        policy = {"second_expert_policy": "sampling"}
        file.write_text(json.dumps(json.loads(file.read_text()) | policy))
    return folder / "model"


@cache
def _seen(name: str) -> tuple[Observed, ...]:
    return observe(model_of(name), name)


def _scanned(name: str, folder: Path, tokens: Path) -> Results:
    checkpoint = str(_checkpoint(name, folder))
    return open_results(scan(ScanRequest(checkpoint, folder / "out", tokens=str(tokens))))


def _assert_slots(results: Results, router: Observed, chosen: np.ndarray) -> np.ndarray:
    """Each expert has the slots that choices count; those are the answer."""
    key = f"{router.stack}/{router.layer}"
    rows = [r for r in results.rows("experts") if (r["router"], r["population"]) == (key, "all")]
    slots = [row["num_slots"] for row in sorted(rows, key=lambda row: row["expert"])]
    expected = np.bincount(chosen.ravel(), minlength=len(rows))
    np.testing.assert_array_equal(slots, expected)
    return expected


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
def test_loads_and_pairs_of_listed_routers_are_those_that_were_recorded(name, tmp_path):
    seen = _seen(name)
    results = _scanned(name, tmp_path, _recording(seen, tmp_path / "rec"))
    layers = {row["router"]: row for row in results.rows("layers") if row["population"] == "all"}
    assert len(layers) == len(seen)
    for router in seen:
        slots = _assert_slots(results, router, router.chosen)
        share = slots[slots > 0] / slots.sum()
        row = layers[f"{router.stack}/{router.layer}"]
        np.testing.assert_allclose(row["load_entropy_nats"], -(share * np.log(share)).sum())
        sets = {tuple(sorted(chosen)) for chosen in router.chosen.tolist()}
        assert row["num_expert_sets"] == len(sets)
        # weights of loaded routers are measured, and of listed ones nothing but the choices
        is_loaded = name == "deepseek_v4" and router.layer > 0
        for figure in ("margin_p50", "gram_score_raw", "num_zero_rows"):
            assert is_loaded or row.get(figure) is None
        assert not is_loaded or row["num_zero_rows"] is not None


def test_what_capture_refuses_is_counted_from_what_its_refusal_proposes(tmp_path):
    """A trace of an engine, which lacks the last token; ids of one's own loop are tested above."""
    seen = _seen("zaya")
    (tmp_path / "a.txt").write_text("ab")
    request = CaptureRequest(saved("zaya"), (TextFile(tmp_path / "a.txt"),), tmp_path / "rec")
    with pytest.raises(RouterError, match="cannot be measured: it") as caught:
        plan_capture(request)
    for way in ("--tokens REC, a trace of an engine", "RecordingWriter", "capture does not record"):
        assert way in caught.value.hint
    ids = np.stack([router.chosen[:LENGTH] for router in seen], axis=1)
    trace = tmp_path / "trace.jsonl"
    write_vllm(trace, [Written("a", ids[:-1], np.arange(LENGTH, dtype=np.int64), 5)])
    results = _scanned("zaya", tmp_path, trace)
    for number, router in enumerate(seen):
        _assert_slots(results, router, ids[:-1, number])


def test_a_recording_that_leaves_a_listed_router_out_is_scanned_without_it(tmp_path):
    recording = _recording(_seen("deepseek_v4")[1:], tmp_path / "rec")
    run = _scanned("deepseek_v4", tmp_path, recording).run
    assert [router["name"] for router in run["routers"]] == ["text/1", "text/2", "text/3"]
    assert run["checkpoint"]["num_routers"] == run["checkpoint"]["num_expected"] == 3


def test_inputs_without_choices_do_not_measure_a_listed_router(tmp_path):
    recording = _recording(_seen("doge"), tmp_path / "rec", "router_input")
    with pytest.raises(RecordingError, match="does not say what router text/0 chose") as caught:
        _scanned("doge", tmp_path, recording)
    assert "stage ids" in caught.value.hint


def test_without_tokens_a_hint_leads_to_choices_and_weights_tell_the_checkpoint(tmp_path):
    with pytest.raises(RouterError, match="cannot be measured") as caught:
        scan(ScanRequest(str(saved("zaya")), tmp_path / "out"))
    assert "moegeom scan CKPT --tokens REC" in caught.value.hint
    prints = set()
    for name in ("doge", "zaya"):
        listed = load_routers(open_checkpoint(saved(name)), with_listed=True)
        assert all(router.listed and router.hidden_size == 0 for router in listed.routers)
        prints.add(listed.fingerprint)
    assert len(prints) == 2
