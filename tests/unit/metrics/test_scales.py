"""Routers of every size that float32 holds: no warning on the screen, no number that is none."""

import functools
import itertools

import numpy as np
import pytest

from moegeom.core.router import Norm, Rule
from moegeom.engine.request import MeasureOptions
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource
from tests.by_day import by_day
from tests.unit.scan.made import SUM_TO_ONE, router_with

EXPERTS, HIDDEN, TOKENS = 8, 16, 300
EXPONENTS = (-140, -127, -100, -60, 0, 60, 100, 120, 125)
RULES = {
    "softmax": Rule(2, "softmax", SUM_TO_ONE),
    "sigmoid": Rule(2, "sigmoid", SUM_TO_ONE, has_selection_bias=True),
}


@functools.cache
def measured(exponent: int, rule: str = "softmax", spread: float = 0.0):
    """The whole-population row of a router whose rows are multiplied by a power of two.

    Rows are the larger the later, the last one by twice the ``spread`` than the first.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((EXPERTS, HIDDEN))
    bias = 0.1 * random.standard_normal(EXPERTS)
    sizes = np.exp2(exponent + np.linspace(-spread, spread, EXPERTS))[:, None]
    with np.errstate(under="ignore"):
        router = router_with(
            (rows * sizes).astype(np.float32),
            RULES[rule],
            selection_bias=bias if RULES[rule].has_selection_bias else None,
            gain=np.ones(HIDDEN, np.float32),
            norm=Norm("rms", 1e-6, "norm.weight"),
        )
    values = random.standard_normal((TOKENS, HIDDEN))
    values *= np.sqrt(HIDDEN) / np.linalg.norm(values, axis=1, keepdims=True)
    source = ArraySource({router.name: values.astype(np.float32)})
    run = RouterRun(router, source, list(METRICS.all()), MeasureOptions(non_finite="skip"))
    layers = measure_router(run).rows["layers"]
    return next(r for r in layers if (r["variant"], r["population"]) == ("as_stored", "all"))


@pytest.mark.parametrize(
    ("exponent", "rule"),
    by_day(
        itertools.product(EXPONENTS, RULES),
        {
            "subnormal rows": (-140, "softmax"),
            "margins below the histogram": (-60, "softmax"),
            "margins beyond the histogram": (60, "softmax"),
            "large scores": (100, "sigmoid"),
            "logits that overflow": (125, "softmax"),
        },
    ),
)
def test_every_scale_is_measured_without_a_warning(exponent, rule):
    row = measured(exponent, rule)
    # near the end of the range the logits of some tokens overflow, and are left out
    assert row["num_tokens"] == TOKENS if exponent < 120 else 0 < row["num_tokens"] <= TOKENS
    assert [n for n, value in row.items() if isinstance(value, float) and np.isinf(value)] == []
    tolerance = 1e-5 if exponent > -120 else 0.02
    score = measured(0, rule)["gram_score_raw"]
    assert row["gram_score_raw"] == pytest.approx(score, abs=tolerance)


def test_rows_of_very_different_sizes_have_a_raw_gram_score():
    score = measured(0)["gram_score_raw"]
    assert measured(0, spread=100.0)["gram_score_raw"] == pytest.approx(score, abs=1e-5)


def test_margins_beyond_the_histogram_are_bounds_and_not_numbers():
    """Logits are those of scale 1 times the power of two, so the margins are known."""
    assert measured(0)["margin_bound"] is None
    assert measured(0)["margin_p50"] > 0.0
    bounds = {-60: "p001 < 2^-40, p01 < 2^-40, p50 < 2^-40", 60: "p50 >= 2^24"}
    for exponent, bound in bounds.items():
        assert measured(exponent)["margin_p50"] is None
        assert measured(exponent)["margin_bound"].endswith(bound)


def test_sums_beyond_the_counters_are_unknown_and_not_clamped():
    assert measured(0)["log_sum_exp_mean"] is not None
    assert measured(10)["log_sum_exp_mean"] > 2.0**10
    assert measured(30)["log_sum_exp_mean"] is measured(30)["z_loss"] is None
