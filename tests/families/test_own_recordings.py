"""What moegeom itself records of a model is believed: models as they are before any training too.

Their residual streams are as small as the eps of their norms.
"""

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
from tests.by_day import by_day
from tests.families.observed import FORWARD, VOCABULARY
from tests.families.tiny_configs import tiny_config
from tests.families.tiny_families import FAMILIES
from tests.families.tiny_models import LOADED, OWN_NORM, model_of, repeatable

STRICT = {"stale_inputs": False, "unverified": False}

#: Families whose routers are heard in a run over tokens.
RUN = [
    name
    for name in LOADED
    if "__" not in name and FORWARD.get(name, True) and name not in OWN_NORM | {"qwen3_omni_moe"}
]


def _fresh(name: str) -> Any:
    with repeatable(name):
        return getattr(transformers, FAMILIES[name].model)(tiny_config(name)).eval()


def _believed(name: str, model: Any, folder: Path) -> Trust:
    model.save_pretrained(folder / "model")
    recorder = RouterRecorder(model, folder / "rec", checkpoint=folder / "model", keep="hidden")
    with repeatable(name), recorder:
        ids = torch.randint(3, VOCABULARY, (2, 64))
        recorder.tokens(ids, documents=[0, 1])
        if model.config.is_encoder_decoder:
            model(input_ids=ids, decoder_input_ids=ids)
        else:
            model(input_ids=ids, use_cache=False)
    loaded = load_routers(open_checkpoint(folder / "model"))
    source = open_recording(folder / "rec")
    heard = [prepare(r) for r in loaded.routers if r.name in source.facts.routers]
    assert heard
    return examine(heard, source, loaded.fingerprint, load_kernels("cpu"), STRICT)


CASES = [(name, make) for name in RUN for make in (_fresh, model_of)]


@pytest.mark.parametrize(
    ("name", "make"),
    by_day(
        CASES,
        {
            "RMS": ("deepseek_v3", _fresh),
            "RMS with gains": ("mixtral", model_of),
            "layer norm": ("dbrx", _fresh),
            "layer norm with gains": ("phimoe", model_of),
            "gains about 0": ("qwen3_next", _fresh),
            "no norm in front": ("flex_olmo", _fresh),
            "encoder and decoder": ("switch_transformers", _fresh),
        },
    ),
)
def test_an_own_recording_is_believed(name, make, tmp_path):
    trust = _believed(name, make(name), tmp_path)
    assert trust.fingerprint == "matches"
    assert trust.share_reproduced is None or trust.share_reproduced >= 0.99


def test_an_own_recording_whose_norms_feel_their_eps_is_believed(tmp_path):
    """Embeddings half as large as hy_v3 makes them: no input of its first router has length 1."""
    model = _fresh("hy_v3")
    model.get_input_embeddings().weight.data.mul_(0.5)
    trust = _believed("hy_v3", model, tmp_path)
    assert trust.rms_median is not None
    np.testing.assert_array_less(trust.rms_median, 0.98)
    assert trust.overridden == ()
