"""The trained sample checkpoints: every recorded choice follows from the recorded inputs.

Scans run in this process, so that the kernels are loaded once.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router
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
