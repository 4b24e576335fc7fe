"""Figures of gates from sums over blocks."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from moegeom.geometry.gating import FIGURES, SUMS, gate_pull, gating_figures

BLOCKS, HEADS = 16, 3


def sums_of(blocks: int, each: int, gates: np.ndarray) -> dict[str, np.ndarray]:
    """Of gates (tokens, heads), ``each`` tokens in a block."""
    shaped = gates.reshape(blocks, each, -1)
    found = {name: np.zeros((BLOCKS, gates.shape[1])) for name in SUMS}
    found["gate"][:blocks] = shaped.sum(axis=1)
    return found


def test_the_error_of_a_mean_of_equal_blocks_is_that_of_the_blocks():
    gates = np.random.default_rng(0).random((BLOCKS * 5, HEADS))
    tokens = np.full(BLOCKS, 5)
    found = gating_figures(sums_of(BLOCKS, 5, gates), tokens, tokens)["gate_mean"]
    means = gates.reshape(BLOCKS, 5, HEADS).mean(axis=1)
    np.testing.assert_allclose(found.value, gates.mean(axis=0))
    np.testing.assert_allclose(found.error, scipy.stats.sem(means))
    assert found.mean == pytest.approx(gates.mean())
    assert found.mean_error == pytest.approx(scipy.stats.sem(means.mean(axis=1)))


def test_empty_blocks_count_for_nothing_and_one_block_has_no_error():
    gates = np.random.default_rng(0).random((8, HEADS))
    two = np.array([4, 4] + [0] * 14)
    found = gating_figures(sums_of(2, 4, gates), two, two)["gate_mean"]
    means = gates.reshape(2, 4, HEADS).mean(axis=1)
    np.testing.assert_allclose(found.error, scipy.stats.sem(means))
    one = np.array([8] + [0] * 15)
    found = gating_figures(sums_of(1, 8, gates), one, one)["gate_mean"]
    assert np.isnan(found.error).all() and np.isfinite(found.value).all()


def test_nothing_added_up_is_not_known():
    none = np.zeros(BLOCKS, int)
    found = gating_figures({name: np.zeros((BLOCKS, HEADS)) for name in SUMS}, none, none)
    assert found.keys() == FIGURES.keys()
    assert all(np.isnan(figure.value).all() and np.isnan(figure.mean) for figure in found.values())


def test_the_pull_of_gates_is_what_was_planted():
    random = np.random.default_rng(0)
    inner = 3.0 + random.normal(size=(4000, HEADS, 8))
    pull = gate_pull(inner.sum(axis=0), (inner**2).sum(axis=0), len(inner))
    np.testing.assert_allclose(pull, 3.0, rtol=0.05)
    assert np.isinf(gate_pull(np.full((1, 8), 10.0), np.full((1, 8), 10.0), 10))
    assert np.isnan(gate_pull(np.zeros((1, 8)), np.zeros((1, 8)), 10))
