"""Tokens of another checkpoint, stage or rule are refused with the numbers, or labelled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import RecordingError
from moegeom.geometry.norm import normed
from moegeom.geometry.selection.route import route
from moegeom.kernels.table import load_kernels
from moegeom.scan.prepared import prepare
from moegeom.scan.trust import examine

STRICT = {"stale_inputs": False, "unverified": False}
TOKENS = 600


@pytest.fixture
def router(made):
    return made.router(norm=True)


@pytest.fixture
def source(made, router):
    """Inputs as the norm gives them, and the choices that follow from them."""
    values = normed(made.inputs(TOKENS), "rms", 1e-6, router.gain)
    chosen = route(values @ router.weight.T, router.rule).chosen
    return made.source("router_input", made.columns(TOKENS), values, chosen)


def examined(router, source, allow=STRICT, fingerprint="sha256:a"):
    prepared = [prepare(router, with_distances=False)]
    return examine(prepared, source, fingerprint, load_kernels("cpu"), allow)


def test_true_inputs_are_believed(router, source):
    found = examined(router, source)
    assert (found.fingerprint, found.overridden) == ("unknown", ())
    np.testing.assert_allclose(found.rms_median, 1.0, rtol=1e-3)
    np.testing.assert_array_equal(found.share_reproduced, 1.0)


def test_another_checkpoint_is_refused_unless_stale_inputs_are_allowed(router, source):
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:b")
    with pytest.raises(RecordingError, match="recorded from another checkpoint"):
        examined(router, source)
    found = examined(router, source, STRICT | {"stale_inputs": True})
    assert found.fingerprint == "differs"
    assert len(found.overridden) == 1


def test_inputs_before_the_gain_are_refused_unless_unverified_is_allowed(router, source):
    source.values = source.values / router.gain * 3
    with pytest.raises(RecordingError, match="expected 1"):
        examined(router, source)
    found = examined(router, source, STRICT | {"unverified": True})
    np.testing.assert_array_less(1.5, found.rms_median)


def test_choices_of_another_rule_are_refused_with_the_share(router, source):
    source.chosen = (source.chosen + 1) % 12
    with pytest.raises(RecordingError, match="of the first recorded choices follow"):
        examined(router, source)


def test_choices_of_other_experts_on_a_tie_are_reproduced(router, source):
    """Rows 2 and 7 are twins: another engine may take either."""
    chosen = source.chosen
    swapped = np.where(chosen == 2, 7, np.where(chosen == 7, 2, chosen)).astype(np.int32)
    source.chosen = swapped
    np.testing.assert_array_equal(examined(router, source).share_reproduced, 1.0)
