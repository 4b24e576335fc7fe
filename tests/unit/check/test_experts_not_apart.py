"""Copies with noise are found in a sample of each expert; experts that grew apart are left alone."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import keep, outcome_of, write_model
from tests.unit.check.defects import EXPERT, OF_EXPERTS, _set, upcycled

BF16 = ml_dtypes.bfloat16
COPIED = OF_EXPERTS["MGG208"]


@pytest.fixture
def judge(judged):
    def outcome(case, **options):
        return outcome_of(judged(case, experts=True, select=("MGG208",), **options), "MGG208")

    return outcome


def every(change):
    """Spoils the experts of layer 1, expert by expert, after they were made copies with noise."""

    def spoil(tensors, config):
        upcycled(tensors, config)
        for leaf in ("gate", "up", "down"):
            for expert in range(16):
                name = EXPERT.format(1, expert, leaf)
                values = tensors[name].astype(np.float64)
                changed = change(values, expert)
                tensors[name] = changed.astype(BF16) if changed.dtype == np.float64 else changed

    return replace(COPIED, spoil=spoil)


def test_copies_with_noise_are_named_and_the_bytes_read_are_announced(tmp_path):
    watch = Mock()
    model = str(write_model(tmp_path, COPIED, COPIED.spoil))
    request = GateRequest(model, experts=True, select=("MGG208",))
    (outcome,) = gate(request, watch).verdict.outcomes
    (finding,) = outcome.findings
    assert (outcome.state, finding.routers) == ("failed", ("text/1",))
    assert "16 experts differ by no more than initial noise" in finding.title
    watch.say.assert_called_once_with("reads 393,216 bytes of experts")


def test_exact_copies_are_copies_up_to_their_storage(judge):
    first = {}
    (finding,) = judge(every(lambda v, e: first.setdefault(v.shape, v))).findings
    assert "copies up to the last digits of their storage" in finding.title


def _by_tokens(values, expert):
    """An outer product, as a group of tokens makes it, with half of the energy of the noise."""
    random = np.random.default_rng(expert)
    along = np.outer(random.standard_normal(len(values)), random.standard_normal(values.shape[1]))
    return values + 0.007 * along


def _last_alone(values, expert):
    random = np.random.default_rng(expert)
    return values if values.shape == (32, 64) else 0.02 * random.standard_normal(values.shape)


def test_experts_that_grew_apart_are_no_copies(judge):
    for change in (_by_tokens, _last_alone):
        assert judge(every(change)).state == "passed"


def _of_first(change):
    return every(lambda values, expert: change(values) if expert == 0 else values)


def _missing(tensors, config):
    for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
        del tensors[name]


def _too_large(tensors, config):
    for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
        tensors[name] = tensors[name].astype(np.float64) * 1e200


#: Experts of layer 1 of which a figure is missing, and the reason.
UNKNOWN = {
    "all zero": (every(lambda values, e: 0.0 * values), "an expert is all 0"),
    "one zero": (_of_first(lambda values: 0.0 * values), "an expert is all 0"),
    "a nan": (every(lambda values, e: _set(values, (0, 0), np.nan)), "not finite"),
    "one infinite": (_of_first(lambda values: values + np.inf), "not finite"),
    "too large": (replace(COPIED, spoil=_too_large), "beyond float32"),
    "no floats": (every(lambda values, e: values.astype(np.int8)), "is stored as I8"),
    "missing": (replace(COPIED, spoil=_missing), "no tensors of experts"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_without_a_figure_are_inconclusive(name, judge):
    case, reason = UNKNOWN[name]
    outcome = judge(case)
    assert (outcome.state, outcome.num_open) == ("inconclusive", 1)
    assert reason in outcome.reason


def test_without_the_option_nobody_counts_it_but_who_names_it(judged, tmp_path):
    usual = judged(COPIED, keep, experts=False).verdict
    assert "MGG208" not in [outcome.code for outcome in usual.outcomes]
    assert "expert weights" in usual.not_looked_at
    named = gate(GateRequest("model", select=("MGG208",))).verdict
    assert [o.state for o in named.outcomes] == ["needs experts"]
    assert named.exit_code == 4
    profile = tmp_path / "p.toml"
    profile.write_text('require = ["MGG208"]\n')
    required = gate(GateRequest("model", profile=profile))
    assert (outcome_of(required, "MGG208").state, required.exit_code) == ("inconclusive", 4)
    read = gate(GateRequest("model", experts=True)).verdict
    assert "expert weights beyond a sample" in read.not_looked_at


def test_every_plain_format_is_read(judge):
    for dtype in (np.float16, np.float32, BF16):

        def spoil(tensors, config, dtype=dtype):
            upcycled(tensors, config)
            for name in [name for name in tensors if ".experts." in name]:
                tensors[name] = tensors[name].astype(dtype)

        outcome = judge(replace(COPIED, spoil=spoil))
        assert [finding.routers for finding in outcome.findings] == [("text/1",)]
