"""Oracle: mpmath's erfc, scipy's Levy distribution, the series for an interval, and simulation.

Closed forms: one boundary, two orthogonal boundaries (independent), parallel boundaries on one side (the nearer
one decides) and on both sides (exit from an interval).
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy.stats import levy

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


class Cell:
    """One input of a router with noise of a given factor."""

    def __init__(self, weight, z, k, factor=1.0):
        self.z = np.array(z, dtype=np.float64)
        self.weight = np.array(weight, dtype=np.float64)
        self.rows = noisy_rows(self.weight, factor)
        self.distances = noisy_distances(self.weight, factor, np.arange(len(self.z)) / 7.0)
        self.chosen = top_k(self.z[None], k)
        self.sigmas = boundary_sigmas(self.z[None], self.chosen, self.distances)
        self.is_positive = are_boundaries_positive(self.rows, self.chosen)

    def bounds(self, time):
        found = exit_probability(self.sigmas, time, self.is_positive)
        return found.lower[0], found.upper[0]

    def curve(self, times, paths, seed=0, drift=None):
        generator = np.random.default_rng(seed)
        chosen, rows = self.chosen[0], self.rows
        return simulate_exit(self.z, chosen, rows, self.distances, times, paths, generator, drift)


def one_boundary(r, time):
    return float(mpmath.erfc(r / mpmath.sqrt(2 * time)))


def interval(below, above, time):
    """Probability that Brownian motion from 0 has left (-below, above): the sine series."""
    width = below + above
    stay = mpmath.nsum(
        lambda n: (
            4
            / ((2 * n + 1) * mpmath.pi)
            * mpmath.sin((2 * n + 1) * mpmath.pi * below / width)
            * mpmath.exp(-(((2 * n + 1) * mpmath.pi / width) ** 2) * time / 2)
        ),
        [0, mpmath.inf],
    )
    return float(1 - stay)


SINGLE = Cell([[1.0, 0.5], [0.0, 0.0]], [0.9, 0.0], 1)
ORTHOGONAL = Cell([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [0.0, -0.8, -1.4], 1)
ONE_SIDE = Cell([[0.0], [1.0], [2.0]], [0.0, -0.7, -2.0], 1)
BETWEEN = Cell([[-1.0], [0.0], [1.0]], [-0.6, 0.0, -1.1], 1)
EXACT = {
    "one": (SINGLE, lambda t: one_boundary(0.9 / np.hypot(1.0, 0.5), t)),
    "orthogonal": (
        ORTHOGONAL,
        lambda t: 1 - (1 - one_boundary(0.8, t)) * (1 - one_boundary(0.7, t)),
    ),
    "one side": (ONE_SIDE, lambda t: one_boundary(0.7, t)),
    "between": (BETWEEN, lambda t: interval(0.6, 1.1, t)),
}
cells = pytest.mark.parametrize("name", EXACT)


@pytest.mark.parametrize("time", [1e-3, 0.25, 7.0])
def test_the_crossing_probability_is_that_of_mpmath_however_small(time):
    sigmas = np.array([0.0, 1e-8, 0.3, 5.0, 60.0])
    with mpmath.workdps(40):
        expected = [float(mpmath.log(mpmath.erfc(r / mpmath.sqrt(2 * time)))) for r in sigmas]
    found = log_crossing_probability(sigmas, time)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("p", [1e-300, 1e-9, 0.3, 0.9, 1 - 1e-9])
def test_the_quantile_of_a_boundary_is_that_of_the_levy_distribution(p):
    sigmas = np.array([0.01, 1.7, 40.0])
    expected = levy.ppf(p, scale=sigmas**2)
    np.testing.assert_allclose(face_quantile(sigmas, p), expected, rtol=1e-6)
    assert face_quantile(np.zeros(1), p)[0] == 0.0


@cells
@pytest.mark.parametrize("time", [0.05, 0.5, 4.0])
def test_bounds_hold_the_closed_form(name, time):
    cell, exact = EXACT[name]
    lower, upper = cell.bounds(time)
    assert lower <= exact(time) * (1.0 + 1e-12)
    assert upper >= exact(time) * (1.0 - 1e-12)


@pytest.mark.parametrize("time", [0.05, 0.5, 4.0])
def test_bounds_are_attained_by_orthogonal_boundaries_and_by_parallel_ones(time):
    np.testing.assert_allclose(ORTHOGONAL.bounds(time)[1], EXACT["orthogonal"][1](time), rtol=1e-12)
    np.testing.assert_allclose(ONE_SIDE.bounds(time)[0], EXACT["one side"][1](time), rtol=1e-12)
    np.testing.assert_allclose(SINGLE.bounds(time), [EXACT["one"][1](time)] * 2, rtol=1e-12)


def test_boundaries_on_both_sides_are_not_certified_and_would_break_slepians_bound():
    assert [c.is_positive[0] for c in (SINGLE, ORTHOGONAL, ONE_SIDE, BETWEEN)] == [True] * 3 + [
        False
    ]
    wrongly = exit_probability(BETWEEN.sigmas, 1.0, np.array([True])).upper[0]
    assert wrongly < EXACT["between"][1](1.0) - 1e-3


@cells
@pytest.mark.parametrize("steps", [2, 12])
def test_the_simulated_bracket_holds_the_closed_form_however_coarse(name, steps):
    cell, exact = EXACT[name]
    curve = cell.curve(np.linspace(0.0, 1.2, steps + 1)[1:], 4000)
    expected = np.array([exact(time) for time in curve.times])
    assert (curve.lower - 4.0 * curve.lower_error <= expected).all()
    assert (expected <= curve.upper + 4.0 * curve.upper_error).all()
    if name == "one":  # sum and maximum are the same
        np.testing.assert_array_equal(curve.lower, curve.upper)


@pytest.mark.parametrize("steps", [1, 3])
def test_one_boundary_is_simulated_to_three_digits(steps):
    curve = SINGLE.curve(np.linspace(0.0, 1.2, steps + 1)[1:], 300_000)
    expected = np.array([EXACT["one"][1](time) for time in curve.times])
    np.testing.assert_array_less(np.abs(curve.lower - expected), 4.0 * curve.lower_error)
    assert (curve.lower_error < 1e-3).all()


def test_finer_times_bring_the_bracket_together():
    widths = []
    for steps in (1, 4, 32):
        curve = BETWEEN.curve(np.linspace(0.0, 1.2, steps + 1)[1:], 2000)
        widths.append(curve.upper[-1] - curve.lower[-1])
    assert widths[0] > 3.0 * widths[1] > 9.0 * widths[2] >= 0.0


def test_standard_errors_are_the_spread_of_repeated_simulations():
    times = np.linspace(0.0, 0.5, 4)[1:]
    curves = [BETWEEN.curve(times, 100, seed) for seed in range(150)]
    for bound in ("lower", "upper"):
        spread = np.std([getattr(curve, bound) for curve in curves], axis=0, ddof=1)
        stated = np.mean([getattr(curve, f"{bound}_error") for curve in curves], axis=0)
        np.testing.assert_allclose(stated, spread, rtol=0.25)


@pytest.fixture(scope="module")
def random_cell():
    random = np.random.default_rng(13)
    weight, factor = random.standard_normal((6, 4)), 0.4 * random.standard_normal((4, 3))
    return Cell(weight, weight @ random.standard_normal(4), 2, factor), factor


def test_the_bracket_is_what_inputs_in_small_steps_do(random_cell):
    """Inputs themselves move, and their chosen set is looked at: a lower bound at finite steps."""
    cell, factor = random_cell
    curve = cell.curve(np.linspace(0.0, 0.3, 21)[1:], 4000)
    random = np.random.default_rng(1)
    paths, steps = 1500, 500
    moved, has_left = np.zeros((paths, 4)), np.zeros(paths, dtype=bool)
    before = np.sort(cell.chosen[0])
    for _ in range(steps):
        moved += np.sqrt(0.3 / steps) * random.standard_normal((paths, 3)) @ factor.T
        now = np.sort(top_k(cell.z + moved @ cell.weight.T, 2), axis=1)
        has_left |= (now != before).any(axis=1)
    share, error = has_left.mean(), has_left.std() / np.sqrt(paths)
    assert 0.1 < share < 0.9
    assert share <= curve.upper[-1] + 4.0 * np.hypot(error, curve.upper_error[-1])
    # steps that are not looked between miss some crossings: about 0.58 of a step's deviation
    assert share >= curve.lower[-1] - 4.0 * np.hypot(error, curve.lower_error[-1]) - 0.03
    lower, upper = cell.bounds(0.3)
    assert lower <= share + 4.0 * error
    assert upper >= share - 4.0 * error


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_quantiles_are_bracketed_by_bounds_and_by_simulation(random_cell, p):
    cell, _ = random_cell
    (earliest,), (latest,) = cell_quantiles(cell.sigmas[:1], p)
    curve = cell.curve(np.geomspace(1e-3, 40.0, 120), 3000)
    # where either bound of the simulation, three errors out, has reached p
    could = curve.times[curve.upper + 3.0 * curve.upper_error >= p][0]
    must = curve.times[curve.lower - 3.0 * curve.lower_error >= p][0]
    assert earliest <= must
    assert latest >= could / 1.1
    np.testing.assert_allclose(exit_probability(cell.sigmas, earliest).upper, [p], rtol=1e-7)
    np.testing.assert_allclose(exit_probability(cell.sigmas, latest).lower, [p], rtol=1e-9)


def test_simulation_reaches_one_half_at_the_median_of_one_boundary():
    r = SINGLE.sigmas[0, 0]
    curve = SINGLE.curve(np.geomspace(0.01, 100.0, 60), 3000)
    median = np.searchsorted(curve.times, levy.ppf(0.5, scale=r**2))
    assert curve.lower[median - 1] - 3.0 * curve.lower_error[median - 1] < 0.5
    assert curve.upper[median] + 3.0 * curve.upper_error[median] > 0.5


# -------------------------------------------------------------------------------------------- drift
def crossed_with_drift(r, nu, time):
    """The inverse Gaussian density of the crossing time, integrated."""

    def density(t):
        return r / mpmath.sqrt(2 * mpmath.pi * t**3) * mpmath.exp(-((r + nu * t) ** 2) / (2 * t))

    return float(mpmath.quad(density, [0, time / 50, time / 5, time]))


@pytest.mark.parametrize("nu", [-3.0, -0.4, 0.0, 0.7, 2.5])
@pytest.mark.parametrize("time", [0.3, 5.0])
def test_a_drift_crosses_as_often_as_its_density_says(nu, time):
    sigmas = np.array([0.2, 1.1, 3.0])
    found = np.exp(log_crossing_probability(sigmas, time, np.full(3, nu)))
    expected = [crossed_with_drift(r, nu, time) for r in sigmas]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_worked_drift_and_its_bridge():
    """From 1 with drift -0.8 and standard deviation 1.3, by 1.1: 0.68135."""
    cell = Cell([[1.0], [0.0]], [1.0, 0.0], 1, 1.3)
    drift = np.array([-0.8, 0.0])
    nu = boundary_sigmas(drift[None], cell.chosen, cell.distances)
    found = exit_probability(cell.sigmas, 1.1, drifts=nu)
    np.testing.assert_allclose([found.lower[0], found.upper[0]], 0.68135, atol=5e-6)
    curve = cell.curve(np.array([0.4, 1.1]), 200_000, drift=drift)
    assert abs(curve.lower[-1] - found.lower[0]) < 4.0 * curve.lower_error[-1] < 0.01


def test_without_drift_it_is_the_plain_probability_and_limits_stay():
    sigmas = np.array([0.0, 1e-8, 0.3, 5.0, np.inf])
    plain = log_crossing_probability(sigmas, 0.7)
    np.testing.assert_allclose(
        log_crossing_probability(sigmas, 0.7, np.zeros(5)), plain, rtol=1e-12
    )
    # for ever: certain towards the boundary, exp(-2 nu r) away from it
    for_ever = np.exp(log_crossing_probability(np.full(2, 1.5), 1e9, np.array([-0.1, 0.4])))
    np.testing.assert_allclose(for_ever, [1.0, np.exp(-1.2)], rtol=1e-9)
    far = log_crossing_probability(np.array([400.0]), 1.0, np.array([0.5]))
    with mpmath.workdps(60):
        r, nu = mpmath.mpf(400), mpmath.mpf(1) / 2
        ahead = mpmath.erfc((r + nu) / mpmath.sqrt(2)) / 2
        back = mpmath.exp(-2 * nu * r) * mpmath.erfc((r - nu) / mpmath.sqrt(2)) / 2
        np.testing.assert_allclose(far, [float(mpmath.log(ahead + back))], rtol=1e-12)


def test_drifting_inputs_in_small_steps_are_between_the_bounds(random_cell):
    cell, factor = random_cell
    random = np.random.default_rng(5)
    gamma = 0.9 * random.standard_normal(4)
    drift = cell.weight @ gamma
    curve = cell.curve(np.linspace(0.0, 0.3, 21)[1:], 4000, drift=drift)
    nu = boundary_sigmas(drift[None], cell.chosen, cell.distances)
    bounds = exit_probability(cell.sigmas, 0.3, drifts=nu)
    paths, steps = 1500, 500
    moved, has_left = np.zeros((paths, 4)), np.zeros(paths, dtype=bool)
    before = np.sort(cell.chosen[0])
    for _ in range(steps):
        noise = random.standard_normal((paths, 3)) @ factor.T
        moved += 0.3 / steps * gamma + np.sqrt(0.3 / steps) * noise
        now = np.sort(top_k(cell.z + moved @ cell.weight.T, 2), axis=1)
        has_left |= (now != before).any(axis=1)
    share, error = has_left.mean(), has_left.std() / np.sqrt(paths)
    without = cell.bounds(0.3)
    assert abs(share - without[0]) > 0.02 or abs(bounds.lower[0] - without[0]) > 0.02
    assert share <= curve.upper[-1] + 4.0 * np.hypot(error, curve.upper_error[-1])
    assert share >= curve.lower[-1] - 4.0 * np.hypot(error, curve.lower_error[-1]) - 0.03
    assert bounds.lower[0] <= share + 4.0 * error
    assert bounds.upper[0] >= share - 4.0 * error
