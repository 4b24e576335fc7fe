"""Noise: flips, exits from a cell, rounding. Oracles: simulation, Python's sets, ways to break ties."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import Rule, Weights
from moegeom.geometry import noise, paths
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import noise_between
from moegeom.geometry.selection import top_k
from moegeom.kernels.cpu.barriers import CompiledBarriers

RANDOM = np.random.default_rng(1)
WEIGHT = RANDOM.standard_normal((6, 4))
INPUTS = RANDOM.standard_normal((30, 4))
LOGITS = INPUTS @ WEIGHT.T
ROWS = row_distances(WEIGHT)
RULE = Rule(2, "softmax", Weights("scores"))


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def simulated(logits, chosen, weight, times, number):
    barriers = CompiledBarriers.of(RULE, None, chosen, weight, row_distances(weight))
    every = np.arange(len(logits))
    return paths.simulate_exit(logits, barriers, every, times, number, [*map(draw, every)])


# ---------------------------------------------------------------------------- bounds and draws
def bounds(z, k, scale, rows=ROWS):
    flip = noise.flip_bounds(z, top_k(z, k), rows, np.full(len(z), scale))
    return np.stack([flip.lower, flip.estimate, flip.upper])


def test_bounds_are_in_order_grow_with_the_noise_and_vanish_without():
    assert_array_equal(bounds(LOGITS, 6, 1.0), np.zeros((3, 30)))
    assert_array_equal(bounds(LOGITS, 2, 0.0), np.zeros((3, 30)))
    drawn = noise.simulate_flip(INPUTS, WEIGHT, RULE, np.zeros((1, 1)), 3, draw())
    assert_array_equal(drawn, np.zeros(30))
    for scale in (0.0, 1e-9):
        on_it = bounds(np.array([[1.0, 1.0, -5.0]]), 1, scale, row_distances(np.eye(3)))
        assert_allclose(on_it, np.full((3, 1), 0.5), rtol=1e-3)
    table = np.array([bounds(LOGITS, 2, scale) for scale in np.geomspace(1e-3, 10.0, 30)])
    assert (np.diff(table, axis=1) >= 0.0).all()
    assert (np.diff(table, axis=0)[:, [0, 2]] >= 0.0).all()


def test_tiles_change_nothing_noise_has_sizes(monkeypatch):
    whole = bounds(LOGITS, 2, 0.3)
    monkeypatch.setattr(noise, "_AT_ONCE", 1)
    assert_allclose(bounds(LOGITS, 2, 0.3), whole, rtol=1e-13)
    scale = np.where(np.arange(30) < 15, 0.0, 5.0)[:, None]
    parts = noise.simulate_flip(INPUTS, WEIGHT, RULE, scale, 20, draw())
    assert (parts[:15] == 0).all()
    assert ((parts[15:] > 0) & (parts[15:] <= 20)).all()
    assert bounds(LOGITS[:0], 2, 1.0).shape == (3, 0)
    # as many columns as others: two recordings of one run, no token moves
    nothing = np.zeros((0, 6), np.float32), np.zeros((0, 2), np.int32)
    assert noise.boundary_sigmas(*nothing, row_distances(np.eye(6, 3))).shape == (0, 2 * 4)


def test_equal_rows_and_runs_are_without_noise_and_a_constant_difference_is_none():
    for rows, expected in (
        (np.ones((4, 2)), [0.0] * 4),
        (np.ones((1, 2)), [0.0]),
        (np.array([[2.0], [0.0]]), [np.sqrt(2.0)] * 2),
    ):
        assert_allclose(noise.logit_deviations(row_distances(rows)), expected)
    equal = noise_between(INPUTS, INPUTS)
    assert (equal.scale, equal.kappa, equal.systematic_share) == (0.0, 0.0, 0.0)
    shifted = noise_between(INPUTS, INPUTS + np.array([1.0, 0.0, 0.0, 0.0]))
    assert_allclose(shifted.systematic_share, 1.0)
    none = noise_between(INPUTS[:0], INPUTS[:0])
    assert np.isnan([none.scale, none.kappa, none.systematic_share]).all()


# -------------------------------------------------------------------------------------------- sets
E, K = 6, 3
SETS = st.permutations(range(E)).map(lambda order: order[:K])


@given(st.lists(st.integers(0, 3), min_size=E, max_size=E), SETS)
def test_a_set_differs_for_certain_when_no_way_of_breaking_ties_gives_it(scores, chosen):
    possible = [
        set(some)
        for some in itertools.combinations(range(E), K)
        if min(scores[i] for i in some) >= max(scores[j] for j in set(range(E)) - set(some))
    ]
    differs = noise.certainly_differs(np.array([scores], np.float64), np.array([chosen], np.int32))
    assert differs[0] == (set(chosen) not in possible)


@given(SETS, SETS, st.lists(st.floats(0.01, 1.0), min_size=K, max_size=K))
def test_moved_weight_and_swaps_are_those_of_the_sets(one, other, weights):
    a, b = np.array([one], np.int32), np.array([other], np.int32)
    moved = noise.weight_moved(np.array([weights]), a, b)[0]
    left = sum(w for w, e in zip(weights, one, strict=True) if e not in other)
    assert_allclose(moved, left / sum(weights), rtol=1e-12)
    assert (moved == 0.0) == (set(one) == set(other))
    assert noise.shares_expert(a, b)[0].tolist() == [e in other for e in one]
    swaps = noise.swapped_pairs(a, b)
    assert swaps[:, 1].tolist() == [e for e in one if e not in other]
    assert swaps[:, 2].tolist() == [e for e in other if e not in one]


def test_swaps_name_the_row_they_are_in_and_weights_of_zero_move_an_unknown_share():
    one = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    other = np.array([[1, 0], [3, 0], [0, 1]], np.int32)
    assert noise.swapped_pairs(one, other).tolist() == [[1, 2, 0], [2, 4, 0], [2, 5, 1]]
    assert_array_equal(noise.weight_moved(np.zeros((3, 2)), one, other), [0.0, np.nan, np.nan])


# ---------------------------------------------------------------------------------------- rounding
def test_numbers_anywhere_tie_as_often_as_the_spacing_of_the_format_says():
    values = np.float32([1.0, 1.5, 2.0, -3.0, 1e-3, 65_000.0])
    assert_array_equal(noise.spacing(values.astype("f8"), 2.0**-24), np.abs(np.spacing(values)))
    assert noise.spacing(np.zeros(1), 2.0**-8)[0] == 0.0


@pytest.mark.parametrize(
    ("gap", "deviation", "step"),
    [(0.3, 0.2, 0), (0.3, 0.2, 0.5), (0, 0.1, 1), (0.9, 0.3, 1), (0.2, 0, 1), (0.2, 0.5, 0.001)],
)
def test_noise_and_rounding_turn_a_gap_as_often_as_is_predicted(gap, deviation, step):
    random, draws = draw(1), 400_000
    noisy = gap + deviation * random.standard_normal(draws)
    low = random.uniform(0.0, 100.0, draws)
    after = noisy if step == 0.0 else np.rint((low + noisy) / step) - np.rint(low / step)
    expected = (after < 0.0).mean() + 0.5 * (after == 0.0).mean()
    one = np.ones(1)
    turned = noise.flip_prediction(gap * one, deviation * one, step * one)[0]
    assert abs(turned - expected) < 3e-3
    assert noise.flip_prediction(0.3 * one, 0.0 * one, 0.0 * one)[0] == 0.0


@pytest.mark.parametrize(("experts", "k", "scale"), [(2, 1, 0.1), (16, 4, 0.3), (64, 8, 0.03)])
def test_few_experts_stand_for_all(experts: int, k: int, scale: float) -> None:
    random = draw(2)
    logits = random.standard_normal((500, experts))
    deviation = scale * np.exp(0.3 * random.standard_normal((500, experts)))
    chosen = np.argsort(-logits, axis=1)[:, :k].astype(np.int32)
    flipped = [
        (np.sort(np.argsort(-noisy, axis=1)[:, :k], axis=1) != np.sort(chosen, axis=1)).any(axis=1)
        for noisy in logits + deviation * random.standard_normal((200, 500, experts))
    ]
    share = noise.nearest_flip(logits, chosen, deviation).mean()
    assert_allclose(share, np.mean(flipped), rtol=0.06)


# ------------------------------------------------------------------------------------------- exits
FIRST = np.array([[0]], dtype=np.int32)


def test_boundaries_are_those_of_each_chosen_expert_and_each_other():
    chosen = top_k(LOGITS, 2)
    sigmas = noise.boundary_sigmas(LOGITS, chosen, ROWS)
    assert sigmas.shape == (30, 8)
    for token in range(30):
        z, own = LOGITS[token], chosen[token]
        pairs = [(i, j) for i in own for j in range(6) if j not in own]
        expected = [(z[i] - z[j]) / np.linalg.norm(WEIGHT[i] - WEIGHT[j]) for i, j in pairs]
        assert_allclose(sigmas[token], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "factor", [0.3, np.array([0.1, 2.0, 0.5, 1.0]), draw().standard_normal((4, 2))], ids=str
)
def test_distances_are_deviations_of_the_differences(factor):
    spread = np.diag(np.broadcast_to(factor, 4)) if np.ndim(factor) < 2 else factor
    covariance = WEIGHT @ spread @ spread.T @ WEIGHT.T
    own = np.diag(covariance)
    off = ~np.eye(6, dtype=bool)
    expected = np.sqrt(own[:, None] + own - 2.0 * covariance)[off]
    assert_allclose(1.0 / noise.noisy_distances(WEIGHT, factor).inverse[off], expected, rtol=1e-9)
    rows = noise.noisy_rows(WEIGHT, factor)
    assert_allclose(rows @ rows.T, covariance, atol=1e-12)


def test_a_difference_that_noise_leaves_alone_has_no_boundary_and_a_permanent_tie_one_everywhere():
    weight = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    distances = noise.noisy_distances(weight, np.array([0.0, 1.0]))
    assert len(distances.permanent_ties) == 0
    # the second is on the boundary, noise or not
    for z, expected in (([2.0, 1.0, 0.0], [np.inf, 2.0]), ([2.0, 2.0, 0.0], [0.0, 2.0])):
        assert_array_equal(noise.boundary_sigmas(np.array([z]), FIRST, distances), [expected])
    distances = noise.noisy_distances(np.array([[1.0, 0.5], [1.0, 0.5], [0.0, 0.0]]), 0.1)
    assert_array_equal(distances.permanent_ties, [[0, 1]])
    sigmas = noise.boundary_sigmas(np.array([[1.0, 1.0 - 1e-16, 0.0]]), FIRST, distances)
    assert sigmas[0, 0] == 0.0
    assert paths.exit_probability(sigmas, 0.0).lower[0] == 1.0


def test_a_cell_without_boundaries_is_never_left_and_on_a_boundary_at_once():
    chosen = top_k(LOGITS, 6)
    sigmas = noise.boundary_sigmas(LOGITS, chosen, ROWS)
    assert sigmas.shape == (30, 0)
    exits = paths.exit_probability(sigmas, 3.0)
    assert_array_equal([exits.lower, exits.upper], np.zeros((2, 30)))
    assert np.isinf(paths.cell_quantiles(sigmas, 0.5)).all()
    curve = simulated(LOGITS[:1], chosen[:1], WEIGHT, np.ones((1, 1)), 10)
    assert_array_equal([curve.lower, curve.upper], np.zeros((2, 1, 1)))
    sigmas = np.array([[0.0, 1.0]])
    for time in (0.0, 1e-12, 5.0):
        exits = paths.exit_probability(sigmas, time)
        assert_array_equal([exits.lower, exits.upper], [[1.0], [1.0]])
    assert not np.any(paths.cell_quantiles(sigmas, 0.5))
    z, weight = np.array([1.0, 1.0, 0.0]), np.array([[1.0], [0.0], [0.5]])
    curve = simulated(z[None], FIRST, weight, np.ones((1, 1)), 10)
    assert_array_equal([curve.lower, curve.upper], np.ones((2, 1, 1)))


def test_at_0_and_infinity_nothing_is_crossed_and_chances_grow_with_time():
    assert_array_equal(paths.log_crossing_probability(np.array([1.0, np.inf]), 0.0), [-np.inf] * 2)
    assert paths.log_crossing_probability(np.array([np.inf]), 5.0)[0] == -np.inf
    assert paths.exit_probability(np.array([[np.inf, np.inf]]), 5.0).upper[0] == 0.0
    assert paths.face_quantile(np.array([np.inf, 1.0]), 1.0).tolist() == [np.inf, np.inf]
    far = paths.exit_probability(np.array([[50.0, 60.0]]), 1.0)
    assert -1300.0 < far.log_lower[0] <= far.log_upper[0] < -1200.0
    assert far.lower[0] == 0.0
    sigmas = noise.boundary_sigmas(LOGITS, top_k(LOGITS, 2), ROWS)
    exits = [paths.exit_probability(sigmas, time) for time in np.geomspace(1e-4, 1e4, 60)]
    assert (np.diff([e.log_lower for e in exits], axis=0) >= 0.0).all()
    assert (np.diff([e.log_upper for e in exits], axis=0) >= 0.0).all()


def test_tiles_do_not_change_a_simulation(monkeypatch):
    """Each input takes its numbers from a generator of its own."""
    times = np.tile([0.1, 0.2], (3, 1))
    whole = simulated(LOGITS[:3], top_k(LOGITS[:3], 2), WEIGHT, times, 40)
    monkeypatch.setattr(paths, "_AT_ONCE", 600)
    parts = simulated(LOGITS[:3], top_k(LOGITS[:3], 2), WEIGHT, times, 40)
    for name, part in vars(parts).items():
        assert_array_equal(part, getattr(whole, name))
