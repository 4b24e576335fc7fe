"""Every metric keeps the theorems that moegeom ships for plug-ins, and the theorems can fail."""

import dataclasses
import itertools

import pytest

from moegeom.metrics import METRICS
from moegeom.testing.metric_theorems import THEOREMS
from tests.by_day import by_day

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


def declaring(name: str, invariance: str):
    return dataclasses.replace(METRICS[name], invariances=(invariance,))


SPOILED = {
    "relabelled_experts": (spoiled("load", with_first_expert), r"load: layers\.gini"),
    "scaled_router": (declaring("margins", "positive_scaling"), "margin_p"),
    "permuted_tokens": (declaring("neighbours", "token_permutation"), "neighbour"),
    "folded_gain": (declaring("boundary_distance", "gain_folding"), "boundary_distance"),
    "shifted_rows": (declaring("z_loss", "common_row_shift"), "log_sum_exp_mean|z_loss"),
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
