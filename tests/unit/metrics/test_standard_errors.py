"""Standard errors are the delete-one jackknife over blocks, by hand; means of samples are exact.
Routers of every size that float32 holds: no warning on the screen, no number that is none.
"""

import functools
import itertools

import numpy as np
import pytest

from moegeom.core.router import Norm, Rule
from moegeom.engine.request import MeasureOptions
from moegeom.geometry.boundary.orders import extra_experts, order_eps
from moegeom.geometry.load import load_cv, load_share, max_vio
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.table import load_kernels
from moegeom.measure.finish import finish_router
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource
from tests.by_day import by_day
from tests.unit.kernels.test_reductions import batch_of
from tests.unit.scan.made import SOFTMAX, SUM_TO_ONE, normal_rows, router_with

EXPERTS, TOP_K = 6, 2
ROUTER = router_with(normal_rows(EXPERTS, 4), Rule(TOP_K, "softmax", SOFTMAX))
NEEDS = ("token_counts", "expert_counts", "margin_histogram", "expert_sets")
NAMES = ("domain=code", "domain=prose", "domain=(others)", "domain=(none)")


class Stream:
    """Tokens with chosen sets, in blocks and populations of the test's choice."""

    def __init__(self, blocks, populations) -> None:
        random = np.random.default_rng(1)
        self.block = np.asarray(blocks, np.int32)
        self.population = np.asarray(populations, np.int32)
        tokens = len(self.block)
        score = random.standard_normal((tokens, EXPERTS)) + np.linspace(0, 1, EXPERTS)
        self.chosen = np.argsort(-score, axis=1)[:, :TOP_K].astype(np.int32)
        self.margin = random.exponential(1.0, tokens)

    def counts(self, kept) -> np.ndarray:
        return np.bincount(self.chosen[kept].reshape(-1), minlength=EXPERTS)

    def rows(self) -> dict[str, dict]:
        """The row of ``layers`` by population, and with it the rows of ``experts``."""
        of_tokens = {"block": self.block, "population": self.population, "chosen": self.chosen}
        batch = batch_of(len(self.block), **of_tokens, margin=self.margin)
        states = {}
        for name in NEEDS:
            accumulator = REDUCTIONS[name].start(Extent(len(NAMES), EXPERTS, TOP_K))
            accumulator.fold(batch, load_kernels("cpu"))
            states[name] = accumulator.state()
        metrics = [METRICS[name] for name in ("tokens", "load", "margins", "expert_sets", "rows")]
        finished = finish_router(ROUTER, states, NAMES, metrics, {})
        assert finished.reasons == {}
        experts = {}
        for row in finished.rows["experts"]:
            experts.setdefault(row["population"], []).append(row)
        return {
            row["population"]: {**row, "experts": experts[row["population"]]}
            for row in finished.rows["layers"]
        }


def jackknife(values) -> np.ndarray:
    values = np.asarray(values)
    g = len(values)
    return np.sqrt((g - 1) / g * ((values - values.mean(axis=0)) ** 2).sum(axis=0))


@pytest.fixture
def stream():
    random = np.random.default_rng(2)
    return Stream(random.choice([0, 3, 4, 9, 15], 500), random.choice([0, 1, 3], 500))


@pytest.mark.parametrize(("population", "label"), [("all", None), ("domain=prose", 1)])
def test_the_error_is_the_jackknife_over_the_blocks_that_hold_tokens(stream, population, label):
    row = stream.rows()[population]
    own = np.ones(500, bool) if label is None else stream.population == label
    assert row["num_tokens"] == own.sum()
    without = [stream.counts(own & (stream.block != b)) for b in (0, 3, 4, 9, 15)]
    for column, figure in {"load_cv_ddof0": load_cv, "max_vio_global": max_vio}.items():
        np.testing.assert_allclose(row[column], figure(stream.counts(own)), rtol=1e-14)
        expected = jackknife([figure(counts) for counts in without])
        np.testing.assert_allclose(row[f"{column}_se"], expected, rtol=1e-12)
    shares = jackknife([load_share(counts) for counts in without])
    errors = [expert["load_se"] for expert in row["experts"]]
    np.testing.assert_allclose(errors, shares, rtol=1e-12)


