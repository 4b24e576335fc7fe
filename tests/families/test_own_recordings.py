"""What moegeom itself records of a model is believed: models as they are before any training too.

Their residual streams are as small as the eps of their norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from moegeom.checkpoint.open import open_checkpoint
from moegeom.engine.prepared import prepare
from moegeom.engine.trust import Trust, examine
from moegeom.kernels.table import load_kernels
from moegeom.recorder import RouterRecorder
from moegeom.router.load import load_routers
from moegeom.tokens.recording.reader import open_recording
from tests.families.by_day import some_by_day
from tests.families.observed import FORWARD, VOCABULARY
from tests.families.test_families_against_transformers import LOADED, OWN_NORM, model_of
from tests.families.tiny_configs import tiny_config
from tests.families.tiny_families import FAMILIES
from tests.families.tiny_models import repeatable

STRICT = {"stale_inputs": False, "unverified": False}

#: Families whose routers are heard in a run over tokens.
RUN = [
    name
    for name in LOADED
    if "__" not in name and FORWARD.get(name, True) and name not in OWN_NORM | {"qwen3_omni_moe"}
]


def _fresh(name: str) -> Any:
    """The model as its class makes it."""
    with repeatable(name):
        return getattr(transformers, FAMILIES[name].model)(tiny_config(name)).eval()


def _believed(name: str, folder: Path, is_fresh: bool = True) -> Trust:
    model = _fresh(name) if is_fresh else model_of(name)
    model.save_pretrained(folder / "model")
    with (
        repeatable(name),
        RouterRecorder(
            model, folder / "rec", checkpoint=folder / "model", keep="hidden"
        ) as recorder,
    ):
        ids = torch.randint(3, VOCABULARY, (2, 64))
        recorder.tokens(ids, documents=[0, 1])
        if model.config.is_encoder_decoder:
            model(input_ids=ids, decoder_input_ids=ids)
        else:
            model(input_ids=ids, use_cache=False)
    found = load_routers(open_checkpoint(folder / "model"))
    source = open_recording(folder / "rec")
    heard = [r for r in found.routers if r.name in source.facts.routers]
    assert heard
    prepared = [prepare(router) for router in heard]
    return examine(prepared, source, found.fingerprint, load_kernels("cpu"), STRICT)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["untrained", "with gains"])
@pytest.mark.parametrize("name", some_by_day(RUN))
def test_an_own_recording_is_believed(name: str, is_fresh: bool, tmp_path: Path) -> None:
    found = _believed(name, tmp_path, is_fresh)
    assert found.fingerprint == "matches"
    assert found.share_reproduced is None or found.share_reproduced >= 0.99


def test_an_own_recording_whose_norms_feel_their_eps_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings half as large as hy_v3 makes them: no input of its first router has length 1."""
    model = _fresh("hy_v3")
    model.get_input_embeddings().weight.data.mul_(0.5)
    monkeypatch.setattr("tests.families.test_own_recordings._fresh", lambda _: model)
    found = _believed("hy_v3", tmp_path)
    assert found.rms_median is not None
    np.testing.assert_array_less(found.rms_median, 0.98)
    assert found.overridden == ()
