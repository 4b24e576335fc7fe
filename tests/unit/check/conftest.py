"""Small checkpoints, recordings and baselines that a test may spoil in one place."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.finding import Outcome
from moegeom.router.load import load_routers
from moegeom.studies.check.record import Gate
from moegeom.studies.check.study import GateRequest, gate

GATE = "model.layers.{}.mlp.gate.weight"
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
GAIN = "model.layers.{}.post_attention_layernorm.weight"

Tensors = dict[str, np.ndarray]
Spoil = Callable[[Tensors, dict[str, Any]], None]


def keep(tensors: Tensors, config: dict[str, Any]) -> None:
    """Spoils nothing."""


TABLE = "layers.{}.ffn.gate.tid2eid"


def with_token_table(tensors: Tensors, config: dict[str, Any]) -> None:
    """Makes a deepseek_v4 of a deepseek_v3: its layer 1 looks 4 of 384 experts up by token id."""
    random = np.random.default_rng(11)
    names = {GATE: "weight", BIAS: "bias"}
    for layer in [n for n in range(9) if GATE.format(n) in tensors]:
        for name, short in names.items():
            tensors[f"layers.{layer}.ffn.gate.{short}"] = tensors.pop(name.format(layer))
        tensors[f"layers.{layer}.ffn_norm.weight"] = tensors.pop(GAIN.format(layer))
    del tensors["layers.1.ffn.gate.bias"]
    wide = random.standard_normal((384, config["hidden_size"])).astype(np.float32)
    tensors["layers.1.ffn.gate.weight"] = wide
    tensors[TABLE.format(1)] = np.stack(
        [random.choice(384, 4, replace=False) for _ in range(2000)]
    ).astype(np.int64)
    config |= {"model_type": "deepseek_v4", "scoring_func": "sigmoid"}


@dataclass(frozen=True)
class Case:
    """A checkpoint, the tokens it is measured on, and what it is compared with.

    ``before`` spoils the checkpoint of the baseline; None means that there is no baseline. ``made``
    makes another, healthy checkpoint of it first.
    """

    spoil: Spoil = keep
    family: str = "qwen3_moe"
    layers: int = 3
    hidden: int = 64
    tokens: int = 0
    lean: float = 0.05
    before: Spoil | None = None
    before_lean: float = 0.05
    fingerprint: str | None = None
    request: dict[str, Any] = field(default_factory=dict, hash=False)
    made: Spoil = keep

    @property
    def model(self) -> SyntheticModel:
        return SyntheticModel(self.family, self.hidden, 16, 4, self.layers)


def write_model(folder: Path, case: Case, spoil: Spoil) -> Path:
    """The checkpoint ``folder/model``, spoilt; one that is there is written anew."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    model = write_checkpoint(folder / "model", case.model)
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text("utf-8"))
    case.made(tensors, config)
    spoil(tensors, config)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    return model


def _request(folder: Path, case: Case, spoil: Spoil, lean: float) -> GateRequest:
    folder.mkdir()
    model = write_model(folder, case, spoil)
    tokens = None
    if case.tokens:
        fingerprint = case.fingerprint or load_routers(open_checkpoint(model)).fingerprint
        path = write_tokens(folder / "rec", case.model, case.tokens, fingerprint, 0, lean)
        tokens = str(path)
    return GateRequest(str(model), tokens=tokens, num_workers=1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which there is no profile."""
    monkeypatch.chdir(tmp_path)


def outcome_of(judged: Gate, code: str) -> Outcome:
    (outcome,) = [one for one in judged.verdict.outcomes if one.code == code]
    return outcome


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., Gate]:
    """The gate on the checkpoint ``model``, which is written first, with options."""

    def judge(case: Case | None = None, spoil: Spoil | None = None, **options: Any) -> Gate:
        case = case or Case()
        write_model(tmp_path, case, spoil or case.spoil)
        return gate(GateRequest("model", **(case.request | options)))

    return judge


@pytest.fixture(scope="session")
def records() -> dict[Case, Any]:
    """What was judged, and what baselines say, by what they were made of."""
    return {}


@pytest.fixture
def outcomes(tmp_path: Path, records: dict[Case, Any]) -> Callable[[Case], dict[str, Outcome]]:
    """Outcomes of the gate by code; of equal cases it is asked once."""

    def baseline_of(case: Case, folder: Path) -> Path | None:
        if case.before is None:
            return None
        baseline = folder / "baseline.json"
        made_of = replace(case, spoil=keep, lean=0.0, request={"baseline": ...})
        if made_of not in records:
            made = _request(folder / "before", case, case.before, case.before_lean)
            gate(replace(made, baseline=baseline, update_baseline=True))
            records[made_of] = baseline.read_text("utf-8")
        baseline.write_text(records[made_of], "utf-8")
        return baseline

    def judge(case: Case) -> dict[str, Outcome]:
        if case not in records:
            folder = tmp_path / f"case-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            options = {"baseline": baseline_of(case, folder), **case.request}
            asked = _request(folder / "after", case, case.spoil, case.lean)
            verdict = gate(replace(asked, **options)).verdict
            records[case] = {outcome.code: outcome for outcome in verdict.outcomes}
        return records[case]

    return judge
