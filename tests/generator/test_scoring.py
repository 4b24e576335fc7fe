"""The verdicts on faults that nobody listed: how many are named, and that twins are not blamed.

Cases are those of the seeds 0 to 69, one of each operator, on which limits were set; the others are
left alone until a count of all is wanted (`python -m tests.generator.scoring`).
"""

from __future__ import annotations

import pytest

from tests.by_day import by_day
from tests.generator.cases import OPERATORS
from tests.generator.scoring import all_scored, scored

#: Seeds of small cases that are named: one of each kind of operator.
NAMED = (1, 4, 8, 17, 27, 32, 48, 69)


@pytest.mark.parametrize("seed", by_day(NAMED, {"rows damaged": 4}))
def test_a_fault_is_named_and_its_twin_is_not_blamed(seed, tmp_path):
    one = scored(seed, "small", tmp_path)
    assert one.outcome == "named", one.verdict.detail
    assert one.twin_outcome in ("healthy", "open"), one.twin.detail


@pytest.mark.nightly
@pytest.mark.parametrize("size", ["small", "middle"])
def test_most_faults_are_named_hardly_any_wrongly_and_no_twin_is_blamed(size):
    cases = list(all_scored(size, range(len(OPERATORS))))
    assert {len(one.operators) for one in cases} == {1, 2}
    ends = [one.outcome for one in cases]
    assert ends.count("named") >= 0.6 * len(cases)
    assert ends.count("wrong") <= 0.05 * len(cases)
    assert [one.seed for one in cases if one.twin_outcome == "wrong"] == []
