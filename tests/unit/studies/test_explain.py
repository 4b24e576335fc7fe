"""What a verdict of explain may say, and that its table does not contradict it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.geometry.rows import common_choices, overlap_beyond_chance
from moegeom.studies.explain.document import document
from moegeom.studies.explain.record import (
    VERDICTS,
    CauseVerdict,
    Explanation,
    FlipNoise,
    LayerEvidence,
    NamedFault,
    WeightRule,
)
from moegeom.studies.explain.verdict import Evidence, verdict
from moegeom.studies.faults.exchangeable import Spread, Uneven
from moegeom.studies.faults.scope import TokenRegion
from moegeom.studies.faults.score import Fault
from tests.unit.document.records import sample_run

EVEN = Spread(("text/0",), 40, ())


def fault(name: str, bits: float, **facts: Any) -> Fault:
    """A fault of all tokens at the first router, that explains all of it."""
    inside = np.ones(10, bool)
    known: dict[str, Any] = {
        "cause": "logits rounded",
        "region": TokenRegion(inside, "", 0.0),
        "routers": ("text/0",),
        "explained": 1.0,
        "reproduced": {"text/0": 1.0},
        "before": {"text/0": 0.9},
        "mended": 1.0,
    }
    return Fault(name=name, text=name.replace("_", " "), bits=bits, **(known | facts))


def told(name: str, bits: float, scope: str = "") -> NamedFault:
    text = name.replace("_", " ")
    shares = {"text/0": 1.0}, {"text/0": 0.9}
    return NamedFault(name, text, "logits rounded", bits, scope, 1.0, ("text/0",), *shares, 1.0)


def layer(number: int, agreement: float = 0.9, **facts: Any) -> LayerEvidence:
    known: dict[str, Any] = {"num_tokens": 1000, "num_clean": 900, "num_routed": 1000}
    known |= {"num_tried": 9, "num_differ": round(1000 * (1.0 - agreement))}
    known |= {"reproduced": agreement, "bits": 500.0, "num_renamed": 0, "noise": None}
    return LayerEvidence(
        f"text/{number}", agreement=agreement, **(known | {"weights": None} | facts)
    )


def evidence(*layers: LayerEvidence, **facts: Any) -> Evidence:
    known: dict[str, Any] = {"faults": (), "spread": EVEN, "num_matched": 1000, "any_share": 0.1}
    known |= {"log_probs": None, "has_other_inputs": False, "is_of_another": False}
    return Evidence(layers=layers, names=str, **(known | facts))


def explanation(
    *layers: LayerEvidence, faults: tuple[NamedFault, ...] = (), said: CauseVerdict | None = None
) -> Explanation:
    run = sample_run()
    other = {"name": "o", "engine": "", "stage": "ids", "num_tokens": 1000, "notes": []}
    return Explanation(
        run=run,
        other=other,
        against="",
        inputs_of="A",
        num_matched=1000,
        num_examined=1000,
        any_share=0.1,
        layers=layers,
        faults=faults,
        spread=EVEN,
        log_probs=None,
        verdict=said or CauseVerdict("inconclusive", ""),
        not_looked_at=("one thing", "another thing"),
    )


def shown(found: Explanation, form: str, view: View) -> str:
    return render(document(found, view), form, view)


def many(seed: int) -> tuple[NamedFault, ...]:
    """In the order of what they save, as the study returns them."""
    bits = np.sort(np.random.default_rng(seed).uniform(1.0, 900.0, 8))[::-1]
    return tuple(told(f"change_{letter}", b) for letter, b in zip("abcdefgh", bits, strict=True))


@pytest.mark.parametrize("form", ["table", "md"])
@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_faults_stand_in_the_order_of_the_bits_that_are_printed(form, detail, seed):
    found = explanation(layer(0), faults=many(seed))
    text = shown(found, form, View(200, detail=detail))
    bits = [
        int(re.findall(r"(\d+)[ |]*$", line)[0])
        for line in text.splitlines()
        if re.search(r"change [a-h]", line)
    ]
    assert len(bits) == (8 if detail or form == "md" else 5)
    assert bits == sorted(bits, reverse=True)


def test_a_screen_leaves_out_what_saves_nothing():
    found = explanation(layer(0), faults=(told("good", 50.0), told("bad", -3.0)))
    screen, page = (shown(found, form, View(200)) for form in ("table", "md"))
    assert "bad" not in screen
    assert "bad" in page


@pytest.mark.parametrize("form", ["table", "md", "json"])
def test_what_was_not_looked_at_is_counted_in_the_verdict(form):
    text = shown(explanation(layer(0)), form, View(300))
    said = text if form != "table" else " ".join(text.split())
    assert "2 things" in said if form != "json" else '"not_looked_at"' in said


def test_a_page_holds_every_layer_of_which_a_screen_shows_some():
    found = explanation(*(layer(n, 0.5 + 0.01 * n) for n in range(30)))
    screen, page = (shown(found, form, View(100)) for form in ("table", "md"))
    assert len(re.findall(r"^\W+\d+ .* 900 ", page, re.MULTILINE)) == 30
    assert len(re.findall(r"^\W+\d+ .* 900 ", screen, re.MULTILINE)) == 8
    assert "and 22 more layers: --detail" in screen
    assert "--detail" not in page


def test_layers_of_which_the_same_is_said_share_a_line():
    found = explanation(*(layer(n, 0.8 if n == 3 else 0.9) for n in range(30)))
    screen = shown(found, "table", View(100))
    rows = re.findall(r"^  (\S.*?)  .* 900 ", screen, re.MULTILINE)
    assert rows == ["0-2 (3)", "3", "4-29 (26)"]


def test_where_nothing_disagrees_a_screen_asks_nothing_and_a_page_shows_what_was_tried():
    found = explanation(layer(0, 1.0), faults=many(0), said=CauseVerdict("no disagreement", ""))
    screen, page = (shown(found, form, View(100, detail=True)) for form in ("table", "md"))
    assert [word for word in ("causes", "change a", "sets") if word in screen] == []
    assert [word for word in ("causes", "change a", "sets") if word not in page] == []


def test_no_verdict_says_that_no_bug_is_needed():
    assert not any("no bug" in text for pair in VERDICTS.values() for text in pair)


def noisy(missing: float = 0.02, **facts: Any) -> LayerEvidence:
    noise = FlipNoise(0.002, 0.1, 1.0, missing, missing, 0.001, 0, ())
    return layer(0, 1.0 - missing, noise=noise, **facts)


def test_noise_is_the_verdict_only_where_it_was_tested_how_it_is_spread():
    found = verdict(evidence(noisy()))
    assert found.cause == "arithmetic noise only"
    assert "None of the 9 operators" in found.detail
    assert "spread as noise is (level 0.001 over 5 tests)" in found.detail
    few = verdict(evidence(noisy(), spread=Spread(("text/0",), 19, ())))
    assert few.cause == "inconclusive"
    assert "19 flips are too few" in few.detail
    untried = verdict(evidence(noisy(num_routed=0)))
    assert untried.cause == "inconclusive"
    odd = Spread(("text/0",), 40, (Uneven("documents", "documents 3 hold all", 1e-9),))
    uneven = verdict(evidence(noisy(), spread=odd))
    assert uneven.cause == "inconclusive"
    assert "documents 3 hold all" in uneven.detail


def test_a_fault_is_believed_where_it_leads_every_other_cause():
    alone = verdict(evidence(noisy(), faults=(fault("x", 100.0),)))
    assert alone.cause == "logits rounded"
    close = fault("y", 95.0, cause="bias missing")
    two = verdict(evidence(noisy(), faults=(fault("x", 100.0), close)))
    assert two.cause == "inconclusive"
    assert "x" in two.detail
    assert "y" in two.detail
    far = fault("y", 60.0, cause="bias missing")
    assert verdict(evidence(noisy(), faults=(fault("x", 100.0), far))).cause == "logits rounded"
    same = fault("y", 99.0)
    assert verdict(evidence(noisy(), faults=(fault("x", 100.0), same))).cause == "logits rounded"


@pytest.mark.parametrize(
    "facts",
    [{"explained": 0.05}, {"inherits": True}, {"bits": 20.0}],
    ids=["explains little", "inherits", "saves little"],
)
def test_a_fault_that_explains_little_is_not_believed(facts):
    weak = fault("x", **({"bits": 100.0} | facts))
    assert verdict(evidence(noisy(), faults=(weak,))).cause == "arithmetic noise only"


def test_a_fault_that_leaves_what_is_not_noise_is_not_believed_alone():
    odd = Spread(("text/0",), 40, (Uneven("documents", "documents 3 hold all", 1e-9),))
    half = {"text/0": 0.96}
    part = fault("x", 100.0, cause="bias missing", reproduced=half)
    found = verdict(evidence(noisy(), faults=(part,), spread=odd))
    assert found.cause == "inconclusive"
    assert "would explain 60 %" in found.detail
    whole = fault("x", 100.0, cause="bias missing")
    assert verdict(evidence(noisy(), faults=(whole,), spread=odd)).cause == "bias missing"


def test_weights_are_judged_first_where_sets_still_agree():
    rule = WeightRule(500, 0.4, None, "without the scaling factor", 0.0)
    first = layer(0, 1.0, weights=rule)
    behind = dataclasses.replace(noisy(0.3), router="text/1")
    found = verdict(evidence(first, behind))
    assert (found.cause, found.router) == ("routing weights differ", "text/0")
    dropped = dataclasses.replace(rule, zeros=0.1, zeros_even=0.3)
    found = verdict(evidence(layer(0, 1.0, weights=dropped), behind))
    assert found.cause == "capacity"
    fewer = dataclasses.replace(rule, zeros=0.5, zeros_even=1.0)
    found = verdict(evidence(layer(0, 1.0, weights=fewer), behind))
    assert found.cause == "routing weights differ"


def test_what_is_fitted_to_b_gives_way_to_what_is_not():
    fitted = fault("x", 1000.0, cause="bias differs", is_fitted=True)
    plain = fault("y", 900.0, cause="bias missing")
    assert verdict(evidence(noisy(), faults=(fitted, plain))).cause == "bias missing"
    far = fault("y", 800.0, cause="bias missing")
    assert verdict(evidence(noisy(), faults=(fitted, far))).cause == "bias differs"


def test_rounding_that_mends_no_set_is_not_believed():
    nothing = fault("x", 100.0, mended=0.0)
    assert verdict(evidence(noisy(), faults=(nothing,))).cause == "arithmetic noise only"


def test_weights_that_no_rule_explains_need_the_inputs_of_b():
    rule = WeightRule(500, 0.4, None, "renormalised", 0.3)
    first = layer(0, 1.0, weights=rule)
    assert verdict(evidence(first)).cause == "inconclusive"
    known = verdict(evidence(first, has_other_inputs=True))
    assert known.cause == "routing weights differ"


def test_weights_of_some_tokens_are_told_where_their_inputs_are_known():
    rule = WeightRule(500, 0.001, None, "renormalised", 0.3, outlying=0.02)
    first = layer(0, 1.0, weights=rule)
    found = verdict(evidence(first, has_other_inputs=True))
    assert found.cause == "routing weights differ"
    assert "2 % of the tokens" in found.detail
    assert verdict(evidence(first)).cause == "no disagreement"


def test_another_rule_has_to_explain_the_weights_of_some_tokens():
    rule = WeightRule(500, 0.01, None, "renormalised", 0.02, outlying=0.02, outlying_error=0.08)
    assert verdict(evidence(layer(0, 1.0, weights=rule))).cause == "no disagreement"
    fits = dataclasses.replace(rule, nearest_error=0.001)
    found = verdict(evidence(layer(0, 1.0, weights=fits)))
    assert found.cause == "routing weights differ"
    assert "those of 2 % of the tokens much more than the others" in found.detail


def test_a_fault_that_leaves_much_of_b_on_its_own_inputs_is_not_believed():
    part = fault("x", 100.0, cause="bias missing", reproduced={"text/0": 0.96})
    found = verdict(evidence(noisy(), faults=(part,), has_other_inputs=True))
    assert found.cause == "inconclusive"
    assert verdict(evidence(noisy(), faults=(part,))).cause == "bias missing"


def test_another_fingerprint_is_said_before_noise_and_a_found_cause_before_it():
    assert verdict(evidence(noisy(), is_of_another=True)).cause == "another checkpoint"
    found = verdict(evidence(noisy(), faults=(fault("x", 100.0),), is_of_another=True))
    assert found.cause == "logits rounded"


def test_dice_are_unrelated_and_experts_of_other_numbers_are_not():
    random = layer(0, 0.1, beyond_chance=0.01)
    dice = dataclasses.replace(random, beyond_chance_renamed=0.04)
    assert verdict(evidence(dice)).cause == "unrelated"
    renamed = dataclasses.replace(random, beyond_chance_renamed=0.9)
    assert verdict(evidence(renamed)).cause == "inconclusive"


@pytest.mark.parametrize("seed", range(4))
def test_overlap_beyond_chance_of_single_experts_is_kappa(seed):
    random = np.random.default_rng(seed)
    mine = random.integers(0, 6, 400)
    theirs = np.where(random.random(400) < 0.4, mine, random.integers(0, 6, 400))
    counts = common_choices(mine[:, None], theirs[:, None], 6)
    found = overlap_beyond_chance(counts, np.arange(6), 400)
    np.testing.assert_allclose(found, cohen_kappa_score(mine, theirs))


def test_overlap_of_equal_sets_is_one_and_that_of_dice_none():
    random = np.random.default_rng(0)
    mine, theirs = (random.random((20_000, 16)).argsort(axis=1)[:, :4] for _ in range(2))
    own = np.arange(16)
    equal = overlap_beyond_chance(common_choices(mine, mine, 16), own, 20_000)
    dice = overlap_beyond_chance(common_choices(mine, theirs, 16), own, 20_000)
    np.testing.assert_allclose(equal, 1.0)
    np.testing.assert_allclose(dice, 0.0, atol=0.02)
    numbers = random.permutation(16)
    renamed = common_choices(mine, numbers[mine], 16)
    np.testing.assert_allclose(overlap_beyond_chance(renamed, numbers, 20_000), 1.0)
