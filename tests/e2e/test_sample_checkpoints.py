"""The trained sample checkpoints: every recorded choice follows from the recorded inputs. Routers as
large as people serve, 128 experts of width 2048 and 256 in groups of width 7168: loads and margins
are those of the definitions in float64, and nothing is found where nothing is wrong.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

import moegeom as mg
from benchmarks.synthetic import SyntheticModel, synthetic_inputs, write_checkpoint, write_tokens
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router
from moegeom.geometry.selection import route
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from tests.by_day import by_day

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_ckpts"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


CHECKPOINTS = sorted(SAMPLES.glob("*/step_*"), key=lambda path: (path.parent.name, step_of(path)))
NAMES = [f"{path.parent.name}/{path.name}" for path in CHECKPOINTS]

#: An engine that sums in another order may choose differently this near to a tie. In units of the
#: score: an engine that compares softmax values sees a tie where they are equal, whatever the
#: logits are.
NEAR_TIE = 1e-5


def recording_of(checkpoint: Path) -> Path:
    return checkpoint.parent / "rec" / checkpoint.name


@functools.cache
def scanned(name: str) -> Results:
    checkpoint = SAMPLES / name
    out = Path(tempfile.mkdtemp()) / "out"
    scan(ScanRequest(str(checkpoint), out, tokens=str(recording_of(checkpoint)), num_workers=1))
    return open_results(out)


@functools.cache
def routers_of(checkpoint: Path) -> dict[str, Router]:
    return {router.name: router for router in load_routers(open_checkpoint(checkpoint)).routers}


def score_gap(checkpoint: Path, name: str, token: int) -> float:
    """By how much a softmax score left out exceeds one that was chosen, recomputed in float64."""
    router, source = routers_of(checkpoint)[name], open_tokens(recording_of(checkpoint))
    assert router.rule.is_affine
    assert router.rule.score == "softmax"
    logits = source.read_values(name, token, token + 1).astype(np.float64) @ router.weight.T
    scores = np.exp(logits[0] - logits.max())
    scores /= scores.sum()
    chosen = source.read_chosen(name, token, token + 1)[0]
    return float(np.delete(scores, chosen).max() - scores[chosen].min())


def test_at_least_seven_samples_are_there():
    assert len(CHECKPOINTS) >= 7, f"found {NAMES}: sample_ckpts/README.md says how to make them"


#: The last step of each series; the steps before it at night.
_LAST = {path.parent: name for path, name in zip(CHECKPOINTS, NAMES, strict=True)}


@pytest.mark.parametrize("name", by_day(NAMES, [n for n in _LAST.values() if "deepseek" in n]))
def test_every_recorded_choice_is_reproduced_or_near_a_tie(name):
    checkpoint = SAMPLES / name
    assert recording_of(checkpoint).is_dir(), "python sample_ckpts/record.py makes it"
    results = scanned(name)
    assert results.run["trust"]["fingerprint"] == "matches"
    assert results.run["trust"]["overridden"] == []
    assert abs(results.run["trust"]["rms_median"] - 1.0) < 0.01
    rows = {
        row["router"]: row
        for row in results.rows("layers")
        if row["variant"] == "as_stored" and row["population"] == "all"
    }
    assert len(rows) == results.run["checkpoint"]["num_expected"]
    for router, row in rows.items():
        assert row["num_not_reproduced"] == 0
        assert row["num_reproduced"] + row["num_near_tie"] == row["num_tokens"]
        listed = results.run["parts"][router]["disagreements"]
        assert len(listed) == min(row["num_near_tie"], 64)
        differing = [token for token, margin in listed if margin > NEAR_TIE]
        for token in differing:
            assert score_gap(checkpoint, router, int(token)) <= NEAR_TIE


# ----------------------------------------------------------------- routers as large as people serve
NUM_TOKENS = 100
SHAPES = {
    "128 x 2048": SyntheticModel("qwen3_moe", hidden=2048, experts=128, top_k=8, layers=1),
    "256 x 7168, groups": SyntheticModel(
        "deepseek_v3", hidden=7168, experts=256, top_k=8, layers=1
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def place(request, tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("shape"), SHAPES[request.param]
    model = write_checkpoint(folder / "model", shape)
    fingerprint = load_routers(open_checkpoint(model)).fingerprint
    return request.param, model, write_tokens(folder / "rec", shape, NUM_TOKENS, fingerprint)


def definition(shape: SyntheticModel, model):
    """The choice of float64 logits; MaxVio of its loads, of all tokens and without outliers."""
    (router,) = load_routers(open_checkpoint(model)).routers
    inputs = synthetic_inputs(shape, 0, NUM_TOKENS).astype(np.float64) * router.gain
    logits = inputs @ router.weight.T
    routed = route(logits, router.rule, router.selection_bias)
    norms = np.linalg.norm(inputs, axis=1)
    loads = [
        np.bincount(chosen.ravel(), minlength=shape.experts)
        for chosen in (routed.chosen, routed.chosen[norms < 4 * np.median(norms)])
    ]
    return routed, *(load.max() / load.mean() - 1.0 for load in loads)


def test_a_scan_and_a_study_count_what_the_definition_chooses_and_the_gate_passes(place):
    name, model, rec = place
    routed, max_vio, max_vio_of_usual = definition(SHAPES[name], model)
    scan = mg.scan(model, rec)
    assert [
        row
        for row in scan.table("findings").to_pylist()
        if row["severity"] != "note" and row["routers"] and row["code"] != "MGG207"
    ] == []  # rows that are made up are as an initialisation draws them
    (row,) = scan.layers().to_pylist()
    assert (row["num_experts"], row["num_tokens"]) == (SHAPES[name].experts, NUM_TOKENS)
    assert row["max_vio_global"] == pytest.approx(max_vio, abs=1e-12)
    assert row["margin_p50"] == pytest.approx(np.median(routed.margin), rel=0.02)
    assert mg.check(model).exit_code == 0
    (router,) = mg.imbalance(model, rec).value.routers
    assert max_vio_of_usual != max_vio
    assert router.tokens.max_vio == pytest.approx(max_vio_of_usual, abs=1e-12)
