"""Border shares of ties, their sums and ratios, by directions, draws and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from moegeom.geometry.border_shares import (
    CONVENTIONS,
    TieSums,
    border_bound_log10,
    border_shares,
    direction_logits,
    log_leading_share,
    log_order_ratio,
    orthonormal_border_share,
    published_border_bound_log10,
    tie_factor,
    tie_sums,
)
from moegeom.geometry.boundary.orders import free_logit_distance, tie_spread


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 3, 1), 0.1739947), ((8, 3, 2), 0.4093402), ((64, 8, 1), 0.0113547), ((4, 2, 3), 1.0)],
)
def test_borders_of_orthonormal_rows(shape, expected):
    assert orthonormal_border_share(*shape) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orthonormal_rows_are_a_case_of_any_rows(order):
    sums = tie_sums(np.eye(8), 3, order, 4000, 1000, np.random.default_rng(0))
    flats = math.comb(8, order + 1)
    assert sums.flats == flats
    expected = flats * orthonormal_border_share(8, 3, order)
    assert abs(sums.borders - expected) < 4 * sums.borders_error
    assert sums.borders_error < 0.01 * expected
    # factors of orthonormal rows are all one number
    assert sums.weighted == pytest.approx(sums.borders / math.sqrt(order + 1), rel=1e-12)


@pytest.mark.parametrize("tied", [(0, 1), (2, 5), (0, 3, 4), (1, 2, 4, 5)])
def test_borders_are_those_of_directions_on_the_flat(tied):
    random = np.random.default_rng(3)
    rows, k = random.standard_normal((7, 10)), 3
    gram = rows @ rows.T
    found = border_shares(gram, direction_logits(gram, 40_000, random), k, np.array([tied])).mean()
    away = rows[list(tied[1:])] - rows[tied[0]]
    flat = np.linalg.svd(away)[2][len(away) :]
    logits = random.standard_normal((40_000, len(flat))) @ flat @ rows.T
    above = (np.delete(logits, tied, axis=1) > logits[:, [tied[0]]]).sum(axis=1)
    order = len(tied) - 1
    direct = ((above >= k - order) & (above <= k - 1)).mean()
    assert found == pytest.approx(direct, abs=0.012)


def test_equal_and_dependent_rows_leave_no_flat():
    for rows in (np.ones((3, 2)), np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])):
        gram = rows @ rows.T
        logits = direction_logits(gram, 80, np.random.default_rng(0))
        assert np.isnan(border_shares(gram, logits, 1, np.array([[0, 1, 2]]))).all()
        assert tie_factor(gram, np.array([0, 1, 2])) == math.inf
        assert tie_sums(gram, 1, 2, 80, 10, np.random.default_rng(0)).borders == 0.0
    assert tie_sums(np.eye(3), 1, 3, 80, 10, np.random.default_rng(0)).flats == 0


def test_a_sample_of_ties_is_scaled_and_knows_its_error():
    random = np.random.default_rng(4)
    rows = random.standard_normal((12, 20)) * np.linspace(0.5, 2.0, 12)[:, None]
    gram = rows @ rows.T
    whole = tie_sums(gram, 4, 2, 4000, 1000, random)
    parts = [tie_sums(gram, 4, 2, 800, 60, np.random.default_rng(seed)) for seed in range(40)]
    away = [(part.borders - whole.borders) / part.borders_error for part in parts]
    assert 0.6 < np.std(away) < 1.5
    assert abs(np.mean(away)) < 0.6
    assert all(part.flats == whole.flats == 220 for part in parts)


def test_factors_are_those_of_every_base_and_of_singular_values():
    rows = np.random.default_rng(5).standard_normal((6, 9))
    gram = rows @ rows.T
    for tied in itertools.permutations((1, 3, 4)):
        values = np.linalg.svd(rows[list(tied[1:])] - rows[tied[0]], compute_uv=False)
        expected = 1.0 / np.prod(values)
        assert tie_factor(gram, np.array(tied)) == pytest.approx(expected, rel=1e-12)
    assert tie_factor(np.eye(4), np.arange(3)) == pytest.approx(3**-0.5)


# ------------------------------------------------------------------------------------ leading terms
def test_leading_shares_are_what_lies_near_ties_that_all_meet_in_the_middle():
    random = np.random.default_rng(6)
    rows, width = random.standard_normal((4, 6)), 0.004
    inside = random.standard_normal((400_000, 6))
    inside *= (random.random(len(inside)) ** (1 / 6) / np.linalg.norm(inside, axis=1))[:, None]
    logits = inside @ rows.T
    least = np.full(len(inside), np.inf)
    order = np.sort(logits, axis=1)
    for i, j in itertools.combinations(range(4), 2):
        # two tie at the border of two where one of the others is above both and one below
        middle = (logits[:, i] + logits[:, j]) / 2
        is_border = (
            (order > middle[:, None]).sum(axis=1)
            - (logits[:, [i, j]] > middle[:, None]).sum(axis=1)
        ) == 1
        away = np.abs(logits[:, i] - logits[:, j]) / np.linalg.norm(rows[i] - rows[j])
        least = np.minimum(least, np.where(is_border, away, np.inf))
    sums = tie_sums(rows @ rows.T, 2, 1, 40_000, 100, random)
    assert (least < width).mean() == pytest.approx(
        math.exp(log_leading_share(sums, 6, width)), rel=0.05
    )


def test_conventions_of_a_width_are_told_apart_by_draws_in_three_dimensions():
    eps = 0.02
    random = np.random.default_rng(7)
    inside = random.standard_normal((2_000_000, 3))
    inside *= (random.random(len(inside)) ** (1 / 3) / np.linalg.norm(inside, axis=1))[:, None]
    spread = {order: np.empty(0) for order in (1, 2)}
    near = {}
    for order in (1, 2):
        spread = tie_spread(inside, 1, order)
        half = free_logit_distance(inside, 1, order)
        of_base = np.sort(np.abs(inside - inside.max(axis=1, keepdims=True)), axis=1)[:, order]
        shares = {"half_spread": half, "spread": spread, "base": of_base}
        near[order] = {name: float((away < eps).mean()) for name, away in shares.items()}
    assert near[2]["half_spread"] / near[1]["half_spread"] == pytest.approx(0.0205, abs=0.001)
    sums = [tie_sums(np.eye(3), 1, order, 40_000, 9, random) for order in (1, 2)]
    for name in ("half_spread", "spread"):
        expected = math.exp(log_order_ratio(sums[1], sums[0], 3, eps, name))
        assert near[2][name] / near[1][name] == pytest.approx(expected, rel=0.06), name
    base = math.exp(log_order_ratio(sums[1], sums[0], 3, eps, "base"))
    assert base == pytest.approx(0.01386, abs=1e-4)
    assert log_order_ratio(sums[0], sums[0], 3, eps, "spread") == 0.0


def test_without_borders_there_is_no_share_and_no_ratio():
    none, some = TieSums(2, 0, 0.0, 0.0, 0.0, 0.0), TieSums(1, 3, 1.0, 0.1, 1.0, 0.1)
    assert log_leading_share(none, 8, 0.1) == -math.inf
    for name in CONVENTIONS:
        assert log_order_ratio(none, some, 8, 0.1, name) == -math.inf
        assert math.isnan(log_order_ratio(some, none, 8, 0.1, name))


# ------------------------------------------------------------------------------------------- bounds
def test_a_border_is_never_smaller_than_its_bound():
    random = np.random.default_rng(8)
    told = 0
    for _ in range(30):
        rows = random.standard_normal((6, 8))
        tied, above = (0, 1), tuple(i for i in range(2, 6) if random.random() < 0.5)
        away = rows[1] - rows[0]
        logits = random.standard_normal((20_000, 8))
        logits -= np.outer(logits @ away, away) / (away @ away)
        logits = logits @ rows.T
        is_above = logits[:, 2:] > logits[:, :1]
        wanted = np.isin(np.arange(2, 6), above)
        share = float((is_above == wanted).all(axis=1).mean())
        bound = border_bound_log10(rows, tied, above)
        assert 10.0**bound <= share + 4 * math.sqrt(share * (1 - share) / 20_000) + 1e-4
        told += 10.0**bound > share / 50
    assert told > 20


def test_bounds_at_their_corners():
    assert border_bound_log10(np.eye(3), (0, 1, 2), ()) == 0.0
    # one other expert is above on half of the directions
    assert border_bound_log10(np.eye(3), (0, 1), (2,)) == math.log10(0.5)
    # a row between the tied ones is never above both
    between = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    assert border_bound_log10(between, (0, 1), (2,)) == -math.inf
    # two others on one line, on the same and on opposite sides
    line = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    assert border_bound_log10(line, (0, 1), (2, 3)) == math.log10(0.5)
    assert border_bound_log10(line, (0, 1), (2,)) == -math.inf


def test_the_published_bound_sees_dimensions_that_no_row_has():
    assert published_border_bound_log10(4096, 1, 0.3) == pytest.approx(-3380, abs=15)
    # orthonormal rows: any 7 of the 62 others are as likely to be above
    share = math.log10(orthonormal_border_share(64, 8, 1) / math.comb(62, 7))
    assert share - 50 < border_bound_log10(np.eye(64), (0, 1), tuple(range(2, 9))) < share
