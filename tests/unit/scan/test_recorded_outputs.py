"""Recorded outputs of experts reach their metrics, or are refused with the reason."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.core.errors import RecordingError
from moegeom.core.router import Rule
from moegeom.engine import choice
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource
from tests.unit.scan.made import SOFTMAX, normal_rows, router_with, row_of

EXPERTS, HIDDEN, TOKENS = 6, 8, 1536
NAME = "text/0"
ROUTER = router_with(normal_rows(EXPERTS, HIDDEN), Rule(2, "softmax", SOFTMAX))


def outputs(**changes):
    """A shared expert that is affine in the input, routed experts that are not, all experts."""
    random = np.random.default_rng(1)
    inputs = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    shared = inputs @ random.standard_normal((HIDDEN, HIDDEN)).astype(np.float32) + 2
    routed = np.sin(3 * inputs) * np.float32(0.5)
    every = random.standard_normal((TOKENS, EXPERTS, HIDDEN)).astype(np.float32)
    every[:, 3] = every[:, 1]
    made = {"shared_output": shared, "routed_output": routed, "expert_output": every} | changes
    return inputs, {kind: {NAME: values} for kind, values in made.items()}


def layer(inputs, kinds) -> dict:
    source = ArraySource({NAME: inputs}, document_tokens=32, outputs=kinds)
    metrics = [METRICS[name] for name in ("tokens", "affine_carrier", "output_overlap")]
    return row_of(measure_router(RouterRun(ROUTER, source, metrics)).rows["layers"])


@pytest.fixture(scope="module")
def measured():
    """The outputs by kind, in float64, and what is measured of them."""
    inputs, kinds = outputs()
    return (
        inputs,
        {kind: of[NAME].astype(float) for kind, of in kinds.items()},
        layer(inputs, kinds),
    )


def test_energy_overlap_and_affine_parts_are_those_of_the_arrays(measured):
    _, kinds, row = measured
    shared, routed = kinds["shared_output"], kinds["routed_output"]
    energy = ((shared + routed) ** 2).sum()
    np.testing.assert_allclose(row["shared_energy_share"], (shared**2).sum() / energy, 1e-6)
    np.testing.assert_allclose(row["routed_energy_share"], (routed**2).sum() / energy, 1e-6)
    mean = (shared.mean(axis=0) ** 2).sum() / (shared**2).sum(axis=1).mean()
    np.testing.assert_allclose(row["shared_mean_energy_share"], mean, 1e-6)
    assert row["shared_mean_cosine"] > 0.99
    _, kinds, row = measured
    i, j = np.triu_indices(EXPERTS, 1)
    expected = np.mean([cosine_similarity(token)[i, j] for token in kinds["expert_output"]])
    np.testing.assert_allclose(row["overlap_output"], expected, rtol=1e-6)
    np.testing.assert_allclose(row["max_output_cosine"], 1.0, rtol=1e-6)
    inputs, kinds, row = measured
    assert row["shared_affine_r2"] > 0.999
    train = np.arange(TOKENS) % 512 < 384  # any split will do
    routed = kinds["routed_output"]
    theirs = LinearRegression().fit(inputs[train], routed[train])
    residual = ((routed[~train] - theirs.predict(inputs[~train])) ** 2).sum()
    expected = 1 - residual / ((routed[~train] - routed[train].mean(axis=0)) ** 2).sum()
    np.testing.assert_allclose(row["routed_affine_r2"], expected, atol=0.03)
    assert row["routed_residual_r2"] > 0.999


def test_outputs_of_another_model_or_too_large_for_the_memory_are_refused(monkeypatch):
    wide, few = (np.zeros((TOKENS, *shape), np.float32) for shape in ((HIDDEN + 1,), (5, HIDDEN)))
    with pytest.raises(RecordingError, match="9 columns.* has 8"):
        layer(*outputs(shared_output=wide))
    with pytest.raises(RecordingError, match="5 experts.* has 6"):
        layer(*outputs(expert_output=few))
    monkeypatch.setattr(choice, "OUTPUT_BYTES", 2**16)
    with pytest.raises(RecordingError, match="GiB"):
        layer(*outputs())


def test_without_outputs_the_reason_is_said():
    run = RouterRun(ROUTER, ArraySource({NAME: outputs()[0]}), [METRICS["affine_carrier"]])
    assert "no outputs" in measure_router(run).facts["reasons"]["affine_carrier"]
