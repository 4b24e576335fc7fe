"""Copies with noise are found in a sample of each expert; experts that grew apart are left alone."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from moegeom.core.finding import Outcome
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import Case, keep, write_model
from tests.unit.check.defects import EXPERT, OF_EXPERTS, _set, rows, upcycled, with_experts

BF16 = ml_dtypes.bfloat16
COPIED = OF_EXPERTS["MGG208"]


def judged(folder, monkeypatch, case: Case, said: list[str] | None = None, **asked) -> Outcome:
    monkeypatch.chdir(folder)
    model = write_model(folder, case, case.spoil)
    request = GateRequest(str(model), **{"experts": True, "select": ("MGG208",), **asked})
    (outcome,) = gate(request, None, (said if said is not None else []).append).verdict.outcomes
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


def test_copies_with_noise_are_found_and_the_bytes_read_are_said(tmp_path, monkeypatch):
    said: list[str] = []
    outcome = judged(tmp_path, monkeypatch, COPIED, said)
    (finding,) = outcome.findings
    assert (outcome.state, finding.routers) == ("failed", ("text/1",))
    assert "16 experts differ by no more than initial noise" in finding.title
    assert said == ["reads 393,216 bytes of experts"]


def test_exact_copies_are_copies_up_to_their_storage(tmp_path, monkeypatch):
    first = {}
    spoil = every(lambda values, e: first.setdefault(values.shape, values))
    (finding,) = judged(tmp_path, monkeypatch, spoil).findings
    assert "copies up to the last digits of their storage" in finding.title


def test_updates_that_a_group_of_tokens_makes_are_growth(tmp_path, monkeypatch):
    """An outer product for each expert, with half of the energy of the noise."""

    def grown(values, expert):
        random = np.random.default_rng(expert)
        along = np.outer(
            random.standard_normal(len(values)), random.standard_normal(values.shape[1])
        )
        return values + 0.007 * along

    assert judged(tmp_path, monkeypatch, every(grown)).state == "passed"


def test_experts_whose_last_matrix_alone_was_trained_have_grown_apart(tmp_path, monkeypatch):
    def grown(values, expert):
        random = np.random.default_rng(expert)
        return values if values.shape == (32, 64) else 0.02 * random.standard_normal(values.shape)

    assert judged(tmp_path, monkeypatch, every(grown)).state == "passed"


def test_experts_of_zeros_are_no_copies(tmp_path, monkeypatch):
    assert judged(tmp_path, monkeypatch, every(lambda v, e: 0.0 * v)).state == "passed"


def test_what_cannot_be_compared_is_not_passed(tmp_path, monkeypatch):
    eight = every(lambda values, e: values.astype(np.int8))
    outcome = judged(tmp_path, monkeypatch, eight)
    assert outcome.state == "inconclusive"
    assert "text/1" in outcome.reason


def test_values_that_are_not_finite_are_not_passed(tmp_path, monkeypatch):
    broken = every(lambda values, e: _set(values, (0, 0), np.nan))
    outcome = judged(tmp_path, monkeypatch, broken)
    assert (outcome.state, outcome.num_open) == ("inconclusive", 2)
    assert "not finite" in outcome.reason


def test_a_file_of_routers_alone_is_not_passed(tmp_path, monkeypatch):
    outcome = judged(tmp_path, monkeypatch, Case())
    assert outcome.state == "inconclusive"
    assert "no tensors of experts" in outcome.reason


def test_without_the_option_nobody_counts_it_but_who_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(write_model(tmp_path, COPIED, keep))
    usual = gate(GateRequest(model)).verdict
    assert "MGG208" not in [outcome.code for outcome in usual.outcomes]
    assert "expert weights" in usual.not_looked_at
    asked = gate(GateRequest(model, select=("MGG208",))).verdict
    assert [o.state for o in asked.outcomes] == ["needs experts"]
    assert asked.exit_code == 4
    profile = tmp_path / "p.toml"
    profile.write_text('require = ["MGG208"]\n')
    required = gate(GateRequest(model, profile=profile)).verdict
    (outcome,) = [o for o in required.outcomes if o.code == "MGG208"]
    assert (outcome.state, required.exit_code) == ("inconclusive", 4)
    read = gate(GateRequest(model, experts=True)).verdict
    assert "expert weights beyond a sample" in read.not_looked_at


def test_experts_of_results_come_too_late(tmp_path, monkeypatch, world_results):
    from moegeom.core.errors import UsageError

    with pytest.raises(UsageError, match="--experts comes too late"):
        gate(GateRequest(world_results, experts=True))


@pytest.fixture
def world_results(tmp_path):
    model = write_model(tmp_path, Case(), rows(lambda w: w))
    gate(GateRequest(str(model), out=tmp_path / "kept"))
    return str(tmp_path / "kept")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, BF16])
def test_every_plain_format_is_read(tmp_path, monkeypatch, dtype):
    def spoil(tensors, config):
        with_experts(tensors, config)
        upcycled(tensors, config)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].astype(dtype)

    outcome = judged(tmp_path, monkeypatch, replace(COPIED, spoil=spoil))
    assert [finding.routers for finding in outcome.findings] == [("text/1",)]
