"""Which values are believed to be router inputs, and the prior that stands for them."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.router import Norm
from moegeom.tokens.memory import IsotropicRmsPrior
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


def test_router_inputs_pass_whatever_they_are_stored_or_computed_in():
    rows, gain = residual_stream(), GAIN.astype(ml_dtypes.bfloat16)
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        inputs = rms_norm(rows, GAIN).astype(dtype).astype(np.float32)
        result = rms_test(inputs, GAIN, RMS)
        assert result.passed
        assert result.median == pytest.approx(1, abs=2e-3)
        assert (result.share_within_2_percent, result.num_tokens) == (1, 2000)
    scale = (1 / np.sqrt((rows**2).mean(axis=1, keepdims=True))).astype(ml_dtypes.bfloat16)
    inputs = (rows.astype(ml_dtypes.bfloat16) * scale) * gain
    assert rms_test(inputs.astype(np.float32), gain.astype(np.float32), RMS).passed


def test_a_residual_stream_fails():
    rows = residual_stream()
    rms = np.sqrt((rows**2).mean(axis=1, keepdims=True))
    for size in (0.02, 0.9, 1.0, 1.1, 7.0):
        scaled = (rows * size / np.median(rms)).astype(np.float32)
        result = rms_test(scaled, np.ones(512, np.float32), RMS)
        assert not result.passed
        assert "residual stream" in result.sentence
        assert f"{result.median:.4g}" in result.sentence
    # its norm may be nearly constant, too
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal((2000, 1))
    assert not rms_test((rows / rms * noise).astype(np.float32), None, RMS).passed


def test_the_gain_of_another_layer_or_convention_and_padding_fail(stored):
    assert not rms_test(stored, gain_of(seed=2), RMS).passed
    assert not rms_test(stored, None, RMS).passed
    random = np.random.default_rng(0).standard_normal((500, 512))
    without_offset = rms_norm(random, np.full(512, 1.5)).astype(np.float32)
    result = rms_test(without_offset, np.full(512, 0.5, np.float32), RMS)
    assert not result.passed
    assert result.median == pytest.approx(3, abs=1e-3)
    assert "another layer or convention" in result.sentence
    stored[:600] = 0
    result = rms_test(stored, GAIN, RMS)
    assert not result.passed
    assert result.num_zero_tokens == 600
    assert "600 tokens are all zero" in result.sentence


def test_small_tokens_pass_and_dimensions_of_gain_zero_prove_nothing():
    rows = residual_stream()
    rows[:40] *= 1e-3 / np.sqrt((rows[:40] ** 2).mean(axis=1, keepdims=True))
    result = rms_test(rms_norm(rows, GAIN).astype(np.float32), GAIN, RMS)
    assert result.passed
    assert result.p01 == pytest.approx(2**-0.5, abs=1e-3)
    assert result.share_within_2_percent == pytest.approx(0.98)
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


def test_rows_that_are_not_finite_are_counted_and_not_tested(stored):
    stored[5, 3], stored[6, 2] = np.nan, np.inf
    result = rms_test(stored, GAIN, RMS)
    assert (result.passed, result.num_not_finite) == (True, 2)
    nothing = rms_test(np.full((3, 512), np.nan, np.float32), GAIN, RMS)
    assert not nothing.passed
    assert "No token could be tested" in nothing.sentence


def test_layer_norm_outputs_pass_the_test_for_layer_norm_and_others_fail():
    bias = gain_of(seed=3)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        inputs = layer_norm(residual_stream(), GAIN, bias).astype(dtype).astype(np.float32)
        result = rms_test(inputs, GAIN, LAYER, bias)
        assert result.passed
        assert "standard deviation" in result.sentence
        assert not rms_test(inputs, GAIN, LAYER).passed
    rows = np.random.default_rng(0).standard_normal((200, 512))
    result = rms_test((layer_norm(rows, 1, 0) + 0.3).astype(np.float32), None, LAYER)
    assert not result.passed
    assert result.median == pytest.approx(1, abs=1e-4)
    assert "mean reaches 0.3" in result.sentence


def test_fingerprints_match_differ_or_are_unknown():
    assert fingerprint_test("a", "a") == "matches"
    assert fingerprint_test("a", "b") == "differs"
    assert fingerprint_test("", "b") == fingerprint_test("a", "") == "unknown"


OF_PRIOR = np.linspace(0.5, 2, 24, dtype=np.float32)


def prior(num_tokens=1000, seed=7, routers=(("text/0", OF_PRIOR, 24), ("text/1", None, 16))):
    return IsotropicRmsPrior(routers, num_tokens, seed)


@settings(deadline=None)
@given(ends=st.tuples(*[st.integers(0, 1000)] * 2))
def test_any_range_of_the_prior_has_the_bits_of_the_whole(ends):
    start, stop = sorted(ends)
    whole = prior().read_values("text/0", 0, 1000)
    np.testing.assert_array_equal(prior().read_values("text/0", start, stop), whole[start:stop])


def test_the_prior_depends_on_seed_and_router_alone_and_never_repeats_itself():
    first = prior().read_values("text/1", 0, 300)
    alone = prior(300, routers=(("text/1", None, 16),)).read_values("text/1", 0, 300)
    np.testing.assert_array_equal(first, alone)
    assert not np.array_equal(first, prior(seed=8).read_values("text/1", 0, 300))
    duplicate = prior(300, routers=(("text/2", None, 16),)).read_values("text/2", 0, 300)
    assert not np.array_equal(first, duplicate)
    rows = prior(4096).read_values("text/1", 0, 4096)
    assert len({hashlib.sha256(row.tobytes()).digest() for row in rows}) == 4096


def test_the_prior_lies_on_the_sphere_of_an_rms_norm_and_prefers_no_direction():
    rows = prior().read_values("text/0", 0, 1000).astype(np.float64) / OF_PRIOR
    np.testing.assert_allclose(np.sqrt((rows**2).mean(axis=1)), 1, atol=1e-6)
    assert rms_test(prior().read_values("text/0", 0, 1000), OF_PRIOR).passed
    rows = prior(20000).read_values("text/1", 0, 20000).astype(np.float64)
    second_moment = rows.T @ rows / len(rows)
    # Standard error of an off-diagonal entry is 0.007; of the diagonal 0.009.
    np.testing.assert_allclose(second_moment, np.eye(16), atol=0.045)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=0.035)


def test_the_prior_says_that_it_is_one_and_refuses_what_it_has_not():
    facts = prior().facts
    assert facts.is_synthetic
    assert "isotropic-rms" in facts.name
    assert (facts.has_chosen, facts.has_documents) == (False, False)
    assert prior().read_chosen("text/0", 0, 5) is None
    np.testing.assert_array_equal(prior().read_columns(3, 6).document, [-1, -1, -1])
    with pytest.raises(RecordingError, match="text/9"):
        prior().read_values("text/9", 0, 1)
    with pytest.raises(RecordingError, match="router inputs only"):
        prior().read_top_logits("text/0", 0, 1)
    with pytest.raises(InternalError):
        prior().read_values("text/0", 0, 1001)
    with pytest.raises(InternalError, match="gain"):
        prior(routers=(("a", OF_PRIOR, 5),))
