"""A gain that changed alone is found, and a right fold is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.museum.exhibit_smoothing import INCIDENTS, smoothed
from tests.museum.gallery import all_cases, label
from tests.museum.healthy import effective_rows, softmax_model


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


@pytest.mark.parametrize("spread", [1.2, 3.0])
def test_a_right_fold_moves_rows_by_rounding_only(spread):
    before, after = softmax_model(), smoothed(softmax_model(), spread, is_followed=True)
    rows = [effective_rows(model) for model in (before, after)]
    lengths = np.linalg.norm(rows[0], axis=1)
    assert (np.linalg.norm(rows[1] - rows[0], axis=1) < 0.005 * lengths).all()
