"""Oracles: mpmath, scipy's Levy distribution, closed forms of intervals, wedges, quadrants and balls, paths.

Closed forms of exit times: one boundary, two orthogonal boundaries (independent), parallel boundaries on
one side (the nearer one decides) and on both sides (exit from an interval).
"""

from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
from scipy.stats import levy

from moegeom.core.router import Rule, Weights
from moegeom.geometry import noise as noises
from moegeom.geometry.paths import (
    cell_quantiles,
    exit_boundaries,
    exit_probability,
    face_quantile,
    log_crossing_probability,
    simulate_exit,
)
from moegeom.geometry.selection import top_k
from moegeom.kernels.cpu.barriers import CompiledBarriers
from tests.by_day import by_day

#: Of linear boundaries; how many are chosen follows from the cells.
RULE = Rule(1, "softmax", Weights("scores"))


class Cell:
    """One input of a router with noise of a given factor."""

    def __init__(self, weight, z, k, factor=1.0):
        self.z = np.array(z, dtype=np.float64)
        self.weight = np.array(weight, dtype=np.float64)
        self.rows = noises.noisy_rows(self.weight, factor)
        self.distances = noises.noisy_distances(self.weight, factor, np.arange(len(self.z)) / 7.0)
        self.chosen = top_k(self.z[None], k)
        self.sigmas = noises.boundary_sigmas(self.z[None], self.chosen, self.distances)

    def bounds(self, time):
        found = exit_probability(self.sigmas, time)
        return found.lower[0], found.upper[0]

    def curve(self, times, paths, seed=0, drift=None):
        barriers = CompiledBarriers.of(RULE, None, self.chosen, self.rows, self.distances)
        ours, generators = np.zeros(1, np.int64), [np.random.default_rng(seed)]
        curve = simulate_exit(self.z[None], barriers, ours, times[None], paths, generators, drift)
        assert curve.step_error == [0.0]  # of linear rules nothing is biased
        return SimpleNamespace(**{name: part[0] for name, part in vars(curve).items()})


def one_boundary(r, time):
    return float(mpmath.erfc(r / mpmath.sqrt(2 * time)))


def interval(below, above, time):
    """Probability that Brownian motion from 0 has left (-below, above): the sine series."""
    rates = np.arange(1, 121, 2) * np.pi / (below + above)
    terms = np.sin(rates * below) * np.exp(-(rates**2) * time / 2.0) / rates
    return 1.0 - 4.0 / (below + above) * float(terms.sum())


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
    assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("p", [1e-300, 1e-9, 0.3, 0.9, 1 - 1e-9])
def test_the_quantile_of_a_boundary_is_that_of_the_levy_distribution(p):
    sigmas = np.array([0.01, 1.7, 40.0])
    expected = levy.ppf(p, scale=sigmas**2)
    assert_allclose(face_quantile(sigmas, p), expected, rtol=1e-6)
    assert face_quantile(np.zeros(1), p)[0] == 0.0


@cells
@pytest.mark.parametrize("time", [0.05, 0.5, 4.0])
def test_bounds_hold_the_closed_form_and_are_attained(name, time):
    """Below by parallel boundaries on one side, both by one alone; above the chances add up."""
    cell, exact = EXACT[name]
    lower, upper = np.array(cell.bounds(time)) / exact(time)
    assert lower <= 1.0 + 1e-12
    assert upper >= 1.0 - 1e-12
    assert name in ("orthogonal", "between") or lower > 1.0 - 1e-12
    assert name != "one" or upper < 1.0 + 1e-12
    if name == "orthogonal":
        both = one_boundary(0.8, time) + one_boundary(0.7, time)
        assert_allclose(upper * exact(time), min(both, 1.0), rtol=1e-12)


@cells
@pytest.mark.parametrize("steps", [2, 12])
def test_the_simulated_bracket_holds_the_closed_form_however_coarse(name, steps):
    cell, exact = EXACT[name]
    curve = cell.curve(np.linspace(0.0, 1.2, steps + 1)[1:], 4000)
    expected = np.array([exact(time) for time in curve.times])
    assert (curve.lower - 4.0 * curve.lower_error <= expected).all()
    assert (expected <= curve.upper + 4.0 * curve.upper_error).all()
    if name == "one":  # sum and maximum are the same
        assert_array_equal(curve.lower, curve.upper)


