"""Routers of every size that float32 holds: no warning on the screen, no number that is none."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.router import Norm, Provenance, Router, Rule, Weights
from moegeom.engine.request import MeasureOptions
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource

EXPERTS, HIDDEN, TOKENS = 8, 16, 300
EXPONENTS = (-140, -127, -100, -60, 0, 60, 100, 120, 125)
RULES = {
    "softmax": Rule(2, "softmax", Weights("scores", True)),
    "sigmoid": Rule(2, "sigmoid", Weights("scores", True), has_selection_bias=True),
}

pytestmark = pytest.mark.filterwarnings("error")


def measured(exponent: int, rule: str = "softmax", size: float = 1.0, rows=None):
    """The whole-population row of a router whose rows are multiplied by a power of two."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((EXPERTS, HIDDEN)) if rows is None else rows
    bias = 0.1 * random.standard_normal(EXPERTS)
    with np.errstate(under="ignore"):
        router = Router(
            "text/0",
            "text",
            0,
            np.ldexp(weight, exponent).astype(np.float32),
            RULES[rule],
            Provenance("made up", ("gate.weight",), "", "F32"),
            selection_bias=bias if RULES[rule].has_selection_bias else None,
            gain=np.ones(HIDDEN, np.float32),
            norm=Norm("rms", 1e-6, "norm.weight"),
        )
    values = random.standard_normal((TOKENS, HIDDEN))
    values *= size * np.sqrt(HIDDEN) / np.linalg.norm(values, axis=1, keepdims=True)
    source = ArraySource({router.name: values.astype(np.float32)})
    metrics = list(METRICS.all())
    run = RouterRun(router, source, metrics, MeasureOptions(skip_non_finite=True))
    found = measure_router(run)
    rows_of = found.rows["layers"]
    return next(r for r in rows_of if (r["variant"], r["population"]) == ("as_stored", "all"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_every_scale_is_measured_without_a_warning(exponent, rule):
    row = measured(exponent, rule)
    # near the end of the range the logits of some tokens overflow, and are left out
    assert row["num_tokens"] == TOKENS if exponent < 120 else 0 < row["num_tokens"] <= TOKENS
    for name, value in row.items():
        assert not (isinstance(value, float) and np.isinf(value)), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_raw_gram_score_does_not_depend_on_the_scale(exponent):
    tolerance = 1e-5 if exponent > -120 else 0.02
    assert measured(exponent)["gram_score_raw"] == pytest.approx(
        measured(0)["gram_score_raw"], abs=tolerance
    )


def test_rows_of_very_different_sizes_have_a_raw_gram_score():
    random = np.random.default_rng(0)
    rows = random.standard_normal((EXPERTS, HIDDEN))
    sizes = np.exp2(np.linspace(-100, 100, EXPERTS))[:, None]
    found = measured(0, rows=rows * sizes)["gram_score_raw"]
    assert found == pytest.approx(measured(0, rows=rows)["gram_score_raw"], abs=1e-5)


def test_margins_beyond_the_histogram_are_bounds_and_not_numbers():
    """Logits are those of scale 1 times the power of two, so the margins are known."""
    usual = measured(0)
    assert usual["margin_bound"] is None
    assert usual["margin_p50"] > 0.0
    small = measured(-60)
    assert small["margin_p50"] is None
    assert small["margin_bound"] == "p001 < 2^-40, p01 < 2^-40, p50 < 2^-40"
    large = measured(60)
    assert large["margin_p50"] is None
    assert large["margin_bound"].endswith("p50 >= 2^24")


def test_sums_beyond_the_counters_are_unknown_and_not_clamped():
    assert measured(0)["log_sum_exp_mean"] is not None
    assert measured(10)["log_sum_exp_mean"] > 2.0**10
    found = measured(30)
    assert found["log_sum_exp_mean"] is None
    assert found["z_loss"] is None
