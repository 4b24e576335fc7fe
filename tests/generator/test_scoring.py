"""The verdicts on faults that nobody listed: how many are named, and that twins are not blamed.

Cases are those of the seeds 0 to 69, one of each operator, on which limits were set; the others are
left alone until a count of all is wanted (`python -m tests.generator.scoring`).
"""

from typing import Any

import pytest

from moegeom.studies.explain.record import CauseVerdict
from tests.by_day import by_day
from tests.generator.cases import OPERATORS
from tests.generator.noise_pairs import ARITHMETICS, all_noise_pairs
from tests.generator.reliability import CLASSES, named, reliability, table
from tests.generator.scoring import Scored, all_scored, scored

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


# ------------------------------------------------------------------------ margins and healthy pairs
NOISE = CauseVerdict("arithmetic noise only", "")


def verdicts(cause: Any, margin: float | None, outcome: str, **twin: Any) -> Scored:
    known = {"twin": NOISE, "twin_outcome": "healthy"} | twin
    said = CauseVerdict(cause, "", margin=margin)
    return Scored(0, ("rows_permuted",), ("all",), "ids", said, outcome, **known)


def test_verdicts_are_counted_by_their_margin_and_open_ones_are_not():
    found = [
        verdicts("rows damaged", 40.0, "named"),
        verdicts("rows damaged", 99.0, "wrong"),
        verdicts("bias missing", 1000.0, "named"),
        verdicts("inconclusive", 5000.0, "open"),
        verdicts("not the router", None, "named"),
    ]
    classes = reliability(named(found))
    assert [one.least for one in classes] == list(CLASSES)
    assert [(one.number, one.right) for one in classes] == [(0, 0), (2, 1), (0, 0), (0, 0), (1, 1)]
    assert "| 30 to 100 | 2 | 50.0 % |" in table(classes)
    assert "| 1000 and more | 1 | 100.0 % |" in table(classes)

    # a fault that is seen in a twin is wrong unless it is rounding
    rounded = CauseVerdict("inputs rounded", "", margin=50.0)
    for outcome in ("wrong", "rounding"):
        of_twin = verdicts("inconclusive", None, "open", twin=rounded, twin_outcome=outcome)
        assert list(named([of_twin])) == [(50.0, outcome == "rounding")]


def test_a_pair_of_another_format_and_another_order_is_not_called_faulty():
    (one,) = all_noise_pairs([14])
    assert one.arithmetic == "both"
    assert one.outcome != "wrong", one.verdict.detail


@pytest.mark.nightly
def test_of_200_pairs_none_is_called_faulty():
    found = list(all_noise_pairs(range(200)))
    assert {one.arithmetic for one in found} == set(ARITHMETICS)
    assert [(one.seed, one.verdict.cause) for one in found if one.outcome == "wrong"] == []
    assert sum(one.outcome == "open" for one in found) <= 0.5 * len(found)