@pytest.mark.parametrize("steps", [1, 3])
def test_one_boundary_is_simulated_to_three_digits(steps):
    curve = SINGLE.curve(np.linspace(0.0, 1.2, steps + 1)[1:], 300_000)
    expected = np.array([EXACT["one"][1](time) for time in curve.times])
    assert_array_less(np.abs(curve.lower - expected), 4.0 * curve.lower_error)
    assert (curve.lower_error < 1e-3).all()


def test_simulations_come_together():
    widths = []
    for steps in (1, 4, 32):
        curve = BETWEEN.curve(np.linspace(0.0, 1.2, steps + 1)[1:], 2000)
        widths.append(curve.upper[-1] - curve.lower[-1])
    assert widths[0] > 3.0 * widths[1] > 9.0 * widths[2] >= 0.0
    times = np.linspace(0.0, 0.5, 4)[1:]
    curves = [BETWEEN.curve(times, 100, seed) for seed in range(150)]
    for bound in ("lower", "upper"):
        spread = np.std([getattr(curve, bound) for curve in curves], axis=0, ddof=1)
        stated = np.mean([getattr(curve, f"{bound}_error") for curve in curves], axis=0)
        assert_allclose(stated, spread, rtol=0.25)
    r = SINGLE.sigmas[0, 0]
    curve = SINGLE.curve(np.geomspace(0.01, 100.0, 60), 3000)
    median = np.searchsorted(curve.times, levy.ppf(0.5, scale=r**2))
    assert curve.lower[median - 1] - 3.0 * curve.lower_error[median - 1] < 0.5
    assert curve.upper[median] + 3.0 * curve.upper_error[median] > 0.5


@pytest.fixture(scope="module")
def random_cell():
    random = np.random.default_rng(13)
    weight, factor = random.standard_normal((6, 4)), 0.4 * random.standard_normal((4, 3))
    return Cell(weight, weight @ random.standard_normal(4), 2, factor), factor


@pytest.mark.parametrize("is_drifting", [False, True])
def test_the_bracket_is_what_inputs_in_small_steps_do(random_cell, is_drifting):
    """Inputs themselves move, and their chosen set is looked at: a lower bound at finite steps."""
    cell, factor = random_cell
    random = np.random.default_rng(5)
    gamma = 0.9 * random.standard_normal(4) * is_drifting
    drift = cell.weight @ gamma if is_drifting else None
    curve = cell.curve(np.linspace(0.0, 0.3, 21)[1:], 4000, drift=drift)
    lower, upper = still = cell.bounds(0.3)
    if is_drifting:
        nu = noises.boundary_sigmas(drift[None], cell.chosen, cell.distances)
        bounds = exit_probability(cell.sigmas, 0.3, drifts=nu)
        lower, upper = bounds.lower[0], bounds.upper[0]
    paths, steps = 1500, 400
    moved, has_left = np.zeros((paths, 4)), np.zeros(paths, dtype=bool)
    for _ in range(steps):
        noise = random.standard_normal((paths, 3)) @ factor.T
        moved += 0.3 / steps * gamma + np.sqrt(0.3 / steps) * noise
        now = np.sort(top_k(cell.z + moved @ cell.weight.T, 2), axis=1)
        has_left |= (now != np.sort(cell.chosen[0])).any(axis=1)
    share, error = has_left.mean(), has_left.std() / np.sqrt(paths)
    assert 0.1 < share < 0.9
    assert share <= curve.upper[-1] + 4.0 * np.hypot(error, curve.upper_error[-1])
    # steps that are not looked between miss some crossings: about 0.58 of a step's deviation
    assert share >= curve.lower[-1] - 4.0 * np.hypot(error, curve.lower_error[-1]) - 0.03
    assert lower - 4.0 * error <= share <= upper + 4.0 * error
    if is_drifting:
        assert max(abs(share - still[0]), abs(lower - still[0])) > 0.02


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
    assert_allclose(exit_probability(cell.sigmas, earliest).upper, [p], rtol=1e-7)
    assert_allclose(exit_probability(cell.sigmas, latest).lower, [p], rtol=1e-9)


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
    assert_allclose(found, expected, rtol=1e-9)


