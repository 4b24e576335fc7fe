"""Recorded outputs of experts reach their metrics, or are refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from moegeom.core.errors import RecordingError
from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.engine import recorded
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource

EXPERTS, HIDDEN, TOKENS = 6, 8, 1536
NAME = "text/0"


def router() -> Router:
    weight = np.random.default_rng(0).standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    rule = Rule(2, "softmax", Weights("scores"))
    return Router(NAME, "text", 0, weight, rule, Provenance("made up", (), "", "F32"))


def outputs(**changes):
    """A shared expert that is affine in the input, routed experts that are not, all experts."""
    random = np.random.default_rng(1)
    inputs = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    shared = inputs @ random.standard_normal((HIDDEN, HIDDEN)).astype(np.float32) + 2
    routed = np.sin(3 * inputs) * np.float32(0.5)
    every = random.standard_normal((TOKENS, EXPERTS, HIDDEN)).astype(np.float32)
    every[:, 3] = every[:, 1]
    found = {"shared_output": shared, "routed_output": routed, "expert_output": every} | changes
    return inputs, {kind: {NAME: values} for kind, values in found.items()}


def layer(inputs, kinds) -> dict:
    source = ArraySource({NAME: inputs}, document_tokens=32, outputs=kinds)
    metrics = [METRICS[name] for name in ("tokens", "affine_carrier", "output_overlap")]
    rows = measure_router(RouterRun(router(), source, metrics)).rows["layers"]
    return next(r for r in rows if (r["variant"], r["population"]) == ("as_stored", "all"))


def test_energy_and_mean_shares_are_those_of_the_arrays():
    inputs, kinds = outputs()
    found = layer(inputs, kinds)
    shared = kinds["shared_output"][NAME].astype(np.float64)
    routed = kinds["routed_output"][NAME].astype(np.float64)
    whole = shared + routed
    energy = (whole**2).sum()
    np.testing.assert_allclose(found["shared_energy_share"], (shared**2).sum() / energy, 1e-6)
    np.testing.assert_allclose(found["routed_energy_share"], (routed**2).sum() / energy, 1e-6)
    mean = (shared.mean(axis=0) ** 2).sum() / (shared**2).sum(axis=1).mean()
    np.testing.assert_allclose(found["shared_mean_energy_share"], mean, 1e-6)
    assert found["shared_mean_cosine"] > 0.99


def test_an_affine_output_is_predicted_and_one_that_is_not_is_not():
    inputs, kinds = outputs()
    found = layer(inputs, kinds)
    assert found["shared_affine_r2"] > 0.999
    train = np.arange(TOKENS) % 512 < 384  # any split will do
    routed = kinds["routed_output"][NAME]
    theirs = LinearRegression().fit(inputs[train], routed[train])
    residual = ((routed[~train] - theirs.predict(inputs[~train])) ** 2).sum()
    expected = 1 - residual / ((routed[~train] - routed[train].mean(axis=0)) ** 2).sum()
    np.testing.assert_allclose(found["routed_affine_r2"], expected, atol=0.03)
    assert found["routed_residual_r2"] > 0.999


def test_equal_experts_show_as_a_pair():
    from sklearn.metrics.pairwise import cosine_similarity

    inputs, kinds = outputs()
    found = layer(inputs, kinds)
    every = kinds["expert_output"][NAME]
    i, j = np.triu_indices(EXPERTS, 1)
    expected = np.mean([cosine_similarity(token)[i, j] for token in every])
    np.testing.assert_allclose(found["overlap_output"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["max_output_cosine"], 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shared_output": np.zeros((TOKENS, HIDDEN + 1), np.float32)}, "9 columns.* has 8"),
        ({"expert_output": np.zeros((TOKENS, 5, HIDDEN), np.float32)}, "5 experts.* has 6"),
    ],
)
def test_outputs_of_another_model_are_refused(change, said):
    inputs, kinds = outputs(**change)
    with pytest.raises(RecordingError, match=said):
        layer(inputs, kinds)


def test_outputs_that_would_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr(recorded, "LARGEST_OUTPUTS", 2**16)
    inputs, kinds = outputs()
    with pytest.raises(RecordingError, match="GiB"):
        layer(inputs, kinds)


def test_without_outputs_the_reason_is_said():
    inputs, _ = outputs()
    source = ArraySource({NAME: inputs})
    run = RouterRun(router(), source, [METRICS["affine_carrier"]])
    assert "no outputs" in measure_router(run).facts["reasons"]["affine_carrier"]
