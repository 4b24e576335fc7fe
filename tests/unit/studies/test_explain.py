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
    Tried,
)
from moegeom.studies.explain.verdict import Evidence, verdict
from tests.unit.document.records import sample_run


def tried(name: str, share: float, credit: float | None = None, **facts) -> Tried:
    text = name.replace("_", " ")
    known: dict[str, Any] = {
        "cause": "logits rounded",
        "ties": "any",
        "repaired": 0.0,
        "standing": 0.0,
    } | facts
    return Tried(name, text, share=share, credit=share if credit is None else credit, **known)


def layer(number: int, *found: Tried, agreement: float = 0.9, **facts) -> LayerEvidence:
    known: dict[str, Any] = {
        "num_tokens": 1000,
        "num_clean": 900,
        "num_tried": 1000 if found else 0,
    }
    known |= {"tried": found, "num_renamed": 0, "noise": None, "weights": None} | facts
    return LayerEvidence(router=f"text/{number}", agreement=agreement, **known)


def evidence(*layers: LayerEvidence, **facts) -> Evidence:
    known: dict[str, Any] = {
        "placing": None,
        "num_padding": 0,
        "num_matched": 1000,
        "any_share": 0.1,
    }
    known |= {"log_probs": None, "has_other_inputs": False, "is_of_another": False}
    return Evidence(layers=layers, names=str, **(known | facts))


def explanation(*layers: LayerEvidence, said: CauseVerdict | None = None) -> Explanation:
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
        num_padding=0,
        layers=layers,
        log_probs=None,
        verdict=said or CauseVerdict("inconclusive", ""),
        not_looked_at=("one thing", "another thing"),
    )


def shown(found: Explanation, form: str, view: View) -> str:
    return render(document(found, view), form, view)


NAMES = [f"change_{letter}" for letter in "abcdefgh"]


def many(seed: int) -> list[LayerEvidence]:
    random = np.random.default_rng(seed)
    rows = []
    for number in range(3):
        found = [tried("nothing", 0.9)]
        # a hypothesis that does not apply at a router was not tried there
        kept = [name for name in NAMES if number == 0 or random.random() < 0.8]
        found += [tried(n, s := random.uniform(0.5, 1.0), s * random.uniform(0.9, 1)) for n in kept]
        rows.append(layer(number, *found))
    return rows


@pytest.mark.parametrize("form", ["table", "md"])
@pytest.mark.parametrize("all_layers", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_hypotheses_stand_in_the_order_of_the_figures_that_are_printed(form, all_layers, seed):
    found = explanation(*many(seed))
    text = shown(found, form, View(200, all_layers=all_layers))
    shares = [
        100.0 if last == "100" else float(last)
        for line in text.splitlines()
        if re.search(r"change [a-h]", line) and "leaves equal" not in line
        for last in re.findall(r"([\d.]+) %", line)[-1:]
    ]
    assert len(shares) == (len(NAMES) if all_layers or form == "md" else 5)
    assert shares == sorted(shares, reverse=True)


def test_the_short_table_is_the_beginning_of_the_long_one():
    found = explanation(*many(1))
    short, long = (
        re.findall(r"change [a-h]", shown(found, "table", View(200, all_layers=every)))
        for every in (False, True)
    )
    assert long[: len(short) - 1] == short[:-1]


@pytest.mark.parametrize("form", ["table", "md"])
def test_a_share_that_only_ties_allow_is_marked(form):
    held, plain = tried("rounded", 1.0, 0.8), tried("other", 0.7)
    found = explanation(layer(0, tried("nothing", 0.95), held, plain))
    text = shown(found, form, View(200)).replace("\\*", "*")
    assert re.search(r"rounded \*", text)
    assert not re.search(r"other \*", text)
    assert "leaves equal scores" in text
    without = explanation(layer(0, tried("nothing", 0.95), plain))
    assert "leaves equal" not in shown(without, form, View(200))


@pytest.mark.parametrize("form", ["table", "md", "json"])
def test_what_was_not_looked_at_is_counted_in_the_verdict(form):
    text = shown(explanation(layer(0)), form, View(300))
    said = text if form != "table" else " ".join(text.split())
    assert "2 things" in said if form != "json" else '"not_looked_at"' in said


def test_a_page_holds_every_layer_and_hypothesis_of_which_a_screen_shows_some():
    found = explanation(*(layer(n, tried("nothing", 0.9), tried("x", 0.8)) for n in range(30)))
    screen, page = (shown(found, form, View(100)) for form in ("table", "md"))
    assert len(re.findall(r"^\W+\d+ .* 900 ", page, re.MULTILINE)) == 30
    assert len(re.findall(r"^\W+\d+ .* 900 ", screen, re.MULTILINE)) == 8
    assert "and 22 more layers: --all-layers" in screen
    assert "--all-layers" not in page


def test_where_nothing_disagrees_a_screen_asks_nothing_and_a_page_shows_what_was_tried():
    same = layer(0, tried("nothing", 1.0), tried("change_a", 0.9))
    found = explanation(same, said=CauseVerdict("no disagreement", ""))
    screen, page = (shown(found, form, View(100, all_layers=True)) for form in ("table", "md"))
    assert [word for word in ("causes", "change a", "sets") if word in screen] == []
    assert [word for word in ("causes", "change a", "sets") if word not in page] == []


def test_no_verdict_says_that_no_bug_is_needed():
    assert not any("no bug" in text for pair in VERDICTS.values() for text in pair)


def noisy_layer(missing: float, *more: Tried) -> LayerEvidence:
    noise = FlipNoise(0.002, 0.1, 1.0, missing, missing, 0.001, 0, ())
    nothing = tried("nothing", 1.0 - missing)
    return layer(0, nothing, *more, agreement=1.0 - missing, noise=noise)


def test_noise_is_the_verdict_only_where_a_hypothesis_could_have_won():
    enough = verdict(evidence(noisy_layer(0.02, tried("rounded", 0.97))))
    assert enough.cause == "arithmetic noise only"
    assert "Nothing in the list explains it (tried: 1 hypotheses)." in enough.detail
    few = verdict(evidence(noisy_layer(0.009, tried("rounded", 0.97))))
    assert few.cause == "inconclusive"
    assert "too few" in few.detail
    untried = dataclasses.replace(noisy_layer(0.02), tried=(), num_tried=0)
    assert verdict(evidence(untried)).cause == "inconclusive"


def test_another_fingerprint_is_said_before_noise_and_a_found_cause_before_it():
    noise = noisy_layer(0.02, tried("rounded", 0.97))
    assert verdict(evidence(noise, is_of_another=True)).cause == "another checkpoint"
    explains = tried("rounded", 1.0, repaired=1.0, standing=5.0)
    found = verdict(evidence(noisy_layer(0.02, explains), is_of_another=True))
    assert found.cause == "logits rounded"


def test_dice_are_unrelated_and_experts_of_other_numbers_are_not():
    random = layer(0, tried("nothing", 0.1), agreement=0.1, beyond_chance=0.01)
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
