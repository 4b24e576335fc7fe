"""The lines of docs/recordings.md, "I have router_logits", against the recorded inputs."""

from pathlib import Path

import numpy as np
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from tests.short_samples import SAMPLES, short_samples

SAMPLE = "olmoe-balanced"
CHECKPOINT = SAMPLES / SAMPLE / "step_1500"


def test_the_tuple_of_a_model_tells_what_its_inputs_tell(moegeom, tmp_path):
    recording = short_samples() / SAMPLE / "rec/step_1500"
    recorded = open_tokens(recording)
    routers = load_routers(open_checkpoint(str(CHECKPOINT))).routers
    tokens = recorded.facts.num_tokens
    logits = tuple(
        torch.from_numpy(recorded.read_values(router.name, 0, tokens) @ router.weight.T)
        for router in routers
    )
    torch.save(logits, tmp_path / "logits.pt")

    def layers(name, *options):
        arguments = ("--tokens", name, *options, "--out", f"{Path(name).stem}.out")
        as_json = ("--format", "json")
        ran = moegeom(tmp_path, "scan", str(CHECKPOINT), *arguments, *as_json, code=0)
        rows = ran.document["layers"]
        return {
            r["router"]: r for r in rows if (r["variant"], r["population"]) == ("as_stored", "all")
        }

    by_inputs = layers(str(recording))
    by_logits = layers("logits.pt", "--stage", "logits")
    assert by_logits.keys() == by_inputs.keys()
    for router, row in by_logits.items():
        for column in ("load_cv_ddof0", "margin_p50", "boundary_distance_p50"):
            np.testing.assert_allclose(row[column], by_inputs[router][column], rtol=1e-3)
