"""Every metric keeps the theorems that moegeom ships for plug-ins, and the theorems can fail."""

from __future__ import annotations

import dataclasses

import pytest

from moegeom.metrics import METRICS
from moegeom.testing.metric_theorems import THEOREMS


@pytest.mark.one_in(6)
@pytest.mark.parametrize("theorem", THEOREMS)
@pytest.mark.parametrize("name", METRICS.names())
def test_every_metric_keeps_every_theorem(name, theorem):
    THEOREMS[theorem](METRICS[name])


def spoiled(name: str, change, **fields):
    """A metric whose values are changed after they are computed."""
    metric = METRICS[name]

    def finish(reductions, facts):
        return change(metric.finish(reductions, facts), reductions, facts)

    return dataclasses.replace(metric, finish=finish, **fields)


def with_first_expert(values, reductions, facts):
    """A figure of expert 0, whichever that is."""
    load = values["experts"]["load"]
    return {**values, "layers": {**values["layers"], "gini": load[0]}}


def test_a_metric_that_looks_at_one_expert_is_caught():
    with pytest.raises(AssertionError, match=r"load: layers\.gini"):
        THEOREMS["relabelled_experts"](spoiled("load", with_first_expert))


def test_an_invariance_that_does_not_hold_is_caught():
    wrong = dataclasses.replace(METRICS["margins"], invariances=("positive_scaling",))
    with pytest.raises(AssertionError, match="margin_p"):
        THEOREMS["scaled_router"](wrong)
    wrong = dataclasses.replace(METRICS["neighbours"], invariances=("token_permutation",))
    with pytest.raises(AssertionError, match="neighbour"):
        THEOREMS["permuted_tokens"](wrong)
    wrong = dataclasses.replace(METRICS["boundary_distance"], invariances=("gain_folding",))
    with pytest.raises(AssertionError, match="boundary_distance"):
        THEOREMS["folded_gain"](wrong)
    wrong = dataclasses.replace(METRICS["z_loss"], invariances=("common_row_shift",))
    with pytest.raises(AssertionError, match="log_sum_exp_mean|z_loss"):
        THEOREMS["shifted_rows"](wrong)


def test_errors_of_other_figures_are_caught():
    def of_the_first(parts, facts):
        return METRICS["load"].without_each([parts[0], *parts[:-1]], facts)

    wrong = dataclasses.replace(METRICS["load"], without_each=of_the_first)
    with pytest.raises(AssertionError, match=r"load: .*_se"):
        THEOREMS["errors_of_each"](wrong)


def test_a_column_that_is_not_declared_is_caught():
    def more(values, reductions, facts):
        return {"layers": {**values["layers"], "surprise": 1.0}}

    with pytest.raises(AssertionError, match="layers"):
        THEOREMS["declared_columns"](spoiled("z_loss", more))


def test_a_value_for_no_tokens_is_caught():
    def always(values, reductions, facts):
        return {"layers": {"z_loss": 1.0, "log_sum_exp_mean": 0.0}}

    with pytest.raises(AssertionError, match="z_loss"):
        THEOREMS["empty_stream"](spoiled("z_loss", always))
