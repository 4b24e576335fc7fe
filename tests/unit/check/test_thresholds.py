"""Thresholds of a profile: absolute or relative, per layer or at a percentile, beyond chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moegeom.checks import measured_rows, run_checks
from moegeom.checks.baseline import Baseline, BaselineRouter
from moegeom.checks.profile import Ignore, Profile, Threshold
from moegeom.core.finding import Outcome


def _layers(values: dict[int, float], error: float | None = None) -> list[dict[str, Any]]:
    return [
        {
            "router": f"text/{layer}",
            "variant": "as_stored",
            "population": "all",
            "num_tokens": 1000,
            "num_blocks": 16,
            "load_cv_ddof0": value,
            "load_cv_ddof0_se": error,
        }
        for layer, value in values.items()
    ]


def _judge(threshold: Threshold, layers: list[dict[str, Any]], before: float | None = None, **more):
    baseline = None
    if before is not None:
        facts = {"num_experts": 2, "hidden_size": 2, "top_k": 1, "stored_dtype": "BF16"}
        columns = {"load_cv_ddof0": (before, 0.0), "num_blocks": (16.0, None)}
        empty = np.zeros((2, 32), np.float32)
        router = BaselineRouter(facts, columns, {}, empty[:, 0], empty, empty[0])
        names = [row["router"] for row in layers]
        baseline = Baseline("", {}, 1000, {}, dict.fromkeys(names, router))
    profile = Profile(select=("MGP",), thresholds=(threshold,), **more)
    verdict = run_checks(measured_rows(layers, [], baseline=baseline), profile)
    (outcome,) = verdict.outcomes
    return outcome


def _routers(outcome: Outcome) -> list[str]:
    return [router for finding in outcome.findings for router in finding.routers]


AT_MOST = Threshold("load_cv_ddof0", "at_most", 0.5)


AT_LEAST = Threshold("load_cv_ddof0", "at_least", 0.5)
RELATIVE = Threshold("load_cv_ddof0", "at_most", 1.2, is_relative=True)
RISING = {layer: 0.1 * layer for layer in range(11)}


def _percentile(bound: float, percentile: float) -> Threshold:
    return Threshold("load_cv_ddof0", "at_most", bound, percentile=percentile)


#: A threshold, values of layers, their error, the value of the baseline: the state, and who is named.
JUDGED = {
    "each layer beyond": (AT_MOST, {0: 0.4, 1: 0.6, 2: 0.5}, None, None, "failed", ["text/1"]),
    "from below": (AT_LEAST, {0: 0.4, 1: 0.6}, None, None, "failed", ["text/0"]),
    "within chance": (AT_MOST, {0: 0.52}, 0.01, None, "passed", []),
    "beyond chance": (AT_MOST, {0: 0.60}, 0.01, None, "failed", ["text/0"]),
    "the median": (_percentile(0.45, 50.0), RISING, None, None, "failed", ["text/5"]),
    "nine tenths": (_percentile(0.95, 90.0), RISING, None, None, "passed", []),
    "times the baseline": (RELATIVE, {0: 0.47}, None, 0.4, "passed", []),
    "more times": (RELATIVE, {0: 0.49}, None, 0.4, "failed", ["text/0"]),
    "no baseline": (RELATIVE, {0: 0.4}, None, None, "inconclusive", []),
    "no column": (Threshold("load_csv", "at_most", 1.0), {0: 0.4}, None, None, "inconclusive", []),
}


@pytest.mark.parametrize("what", JUDGED)
def test_layers_beyond_a_bound_are_named(what):
    threshold, values, error, before, state, routers = JUDGED[what]
    outcome = _judge(threshold, _layers(values, error), before)
    assert (outcome.state, _routers(outcome)) == (state, routers)


def test_the_bound_or_what_is_lacking_is_named():
    bounds = {
        "at most 0.5": _judge(AT_MOST, _layers({1: 0.6})),
        "1.2 times the baseline's 0.4": _judge(RELATIVE, _layers({0: 0.49}), 0.4),
    }
    assert all(words in outcome.findings[0].title for words, outcome in bounds.items())
    assert "load_csv" in _judge(Threshold("load_csv", "at_most", 1.0), _layers({0: 0.4})).reason


def test_what_a_profile_ignores_stays_with_its_reason():
    ignore = (Ignore("MGP901", "known", frozenset({3})),)
    for layer, state, reason, numbers in (
        (3, "ignored", "known", (0, 1)),
        (4, "failed", "", (1, 0)),
    ):
        outcome = _judge(AT_MOST, _layers({layer: 0.9}), ignore=ignore)
        assert (outcome.state, outcome.reason) == (state, reason)
        assert (len(outcome.findings), len(outcome.accepted)) == numbers
