"""Routers as large as people serve: 128 experts of width 2048, and 256 in groups of width 7168.

Loads and margins are those of the definitions in float64, and nothing is found where nothing is
wrong; small shapes cannot show what only a wide sum, a full mask of groups or a set of 256 experts
breaks.
"""

import numpy as np
import pytest

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.geometry.selection import route
from moegeom.router.load import load_routers
from moegeom.testing.synthetic import (
    SyntheticModel,
    synthetic_inputs,
    write_checkpoint,
    write_tokens,
)

NUM_TOKENS = 300
SHAPES = {
    "128 x 2048": SyntheticModel("qwen3_moe", hidden=2048, experts=128, top_k=8, layers=1),
    "256 x 7168, groups": SyntheticModel(
        "deepseek_v3", hidden=7168, experts=256, top_k=8, layers=1
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def place(request, tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("shape"), SHAPES[request.param]
    model = write_checkpoint(folder / "model", shape)
    fingerprint = load_routers(open_checkpoint(model)).fingerprint
    return request.param, model, write_tokens(folder / "rec", shape, NUM_TOKENS, fingerprint)


def definition(shape: SyntheticModel, model):
    """The choice of float64 logits, and MaxVio of its loads."""
    (router,) = load_routers(open_checkpoint(model)).routers
    inputs = synthetic_inputs(shape, 0, NUM_TOKENS).astype(np.float64) * router.gain
    logits = inputs @ router.weight.T
    routed = route(logits, router.rule, router.selection_bias)
    loads = np.bincount(routed.chosen.ravel(), minlength=shape.experts)
    return routed, loads.max() / loads.mean() - 1.0


def test_a_scan_and_a_study_count_what_the_definition_chooses_and_the_gate_passes(place):
    name, model, rec = place
    routed, max_vio = definition(SHAPES[name], model)
    scan = mg.scan(model, rec)
    assert [
        row
        for row in scan.table("findings").to_pylist()
        if row["severity"] != "note" and row["routers"]
    ] == []
    (row,) = scan.layers().to_pylist()
    assert (row["num_experts"], row["num_tokens"]) == (SHAPES[name].experts, NUM_TOKENS)
    assert row["max_vio_global"] == pytest.approx(max_vio, abs=1e-12)
    assert row["margin_p50"] == pytest.approx(np.median(routed.margin), rel=0.02)
    assert mg.check(model).exit_code == 0
    (router,) = mg.imbalance(model, rec).value.routers
    assert router.tokens.max_vio == pytest.approx(max_vio, abs=1e-12)
