"""Margins are counted in their classes, and healthy pairs are not called faulty."""

from __future__ import annotations

from typing import Any

import pytest

from moegeom.studies.explain.record import CauseVerdict
from tests.generator.noise_pairs import ARITHMETICS, all_noise_pairs
from tests.generator.reliability import CLASSES, named, reliability, table
from tests.generator.scoring import Scored

NOISE = CauseVerdict("arithmetic noise only", "")


def scored(cause: Any, margin: float | None, outcome: str, **twin: Any) -> Scored:
    known = {"twin": NOISE, "twin_outcome": "healthy"} | twin
    said = CauseVerdict(cause, "", margin=margin)
    return Scored(0, ("rows_permuted",), ("all",), "ids", said, outcome, **known)


def test_verdicts_are_counted_by_their_margin_and_open_ones_are_not():
    found = [
        scored("rows damaged", 40.0, "named"),
        scored("rows damaged", 99.0, "wrong"),
        scored("bias missing", 1000.0, "named"),
        scored("inconclusive", 5000.0, "open"),
        scored("not the router", None, "named"),
    ]
    classes = reliability(named(found))
    assert [one.least for one in classes] == list(CLASSES)
    assert [(one.number, one.right) for one in classes] == [(0, 0), (2, 1), (0, 0), (0, 0), (1, 1)]
    assert "| 30 to 100 | 2 | 50.0 % |" in table(classes)
    assert "| 1000 and more | 1 | 100.0 % |" in table(classes)

    # a fault that is seen in a twin is wrong unless it is rounding
    rounded = CauseVerdict("inputs rounded", "", margin=50.0)
    for outcome in ("wrong", "rounding"):
        of_twin = scored("inconclusive", None, "open", twin=rounded, twin_outcome=outcome)
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