def test_the_worked_drift_has_its_bridge_and_none_is_the_plain_probability():
    """From 1 with drift -0.8 and standard deviation 1.3, by 1.1: 0.68135."""
    cell = Cell([[1.0], [0.0]], [1.0, 0.0], 1, 1.3)
    drift = np.array([-0.8, 0.0])
    nu = noises.boundary_sigmas(drift[None], cell.chosen, cell.distances)
    found = exit_probability(cell.sigmas, 1.1, drifts=nu)
    assert_allclose([found.lower[0], found.upper[0]], 0.68135, atol=5e-6)
    curve = cell.curve(np.array([0.4, 1.1]), 200_000, drift=drift)
    assert abs(curve.lower[-1] - found.lower[0]) < 4.0 * curve.lower_error[-1] < 0.01
    sigmas = np.array([0.0, 1e-8, 0.3, 5.0, np.inf])
    plain = log_crossing_probability(sigmas, 0.7)
    assert_allclose(log_crossing_probability(sigmas, 0.7, np.zeros(5)), plain, rtol=1e-12)
    # for ever: certain towards the boundary, exp(-2 nu r) away from it
    for_ever = np.exp(log_crossing_probability(np.full(2, 1.5), 1e9, np.array([-0.1, 0.4])))
    assert_allclose(for_ever, [1.0, np.exp(-1.2)], rtol=1e-9)
    far = log_crossing_probability(np.array([400.0]), 1.0, np.array([0.5]))
    with mpmath.workdps(60):
        r, nu = mpmath.mpf(400), mpmath.mpf(1) / 2
        ahead = mpmath.erfc((r + nu) / mpmath.sqrt(2)) / 2
        back = mpmath.exp(-2 * nu * r) * mpmath.erfc((r - nu) / mpmath.sqrt(2)) / 2
        assert_allclose(far, [float(mpmath.log(ahead + back))], rtol=1e-12)


# -------------------------------------------------------------------------------------------- exits
WALKS = 10_000


def walked(weight, logits, k, factor=1.0, walks=WALKS, seed=0, **most):
    weight, z = np.array(weight, dtype=np.float64), np.array([logits], dtype=np.float64)
    distances = noises.noisy_distances(weight, factor, np.arange(len(weight)) / 7.0)
    rows, generator = noises.noisy_rows(weight, factor), np.random.default_rng(seed)
    barriers = CompiledBarriers.of(RULE, None, top_k(z, k), rows, distances)
    return exit_boundaries(z, barriers, np.zeros(1, np.int64), walks, generator, **most)


def share_of(exits, out, into):
    pair = exits.pair[0]
    return float(((pair[:, 0] == out) & (pair[:, 1] == into)).mean())


def close(found, expected, number=WALKS):
    assert abs(found - expected) < 4.0 * np.sqrt(expected * (1.0 - expected) / number)


@pytest.mark.parametrize("degrees", [30.0, 60.0, 90.0, 150.0, 179.0])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_wedge_is_left_through_its_sides_as_their_angles_say(degrees, share):
    """Harmonic measure of the side at angle 0, from the angle a of a wedge of angle A, is 1 - a/A."""
    whole = np.deg2rad(degrees)
    at = 1.7 * np.array([np.cos(share * whole), np.sin(share * whole)])
    inward = np.array([[0.0, 1.0], [np.sin(whole), -np.cos(whole)]])
    # a third coordinate along the edge changes nothing
    weight = np.vstack([np.zeros(3), np.hstack([-inward * [[1.0], [2.5]], np.zeros((2, 1))])])
    exits = walked(weight, [0.0, *(weight[1:, :2] @ at)], 1)
    close(share_of(exits, 0, 1), 1.0 - share)
    assert share_of(exits, 0, 1) + share_of(exits, 0, 2) == 1.0


