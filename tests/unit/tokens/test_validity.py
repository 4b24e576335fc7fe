import ml_dtypes
import numpy as np
import pytest

from moegeom.core.router import Norm
from moegeom.tokens.validity import fingerprint_test, rms_test

RMS = Norm("rms", 1e-6, "norm.weight")
LAYER = Norm("layer", 1e-5, "norm.weight")


def residual_stream(tokens=2000, hidden=512):
    """As in trained models: heavy tails over dimensions, norms that vary, a few huge tokens."""
    random = np.random.default_rng(0)
    scale = np.exp(0.5 * random.standard_normal(hidden))
    size = np.exp(0.25 * random.standard_normal((tokens, 1)))
    rows = random.standard_normal((tokens, hidden)) * scale * size
    rows[::400, 3] = 1000.0
    return rows


def gain_of(seed=1):
    return np.exp(0.4 * np.random.default_rng(seed).standard_normal(512)).astype(np.float32)


def rms_norm(rows, gain, eps=1e-6):
    return gain * rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)


def layer_norm(rows, gain, bias, eps=1e-5):
    centred = rows - rows.mean(axis=1, keepdims=True)
    return gain * centred / np.sqrt(centred.var(axis=1, keepdims=True) + eps) + bias


GAIN = gain_of()


@pytest.fixture
def stored():
    """Router inputs behind the norm."""
    return rms_norm(residual_stream(), GAIN).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_router_inputs_pass_whatever_they_are_stored_as(dtype):
    inputs = rms_norm(residual_stream(), GAIN).astype(dtype).astype(np.float32)
    result = rms_test(inputs, GAIN, RMS)
    assert result.passed
    assert result.median == pytest.approx(1, abs=2e-3)
    assert (result.share_within_2_percent, result.num_tokens) == (1, 2000)


def test_a_norm_computed_in_bfloat16_throughout_passes():
    gain = GAIN.astype(ml_dtypes.bfloat16)
    rows = residual_stream()
    scale = (1 / np.sqrt((rows**2).mean(axis=1, keepdims=True))).astype(ml_dtypes.bfloat16)
    inputs = (rows.astype(ml_dtypes.bfloat16) * scale) * gain
    assert rms_test(inputs.astype(np.float32), gain.astype(np.float32), RMS).passed


@pytest.mark.parametrize("size", [0.02, 0.9, 1.0, 1.1, 7.0])
def test_a_residual_stream_fails(size):
    rows = residual_stream()
    rms = np.sqrt((rows**2).mean(axis=1, keepdims=True))
    result = rms_test(
        (rows * size / np.median(rms)).astype(np.float32), np.ones(512, np.float32), RMS
    )
    assert not result.passed
    assert "residual stream" in result.sentence
    assert f"{result.median:.4g}" in result.sentence
    # its norm may be nearly constant, too
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal((2000, 1))
    assert not rms_test((rows / rms * noise).astype(np.float32), None, RMS).passed


def test_the_gain_of_another_layer_or_convention_fails(stored):
    assert not rms_test(stored, gain_of(seed=2), RMS).passed
    assert not rms_test(stored, None, RMS).passed
    random = np.random.default_rng(0).standard_normal((500, 512))
    without_offset = rms_norm(random, np.full(512, 1.5)).astype(np.float32)
    result = rms_test(without_offset, np.full(512, 0.5, np.float32), RMS)
    assert not result.passed
    assert result.median == pytest.approx(3, abs=1e-3)
    assert "another layer or convention" in result.sentence


def test_a_few_tokens_so_small_that_eps_matters_pass():
    rows = residual_stream()
    rows[:40] *= 1e-3 / np.sqrt((rows[:40] ** 2).mean(axis=1, keepdims=True))
    result = rms_test(rms_norm(rows, GAIN).astype(np.float32), GAIN, RMS)
    assert result.passed
    assert result.p01 == pytest.approx(2**-0.5, abs=1e-3)
    assert result.share_within_2_percent == pytest.approx(0.98)


def test_dimensions_of_gain_zero_are_skipped_and_prove_nothing():
    gain = GAIN.copy()
    gain[::8] = 0
    inputs = rms_norm(residual_stream(), gain).astype(np.float32)
    result = rms_test(inputs, gain, RMS)
    assert result.passed
    assert result.num_dimensions_skipped == 64
    assert "64 dimensions" in result.sentence
    assert not rms_test(3 * inputs, gain, RMS).passed
    assert not rms_test(inputs / 3, gain, RMS).passed
    assert not rms_test(np.ones((4, 8), np.float32), np.zeros(8, np.float32), RMS).passed


def test_padding_fails_and_is_named(stored):
    stored[:600] = 0
    result = rms_test(stored, GAIN, RMS)
    assert not result.passed
    assert result.num_zero_tokens == 600
    assert "600 tokens are all zero" in result.sentence


def test_rows_that_are_not_finite_are_counted_and_not_tested(stored):
    stored[5, 3], stored[6, 2] = np.nan, np.inf
    result = rms_test(stored, GAIN, RMS)
    assert (result.passed, result.num_not_finite) == (True, 2)
    nothing = rms_test(np.full((3, 512), np.nan, np.float32), GAIN, RMS)
    assert not nothing.passed
    assert "No token could be tested" in nothing.sentence


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_layer_norm_outputs_pass_the_test_for_layer_norm(dtype):
    bias = gain_of(seed=3)
    inputs = layer_norm(residual_stream(), GAIN, bias).astype(dtype).astype(np.float32)
    result = rms_test(inputs, GAIN, LAYER, bias)
    assert result.passed
    assert "standard deviation" in result.sentence
    assert not rms_test(inputs, GAIN, LAYER).passed


def test_rows_whose_mean_is_not_zero_fail_the_test_for_layer_norm():
    rows = np.random.default_rng(0).standard_normal((200, 512))
    result = rms_test((layer_norm(rows, 1, 0) + 0.3).astype(np.float32), None, LAYER)
    assert not result.passed
    assert result.median == pytest.approx(1, abs=1e-4)
    assert "mean reaches 0.3" in result.sentence


def test_fingerprints_match_differ_or_are_unknown():
    assert fingerprint_test("a", "a") == "matches"
    assert fingerprint_test("a", "b") == "differs"
    assert fingerprint_test("", "b") == fingerprint_test("a", "") == "unknown"
