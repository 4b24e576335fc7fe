"""Models that are trained beside each other: what they share, and what transformers makes of one;
from text to the page: the attack, pairs, result files, and what is said of them.
"""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import binom, ttest_rel

from benchmarks.trained import compare, digits, page, text
from benchmarks.trained.claims import CLAIMS, values_of, verdict
from benchmarks.trained.evaluation import (
    affine_router,
    choice_figures,
    evaluate,
    flipped_share,
    gram_z,
    jump_over_output,
    recorded,
)
from benchmarks.trained.export import as_olmoe
from benchmarks.trained.methods import METHODS
from benchmarks.trained.model import is_of_router
from benchmarks.trained.paired import NOT_SEEN, Difference, difference_text, paired, spread_text
from benchmarks.trained.pictures import charts
from benchmarks.trained.records import ResultFile, read
from benchmarks.trained.settings import QUICK, Settings
from benchmarks.trained.studies import STUDIES
from benchmarks.trained.text import HeldOut, batches
from benchmarks.trained.training import build, routers_of, train

TINY = Settings(
    name="tiny",
    hidden=16,
    layers=2,
    heads=2,
    experts=4,
    top_k=2,
    width=8,
    length=24,
    sequences_per_domain=1,
    steps=3,
    seeds=1,
    renormalise=True,
    held_out_per_domain=2,
    router_dimension=4,
)


@pytest.fixture(scope="module")
def held_out():
    tokens = next(batches(TINY, 7))
    return HeldOut(tokens, tokens.flip(0), 0.0, 1)


def stirred(method, settings=TINY, seed=0):
    """An untrained model whose routers and experts differ enough to be told apart."""
    model = build(METHODS[method], settings, seed)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def test_the_same_seed_gives_the_same_bytes():
    first, second = (train(METHODS["smooth"], TINY, 0)[0] for _ in range(2))
    for run in (first, second):
        run |= {"seconds": 0.0, "figures": run["figures"] | {"ms_per_step": 0.0}}
    assert first == second
    assert train(METHODS["smooth"], TINY, 1)[0]["curves"] != first["curves"]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "top-k"])
