"""Every incident is found by its code, its twins are left alone, and each is what its story says."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.core.errors import CheckpointError
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import one_of_each
from tests.museum.checkpoint import name_of
from tests.museum.exhibit_biases import (
    BIAS_BEFORE_CAST,
    BIAS_NEVER_UPDATED,
    BIAS_RAN_AWAY,
)
from tests.museum.exhibit_rows import ROWS_SORTED_AS_TEXT
from tests.museum.gallery import Case, Incident, all_cases
from tests.museum.healthy import sigmoid_model, softmax_model
from tests.museum.incidents import INCIDENTS
from tests.museum.renumbering import permuted, text_order


def mechanism(shown: tuple[Incident, Case]) -> tuple[str, bool, bool]:
    """By day one size that is found, one that is missed and one twin of each incident."""
    incident, case = shown
    return incident.name, case in incident.twins, case.is_missed


def label(one: Any) -> str:
    """Of an incident and of a disagreement its name, of a case what was done."""
    return getattr(one, "name", "") or one.text


@pytest.mark.parametrize(
    ("incident", "case"), one_of_each(all_cases(INCIDENTS), mechanism), ids=label
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


# ----------------------------------------------------------------------------- what the gate tells
@pytest.mark.parametrize(
    ("incident", "size", "code", "title", "detail"),
    [
        (BIAS_BEFORE_CAST, 1, "MGN112", "", "238 distinct values become 8"),
        (BIAS_RAN_AWAY, 1, "MGI110", "expert 9", "Certificate: 31 experts beat expert 9 for every"),
        (BIAS_NEVER_UPDATED, 0, "MGN116", "selection bias 0:", ""),
        (BIAS_NEVER_UPDATED, 2, "MGN116", "selection bias 0.5:", ""),
        (ROWS_SORTED_AS_TEXT, 0, "MGI121", "2 was 3, 3 was 2", "16 of 16 experts are where they"),
    ],
)
def test_a_finding_names_what_it_is_about(museum, incident, size, code, title, detail):
    finding = museum.visit(incident, incident.sizes[size]).of(code)
    assert title in finding.title
    assert detail in finding.detail


def test_a_repair_has_its_proof_and_rows_renumbered_without_experts_are_an_error(museum):
    fix = museum.visit(BIAS_BEFORE_CAST, BIAS_BEFORE_CAST.sizes[1]).of("MGN112").fix
    assert "subtract 6.94 from every bias" in fix
    assert "Proof that no choice changes" in fix
    assert name_of("bias", 0).replace("0", "*") in fix
    model = softmax_model()
    seen = museum.show(permuted(model, text_order(32), ("weight",)), model)
    assert (seen.codes, seen.exit_code) == (("MGI121",), 1)
    assert "is not known" in seen.of("MGI121").detail


def test_a_sharded_save_is_refused_before_its_slices_are_taken_for_tensors(tmp_path):
    model = sigmoid_model()
    (tmp_path / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
    for part in (0, 1):
        slices = {n: np.array_split(t, 2)[part].copy() for n, t in model.tensors.items()}
        file = tmp_path / f"shard-0000{part + 1}-model-00001-of-00001.safetensors"
        save_file(slices, file, metadata={"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(CheckpointError, match="row slices"):
        gate(GateRequest(str(tmp_path)))
