"""Columns under a second name: derived on reading, never written."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from moegeom.metrics import METRICS
from moegeom.results.derived import DERIVED, with_derived

FACTS = {"name": "text/0", "num_experts": 8, "top_k": 2, "hidden_size": 64}

WRITTEN = {column.name for metric in METRICS.all() for column in metric.columns.get("layers", ())}


def layers(router="text/0", **columns):
    return pa.table({"router": [router]} | {name: [value] for name, value in columns.items()})


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_derived_is_not_written_and_its_source_is(name):
    assert name not in WRITTEN
    assert DERIVED[name].column in WRITTEN


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        ("load_imbalance_global", 0.5, 1.5),
        ("load_entropy_nats", 1.0, math.log(8)),
        ("kl_to_uniform_nats", 1.0, 0.0),
        ("diversity", 4.0, 0.5),
        ("load_balancing_loss_hf", 1.0, 2.0),
        ("boundary_distance_rms_p50", 16.0, 2.0),
        ("chosen_entropy_normalised", math.log(2), 1.0),
        ("load_cv_ddof1", math.sqrt(7 / 8), 1.0),
        ("routing_entropy_nats", 0.5, math.log(8) / 2),
    ],
)
def test_values_worked_out_by_hand(name, source, value):
    found = with_derived(layers(**{DERIVED[name].column: source}), [FACTS])
    assert found[name].to_pylist() == [pytest.approx(value)]


def test_an_error_is_scaled_and_never_negative():
    held = layers(load_entropy_normalised=0.5, load_entropy_normalised_se=0.1)
    found = with_derived(held, [FACTS])
    assert found["kl_to_uniform_nats_se"].to_pylist() == [pytest.approx(0.1 * math.log(8))]


def test_what_a_file_holds_is_believed_and_a_foreign_router_gets_nothing():
    found = with_derived(layers(max_vio_global=0.5, load_imbalance_global=9.0), [FACTS])
    assert found["load_imbalance_global"].to_pylist() == [9.0]
    assert with_derived(layers("text/9", diversity=None, max_vio_global=1.0), [FACTS])[
        "load_imbalance_global"
    ].to_pylist() == [None]


def test_one_expert_and_top_1_have_no_normalised_entropy_and_no_sample_deviation():
    one = FACTS | {"num_experts": 1, "top_k": 1}
    found = with_derived(layers(load_cv_ddof0=0.0, chosen_entropy_nats=0.0), [one])
    assert found["load_cv_ddof1"].to_pylist() == [None]
    assert found["chosen_entropy_normalised"].to_pylist() == [None]
