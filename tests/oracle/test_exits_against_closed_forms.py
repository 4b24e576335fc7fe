"""Oracle: the angles of a wedge, the ends of an interval, the harmonic measure of a quadrant, harmonic
functions of a ball, and paths in small steps.
"""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.exits import _end_of_line, exit_boundaries
from moegeom.geometry.noise import noisy_distances, noisy_rows
from moegeom.geometry.selection import top_k

WALKS = 40_000


def walked(weight, logits, k, factor=1.0, walks=WALKS, seed=0):
    weight, z = np.array(weight, dtype=np.float64), np.array([logits], dtype=np.float64)
    distances = noisy_distances(weight, factor, np.arange(len(weight)) / 7.0)
    rows, generator = noisy_rows(weight, factor), np.random.default_rng(seed)
    return exit_boundaries(z, top_k(z, k), rows, distances, walks, generator)


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


def test_an_interval_is_left_as_in_gamblers_ruin():
    exits = walked([[-1.0], [0.0], [3.0]], [-0.6, 0.0, -3.3], 1)
    close(share_of(exits, 1, 0), 1.1 / 1.7)
    np.testing.assert_allclose(np.unique(np.round(exits.second, 5)), 1.7 / 0.6, atol=1e-4)


def test_one_boundary_alone_is_always_the_exit_however_far():
    exits = walked([[1.0, 0.5, 2.0], [0.0, 0.0, 0.0]], [40.0, 0.0], 1)
    assert share_of(exits, 0, 1) == 1.0


def test_the_next_boundary_at_the_exit_is_as_near_as_in_a_quadrant():
    """Squared, the quadrant is a half-plane, whose exit law is Cauchy's."""
    a, b = 0.5, 0.9
    exits = walked([[0.0, 0.0], [-1.0, 0.0], [0.0, -1.0]], [0.0, -a, -b], 1, walks=200_000)
    real, imaginary = a * a - b * b, 2.0 * a * b
    shares = []
    for near in (0.3, 0.1, 0.03):
        ends = [((near * a) ** 2 + side * real) / imaginary for side in (1.0, -1.0)]
        expected = float(np.arctan(ends).sum() / np.pi)
        shares.append(float((exits.second < near).mean()))
        close(shares[-1], expected, 200_000)
    # exits are of order 1: shares near another boundary vanish, here with the square
    assert shares[1] < 0.2 * shares[0]


def test_noise_that_is_wider_one_way_leaves_that_way():
    factor = np.array([[3.0, 0.0], [0.0, 1.0]])
    exits = walked([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0.0, -0.9, -0.9], 1, factor)
    close(share_of(exits, 0, 1), 2.0 / np.pi * np.arctan(3.0))


@pytest.mark.parametrize("experts", [6, 40])
def test_pairs_are_those_of_inputs_in_small_steps(experts):
    random = np.random.default_rng(3)
    weight = random.standard_normal((experts, 12)) / np.sqrt(12.0)
    z = weight @ random.standard_normal(12)
    k, paths, walks = 2, 1500, 6000
    exits = walked(weight, z, k, walks=walks)
    before = np.sort(top_k(z[None], k)[0])
    distance = 1.0 / np.maximum(noisy_distances(weight, 1.0).inverse, 1e-300)
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


def test_what_cannot_be_left_is_said_and_what_is_on_a_boundary_is_left_at_once():
    assert (walked([[1.0], [2.0]], [0.3, 0.1], 2, walks=3).pair == -1).all()
    # the noise moves no difference of logits
    still = walked([[1.0, 0.0], [1.0, 1.0]], [0.3, 0.1], 1, np.array([1.0, 0.0]), walks=3)
    assert (still.pair == -1).all()
    assert np.isnan(still.second).all()
    tied = walked([[1.0, 0.0], [0.0, 1.0], [0.3, 0.2]], [0.3, 0.3, -2.0], 1, walks=3)
    np.testing.assert_array_equal(tied.pair[0], [[0, 1]] * 3)
    few = exit_boundaries(
        np.array([[1.0, 0.0]]),
        np.int32([[0]]),
        np.eye(2),
        noisy_distances(np.eye(2), 1.0),
        5,
        np.random.default_rng(0),
        most_balls=0,
    )
    assert (few.pair == -1).all()


def ball_steps(places, centre_shift, dims, random):
    """Where balls that touch the sphere of radius 1 from inside are left."""
    radius = np.linalg.norm(places, axis=1)
    normal = -places / radius[:, None]
    line = random.standard_normal(places.shape)
    line /= np.linalg.norm(line, axis=1)[:, None]
    length = _end_of_line(line, normal, 1.0 - radius, np.full(len(places), centre_shift), random)
    return places + length[:, None] * line


@pytest.mark.parametrize("dims", [2, 3, 7])
@pytest.mark.parametrize("inwards", [0.0, 0.2, 5.0])
def test_harmonic_functions_keep_their_mean_from_ball_to_ball(dims, inwards):
    random = np.random.default_rng(dims)
    start = np.zeros(dims)
    start[0] = 0.4
    found = ball_steps(np.tile(start, (400_000, 1)), inwards, dims, random)
    tests = [
        (found[:, 0], start[0]),
        (found[:, 0] ** 2 - found[:, 1] ** 2, start[0] ** 2),
        (found[:, 0] ** 3 - 3.0 * found[:, 0] * found[:, 1] ** 2, start[0] ** 3),
    ]
    # exits of a ball of 5 reach far: their means are checked where they are finite enough
    for values, expected in tests if inwards < 1.0 else tests[:1]:
        error = values.std() / np.sqrt(len(values))
        assert abs(values.mean() - expected) < 5.0 * error
    centre = start - np.eye(dims)[0] * inwards
    np.testing.assert_allclose(np.linalg.norm(found - centre, axis=1), 0.6 + inwards, rtol=1e-9)


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_a_tie_of_more_experts_is_come_near_as_seldom_as_the_lemma_says(dims):
    """S0 Lemma A.27: to the radius rho around a tie of codimension n before R."""
    random = np.random.default_rng(0)
    at, radius, outer, number = 0.7, 0.1, 2.0, 20_000
    places = np.zeros((number, dims))
    places[:, 0] = at
    live, came = np.arange(number), np.zeros(number, dtype=bool)
    while len(live):
        now = places[live]
        distance = np.linalg.norm(now, axis=1)
        room = np.minimum(distance - radius, outer - distance)
        line = random.standard_normal(now.shape)
        line /= np.linalg.norm(line, axis=1)[:, None]
        length = _end_of_line(line, -now, room, np.zeros(len(now)), random)
        places[live] = now + length[:, None] * line
        distance = np.linalg.norm(places[live], axis=1)
        is_near = distance < radius + 1e-5
        came[live[is_near]] = True
        live = live[~is_near & (distance < outer - 1e-5)]
    if dims == 2:
        expected = np.log(outer / at) / np.log(outer / radius)
    else:
        power = 2.0 - dims
        expected = (at**power - outer**power) / (radius**power - outer**power)
    close(came.mean(), expected, number)
