"""Claim: fresh documents hardly ever fail the gate, and it says how small a defect it finds.

A baseline of olmoe-balanced is made from 64 documents of 64 bytes. Then

1. 400 further sets of 64 documents are drawn, each with text of its own, and measured against that
   baseline. Printed: the share of sets on which any check fails (target: at most 0.5 %).
2. the router is changed in three ways and in growing size; each size is measured on 20 fresh sets.
   Printed: the smallest size that is found on at least 90 % of them, by the rows alone (MGG401) and
   by the tokens alone.

Documents are windows at random places of the training text, domains taking turns. Changed routers
read the inputs that the unchanged model gives: exact for the first layer, close for the others.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from moegeom.checks import measured_results, run_checks
from moegeom.checks.baseline import Baseline, baseline_of
from moegeom.checks.profile import Profile
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
from tests.array_source import ArraySource

SAMPLES = Path(__file__).parents[1] / "sample_ckpts"
sys.path.insert(0, str(SAMPLES))

from corpus import load_corpus  # noqa: E402 - a script of the samples, not a package
from routers import listen  # noqa: E402

MODEL = SAMPLES / "olmoe-balanced/step_1500"
EARLIER = SAMPLES / "olmoe-balanced/step_1000"
DOCUMENTS, LENGTH = 64, 64

#: Checks that look at tokens only.
TOKEN_CHECKS = Profile(select=("MGB", "MGN4", "MGG402"))
ROW_CHECKS = Profile(select=("MGG401", "MGI"))

Inputs = dict[str, np.ndarray]


class Documents:
    """Endless sets of documents, run through the model."""

    def __init__(self, seed: int) -> None:
        self._texts = [np.frombuffer(domain.training, np.uint8) for domain in load_corpus()]
        self._random = np.random.default_rng(seed)
        self._model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    @torch.no_grad()
    def draw(self) -> Inputs:
        """Router inputs of 64 new documents, by router, document after document."""
        rows = []
        for number in range(DOCUMENTS):
            text = self._texts[number % len(self._texts)]
            start = self._random.integers(len(text) - LENGTH)
            rows.append(text[start : start + LENGTH])
        with listen(self._model, keep_inputs=True) as traces:
            self._model(input_ids=torch.tensor(np.array(rows), dtype=torch.long), use_cache=False)
        return {f"text/{layer}": torch.cat(t.inputs).numpy() for layer, t in traces.items()}


def measured(checkpoint: Path, inputs: Inputs, folder: Path) -> Results:
    """The results of a scan, at ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    source = ArraySource(inputs, document_tokens=LENGTH)
    return open_results(scan(ScanRequest(str(checkpoint), folder, tokens=source)))


def failed(results: Results, baseline: Baseline, profile: Profile) -> list[str]:
    """Codes of the checks that fail."""
    verdict = run_checks(measured_results(results, baseline=baseline), profile)
    return [outcome.code for outcome in verdict.in_state("failed")]


@dataclass(frozen=True)
class Defect:
    """A change of the rows of every router, of a size; ``earlier`` are those of step 1000."""

    name: str
    sizes: Sequence[float]
    apply: Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]


def _noise(rows: np.ndarray, earlier: np.ndarray, mean: np.ndarray, size: float) -> np.ndarray:
    noise = np.random.default_rng(1).standard_normal(rows.shape)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows + size * noise * lengths / np.sqrt(rows.shape[1])


def _imbalance(rows: np.ndarray, earlier: np.ndarray, mean: np.ndarray, size: float) -> np.ndarray:
    changed = rows.copy()
    # along the mean input: the logit of expert 3 grows by `size` on average
    changed[3] += size * mean / (mean @ mean)
    return changed


def _drift(rows: np.ndarray, earlier: np.ndarray, mean: np.ndarray, size: float) -> np.ndarray:
    return (1.0 - size) * rows + size * earlier


DEFECTS = (
    Defect(
        "weight noise, over the length of a row", (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4), _noise
    ),
    Defect("mean logit added to one expert", (0.02, 0.05, 0.1, 0.2, 0.3, 0.5), _imbalance),
    Defect("way back to the checkpoint of step 1000", (0.1, 0.2, 0.3, 0.5, 1.0), _drift),
)


def write_defective(folder: Path, defect: Defect, size: float, inputs: Inputs) -> Path:
    """The checkpoint with changed routers."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(MODEL, folder)
    tensors, earlier = (
        load_file(folder / "model.safetensors"),
        load_file(EARLIER / "model.safetensors"),
    )
    for router, values in inputs.items():
        name = f"model.layers.{router.split('/')[1]}.mlp.gate.weight"
        rows = tensors[name].astype(np.float64)
        mean = values.astype(np.float64).mean(axis=0)
        changed = defect.apply(rows, earlier[name].astype(np.float64), mean, size)
        tensors[name] = changed.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def false_alarms(documents: Documents, baseline: Baseline, sets: int, folder: Path) -> None:
    """Prints how many fresh sets fail the gate."""
    codes: list[str] = []
    alarms = 0
    for _ in range(sets):
        results = measured(MODEL, documents.draw(), folder / "fresh")
        found = failed(results, baseline, Profile())
        alarms += bool(found)
        codes += found
    share = alarms / sets
    print(
        f"sets of fresh documents that fail: {alarms} of {sets} ({share:.2%}) {sorted(set(codes))}"
    )


def detection(documents: Documents, baseline: Baseline, sets: int, folder: Path) -> None:
    """Prints the share of sets on which each defect is found."""
    inputs = documents.draw()
    for defect in DEFECTS:
        smallest: dict[str, float | None] = {"rows": None, "tokens": None}
        for size in defect.sizes:
            checkpoint = write_defective(folder / "changed", defect, size, inputs)
            found = {"rows": 0, "tokens": 0}
            for _ in range(sets):
                results = measured(checkpoint, documents.draw(), folder / "fresh")
                found["rows"] += bool(failed(results, baseline, ROW_CHECKS))
                found["tokens"] += bool(failed(results, baseline, TOKEN_CHECKS))
            told = ", ".join(f"{by} {count}/{sets}" for by, count in found.items())
            print(f"  {defect.name} {size:g}: {told}")
            for by, count in found.items():
                if smallest[by] is None and count >= 0.9 * sets:
                    smallest[by] = size
        print(f"smallest found 9 times in 10, {defect.name}: {smallest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=400)
    parser.add_argument("--detection-sets", type=int, default=20)
    arguments = parser.parse_args()
    documents = Documents(seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        baseline = baseline_of(measured(MODEL, documents.draw(), folder / "first"))
        false_alarms(documents, baseline, arguments.sets, folder)
        detection(documents, baseline, arguments.detection_sets, folder)


if __name__ == "__main__":
    main()
