"""Exit times at the corners: no boundary, on a boundary, noise that cannot reach one, factors of noise."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry import paths
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import (
    are_boundaries_positive,
    boundary_sigmas,
    noisy_distances,
    noisy_rows,
)
from moegeom.geometry.paths import (
    cell_quantiles,
    exit_probability,
    face_quantile,
    log_crossing_probability,
    simulate_exit,
)
from moegeom.geometry.selection import top_k

RANDOM = np.random.default_rng(4)
WEIGHT = RANDOM.standard_normal((5, 3))
LOGITS = RANDOM.standard_normal((4, 3)) @ WEIGHT.T


def test_boundaries_are_those_of_each_chosen_expert_and_each_other():
    chosen = top_k(LOGITS, 2)
    found = boundary_sigmas(LOGITS, chosen, row_distances(WEIGHT))
    assert found.shape == (4, 6)
    for token in range(4):
        pairs = [(i, j) for i in chosen[token] for j in range(5) if j not in chosen[token]]
        expected = [
            (LOGITS[token, i] - LOGITS[token, j]) / np.linalg.norm(WEIGHT[i] - WEIGHT[j])
            for i, j in pairs
        ]
        np.testing.assert_allclose(found[token], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "factor", [0.3, np.array([0.1, 2.0, 0.5]), RANDOM.standard_normal((3, 2))], ids=str
)
def test_distances_are_deviations_of_the_differences(factor):
    spread = np.diag(np.broadcast_to(factor, 3)) if np.ndim(factor) < 2 else factor
    covariance = WEIGHT @ spread @ spread.T @ WEIGHT.T
    own = np.diag(covariance)
    expected = np.sqrt(own[:, None] + own - 2.0 * covariance)
    found = noisy_distances(WEIGHT, factor)
    off = ~np.eye(5, dtype=bool)
    np.testing.assert_allclose(1.0 / found.inverse[off], expected[off], rtol=1e-9)
    np.testing.assert_allclose(
        noisy_rows(WEIGHT, factor) @ noisy_rows(WEIGHT, factor).T, covariance, atol=1e-12
    )


def test_noise_that_leaves_a_difference_alone_never_crosses_its_boundary():
    weight = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    along_the_second = np.array([0.0, 1.0])
    distances = noisy_distances(weight, along_the_second)
    sigmas = boundary_sigmas(
        np.array([[2.0, 1.0, 0.0]]), np.array([[0]], dtype=np.int32), distances
    )
    np.testing.assert_array_equal(sigmas, [[np.inf, 2.0]])
    assert len(distances.permanent_ties) == 0
    # on the boundary, noise or not
    level = boundary_sigmas(np.array([[2.0, 2.0, 0.0]]), np.array([[0]], dtype=np.int32), distances)
    np.testing.assert_array_equal(level, [[0.0, 2.0]])


def test_a_permanent_tie_is_a_boundary_everywhere():
    weight = np.array([[1.0, 0.5], [1.0, 0.5], [0.0, 0.0]])
    distances = noisy_distances(weight, 0.1)
    np.testing.assert_array_equal(distances.permanent_ties, [[0, 1]])
    chosen = np.array([[0]], dtype=np.int32)
    sigmas = boundary_sigmas(np.array([[1.0, 1.0 - 1e-16, 0.0]]), chosen, distances)
    assert sigmas[0, 0] == 0.0
    assert exit_probability(sigmas, 0.0).lower[0] == 1.0


def test_without_boundaries_nothing_is_left():
    chosen = top_k(LOGITS, 5)
    sigmas = boundary_sigmas(LOGITS, chosen, row_distances(WEIGHT))
    assert sigmas.shape == (4, 0)
    found = exit_probability(sigmas, 3.0)
    np.testing.assert_array_equal([found.lower, found.upper], np.zeros((2, 4)))
    assert np.isinf(cell_quantiles(sigmas, 0.5)).all()
    assert are_boundaries_positive(WEIGHT, chosen).all()
    curve = simulate_exit(
        LOGITS[0], chosen[0], WEIGHT, row_distances(WEIGHT), np.ones(1), 10, np.random.default_rng()
    )
    np.testing.assert_array_equal([curve.lower, curve.upper], np.zeros((2, 1)))


def test_on_a_boundary_the_cell_is_left_at_once():
    sigmas = np.array([[0.0, 1.0]])
    for time in (0.0, 1e-12, 5.0):
        found = exit_probability(sigmas, time, np.array([True]))
        np.testing.assert_array_equal([found.lower, found.upper], [[1.0], [1.0]])
    assert not np.any(cell_quantiles(sigmas, 0.5))
    z = np.array([1.0, 1.0, 0.0])
    weight = np.array([[1.0], [0.0], [0.5]])
    chosen = np.array([0], dtype=np.int32)
    curve = simulate_exit(
        z, chosen, weight, row_distances(weight), np.ones(1), 10, np.random.default_rng(0)
    )
    np.testing.assert_array_equal([curve.lower, curve.upper], [[1.0], [1.0]])


def test_at_time_0_and_at_infinity_nothing_is_crossed():
    np.testing.assert_array_equal(
        log_crossing_probability(np.array([1.0, np.inf]), 0.0), [-np.inf] * 2
    )
    assert log_crossing_probability(np.array([np.inf]), 5.0)[0] == -np.inf
    assert exit_probability(np.array([[np.inf, np.inf]]), 5.0).upper[0] == 0.0
    assert face_quantile(np.array([np.inf, 1.0]), 1.0).tolist() == [np.inf, np.inf]


def test_bounds_do_not_underflow():
    found = exit_probability(np.array([[50.0, 60.0]]), 1.0, np.array([True]))
    assert -1300.0 < found.log_lower[0] <= found.log_upper[0] < -1200.0
    assert found.lower[0] == 0.0


def test_the_probability_increases_with_time():
    sigmas = boundary_sigmas(LOGITS, top_k(LOGITS, 2), row_distances(WEIGHT))
    found = [exit_probability(sigmas, time) for time in np.geomspace(1e-4, 1e4, 60)]
    assert (np.diff([f.log_lower for f in found], axis=0) >= 0.0).all()
    assert (np.diff([f.log_upper for f in found], axis=0) >= 0.0).all()


def test_slepian_is_used_where_it_holds_and_only_there():
    sigmas = np.array([[0.5, 0.6], [0.5, 0.6]])
    found = exit_probability(sigmas, 1.0, np.array([True, False]))
    p = np.exp(log_crossing_probability(sigmas[0], 1.0))
    np.testing.assert_allclose(found.upper, [1.0 - (1.0 - p).prod(), 1.0])
    assert p.sum() > 1.0


def test_tiles_do_not_change_a_simulation(monkeypatch):
    """Paths take their numbers from one generator, so the tile is part of the seed: errors agree."""
    chosen = top_k(LOGITS[:1], 2)[0]
    arguments = (LOGITS[0], chosen, WEIGHT, row_distances(WEIGHT), np.array([0.1, 0.2]), 4000)
    whole = simulate_exit(*arguments, np.random.default_rng(1))
    monkeypatch.setattr(paths, "_AT_ONCE", 600)
    parts = simulate_exit(*arguments, np.random.default_rng(2))
    error = np.hypot(whole.upper_error, parts.upper_error)
    np.testing.assert_array_less(np.abs(whole.upper - parts.upper), 4.0 * error)
    np.testing.assert_allclose(whole.upper_error, parts.upper_error, rtol=0.3)