def test_cells_are_left_as_closed_forms_say_or_at_once_or_never():
    """Squared, the quadrant is a half-plane, whose exit law is Cauchy's."""
    a, b = 0.5, 0.9
    exits = walked([[0.0, 0.0], [-1.0, 0.0], [0.0, -1.0]], [0.0, -a, -b], 1, walks=100_000)
    real, imaginary = a * a - b * b, 2.0 * a * b
    shares = []
    for near in (0.3, 0.1, 0.03):
        ends = [((near * a) ** 2 + side * real) / imaginary for side in (1.0, -1.0)]
        expected = float(np.arctan(ends).sum() / np.pi)
        shares.append(float((exits.second < near).mean()))
        close(shares[-1], expected, 100_000)
    # exits are of order 1: shares near another boundary vanish, here with the square
    assert shares[1] < 0.2 * shares[0]
    exits = walked([[-1.0], [0.0], [3.0]], [-0.6, 0.0, -3.3], 1)
    close(share_of(exits, 1, 0), 1.1 / 1.7)
    # in a few steps of a thousand the farther end is crossed and left again before the nearer one
    assert (np.abs(exits.second - 1.7 / 0.6) < 1e-4).mean() > 0.995
    exits = walked([[1.0, 0.5, 2.0], [0.0, 0.0, 0.0]], [40.0, 0.0], 1)
    assert share_of(exits, 0, 1) == 1.0
    factor = np.array([[3.0, 0.0], [0.0, 1.0]])
    exits = walked([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0.0, -0.9, -0.9], 1, factor)
    close(share_of(exits, 0, 1), 2.0 / np.pi * np.arctan(3.0))
    assert (walked([[1.0], [2.0]], [0.3, 0.1], 2, walks=3).pair == -1).all()
    # the noise moves no difference of logits
    still = walked([[1.0, 0.0], [1.0, 1.0]], [0.3, 0.1], 1, np.array([1.0, 0.0]), walks=3)
    assert (still.pair == -1).all()
    assert np.isnan(still.second).all()
    tied = walked([[1.0, 0.0], [0.0, 1.0], [0.3, 0.2]], [0.3, 0.3, -2.0], 1, walks=3)
    assert_array_equal(tied.pair[0], [[0, 1]] * 3)
    assert (walked(np.eye(2), [1.0, 0.0], 1, walks=5, most_steps=0).pair == -1).all()


@pytest.mark.parametrize("experts", by_day([6, 40], [6]))
def test_pairs_are_those_of_inputs_in_small_steps(experts):
    random = np.random.default_rng(3)
    weight = random.standard_normal((experts, 12)) / np.sqrt(12.0)
    z = weight @ random.standard_normal(12)
    k, paths, walks = 2, 300, 6000
    exits = walked(weight, z, k, walks=walks)
    before = np.sort(top_k(z[None], k)[0])
    distance = 1.0 / np.maximum(noises.noisy_distances(weight, 1.0).inverse, 1e-300)
    chosen = np.isin(np.arange(experts), before)
    reach = float(((z[chosen, None] - z[~chosen]) / distance[np.ix_(chosen, ~chosen)]).min())
    moved, live = np.tile(z, (paths, 1)), np.ones(paths, dtype=bool)
    counts: dict[tuple[int, int], int] = {}
    for _ in range(40_000):
        step = 0.06 * reach * random.standard_normal((int(live.sum()), 12)) @ weight.T
        moved[live] += step
        now = np.sort(top_k(moved[live], k), axis=1)
        left = (now != before).any(axis=1)
        for after in now[left]:
            out, into = np.setdiff1d(before, after), np.setdiff1d(after, before)
            if len(out) == 1:
                counts[int(out[0]), int(into[0])] = counts.get((int(out[0]), int(into[0])), 0) + 1
        live[np.flatnonzero(live)[left]] = False
        if not live.any():
            break
    for (out, into), count in counts.items():
        share = count / paths
        error = np.sqrt(max(share * (1.0 - share), 1e-3) * (1.0 / paths + 1.0 / walks))
        assert abs(share_of(exits, out, into) - share) < 4.0 * error + 0.02
    assert max(counts.values()) < 0.97 * paths
