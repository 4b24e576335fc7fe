"""From text to the page: the attack, pairs, result files, and what is said of them."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import binom, ttest_rel

from benchmarks.trained import compare, digits, page, text
from benchmarks.trained.claims import CLAIMS, values_of, verdict
from benchmarks.trained.methods import METHODS
from benchmarks.trained.paired import NOT_SEEN, Difference, difference_text, paired, spread_text
from benchmarks.trained.pictures import charts
from benchmarks.trained.records import ResultFile, read
from benchmarks.trained.settings import QUICK, Settings
from benchmarks.trained.studies import STUDIES

DOCS = Path(__file__).parents[3] / "docs"


def test_an_attack_replaces_whole_words_at_its_rate_but_for_chance():
    data = b"if (x_1 == 0x7f) return caf\xc3\xa9;\n" * 400
    attacked, words = text.attack(data, random.Random(1))
    source = random.Random(1)
    wanted = re.sub(
        rb"[0-9A-Za-z]+", lambda word: b"AAA" if source.random() < 0.025 else word[0], data
    )
    assert attacked == wanted
    assert len(words) == len(re.findall(rb"[0-9A-Za-z]+", data))
    assert [attacked[start : start + 3] for start, hit in words if hit] == [b"AAA"] * sum(
        hit for _, hit in words
    )
    assert re.split(rb"[0-9A-Za-z]+", attacked) == re.split(rb"[0-9A-Za-z]+", data)
    found = text.held_out(48, 8)
    assert found.tokens.shape == found.attacked.shape == (32, 48)
    hits = round(found.attacked_share * found.num_words)
    low, high = binom.ppf([1e-4, 1 - 1e-4], found.num_words, text.RATE)
    assert low <= hits <= high
    assert bytes(found.tokens.numpy().astype(np.uint8)).count(b"AAA") <= hits


def test_batches_are_the_same_for_a_seed_and_have_as_much_of_each_domain():
    first, again, other = (next(text.batches(QUICK, seed)) for seed in (0, 0, 1))
    assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    for part, domain in zip(first.split(QUICK.sequences_per_domain), text.corpus(), strict=True):
        for row in part:
            assert bytes(row.numpy().astype(np.uint8)) in domain.training


def test_paired_differences_are_those_of_scipy():
    values, base = [1.2, 1.9, 1.4, 1.7], [1.0, 1.8, 1.5, 1.1]
    found, ours = ttest_rel(values, base).confidence_interval(0.95), paired(values, base)
    assert_allclose([ours.mean - ours.half, ours.mean + ours.half], [found.low, found.high])
    assert ours.is_seen == (found.low > 0 or found.high < 0)


def test_a_verdict_and_an_interval_say_what_was_seen():
    assert difference_text(Difference(-0.02, 0.021, 3), 3) == f"{NOT_SEEN} (-0.020 +- 0.021)"
    assert difference_text(Difference(-0.02, 0.019, 3), 3) == "-0.020 +- 0.019"
    assert not paired([1.0], [2.0]).is_seen
    assert "one" not in difference_text(paired([1.0, 2.0], [1.0, 2.1]), 2)
    assert spread_text([1.0, 2.0, 3.0], 2) == "2.00 +- 1.00"
    assert spread_text([1.0], 1) == "1.0"
    for mean, sign, words in (
        (-0.02, -1, "seen: "),
        (-0.02, 1, "the opposite is seen: "),
        (-0.02, 0, "a difference is seen: "),
        (0.005, -1, NOT_SEEN),
        (0.005, 0, f"a difference is {NOT_SEEN}"),
    ):
        assert verdict(Difference(mean, 0.01, 3), sign).startswith(words)
        assert verdict(Difference(math.nan, math.nan, 0), sign) == "has not run"


FACTS = {"claim": "c", "settings": {"steps": 3}, "core": "x", "versions": {}, "text": {}}


def test_a_result_file_grows_by_a_run_and_refuses_runs_of_other_settings(tmp_path):
    path = tmp_path / "a.json"
    for seed in range(2):
        held = ResultFile.open(path, FACTS)
        assert len(held.runs) == seed
        assert not held.has(method="m", seed=seed)
        held.add([{"method": "m", "seed": seed}])
        assert json.loads(path.read_text())["runs"][seed]["seed"] == seed
        assert read(path).has(method="m", seed=seed)
    with pytest.raises(ValueError, match="another settings"):
        ResultFile.open(path, FACTS | {"settings": {"steps": 4}})
    assert list(tmp_path.iterdir()) == [path]


def test_runs_that_are_there_are_not_made_again(tmp_path):
    made = []

    def train(name, settings, seed):
        made.append((name, seed))
        return [{"method": name, "seed": seed, "figures": {"accuracy": 2.0 + seed}}]

    suite = compare.Suite("digits", QUICK, ("top-k", "smooth"), "top-k", train)
    suite = dataclasses.replace(suite, settings=dataclasses.replace(QUICK, seeds=1))
    compare.run_suite(suite, tmp_path, ("top-k",))
    suite = dataclasses.replace(suite, settings=dataclasses.replace(QUICK, seeds=2))
    held = compare.run_suite(suite, tmp_path, ("top-k", "smooth"))
    assert made == [("top-k", 0), ("smooth", 0), ("top-k", 1), ("smooth", 1)]
    assert compare.said(held.runs[-1], held, suite).endswith("accuracy 3.0000, over top-k 1.0000")


def test_studies_change_settings_that_there_are_and_name_runs_by_their_values():
    names = {field.name for field in dataclasses.fields(Settings)}
    for study in STUDIES.values():
        assert study.method in METHODS
        assert study.base in study.values
        for changes in study.values.values():
            assert set(changes) <= names
        assert dataclasses.replace(QUICK, **study.values[study.base]) == QUICK or study.base == "1"
    tiny = dataclasses.replace(
        QUICK, hidden=16, heads=2, experts=4, width=8, length=24, steps=2, held_out_per_domain=1
    )
    (run,) = STUDIES["shared"].train("2", tiny, 0)
    assert run["method"] == "2"
    assert run["figures"]["active_width"] == (2 + 2) * 8


def test_images_are_tested_where_no_training_saw_them_with_an_accuracy_for_every_angle():
    domains = digits.angles()
    assert len({len(d.training) + len(d.test) for d in domains.values()}) == 1
    upright = domains[0]
    seen = {row.tobytes() for row in upright.training.numpy()}
    assert not seen & {row.tobytes() for row in upright.test.numpy()}
    assert_array_equal(domains[45].test_class, upright.test_class)
    images, classes = next(digits.batches(digits.DIGITS, 0, 30))
    assert len(images) == len(classes) == 3 * digits.DIGITS.sequences_per_domain
    left_out = {row.tobytes() for row in domains[30].training.numpy()}
    assert not left_out & {row.tobytes() for row in images.numpy()}
    settings = dataclasses.replace(digits.DIGITS, steps=2, hidden=16, experts=4, width=8)
    (run,) = digits.train(METHODS["cosine"], settings, 0)
    angles = [run["figures"][f"accuracy_{angle}"] for angle in digits.ANGLES]
    assert_allclose(run["figures"]["accuracy"], np.mean(angles), rtol=1e-5)


def made_up(methods: dict[str, float]) -> ResultFile:
    """Results in which every method is apart from top-k by a number, or by nothing but noise."""
    runs = [
        {
            "method": name,
            "seed": seed,
            "commit": "0123abc",
            "parameters": 5,
            "seconds": 60.0,
            "figures": dict.fromkeys(
                ("bits", "bits_attacked", "active_width", "ms_per_step", "experts_per_token"),
                2.0 + 0.3 * seed + gap + 0.001 * (-1) ** seed,
            ),
            "curves": [
                {"step": s, "bits": 3.0, "experts_per_token": [2.0], "usage": [0.5, 0.5]}
                for s in (1, 2)
            ],
        }
        for name, gap in methods.items()
        for seed in range(3)
    ]
    facts = {"settings": dataclasses.asdict(QUICK), "core": "a core", "versions": {"torch": "2"}}
    return ResultFile(Path("x"), facts, runs)


def test_the_committed_page_is_that_of_the_committed_results_which_say_how_they_were_made():
    assert (DOCS / "comparison.md").read_text("utf-8") == page.page(page.load_results())
    results = page.load_results()
    assert results
    for name, held in results.items():
        assert {"claim", "settings", "core", "versions", "text"} <= set(held.facts), name
        for run in held.runs:
            assert re.fullmatch(r"[0-9a-f]{7,40}", run["commit"])
            assert run["steps"] == held.facts["settings"]["steps"]
            assert all(math.isfinite(value) for value in run["figures"].values())
        keys = [(run["method"], run["seed"]) for run in held.runs]
        assert len(keys) == len(set(keys))


def test_a_study_repeats_the_quick_setting_to_the_last_digit():
    """Two processes, days or commits apart, made the same bytes."""
    results = page.load_results()
    for name in STUDIES.keys() & {run.removeprefix("study-") for run in results}:
        study = STUDIES[name]
        (same,) = [v for v, c in study.values.items() if dataclasses.replace(QUICK, **c) == QUICK]
        quick = values_of(results["quick"], study.method, "bits")
        for seed, bits in values_of(results[f"study-{name}"], same, "bits").items():
            assert bits == quick[seed]


def test_claims_speak_of_methods_and_suites_that_there_are():
    named = {one.name for method in METHODS.values() for one in (method, *method.also)}
    for claim in CLAIMS:
        assert bool(claim.comparisons) != bool(claim.why)
        for asked in claim.comparisons:
            study = STUDIES.get(asked.suite.removeprefix("study-"))
            entries = set(study.values) if study else named
            assert asked.method in entries
            assert asked.base in entries or isinstance(asked.base, float)


def test_a_figure_at_the_end_is_that_of_the_curve_and_pictures_are_of_what_there_is():
    held = made_up({"top-k": 0.0})
    held.runs[1]["curves"][-1]["experts_per_token"] = [2.5, 2.0]
    assert values_of(held, "top-k", "end_experts_per_token") == {0: 2.0, 1: 2.25, 2: 2.0}
    drawn = charts(made_up({"top-k": 0.0, "osr": 0.1}))
    assert set(drawn) == set(page.PICTURES)
    assert [name for name, _ in drawn["trained-loss"].columns] == ["top-k", "osr"]
    assert len(drawn["trained-usage"].panels) == 2
