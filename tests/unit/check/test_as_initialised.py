"""A router that was never trained is noted; a trained one is not, however early."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, RouterSet, Rule, Weights
from moegeom.engine.run_facts import initialised_facts
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import one_of_each
from tests.museum.healthy import trained
from tests.unit.check.conftest import outcome_of

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
