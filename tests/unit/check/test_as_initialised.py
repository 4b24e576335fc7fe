"""A router that was never trained is noted; a trained one is not, however early."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, RouterSet, Rule, Weights
from moegeom.engine.run_facts import initialised_facts
from moegeom.router.facts import drawn_rows
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import by_day, one_of_each
from tests.museum.healthy import trained
from tests.unit.check.conftest import GATE, Case, outcome_of

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
STEPS = sorted(path.relative_to(SAMPLES) for path in SAMPLES.glob("*/step_*"))


def noted(path: Path) -> set[str]:
    outcome = outcome_of(gate(GateRequest(str(path))), "MGG207")
    return {router for finding in outcome.findings for router in finding.routers}


@pytest.mark.parametrize("step", one_of_each(STEPS, lambda step: step.parent), ids=str)
def test_no_router_of_a_sample_is_taken_for_untrained(step):
    assert noted(SAMPLES / step) == set()


def test_routers_drawn_anew_are_noted_and_do_not_fail_the_gate(tmp_path):
    def drawn(weight, layer):
        return 0.02 * np.random.default_rng([12, layer]).standard_normal(weight.shape)

    model = trained("olmoe-balanced/step_1500")
    assert noted(model.edited("weight", drawn).write(tmp_path / "all")) == {
        "text/0", "text/1", "text/2"
    }  # fmt: skip
    assert noted(model.edited("weight", drawn, (1,)).write(tmp_path / "one")) == {"text/1"}
    assert gate(GateRequest(str(tmp_path / "one"))).verdict.exit_code == 0


def routers(weight: np.ndarray) -> RouterSet:
    rule = Rule(1, "softmax", Weights("scores"))
    provenance = Provenance("made up", ("w",), "", "BF16")
    one = Router("text/0", "text", 0, weight.astype(np.float32), rule, provenance)
    return RouterSet((one,), "m", "f", "", "", initializer_range=0.02)


def errors(weight: np.ndarray) -> np.ndarray:
    """The three distances in standard errors, as the check has them."""
    facts = routers(weight)
    (row,) = initialised_facts(facts, facts.routers)["routers"]
    n = row["num_weights"]
    return np.array(
        [
            (row["std"] / 0.02 - 1.0) * np.sqrt(2.0 * n),
            row["mean"] / 0.02 * np.sqrt(n),
            row["kurtosis"] * np.sqrt(n / 24.0),
        ]
    )


def test_the_three_distances_are_standard_normal_for_what_was_drawn():
    random = np.random.default_rng(5)
    drawn = [0.02 * random.standard_normal((16, 64)) for _ in range(800)]
    scores = np.array([errors(w.astype(ml_dtypes.bfloat16)) for w in drawn])
    np.testing.assert_allclose(scores.mean(axis=0), 0.0, atol=0.15)
    np.testing.assert_allclose(scores.std(axis=0), 1.0, atol=0.12)
    assert (np.abs(scores) <= 3.0).all(axis=1).mean() > 0.97


def test_without_a_number_in_the_config_nothing_is_judged():
    facts = routers(np.ones((16, 64)))
    none = RouterSet(facts.routers, "m", "f", "", "")
    assert initialised_facts(none, none.routers) == {}
    assert initialised_facts(facts, facts.routers)["routers"] == []


# -------------------------------------------------------------------- some rows of a router
SIGMA = 0.02


def partly_drawn(experts: int, hidden: int, drawn: int, seed: int = 0) -> np.ndarray:
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
    named = drawn_rows(partly_drawn(64, 1024, drawn, seed), SIGMA)
    assert set(named) <= set(range(64 - drawn, 64))
    assert len(named) >= 0.8 * drawn


@pytest.mark.parametrize("seed", by_day(range(60), range(6)))
def test_trained_rows_of_the_drawn_length_are_not_named(seed):
    for shape in ((16, 256), (64, 1024), (256, 512)):
        assert drawn_rows(partly_drawn(*shape, 0, seed), SIGMA) == [], shape


LIKE = {
    "of another spread": lambda r, rows: 1.1 * rows,
    "uniform": lambda r, rows: SIGMA * r.uniform(-np.sqrt(3), np.sqrt(3), rows.shape),
    "of heavy tails": lambda r, rows: SIGMA * r.standard_t(5, rows.shape) * np.sqrt(3 / 5),
    "with a mean": lambda r, rows: np.sqrt(0.99) * rows + 0.1 * SIGMA,
    "along one direction": lambda r, rows: (
        0.9 * rows + np.sqrt(0.19) * SIGMA * r.standard_normal((1, rows.shape[1]))
    ),
}


def test_rows_that_resemble_drawn_ones_are_few_or_broken_are_not_named():
    for what, change in LIKE.items():
        weight = partly_drawn(64, 1024, 32)
        weight[32:] = change(np.random.default_rng(2), weight[32:])
        assert drawn_rows(weight, SIGMA) == [], what
    for shape in ((16, 64, 8), (16, 256, 8), (16, 1024, 3)):
        assert drawn_rows(partly_drawn(*shape), SIGMA) == []
    weight = partly_drawn(64, 1024, 32)
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
