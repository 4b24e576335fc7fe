"""Routers that were quantised or cast are found."""

from __future__ import annotations

import numpy as np
import pytest

from tests.museum.exhibit_rounding import INCIDENTS, quantised, wide_model
from tests.museum.gallery import all_cases, label
from tests.museum.healthy import effective_rows


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


@pytest.mark.parametrize(
    ("bits", "least", "most"), [(8, 0.003, 0.01), (4, 0.08, 0.15), (2, 0.5, 1)]
)
def test_quantisation_moves_rows_by_what_its_bits_say(bits, least, most):
    before = effective_rows(wide_model())
    after = effective_rows(wide_model().edited("weight", lambda w, _: quantised(w, bits, 128)))
    moved = np.linalg.norm(after - before, axis=1) / np.linalg.norm(before, axis=1)
    assert (least < moved).all()
    assert (moved < most).all()
