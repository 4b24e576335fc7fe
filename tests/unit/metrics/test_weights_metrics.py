"""Metrics keep the theorems, and the theorems can fail; those of
the weights are null where nothing can be said. The null: random rows of the same lengths, the
same every time. Standard errors are the delete-one jackknife over blocks, by hand; means of samples
are exact. Routers of every size that float32 holds: no warning, no number that is none.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from moegeom.core.router import GroupMask, Norm, Router, Rule
from moegeom.engine.request import MeasureOptions
from moegeom.geometry.load import load_cv, load_share, max_vio
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.table import load_kernels
from moegeom.measure.finish import finish_router
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.variants.random_router import random_router
from tests.array_source import ArraySource
from tests.by_day import by_day
from tests.unit.kernels.test_reductions import batch_of
from tests.unit.metrics.theorems import THEOREMS
from tests.unit.scan.made import SOFTMAX, SUM_TO_ONE, normal_rows, router_with

EXPERTS, HIDDEN, GROUPS = 12, 48, 3
WEIGHTS_METRICS = [metric for metric in METRICS.all() if metric.scope == "weights"]
RULES = ["softmax", "softmax with logit bias", "sigmoid with bias", "sigmoid with bias and groups"]


def a_router(kind: str = "softmax", **changes: Any) -> Router:
    random = np.random.default_rng(RULES.index(kind))
    has_bias, has_logit_bias = kind.startswith("sigmoid"), kind == "softmax with logit bias"
    groups = GroupMask(GROUPS, 2, "top2_sum", -np.inf) if kind.endswith("groups") else None
    weight = 0.05 * random.standard_normal((EXPERTS, HIDDEN)) * random.uniform(0.5, 2, (EXPERTS, 1))
    rule = Rule(3, kind.split(maxsplit=1)[0], SOFTMAX, has_bias, has_logit_bias, groups)
    router = router_with(
        weight + 0.02 * random.standard_normal(HIDDEN),
        rule,
        # wide enough for some experts to be beaten everywhere
        selection_bias=1.2 * random.standard_normal(EXPERTS) if has_bias else None,
        logit_bias=6.0 * random.standard_normal(EXPERTS) if has_logit_bias else None,
        gain=random.uniform(0.2, 2.0, HIDDEN),
        norm=Norm("rms", 1e-6, "norm.weight"),
    )
    return dataclasses.replace(router, **changes)


def tables(metric, router) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of ``layers`` and the rows of ``experts``."""
    found = finish_router(router, {}, (), [metric], {})
    assert found.reasons == {}
    return found.rows["layers"][0], found.rows.get("experts", [])


def test_the_metrics_and_routers_have_something_to_say():
    """Else the theorems would compare null with null, or nothing."""
    names = {metric.name for metric in WEIGHTS_METRICS}
    assert names >= {"effective_router", "reachability", "rows", "selection_bias", "signature"}
    declared = {"expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"}
    assert {i for metric in WEIGHTS_METRICS for i in metric.invariances} == declared
    for kind in RULES[1:]:
        layers, experts = tables(METRICS["reachability"], a_router(kind))
        assert layers["num_reachable"] > 0
        assert layers["num_unreachable"] > 0 or kind == RULES[3]
        assert sum(row["num_beaten_by"] for row in experts) > 0


def with_weight(change, kind="softmax", **more: Any) -> Router:
    router = a_router(kind)
    weight = router.weight.astype(np.float32)
    return dataclasses.replace(router, weight=change(weight), **more)


def _set(weight, where, value):
    weight[where] = value
    return weight


