"""Thresholds of a profile: absolute or relative, per layer or at a percentile, beyond chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moegeom.checks import measured_rows, run_checks
from moegeom.checks.baseline import Baseline, BaselineRouter
from moegeom.checks.profile import Ignore, LayerLimits, LimitSettings, Profile, Threshold
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


def test_each_layer_beyond_its_bound_is_named():
    outcome = _judge(AT_MOST, _layers({0: 0.4, 1: 0.6, 2: 0.5}))
    assert (outcome.state, _routers(outcome)) == ("failed", ["text/1"])
    assert "at most 0.5" in outcome.findings[0].title


def test_at_least_bounds_from_below():
    threshold = Threshold("load_cv_ddof0", "at_least", 0.5)
    assert _routers(_judge(threshold, _layers({0: 0.4, 1: 0.6}))) == ["text/0"]


def test_a_value_within_chance_of_its_bound_passes():
    assert _judge(AT_MOST, _layers({0: 0.52}, error=0.01)).state == "passed"
    assert _judge(AT_MOST, _layers({0: 0.60}, error=0.01)).state == "failed"


def test_a_percentile_judges_one_layer():
    values = {layer: 0.1 * layer for layer in range(11)}
    outcome = _judge(Threshold("load_cv_ddof0", "at_most", 0.45, percentile=50.0), _layers(values))
    assert _routers(outcome) == ["text/5"]
    outcome = _judge(Threshold("load_cv_ddof0", "at_most", 0.95, percentile=90.0), _layers(values))
    assert outcome.state == "passed"


def test_a_relative_bound_multiplies_the_baseline():
    threshold = Threshold("load_cv_ddof0", "at_most", 1.2, is_relative=True)
    assert _judge(threshold, _layers({0: 0.47}), before=0.4).state == "passed"
    outcome = _judge(threshold, _layers({0: 0.49}), before=0.4)
    assert "1.2 times the baseline's 0.4" in outcome.findings[0].title


def test_a_relative_bound_without_baseline_is_inconclusive():
    threshold = Threshold("load_cv_ddof0", "at_most", 1.2, is_relative=True)
    assert _judge(threshold, _layers({0: 0.4})).state == "inconclusive"


def test_an_unknown_column_is_inconclusive_and_named():
    outcome = _judge(Threshold("load_csv", "at_most", 1.0), _layers({0: 0.4}))
    assert outcome.state == "inconclusive"
    assert "load_csv" in outcome.reason


def test_a_threshold_has_a_severity_of_its_own():
    threshold = Threshold("load_cv_ddof0", "at_most", 0.5, severity="warning")
    outcome = _judge(threshold, _layers({0: 0.6}))
    assert (outcome.severity, outcome.findings[0].severity) == ("warning", "warning")


@pytest.mark.parametrize(("layer", "state"), [(3, "ignored"), (4, "failed")])
def test_what_a_profile_ignores_is_kept_with_its_reason(layer, state):
    ignore = (Ignore("MGP901", "known", frozenset({3})),)
    outcome = _judge(AT_MOST, _layers({layer: 0.9}), ignore=ignore)
    assert outcome.state == state
    assert outcome.reason == ("known" if state == "ignored" else "")
    assert (len(outcome.findings), len(outcome.accepted)) == (
        (0, 1) if state == "ignored" else (1, 0)
    )


def test_limits_of_a_layer_come_before_those_of_the_check():
    settings = LimitSettings({"ratio": 4.0}, (LayerLimits(frozenset({1, 2}), {"ratio": 5.0}),))
    profile = Profile(limits={"MGG203": settings})
    asked = [profile.limit("MGG203", "ratio", layer, 3.0) for layer in (0, 1)]
    assert asked == [4.0, 5.0]
    assert profile.limit("MGG203", "other", 1, 3.0) == 3.0
