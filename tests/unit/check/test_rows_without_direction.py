"""Rows that have no direction, as stored or less their mean, are judged and end in no traceback."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.check.conftest import Case
from tests.unit.check.defects import rows


def _one_row_left(weight: np.ndarray) -> np.ndarray:
    """All rows but the first are zero: no two raw rows have a cosine."""
    return weight * (np.arange(len(weight)) == 0)[:, None]


def test_rows_of_zeros_have_no_score_as_stored_and_the_finding_says_so(outcomes):
    found = outcomes(Case(rows(_one_row_left)))["MGG204"]
    assert found.state == "failed"
    assert "no score, for rows of zeros have no direction" in found.findings[0].detail


@pytest.mark.parametrize("exponent", [-100, 100])
def test_rows_of_any_size_have_a_score_as_stored(outcomes, exponent):
    found = outcomes(Case(rows(lambda w: np.ldexp(w + w[:1] * 4.0, exponent).astype(np.float32))))
    assert all("no score" not in f.detail for f in found["MGG204"].findings)
    assert found["MGI103"].state == "passed"


def test_tokens_that_are_equal_are_named(outcomes):
    """300 equal tokens: shares of them are those of one."""
    found = outcomes(Case(tokens=300, layers=1, lean=1e4))["MGI127"]
    assert found.state == "failed"
    assert found.findings[0].title == "all 300 tokens choose the same 4 of 16 experts."
    assert outcomes(Case(tokens=300, layers=1))["MGI127"].state == "passed"
