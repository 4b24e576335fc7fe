"""Biases that were never updated, frozen or run away are found."""

from __future__ import annotations

import pytest

from tests.museum.exhibit_bias_updates import BIAS_NEVER_UPDATED, BIAS_RAN_AWAY, INCIDENTS
from tests.museum.gallery import all_cases, label


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


def test_a_certificate_names_who_beats_the_expert(museum):
    finding = museum.visit(BIAS_RAN_AWAY, BIAS_RAN_AWAY.sizes[1]).of("MGI110")
    assert "expert 9" in finding.title
    assert finding.detail.startswith("Certificate: 31 experts beat expert 9 for every input")


def test_a_constant_bias_is_named_with_its_value(museum):
    said = [museum.visit(BIAS_NEVER_UPDATED, c).of("MGN116") for c in BIAS_NEVER_UPDATED.sizes]
    assert "selection bias 0:" in said[0].title
    assert "selection bias 0.5:" in said[2].title