DEGENERATE = {
    "no finite row": lambda: with_weight(lambda w: w * np.nan),
    "a row of nan": lambda: with_weight(lambda w: _set(w, 3, np.nan)),
    "an entry of infinity": lambda: with_weight(lambda w: _set(w, (3, 2), np.inf)),
    "one finite row": lambda: with_weight(lambda w: _set(w, np.s_[1:], np.nan)),
    "a gain of infinity": lambda: with_weight(
        lambda w: _set(w, (3, 2), 0.0), gain=_set(np.ones(HIDDEN, np.float32), 2, np.inf)
    ),
    "a gain of zeros": lambda: with_weight(lambda w: w, gain=np.zeros(HIDDEN, np.float32)),
    "zero rows": lambda: with_weight(lambda w: 0 * w),
    "equal rows": lambda: with_weight(lambda w: np.tile(w[:1], (EXPERTS, 1))),
    "one expert": lambda: with_weight(lambda w: w[:1], rule=Rule(1, "softmax", SOFTMAX)),
    "two experts": lambda: with_weight(lambda w: w[:2], rule=Rule(1, "softmax", SOFTMAX)),
    "every expert chosen": lambda: a_router(rule=Rule(EXPERTS, "softmax", SOFTMAX)),
    "one dimension": lambda: with_weight(lambda w: w[:, :1], gain=np.ones(1, np.float32)),
    "less than a window": lambda: with_weight(lambda w: w[:, :20], gain=None),
    "huge rows": lambda: with_weight(lambda w: w * np.float32(1e30)),
    "tiny rows": lambda: with_weight(lambda w: w * np.float32(1e-40)),
    "rows beyond squares": lambda: a_router(weight=a_router().weight * 1e200),
    "no norm": lambda: a_router(norm=None, gain=None),
    "a layer norm": lambda: a_router(norm=Norm("layer", 1e-6, "norm.weight")),
    "a bias of nan": lambda: a_router(RULES[2], selection_bias=np.full(EXPERTS, np.nan)),
    "a logit bias of infinity": lambda: a_router(
        RULES[1], logit_bias=_set(np.zeros(EXPERTS), 2, -np.inf)
    ),
    "a huge bias": lambda: a_router(RULES[2], selection_bias=np.full(EXPERTS, 1e300)),
    "a constant bias": lambda: a_router(RULES[3], selection_bias=np.full(EXPERTS, 0.5)),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_routers_give_null_and_no_exception(case):
    """Warnings are errors here: nothing overflows or divides by zero unseen."""
    router = DEGENERATE[case]()
    for metric in WEIGHTS_METRICS:
        rows_of = finish_router(router, {}, (), [metric], {}).rows
        assert rows_of.keys() <= metric.columns.keys() | {"layers"}
        for table, rows in rows_of.items():
            known = {c.name for c in metric.columns[table]} | {"router", "variant", "population"}
            assert all(set(row) <= known for row in rows), table
            if "expert" in known:
                assert [row["expert"] for row in rows] == list(range(router.num_experts)), table


def is_null(value) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def test_without_two_different_rows_there_are_no_cosines_and_no_spectrum():
    for case in ("no finite row", "zero rows", "equal rows", "one expert"):
        layers, experts = tables(METRICS["effective_router"], DEGENERATE[case]())
        for name in ("gram_score_centred", "gram_score_z", "row_condition", "effective_rank"):
            assert is_null(layers[name]), name
        assert layers["row_rank"] == 0
        assert {row["nearest_expert"] for row in experts} == {-1}
        assert all(is_null(row["nearest_cosine"]) for row in experts)


def test_a_row_that_is_not_finite_is_null_and_the_others_keep_their_numbers():
    layers, experts = tables(METRICS["effective_router"], DEGENERATE["a row of nan"]())
    assert not is_null(layers["gram_score_centred"])
    for number, row in enumerate(experts):
        assert is_null(row["centred_row_norm"]) == (number == 3)
        assert row["nearest_expert"] != 3
    names = [row["nearest_expert"] for row in experts]
    assert names[3] == -1
    assert max(names) > 3  # numbers of experts, not of finite rows


def test_nothing_is_reached_or_signed_when_a_row_is_not_finite_or_behind_a_layer_norm():
    for case in ("a row of nan", "no finite row", "a gain of infinity"):
        router = DEGENERATE[case]()
        assert tables(METRICS["reachability"], router)[0]["num_reach_open"] == EXPERTS
        layers, experts = tables(METRICS["signature"], router)
        projections = {"mean_row_projections", "row_projections"}
        assert [row for row in (layers, *experts) if row.keys() & projections] == []
    layers, experts = tables(METRICS["reachability"], DEGENERATE["a layer norm"]())
    assert [row for row in (layers, *experts) if row.keys() & {"num_reachable", "reach"}] == []


def test_a_cast_that_merges_biases_is_seen_by_reach():
    """Expert 0 is just ahead of the others' range; rounding to bfloat16 takes it below."""
    router = a_router(RULES[2], gain=np.full(HIDDEN, 1e-9), rule=Rule(1, "sigmoid", SOFTMAX, True))
    bias = np.full(EXPERTS, 7.0)
    bias[0] = 7.001
    layers, experts = tables(
        METRICS["reachability"], dataclasses.replace(router, selection_bias=bias)
    )
    assert layers["num_unreachable"] == EXPERTS - 1
    assert layers["num_unreachable_bf16"] == 0
    assert [row["num_beaten_by"] for row in experts] == [0] + [1] * (EXPERTS - 1)


def test_random_routers_are_within_a_few_sigmas_of_chance():
    """Sigmas of centred rows: with eight experts those of raw rows are three times as large."""
    random, found = np.random.default_rng(5), []
    for _ in range(100):
        router = a_router(weight=random.standard_normal((8, 512)), gain=None)
        layers, _ = tables(METRICS["effective_router"], router)
        found.append(layers["gram_score_z"])
    np.testing.assert_allclose(np.mean(found), 0.0, atol=0.4)
    np.testing.assert_allclose(np.std(found), 1.0, atol=0.25)


def test_one_row_at_the_mean_does_not_hide_the_nearest_of_the_others():
    weight = np.array([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [2.0, 1.0], [-2.0, -1.0]])
    router = a_router(weight=weight, gain=None, rule=Rule(1, "softmax", SOFTMAX))
    layers, experts = tables(METRICS["effective_router"], router)
    assert [row["nearest_expert"] for row in experts] == [-1, 3, 4, 1, 2]
    np.testing.assert_allclose(layers["max_cosine_centred"], 3 / np.sqrt(10), rtol=1e-12)


@pytest.fixture
def router():
    weight = normal_rows(16, 300)
    weight[3] *= 40.0
    weight[5] = 0.0
    return router_with(weight, Rule(4, "softmax", SOFTMAX), logit_bias=np.ones(16, np.float32))


def lengths(router) -> np.ndarray:
    return np.linalg.norm(router.weight.astype(np.float64), axis=1)


def test_rows_keep_their_lengths_and_all_else_stays(router):
    null = random_router(router, 0)
    np.testing.assert_allclose(lengths(null), lengths(router), rtol=1e-6)
    assert (null.rule, null.name, null.weight.dtype) == (router.rule, router.name, np.float32)
    np.testing.assert_array_equal(null.logit_bias, router.logit_bias)


def test_directions_are_new_and_unrelated(router):
    null = random_router(router, 0)
    is_long = lengths(router) > 0
    cosine = (null.weight * router.weight).sum(axis=1)[is_long] / lengths(router)[is_long] ** 2
    np.testing.assert_array_less(np.abs(cosine), 5 / np.sqrt(300))
    gram = null.weight[is_long] @ null.weight[is_long].T
    gram /= np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    np.testing.assert_array_less(np.abs(gram[~np.eye(15, dtype=bool)]), 5.5 / np.sqrt(300))


def test_rows_are_those_of_the_seed_and_the_layer(router):
    first = random_router(router, 7)
    np.testing.assert_array_equal(random_router(router, 7).weight, first.weight)
    other_layer = random_router(dataclasses.replace(router, name="text/3"), 7)
    for other in (random_router(router, 8), other_layer):
        same = (first.weight == other.weight).mean(axis=1)[lengths(router) > 0]
        np.testing.assert_array_less(same, 0.01)


#: The theorems that hold for metrics that declare an invariance.
DECLARED = {
    "permuted_tokens": "token_permutation",
    "relabelled_experts": "expert_relabelling",
    "shifted_rows": "common_row_shift",
    "scaled_router": "positive_scaling",
    "folded_gain": "gain_folding",
}


def claims(name: str) -> list[str]:
    """The theorems that say something about a metric: the others of the declared ones are empty."""
    return [t for t in THEOREMS if DECLARED.get(t) in (None, *METRICS[name].invariances)]


@pytest.mark.parametrize(
    ("name", "theorem"),
    by_day(
        itertools.product(METRICS.names(), THEOREMS),
        # each metric with one of its theorems, each theorem with several metrics
        [
            (name, claims(name)[turn % len(claims(name))])
            for turn, name in enumerate(METRICS.names())
        ],
    ),
)
def test_every_metric_keeps_every_theorem(name, theorem):
    THEOREMS[theorem](METRICS[name])


def spoiled(name: str, change):
    """A metric whose values are changed after they are computed."""
    metric = METRICS[name]
    finish = lambda reductions, facts: change(metric.finish(reductions, facts))
    return dataclasses.replace(metric, finish=finish)


def of_the_first(parts, facts):
    """Errors of other figures."""
    return METRICS["load"].without_each([parts[0], *parts[:-1]], facts)


def with_first_expert(values):
    """A figure of expert 0, whichever that is."""
    return {**values, "layers": {**values["layers"], "gini": values["experts"]["load"][0]}}


def declared_as(name: str, invariance: str):
    return dataclasses.replace(METRICS[name], invariances=(invariance,))


SPOILED = {
    "relabelled_experts": (spoiled("load", with_first_expert), r"load: layers\.gini"),
    "scaled_router": (declared_as("margins", "positive_scaling"), "margin_p"),
    "permuted_tokens": (declared_as("neighbours", "token_permutation"), "neighbour"),
    "folded_gain": (declared_as("boundary_distance", "gain_folding"), "boundary_distance"),
    "shifted_rows": (declared_as("z_loss", "common_row_shift"), "log_sum_exp_mean|z_loss"),
    "errors_of_each": (
        dataclasses.replace(METRICS["load"], without_each=of_the_first),
        r"load: .*_se",
    ),
    "declared_columns": (
        spoiled("z_loss", lambda values: {"layers": {**values["layers"], "surprise": 1.0}}),
        "layers",
    ),
    "empty_stream": (
        spoiled("z_loss", lambda _: {"layers": {"z_loss": 1.0, "log_sum_exp_mean": 0.0}}),
        "z_loss",
    ),
}


@pytest.mark.parametrize("theorem", SPOILED)
def test_a_metric_that_breaks_a_theorem_is_caught(theorem):
    metric, column = SPOILED[theorem]
    with pytest.raises(AssertionError, match=column):
        THEOREMS[theorem](metric)


# ---------------------------------------------------------------------------------- standard errors
FEW_EXPERTS, TOP_K = 6, 2
ROUTER = router_with(normal_rows(FEW_EXPERTS, 4), Rule(TOP_K, "softmax", SOFTMAX))
NEEDS = ("token_counts", "expert_counts", "margin_histogram", "expert_sets")
NAMES = ("domain=code", "domain=prose", "domain=(others)", "domain=(none)")


class Stream:
    """Tokens with chosen sets, in blocks and populations of the test's choice."""

    def __init__(self, blocks, populations) -> None:
        random = np.random.default_rng(1)
        self.block = np.asarray(blocks, np.int32)
        self.population = np.asarray(populations, np.int32)
        tokens = len(self.block)
        score = random.standard_normal((tokens, FEW_EXPERTS)) + np.linspace(0, 1, FEW_EXPERTS)
        self.chosen = np.argsort(-score, axis=1)[:, :TOP_K].astype(np.int32)
        self.margin = random.exponential(1.0, tokens)

    def counts(self, kept) -> np.ndarray:
        return np.bincount(self.chosen[kept].reshape(-1), minlength=FEW_EXPERTS)

    def rows(self) -> dict[str, dict]:
        """The row of ``layers`` by population, and with it the rows of ``experts``."""
        of_tokens = {"block": self.block, "population": self.population, "chosen": self.chosen}
        batch = batch_of(len(self.block), **of_tokens, margin=self.margin)
        states = {}
        for name in NEEDS:
            accumulator = REDUCTIONS[name].start(Extent(len(NAMES), FEW_EXPERTS, TOP_K))
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
        made.chosen = np.argsort(random.random((640, FEW_EXPERTS)), axis=1)[:, :TOP_K].astype(
            np.int32
        )
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


# ------------------------------------------------------------ rows of every size that float32 holds
SCALED_EXPERTS, NARROW, TOKENS = 8, 16, 300
EXPONENTS = (-140, -127, -100, -60, 0, 60, 100, 120, 125)
SCALED_RULES = {
    "softmax": Rule(2, "softmax", SUM_TO_ONE),
    "sigmoid": Rule(2, "sigmoid", SUM_TO_ONE, has_selection_bias=True),
}


@functools.cache
def measured(exponent: int, rule: str = "softmax", spread: float = 0.0):
    """The whole-population row of a router whose rows are multiplied by a power of two.

    Rows are the larger the later, the last one by twice the ``spread`` than the first.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((SCALED_EXPERTS, NARROW))
    bias = 0.1 * random.standard_normal(SCALED_EXPERTS)
    sizes = np.exp2(exponent + np.linspace(-spread, spread, SCALED_EXPERTS))[:, None]
    with np.errstate(under="ignore"):
        router = router_with(
            (rows * sizes).astype(np.float32),
            SCALED_RULES[rule],
            selection_bias=bias if SCALED_RULES[rule].has_selection_bias else None,
            gain=np.ones(NARROW, np.float32),
            norm=Norm("rms", 1e-6, "norm.weight"),
        )
    values = random.standard_normal((TOKENS, NARROW))
    values *= np.sqrt(NARROW) / np.linalg.norm(values, axis=1, keepdims=True)
    source = ArraySource({router.name: values.astype(np.float32)})
    run = RouterRun(router, source, list(METRICS.all()), MeasureOptions(non_finite="skip"))
    layers = measure_router(run).rows["layers"]
    return next(r for r in layers if (r["variant"], r["population"]) == ("as_stored", "all"))


@pytest.mark.parametrize(
    ("exponent", "rule"),
    by_day(
        itertools.product(EXPONENTS, SCALED_RULES),
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
