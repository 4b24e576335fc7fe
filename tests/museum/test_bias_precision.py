"""Biases that lose their differences in bfloat16 are found, and centred ones left alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.museum.checkpoint import Checkpoint, name_of, rounded
from tests.museum.exhibit_bias_precision import BIAS_BEFORE_CAST, GLM_OFFSET, INCIDENTS
from tests.museum.gallery import all_cases, label
from tests.museum.healthy import GLM_DISTINCT, glm_model


def distinct(model: Checkpoint) -> int:
    """Different values among the biases of the first layer."""
    return len(np.unique(model.tensors[name_of("bias", 0)]))


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


def test_the_biases_are_those_of_the_thread():
    model = glm_model(GLM_OFFSET)
    biases = model.tensors[name_of("bias", 0)]
    assert (float(biases.min()), float(biases.max())) == pytest.approx((6.817, 7.063), abs=1e-6)
    assert distinct(model) == GLM_DISTINCT
    assert distinct(model.edited("bias", lambda b, _: rounded(b))) == 8


def test_the_repair_is_neutral_and_named_with_its_proof(museum):
    finding = museum.visit(BIAS_BEFORE_CAST, BIAS_BEFORE_CAST.sizes[1]).of("MGN112")
    assert "238 distinct values become 8" in finding.detail
    assert "subtract 6.94 from every bias" in finding.fix
    assert "Proof that no choice changes" in finding.fix
    assert name_of("bias", 0).replace("0", "*") in finding.fix


def test_the_repair_restores_what_the_cast_takes():
    repaired = glm_model(GLM_OFFSET).edited("bias", lambda b, _: rounded(b - GLM_OFFSET))
    assert distinct(repaired) > 200
