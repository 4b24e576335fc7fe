"""Configs that leave the rule open, contradict themselves or quantise routers are found."""

from __future__ import annotations

import pytest

from tests.museum.exhibit_configs import INCIDENTS
from tests.museum.gallery import all_cases, label


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)