def test_methods_share_every_initial_value_that_has_a_name_and_a_shape_in_common(method):
    base, other = (dict(build(METHODS[m], TINY, 3).named_parameters()) for m in ("top-k", method))
    shared = [n for n in base if n in other and base[n].shape == other[n].shape]
    assert {"embed_tokens.weight", "layers.1.self_attn.q_proj.weight"} <= set(shared)
    for name in shared:
        if not is_of_router(name) or method.startswith(("smooth", "relu")):
            assert_array_equal(base[name].detach(), other[name].detach(), err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_weight_and_is_evaluated(method, held_out):
    model = build(METHODS[method], TINY, 0)
    tokens = held_out.tokens
    logits, done = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss + sum(routed.loss for routed in done)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    for evaluated in (METHODS[method], *METHODS[method].also):
        evaluated.prepare(routers_of(model))
        figures = evaluate(model, held_out, evaluated, TINY)
        assert all(math.isfinite(value) for value in figures.values()), figures
        assert figures["bits"] > 0.0


@pytest.mark.parametrize("renormalise", [False, True])
def test_bits_per_byte_are_the_loss_of_transformers(renormalise, held_out):
    settings = dataclasses.replace(TINY, renormalise=renormalise)
    model = stirred("top-k", settings)
    figures = evaluate(model, held_out, METHODS["top-k"], settings)
    exported = as_olmoe(model, settings)
    with torch.no_grad():
        loss = exported(input_ids=held_out.tokens, labels=held_out.tokens).loss.item()
    assert_allclose(figures["bits"] * math.log(2.0), loss, rtol=1e-5)


def test_what_olmoe_has_not_is_not_exported():
    with pytest.raises(ValueError, match="shared"):
        as_olmoe(build(METHODS["top-k"], TINY, 0), dataclasses.replace(TINY, shared=1))


def test_widths_count_shared_experts_dense_layers_and_the_experts_that_a_block_stands_for(held_out):
    widths = {
        name: evaluate(build(METHODS[name], TINY, 0), held_out, METHODS[name], TINY)["active_width"]
        for name in ("dense-active", "dense-total", "top-k", "smear")
    }
    assert widths == {"dense-active": 16.0, "dense-total": 32.0, "top-k": 16.0, "smear": 16.0}
    method = METHODS["top-k"]
    shared = dataclasses.replace(TINY, shared=1)
    assert evaluate(build(method, shared, 0), held_out, method, shared)["active_width"] == 24.0
    dense = dataclasses.replace(TINY, first_dense=2)
    figures = evaluate(build(method, dense, 0), held_out, method, dense)
    assert figures["active_width"] == 16.0
    assert "max_vio" not in figures


def test_costs_and_temperatures_are_those_of_the_settings():
    macs = {n: build(METHODS[n], TINY, 0).layers[0].mlp.router_macs(24) for n in METHODS}
    assert macs["dense-active"] == 0
    assert macs["top-k"] == macs["smooth"] == macs["relu"] == macs["centred"] == 4 * 16
    # a projection to 4 numbers, and 4 rows there
    assert macs["cosine"] == 4 * 16 + 4 * 4
    # 2 merged experts of width 16, 3 matrices each, and 2 rows of logits
    assert macs["smear"] == 2 * 3 * 16 * 16 + 2 * 16
    hot = dataclasses.replace(TINY, temperature=4.0)
    plain, heated = stirred("top-k"), stirred("top-k", hot)
    inputs = torch.randn(5, 3, TINY.hidden, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = plain.layers[0].mlp(inputs)[1].logits
        second = heated.layers[0].mlp(inputs)[1].logits
    assert_allclose(second, first / 4.0, rtol=1e-6)


def test_gradients_through_the_factor_reach_rows_or_inputs_alone():
    """Each side is that of the whole gradient or of none through the factor."""
    slopes = {}
    for name in ("", "-detached", "-rows", "-inputs"):
        router = routers_of(stirred(f"smooth-near-0{name}"))[0].double()
        with torch.no_grad():
            router.theta.fill_(0.5)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(40, TINY.hidden, generator=generator, dtype=torch.float64).requires_grad_()
        weights = torch.randn(40, TINY.experts, generator=generator, dtype=torch.float64)
        routed = router(x)
        assert routed.num_chosen.max() > TINY.top_k
        (routed.dense() * weights).sum().backward()
        slopes[name] = router.weight.grad, x.grad
    for side, (reached, other) in enumerate((("-rows", "-inputs"), ("-inputs", "-rows"))):
        assert_allclose(slopes[reached][side], slopes[""][side], atol=1e-12)
        assert_allclose(slopes[other][side], slopes["-detached"][side], atol=1e-12)
        assert abs(slopes[""][side] - slopes["-detached"][side]).max() > 1e-3


def test_figures_of_choices_are_those_of_counting():
    chosen = np.array([[0, 1], [1, 0], [2, -1], [0, 1]])
    found = choice_figures(chosen, 4)
    # three of seven slots for experts 0 and 1 each; fair are 7 / 4
    assert_allclose(found["max_vio"], 3 / (7 / 4) - 1)
    assert found["experts_per_token"] == 7 / 4
    # sets {0, 1} three times and {2} once: plug-in entropy and the correction 1 / (2 T)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + 1 / 8
    assert_allclose(found["effective_sets"], math.exp(entropy))


def test_the_jump_is_the_difference_of_outputs_on_either_side_of_the_boundary(held_out):
    model = stirred("top-k").double()
    block = model.layers[0].mlp
    with recorded(model.float()) as layers, torch.no_grad():
        model(held_out.tokens)
    inputs = layers[0].inputs[0].numpy()
    rows = block.router.weight.detach().numpy().astype(np.float64)
    router = affine_router(rows, None, TINY)
    jumps = []
    for y in inputs.astype(np.float64):
        order = np.argsort(-(rows @ y))
        pairs = [rows[i] - rows[j] for i in order[:2] for j in order[2:]]
        normal = min((pair / np.linalg.norm(pair) for pair in pairs), key=lambda n: n @ y)
        edge = y - normal @ y * normal
        sides = torch.from_numpy(np.stack([edge + 1e-6 * normal, edge - 1e-6 * normal]))
        with torch.no_grad():
            here, there = block.double()(sides.unsqueeze(0))[0][0].numpy()
        jumps.append(np.linalg.norm(here - there) / np.linalg.norm(here))
    with torch.no_grad():
        found = jump_over_output(router, inputs, block.float())
    assert_allclose(found, np.median(jumps), rtol=1e-3)


def test_flips_are_those_of_torch_in_bfloat16():
    random = np.random.default_rng(5)
    rows, inputs = random.standard_normal((8, 16)), random.standard_normal((4000, 16))
    inputs = inputs.astype(np.float32)
    low = (
        torch.from_numpy(inputs).bfloat16().double()
        @ torch.from_numpy(rows.astype(np.float32)).bfloat16().double().T
    )
    exact = np.argsort(-(inputs.astype(np.float64) @ rows.astype(np.float32).T), axis=1)[:, :2]
    rounded = torch.sort(low.bfloat16().float(), dim=1, descending=True, stable=True)[1][:, :2]
    differ = (np.sort(exact, 1) != np.sort(rounded.numpy(), 1)).any(axis=1)
    assert 10 < differ.sum() < 400
    assert flipped_share(affine_router(rows, None, TINY), inputs) == differ.mean()


def test_random_rows_have_a_gram_z_near_0_and_orthonormal_ones_a_large_one():
    random = np.random.default_rng(2)
    drawn = [gram_z(random.standard_normal((8, 16)), np.ones(16), False) for _ in range(200)]
    assert abs(np.mean(drawn)) < 0.3
    assert_allclose(np.std(drawn), 1.0, atol=0.2)
    assert gram_z(np.eye(8, 16), np.ones(16), False) > 5.0
    # a vector that all rows share chooses nothing under an affine rule
    rows = random.standard_normal((8, 16))
    assert_allclose(gram_z(rows + 3.0, np.ones(16), True), gram_z(rows, np.ones(16), True))


# ------------------------------------------------------------------------ result files and the page
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
