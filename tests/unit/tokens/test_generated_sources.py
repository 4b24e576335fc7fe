import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.errors import InternalError, RecordingError
from moegeom.tokens.prior import IsotropicRmsPrior
from moegeom.tokens.validity import rms_test

GAIN = np.linspace(0.5, 2, 24, dtype=np.float32)


def prior(num_tokens=1000, seed=7, routers=(("text/0", GAIN, 24), ("text/1", None, 16))):
    return IsotropicRmsPrior(routers, num_tokens, seed)


@settings(deadline=None)
@given(ends=st.tuples(*[st.integers(0, 1000)] * 2))
def test_any_range_of_the_prior_has_the_bits_of_the_whole(ends):
    start, stop = sorted(ends)
    whole = prior().read_values("text/0", 0, 1000)
    np.testing.assert_array_equal(prior().read_values("text/0", start, stop), whole[start:stop])


def test_the_prior_depends_on_seed_and_router_and_on_nothing_else():
    first = prior().read_values("text/1", 0, 300)
    alone = prior(300, routers=(("text/1", None, 16),)).read_values("text/1", 0, 300)
    np.testing.assert_array_equal(first, alone)
    assert not np.array_equal(first, prior(seed=8).read_values("text/1", 0, 300))
    duplicate = prior(300, routers=(("text/2", None, 16),)).read_values("text/2", 0, 300)
    assert not np.array_equal(first, duplicate)


def test_no_block_of_the_prior_repeats_another():
    rows = prior(4096).read_values("text/1", 0, 4096)
    assert len({hashlib.sha256(row.tobytes()).digest() for row in rows}) == 4096


def test_the_prior_lies_on_the_sphere_of_an_rms_norm():
    rows = prior().read_values("text/0", 0, 1000).astype(np.float64) / GAIN
    np.testing.assert_allclose(np.sqrt((rows**2).mean(axis=1)), 1, atol=1e-6)
    assert rms_test(prior().read_values("text/0", 0, 1000), GAIN).passed


def test_the_prior_prefers_no_direction():
    rows = prior(20000).read_values("text/1", 0, 20000).astype(np.float64)
    second_moment = rows.T @ rows / len(rows)
    # Standard error of an off-diagonal entry is 0.007; of the diagonal 0.009.
    np.testing.assert_allclose(second_moment, np.eye(16), atol=0.045)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=0.035)


def test_the_prior_says_that_it_is_one():
    facts = prior().facts
    assert facts.is_synthetic
    assert "isotropic-rms" in facts.name
    assert (facts.has_chosen, facts.has_documents) == (False, False)
    assert prior().read_chosen("text/0", 0, 5) is None
    np.testing.assert_array_equal(prior().read_columns(3, 6).document, [-1, -1, -1])


def test_the_prior_refuses_what_it_has_not():
    with pytest.raises(RecordingError, match="text/9"):
        prior().read_values("text/9", 0, 1)
    with pytest.raises(RecordingError, match="router inputs only"):
        prior().read_top_logits("text/0", 0, 1)
    with pytest.raises(InternalError):
        prior().read_values("text/0", 0, 1001)
    with pytest.raises(InternalError, match="gain"):
        prior(routers=(("a", GAIN, 5),))
