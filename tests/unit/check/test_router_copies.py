"""Copies of a router are found whatever was done to them, and equal copies are none."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.checkpoint.ranks import are_ranks
from moegeom.core.errors import CheckpointError
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import BIAS, GAIN, GATE, Case, keep, outcome_of, write_model

LAYERS = Case(layers=4, hidden=128)


def of_gate(code: str, target: str = "model"):
    return outcome_of(gate(GateRequest(target)), code)


@pytest.fixture
def spoilt(judged):
    """The model with layer 3 made of layer 0 and of itself."""

    def outcome(change):
        def spoil(tensors, config):
            first, last = (tensors[GATE.format(n)].astype(np.float32) for n in (0, 3))
            tensors[GATE.format(3)] = change(first, last)

        return outcome_of(judged(LAYERS, spoil), "MGI112")

    return outcome


COPIES = {
    "equal": (lambda a, b: a, "hold the same router"),
    "twice as long": (lambda a, b: 2 * a, "layer 3 is 2 times that of layer 0"),
    "a third": (lambda a, b: a / 3, "0.3333 times"),
    "less one": (lambda a, b: np.vstack([a[:15], b[15:]]), "share 15 rows"),
    "two rows": (lambda a, b: np.vstack([b[:5], a[5:7], b[7:]]), "share 2 rows"),
    "moved": (lambda a, b: np.vstack([b[:4], a[:8], b[12:]]), "share 8 rows"),
}


@pytest.mark.parametrize("what", COPIES)
def test_a_copied_router_or_block_is_an_error(spoilt, what):
    change, words = COPIES[what]
    (finding,) = spoilt(change).findings
    assert (finding.severity, finding.routers) == ("error", ("text/0", "text/3"))
    assert words in finding.title
    if what == "moved":  # where its rows came from and went
        assert (
            "Experts 0-7 of the one are experts 4-11 of the other, 4 further on" in finding.detail
        )


def test_a_copy_through_bfloat16_is_found_in_float32(judged):
    def spoil(tensors, config):
        for layer in range(4):
            exact = tensors[GATE.format(layer)].astype(np.float32)
            noise = np.random.default_rng(layer).standard_normal(exact.shape)
            tensors[GATE.format(layer)] = (exact * (1 + 1e-3 * noise)).astype(np.float32)
        tensors[GATE.format(2)] = tensors[GATE.format(0)].astype("bfloat16")

    (finding,) = outcome_of(judged(LAYERS, spoil), "MGI112").findings
    assert finding.title == "the router of layer 2 is a cast of that of layer 0."


HEALTHY = {
    "its own": lambda a, b: b,
    "one row alone": lambda a, b: np.vstack([a[:1], b[1:]]),
    "rows of one length": lambda a, b: b / np.linalg.norm(b, axis=1, keepdims=True),
    "the lengths of another": lambda a, b: (
        b
        * np.random.default_rng(3).permutation(np.linalg.norm(a, axis=1))[:, None]
        / np.linalg.norm(b, axis=1, keepdims=True)
    ),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_what_only_resembles_a_copy_is_none(spoilt, what):
    assert spoilt(HEALTHY[what]).state == "passed"


WRAPPED = {
    "base_model.model.{}": GATE,
    "module.{}": BIAS,
    "state_dict._orig_mod.{}": GAIN,
    "module.base_model.model.{}": GATE,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_part_of_a_router_that_a_wrapper_holds_too_is_a_copy(judged, wrapper):
    def copied(change):
        def spoil(tensors, config):
            name = WRAPPED[wrapper].format(1)
            tensors[wrapper.format(name)] = change(tensors[name])

        return outcome_of(judged(Case(family="deepseek_v3"), spoil), "MGI114")

    assert copied(lambda values: values).state == "passed"
    (finding,) = copied(lambda values: np.full_like(values, np.nan)).findings
    assert finding.severity == "error"
    assert "is also there as" in finding.title


def ranked(tmp_path, change, names=("model-rank-0", "model-rank-1")):
    """The model in a file for each of two ranks; ``change`` what the second one has of a gate."""
    model = write_model(tmp_path, Case(), keep)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    other = {n: change(t) if n == GATE.format(1) else t for n, t in tensors.items()}
    for file, held in zip(names, (tensors, other), strict=True):
        (model / file).parent.mkdir(exist_ok=True)
        save_file({n: np.ascontiguousarray(t) for n, t in held.items()},
                  model / f"{file}.safetensors")  # fmt: skip
    return model


FILES, IN_FOLDERS = ("model-rank-0", "model-rank-1"), ("rank_0/model", "rank_1/model")


@pytest.mark.parametrize("names", [FILES, IN_FOLDERS])
def test_ranks_that_hold_one_router_are_one_checkpoint(tmp_path, names):
    model = ranked(tmp_path, lambda gate: gate, names)
    (model / "notes").mkdir()
    assert (gate(GateRequest("model")).exit_code, of_gate("MGI114").state) == (0, "passed")
    if names == IN_FOLDERS:  # a config in the first of them counts for all
        (model / "config.json").rename(model / "rank_0/config.json")
        assert gate(GateRequest("model")).exit_code == 0


@pytest.mark.parametrize("names", [FILES, IN_FOLDERS])
def test_a_router_that_differs_between_ranks_is_an_error_with_the_rows_counted(tmp_path, names):
    def drifted(gate):
        moved = gate.copy()
        moved[[2, 7]] *= gate.dtype.type(1.02)
        return moved

    ranked(tmp_path, drifted, names)
    (finding,) = of_gate("MGI114").findings
    assert gate(GateRequest("model")).exit_code == 1
    assert f"{names[0]}.safetensors and in {names[1]}.safetensors" in finding.title
    assert "with other numbers in 2 rows of 16" in finding.title
    # a slice in another rank is no copy that is equal
    ranked(tmp_path, lambda gate: gate[:8], names)
    (finding,) = of_gate("MGI114").findings
    assert "with other shapes or dtypes" in finding.title


def test_folders_that_are_no_ranks_are_not_joined(tmp_path):
    ranked(tmp_path, lambda gate: gate, ("step_1/model", "step_2/model"))
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        gate(GateRequest("model"))


RANKS = {
    ("model-rank-0", "model-rank-1"): True,
    ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"): True,
    ("tp0.safetensors", "tp1.safetensors"): True,
    ("model_rank_0_of_2", "model_rank_1_of_2"): True,
    ("model-00001-of-00002", "model-00002-of-00002"): False,
    ("consolidated.00.pth", "consolidated.01.pth"): False,
    ("step1.pt", "step2.pt"): False,
    ("model-rank-0",): False,
    ("model-rank-0", "other-rank-1"): False,
    ("rank_0/a", "rank_0/b", "rank_1/a", "rank_1/b"): True,
    ("rank_0/a", "rank_0/b", "rank_1/a"): False,
    (): False,
}


def test_only_files_that_differ_in_the_number_of_a_rank_are_ranks():
    assert {names: are_ranks(names) for names in RANKS} == RANKS
