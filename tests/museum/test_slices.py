"""Tensors and configs that contradict each other are found."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.core.errors import CheckpointError
from moegeom.studies.check.study import GateRequest, gate
from tests.museum.exhibit_slices import INCIDENTS
from tests.museum.gallery import all_cases, label
from tests.museum.healthy import sigmoid_model


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


def test_a_sharded_save_is_refused_before_its_slices_are_taken_for_tensors(tmp_path):
    model = sigmoid_model()
    (tmp_path / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
    for part in (0, 1):
        slices = {n: np.array_split(t, 2)[part].copy() for n, t in model.tensors.items()}
        file = tmp_path / f"shard-0000{part + 1}-model-00001-of-00001.safetensors"
        save_file(slices, file, metadata={"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(CheckpointError, match="row slices"):
        gate(GateRequest(str(tmp_path)))
