"""Rows that are as the config draws them are told from trained ones, by length, angle and shape."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.router.drawn_rows import drawn_rows
from tests.by_day import by_day
from tests.museum.exhibit_untrained import model as trained_model
from tests.unit.check.conftest import GATE, Case, outcome_of

SIGMA = 0.02


def router(experts: int, hidden: int, drawn: int, seed: int = 0) -> np.ndarray:
    """Rows of which the last ``drawn`` are new, the others of twelve directions and some noise."""
    random = np.random.default_rng([7, seed])
    directions = random.standard_normal((12, hidden))
    rows = random.standard_normal((experts, 12)) @ directions / np.sqrt(12.0)
    rows = 0.8 * rows + 0.6 * random.standard_normal((experts, hidden))
    rows *= SIGMA * np.exp(random.normal(0.0, 0.15, (experts, 1)))
    rows[experts - drawn :] = SIGMA * random.standard_normal((drawn, hidden))
    return rows


@pytest.mark.parametrize(
    ("drawn", "seed"),
    by_day(
        [(drawn, seed) for drawn in (8, 32, 48) for seed in range(20)],
        {"few": (8, 0), "half": (32, 1), "most": (48, 2)},
    ),
)
def test_new_rows_among_trained_ones_are_named(drawn, seed):
    named = drawn_rows(router(64, 1024, drawn, seed), SIGMA)
    assert set(named) <= set(range(64 - drawn, 64))
    assert len(named) >= 0.8 * drawn


@pytest.mark.parametrize("seed", by_day(range(60), range(6)))
def test_trained_rows_of_the_drawn_length_are_not_named(seed):
    for shape in ((16, 256), (64, 1024), (256, 512)):
        assert drawn_rows(router(*shape, 0, seed), SIGMA) == [], shape


LIKE = {
    "of another spread": lambda r, rows: 1.1 * rows,
    "uniform": lambda r, rows: SIGMA * r.uniform(-np.sqrt(3), np.sqrt(3), rows.shape),
    "of heavy tails": lambda r, rows: SIGMA * r.standard_t(5, rows.shape) * np.sqrt(3 / 5),
    "with a mean": lambda r, rows: np.sqrt(0.99) * rows + 0.1 * SIGMA,
    "along one direction": lambda r, rows: (
        0.9 * rows + np.sqrt(0.19) * SIGMA * r.standard_normal((1, rows.shape[1]))
    ),
}


@pytest.mark.parametrize("what", LIKE)
def test_rows_that_only_resemble_drawn_ones_are_not_named(what):
    weight = router(64, 1024, 32)
    weight[32:] = LIKE[what](np.random.default_rng(2), weight[32:])
    assert drawn_rows(weight, SIGMA) == []


def test_few_numbers_name_nothing():
    for experts, hidden, drawn in ((16, 64, 8), (16, 256, 8), (16, 1024, 3)):
        assert drawn_rows(router(experts, hidden, drawn), SIGMA) == []


def test_rows_that_are_not_finite_or_zero_do_no_harm():
    weight = router(64, 1024, 32)
    weight[0], weight[1] = np.nan, 0.0
    assert set(drawn_rows(weight, SIGMA)) <= set(range(32, 64))


def test_a_router_whose_rows_share_a_direction_is_not_taken_for_drawn(judged):
    def aligned(tensors, config):
        config["initializer_range"] = 0.02
        for layer in range(3):
            random = np.random.default_rng(layer)
            rows = random.standard_normal((16, 256))
            rows = np.sqrt(0.9) * rows + np.sqrt(0.1) * random.standard_normal(256)
            tensors[GATE.format(layer)] = (0.02 * rows).astype(np.float32)

    assert outcome_of(judged(Case(hidden=256), aligned), "MGG207").state == "passed"


def test_the_twin_of_the_museum_is_trained():
    assert trained_model().config["initializer_range"] == pytest.approx(0.8 / np.sqrt(512))