def test_populations_are_listed_when_they_hold_tokens(stream):
    assert sorted(stream.rows()) == ["all", "domain=code", "domain=prose"]


def test_what_lies_within_one_block_has_no_error():
    row = Stream(np.full(80, 5), np.zeros(80)).rows()["all"]
    for column in ("load_cv_ddof0_se", "margin_p50_se", "expert_set_coverage_se"):
        assert row[column] is None
    assert [e["load_se"] for e in row["experts"]] == [None] * 6
    assert row["load_cv_ddof0"] > 0.0
    blocks = np.repeat([1, 2], 60)
    rows = Stream(blocks, np.where(blocks == 1, 0, 1)).rows()
    assert rows["domain=code"]["load_cv_ddof0_se"] is None
    assert rows["all"]["load_cv_ddof0_se"] > 0.0


def test_the_error_of_independent_blocks_is_the_spread_over_streams():
    """Over many streams, the mean squared error bar is the variance of the figure."""
    figures, errors = [], []
    for seed in range(60):
        random = np.random.default_rng(seed)
        made = Stream(np.repeat(np.arange(NUM_BLOCKS), 40), np.zeros(640))
        made.chosen = np.argsort(random.random((640, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        counts = np.array([made.counts(made.block == b) for b in range(NUM_BLOCKS)])
        total = counts.sum(axis=0)
        figures.append(load_share(total)[0])
        errors.append(jackknife(load_share(total - counts))[0])
    ratio = np.mean(np.square(errors)) / np.var(figures, ddof=1)
    np.testing.assert_allclose(ratio, 1.0, atol=0.6)


def test_a_metric_without_its_reduction_is_null_with_the_reason():
    metrics = [METRICS["load"], METRICS["rows"]]
    finished = finish_router(ROUTER, {}, (), metrics, {"expert_counts": "no tokens"})
    assert finished.reasons == {"load": "no tokens"}
    (row,) = finished.rows["layers"]
    assert "load_cv_ddof0" not in row
    np.testing.assert_equal(row["num_duplicate_rows"], 0)


def test_orders_and_extra_experts_are_means_over_the_tokens():
    router = router_with(normal_rows(9, 16), Rule(3, "softmax", SOFTMAX))
    values = normal_rows(3000, 16, seed=1) + np.float32(0.5)
    metrics = [METRICS[name] for name in ("tokens", "orders")]
    tables = measure_router(RouterRun(router, ArraySource({router.name: values}), metrics)).rows
    assert {row["variant"] for row in tables["orders"]} == {"as_stored", "random"}
    logits = values @ router.weight.T
    rows = [row for row in tables["orders"] if row["variant"] == "as_stored"]
    assert [row["width"] for row in rows] == [0.0, 2.0**-8, 2.0**-6, 2.0**-4, 0.25, 1.0]
    for row in rows:
        orders = order_eps(logits, 3, row["width"])
        expected = {f"order_{least}_share": (orders >= least).mean() for least in (2, 3, 4)}
        expected["order_mean"] = orders.mean()
        expected["extra_experts_mean"] = extra_experts(logits, 3, row["width"]).mean()
        for column, mean in expected.items():
            np.testing.assert_allclose(row[column], mean, rtol=1e-3, atol=2e-3, err_msg=column)
        assert row["order_max"] == orders.max()
        assert row["order_mean_se"] > 0.0 or orders.max() == 0


# ------------------------------------------------------------ rows of every size that float32 holds
SCALED_EXPERTS, HIDDEN, TOKENS = 8, 16, 300
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
    rows = random.standard_normal((SCALED_EXPERTS, HIDDEN))
    bias = 0.1 * random.standard_normal(SCALED_EXPERTS)
    sizes = np.exp2(exponent + np.linspace(-spread, spread, SCALED_EXPERTS))[:, None]
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
