"""What was planted in inputs, rows and biases is what `imbalance` calls the cause, and its price."""

import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from scipy.stats import norm

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.core.router import GroupMask, Router, Rule, Weights
from moegeom.core.tokens import TopLogits
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import draw_sample
from moegeom.geometry.balancing import Loads
from moegeom.geometry.reference_laws import LAWS, Law, attributed, reference_laws
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.studies.imbalance import study
from moegeom.studies.imbalance.document import document, imbalance_figures
from moegeom.studies.imbalance.record import (
    CAUSES,
    MEANINGS,
    Imbalance,
    ImbalanceRequest,
    RouterImbalance,
)
from moegeom.tokens.memory import hold
from moegeom.tokens.open import open_tokens
from tests.array_source import ArraySource
from tests.by_day import by_day
from tests.unit.studies.orthonormal import (
    EXPERTS,
    HIDDEN,
    LENGTH,
    TOP_K,
    inputs_of,
    router_of,
    source_of,
)
from tests.unit.studies.samples import (
    BALANCED,
    COLLAPSED,
    GROUPED,
    sides,
    unwrapped,
    widest,
    worded,
)

KERNELS, REQUEST = load_kernels("cpu"), ImbalanceRequest("model")

shown = functools.partial(worded, document)


def looked_at(router: Router, inputs: np.ndarray, **options) -> RouterImbalance:
    """At a level at which chance fails no test of what is meant; 5 % is tested by itself."""
    return of_source(router, source_of(inputs), **options)


def of_source(router: Router, source, **options) -> RouterImbalance:
    read = draw_sample(router, source, ComputeOptions(), study.sampled(router))
    return study.router_imbalance(router, read, KERNELS, 0.002, **({"request": REQUEST} | options))


def sample(model: Path, **options) -> Imbalance:
    checkpoint, tokens = map(str, sides(model))
    return study.imbalance(ImbalanceRequest(checkpoint, **({"tokens": tokens} | options)))


@functools.cache
def whole(name: str) -> Imbalance:
    """Of the sample with groups one layer."""
    return sample(BALANCED.parent / name, layers="1" if name == GROUPED.name else None)


OF_BALANCED, OF_COLLAPSED = BALANCED.name, COLLAPSED.name
ROWS = router_of().weight
WRONG_BIAS = 0.2 * np.random.default_rng(3).standard_normal(EXPERTS)
NO_BIAS = np.zeros(EXPERTS)


def test_draws_have_the_moments_of_their_law():
    random = np.random.default_rng(0)
    rows = random.standard_normal((5, 8))
    inputs = random.standard_normal((400, 8)) + random.standard_normal(8)
    bias = random.standard_normal(5)
    logits = inputs @ rows.T + bias
    about_mean, about_zero = inputs.var(axis=0).mean(), (inputs**2).mean()
    laws = reference_laws(logits, bias, rows, inputs)
    assert tuple(laws) == LAWS
    spread, gram = np.cov(logits.T, ddof=0), rows @ rows.T
    expected = {
        "isotropic": (bias, about_zero * gram),
        "mean": (logits.mean(axis=0), about_mean * gram),
        "covariance": (bias, spread),
        "gaussian": (logits.mean(axis=0), spread),
    }
    for name, (mean, covariance) in expected.items():
        drawn = laws[name].draw(200_000, np.random.default_rng(1))
        size = np.sqrt(np.diag(covariance))
        np.testing.assert_allclose((drawn.mean(axis=0) - mean) / size, 0.0, atol=0.01)
        unit = np.outer(size, size)
        np.testing.assert_allclose(np.cov(drawn.T) / unit, covariance / unit, atol=0.02)
    bare = reference_laws(np.eye(4), np.zeros(4), np.eye(4), None)
    assert set(bare) == {"covariance", "gaussian"}
    root = np.array([[1.0, 0.3], [-0.2, 0.8]])
    law = Law(root, np.array([0.4, 0.1]))
    drawn = law.draw(200_000, np.random.default_rng(2))
    expected = norm.cdf(0.3 / np.linalg.norm(np.array([1.0, -1.0]) @ root))
    assert (drawn[:, 0] > drawn[:, 1]).mean() == pytest.approx(expected, abs=0.005)


def test_additive_laws_are_parted_as_they_were_made():
    part = attributed({"isotropic": 1.0, "mean": 3.0, "covariance": 1.5, "gaussian": 3.5}, 3.4)
    assert (part.rows, part.mean, part.covariance) == (1.0, 2.0, 0.5)


def test_even_inputs_are_even_and_long_rows_and_wide_directions_causes_by_themselves():
    even = looked_at(router_of(), inputs_of(136))  # more than inputs are compared of
    assert (even.cause, even.is_pulled, even.num_tokens) == ("even", False, 136 * LENGTH)
    assert looked_at(router_of(), inputs_of(1)).cause == "few"
    assert looked_at(router_of(experts=TOP_K), inputs_of(8)).cause == "even"
    rows, inputs = router_of().weight, inputs_of(48)
    long = rows * np.geomspace(0.3, 3.0, len(rows), dtype=np.float32)[:, None]
    assert looked_at(router_of(weight=long), inputs).cause == "rows"
    wide = inputs + sum(4.0 * np.outer(inputs @ rows[n], rows[n]) for n in (5, 6))
    assert looked_at(router_of(), wide.astype(np.float32)).cause == "covariance"


@pytest.mark.parametrize(
    "case", ["hidden size 1", "equal rows", "zero rows", "equal inputs", "one token"]
)
def test_degenerate_routers_and_samples_have_values_or_none(case):
    """No search without end, no division by 0: every figure is a number or missing."""
    weight, inputs = ROWS, inputs_of(8)
    if case == "hidden size 1":
        weight, inputs = ROWS[:, :1], inputs[:, :1]
    elif case == "equal inputs":
        inputs = np.repeat(inputs[:1], len(inputs), axis=0)
    elif case == "one token":
        inputs = inputs[:1]
    else:
        weight = (case == "equal rows") * np.repeat(ROWS[:1], EXPERTS, axis=0)
    one = looked_at(router_of(weight=np.ascontiguousarray(weight)), inputs)
    assert np.isfinite(one.tokens.max_vio)
    assert one.cause in CAUSES
    shown(dataclasses.replace(whole(OF_BALANCED), routers=(one,)), detail=True)


def test_a_mean_along_one_row_is_the_cause_and_is_taken_away_with_it():
    router = router_of()
    lean = np.tile(1.5 * router.weight[3] + 0.8 * router.weight[4], (48, 1))
    inputs = inputs_of(48, lean)
    one = looked_at(router, inputs)
    assert one.cause == "mean input"
    part = one.parts["max_vio"]
    assert part.mean > 0.8 * (one.tokens.max_vio - part.rows)
    assert one.centring.max_vio < 0.3 * one.tokens.max_vio
    centred = looked_at(router, inputs - inputs.mean(axis=0))
    assert centred.pull < 1e-6
    assert centred.cause == "even"
    assert abs(centred.parts["log_effective_sets"].mean) < 0.05


def test_random_rows_and_a_common_mean_are_uneven_and_one_sentence_says_so():
    random = np.random.default_rng(5)
    rows = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    inputs = inputs_of(48, np.tile(random.standard_normal(HIDDEN), (48, 1)))
    one = looked_at(router_of(weight=rows), inputs)
    assert (one.cause, one.is_pulled) == ("mean input", False)
    turned = rows + np.outer(np.linspace(-2.0, 2.0, EXPERTS), inputs.mean(axis=0))
    towards = looked_at(router_of(weight=turned.astype(np.float32)), inputs)
    assert (towards.cause, towards.is_pulled) == ("mean input", True)
    for router, words in ((one, "lean on it no more than random ones"), (towards, "turn towards")):
        text = shown(dataclasses.replace(whole(OF_BALANCED), routers=(router,)))
        assert f"(rows {words}" in " ".join(text.split())


def test_where_every_token_has_a_set_of_its_own_no_number_of_sets_is_printed():
    """64 experts, 8 of them chosen: 4.4 billion sets, of which 4,096 tokens meet as many."""
    rows = np.random.default_rng(6).standard_normal((64, HIDDEN)).astype(np.float32)
    router = router_of(weight=rows, rule=Rule(8, "softmax", Weights("scores", True)))
    inputs = np.random.default_rng(7).standard_normal((4096, HIDDEN)).astype(np.float32)
    one = looked_at(router, inputs)
    assert one.tokens.num_sets > 4000
    assert one.tokens.coverage < 0.05
    assert one.token_law.log_effective_sets is None
    assert "log_effective_sets" not in one.parts
    assert one.tokens.pair_overlap == pytest.approx(8 / 64, abs=0.02)
    record = dataclasses.replace(whole(OF_BALANCED), routers=(one,))
    text = shown(record, detail=True)
    assert "effective sets are missing: hardly two tokens have one set" in text


@pytest.mark.parametrize("name", [OF_BALANCED, OF_COLLAPSED, GROUPED.name])
def test_parts_add_up_on_every_sample(name):
    record = whole(name)
    assert widest(shown(record, width=140)) <= 140
    for router in record.routers:
        assert router.laws[-1].law == "tokens"
        for figure, part in router.parts.items():
            assert part.tokens == pytest.approx(router.token_law.parted(figure), abs=1e-9)


def test_the_mean_input_collapsed_the_collapsed_sample_and_centring_evens_it():
    # figures of 8 other draws, by other code
    expected = {
        OF_BALANCED: [(6.80, 0.11, -0.55, -0.75), (6.94, 0.03, -0.55, -0.79)],
        OF_COLLAPSED: [(6.22, -2.53, -0.03, -0.42), (6.66, -2.64, -0.15, 0.07)],
    }
    for name, layers in expected.items():
        for router, parts in zip(whole(name).routers[:2], layers, strict=True):
            part = router.parts["log_effective_sets"]
            own = (part.rows, part.mean, part.covariance, part.rest)
            np.testing.assert_allclose(own, parts, atol=0.09)
            is_collapsed = name == OF_COLLAPSED
            assert router.cause == ("mean input" if is_collapsed else "even")
            assert router.is_pulled == is_collapsed
    expected = [(0.83, 25.5, 80.9, 0.02), (0.66, 51.3, 192.2, 0.19), (0.55, 44.8, 315.5, 0.21)]
    for router, figures in zip(whole(OF_COLLAPSED).routers, expected, strict=True):
        max_vio, before, sets, moved = figures
        assert router.centring.max_vio == pytest.approx(max_vio, abs=0.01)
        assert router.centring.other_documents < max_vio + 0.1
        assert np.exp(router.token_law.log_effective_sets) == pytest.approx(before, abs=0.1)
        assert router.centring.effective_sets == pytest.approx(sets, abs=0.1)
        assert router.centring.weight_moved == pytest.approx(moved, abs=0.01)


def test_the_page_has_the_mean_resultant_lengths_of_both_trainings():
    page = (BALANCED.parents[1] / "docs/imbalance.md").read_text("utf-8")
    lengths = {}
    for folder in (COLLAPSED, BALANCED):
        checkpoint, recording = map(str, sides(folder))
        routers = load_routers(open_checkpoint(checkpoint)).routers
        lengths[folder] = []
        for router in routers:
            source = open_tokens(recording, None, None, (router.name,))
            rows = draw_sample(router, source, ComputeOptions(), ("input",)).inputs
            unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            lengths[folder].append(f"{np.linalg.norm(unit.mean(axis=0)):.2f}"[1:])
    (a, b, c), (d, e, f) = lengths[COLLAPSED], lengths[BALANCED]
    assert f"{a}, {b} and {c} in the layers of the collapsed training, {d}, {e} and {f} in" in page


def test_laws_and_biases_are_written(tmp_path):
    table, biases = tmp_path / "laws.parquet", tmp_path / "centred.npz"
    (router,) = sample(COLLAPSED, layers="1", out=biases).routers
    (other,) = sample(COLLAPSED, layers="1", out=table).routers
    rows = pq.read_table(table).to_pylist()
    assert [row["law"] for row in rows] == [*LAWS, "tokens"]
    assert rows[-1]["max_vio"] == other.tokens.max_vio
    with np.load(biases) as stored:
        change = stored["text/1/centring_change_float64"]
        np.testing.assert_array_equal(change, router.centring.change)
    with pytest.raises(UsageError, match="exists already"):
        sample(COLLAPSED, out=table)


def test_logits_alone_say_no_cause(tmp_path):
    lean = 4.0 * (np.arange(16) < 2)
    random, logits = np.random.default_rng(0), tmp_path / "logits.npz"
    made = {f"text/{n}": random.standard_normal((1024, 16)) + lean for n in range(3)}
    np.savez(logits, **{name: z.astype(np.float32) for name, z in made.items()})
    record = sample(COLLAPSED, tokens=str(logits), stage="logits", layers="0,2")
    for router in record.routers:
        assert (router.cause, router.parts, router.pull_random) == ("unknown", {}, None)
        assert router.pull > 0.5
    assert "needs recorded router inputs" in unwrapped(shown(record, width=80))


# ------------------------------------------------------------------------------------------ evening
@pytest.fixture(scope="module")
def uneven():
    return looked_at(router_of(WRONG_BIAS), inputs_of(128))


def test_a_bad_update_of_the_bias_is_told_from_a_bad_router(uneven):
    assert uneven.evening.meaning == "holds"
    assert uneven.tokens.max_vio > 1.0
    assert uneven.evening.after.max_vio <= 1 / 512 + 1e-12
    assert all(half.after.max_vio < 0.4 for half in uneven.evening.held_out)
    # what was done wrong is undone, up to what the true router needs on these tokens
    right = looked_at(router_of(NO_BIAS), inputs_of(128))
    undone = np.array(uneven.evening.change) - right.evening.change + WRONG_BIAS - WRONG_BIAS.mean()
    assert np.abs(undone).max() < 0.01 * np.abs(WRONG_BIAS).max()
    assert [half.num_units for half in uneven.evening.held_out] == [64, 64]
    assert sum(half.num_tokens for half in uneven.evening.held_out) == uneven.num_tokens
    # held out is worse than in sample, and no worse than the limit
    for half in uneven.evening.held_out:
        assert uneven.evening.after.max_vio < half.after.max_vio < half.limit


def test_displaced_weight_and_changed_sets_are_those_of_the_new_choice(uneven):
    router = router_of(WRONG_BIAS)
    score = 1.0 / (1.0 + np.exp(-(inputs_of(128) @ router.weight.T).astype(np.float64)))
    q = score + router.selection_bias.astype(np.float64)
    first, second = (np.argsort(-b, axis=1)[:, :TOP_K] for b in (q, q + uneven.evening.change))
    lost = (first[:, :, None] != second[:, None, :]).all(axis=2)
    weight = np.take_along_axis(score, first, axis=1)
    weight /= weight.sum(axis=1, keepdims=True)
    displaced = (weight * lost).sum(axis=1).mean()
    np.testing.assert_allclose(uneven.evening.displaced_weight, displaced, rtol=1e-6)
    np.testing.assert_allclose(uneven.evening.changed_share, lost.any(axis=1).mean())
    np.testing.assert_allclose(np.mean(uneven.evening.change), 0.0, atol=1e-15)
    before, after = (np.take_along_axis(q, chosen, axis=1).mean() for chosen in (first, second))
    spread = np.sqrt((q.std(axis=1) ** 2).mean())
    np.testing.assert_allclose(uneven.evening.score_lost, (before - after) / spread, rtol=1e-5)


def test_an_even_router_is_left_alone_and_one_without_a_bias_told_so():
    lean = 0.6 * np.random.default_rng(4).standard_normal((64, HIDDEN))
    one = looked_at(router_of(NO_BIAS), inputs_of(64, lean))
    assert one.evening.meaning == "balanced"
    assert one.tokens.cv > 1.1 * one.cv_floor  # documents differ, tokens are not independent
    assert one.limit > one.max_vio_floor
    lean = np.broadcast_to(0.6 * ROWS[3], (64, HIDDEN))
    one = looked_at(router_of(), inputs_of(64, lean))
    assert (one.evening.meaning, one.evening.score_unit) == ("holds, no bias now", "logit")
    assert 3 in (expert for expert, *_ in one.evening.pushes()[-2:])
    assert one.evening.change[3] == min(one.evening.change)


def test_documents_of_two_kinds_in_the_two_halves_are_seen():
    """Even blocks lean to one expert and odd blocks to another: a bias for one is wrong for both."""
    half = (np.arange(128) + np.arange(128) // 16) % 2
    lean = np.where(half[:, None] == 0, 1.5 * ROWS[2], -1.5 * ROWS[2] + 1.5 * ROWS[9])
    one = looked_at(router_of(), inputs_of(128, lean))
    assert one.evening.meaning == "documents"
    assert one.evening.after.max_vio < 0.01


def test_equal_rows_are_named_and_equal_scores_too_unless_groups_tell_them_apart():
    rows = ROWS.copy()
    rows[[3, 7]] = rows[2]
    far = np.where(np.isin(np.arange(EXPERTS), (4, 5)), 60.0, 0.0)
    groups = GroupMask(4, 2, "top2_sum", -np.inf)
    routers = [
        (router_of(weight=rows), (((2, 3, 7), "equal rows"),)),
        (router_of(NO_BIAS, logit_bias=far), (((4, 5), "equal scores"),)),
        (router_of(NO_BIAS, groups, weight=rows), (((2, 3), "equal rows"),)),
    ]
    for router, duplicates in routers:
        assert looked_at(router, inputs_of(16)).evening.duplicates == duplicates


def test_tokens_that_are_all_alike_cannot_be_balanced_and_few_documents_tell_nothing():
    one = looked_at(router_of(), np.tile(inputs_of(1)[:1], (64 * LENGTH, 1)))
    assert (one.evening.meaning, one.evening.num_tied) == ("none", 64 * LENGTH)
    assert len(one.evening.duplicates[0][0]) == EXPERTS
    lean = np.broadcast_to(2.0 * ROWS[3], (2, HIDDEN))
    assert looked_at(router_of(), inputs_of(1, lean[:1])).evening.meaning == "unknown"
    assert looked_at(router_of(), inputs_of(2, lean)).evening.meaning in ("unknown", "few")
    assert looked_at(router_of(experts=TOP_K), inputs_of(64)).evening.meaning == "balanced"


GROUPS = [(score, fill) for score in ("max", "top2_sum") for fill in (-np.inf, 0.0)]


@pytest.mark.parametrize(
    ("score", "fill"), by_day(GROUPS, {"masked": ("max", -np.inf), "zeros": ("top2_sum", 0.0)})
)
def test_groups_are_balanced_by_the_true_rule(score, fill):
    one = looked_at(router_of(WRONG_BIAS + 1.0, GroupMask(4, 2, score, fill)), inputs_of(128))
    assert one.evening.is_grouped
    assert (one.evening.gap, one.evening.num_tied) == (None, None)
    assert one.tokens.max_vio > 1.0
    assert one.evening.after.max_vio < 0.05
    assert one.evening.meaning == "holds"


def test_groups_without_bias_are_balanced_in_the_unit_of_their_score():
    one = looked_at(router_of(None, GroupMask(4, 2, "max", 0.0)), inputs_of(64))
    assert (one.evening.score_unit, one.evening.has_selection_bias) == (
        "sigmoid score + bias",
        False,
    )
    assert one.evening.after.max_vio < 0.1


def test_each_meaning_has_its_condition(uneven):
    for changes, of_halves, meaning in (
        ({}, {}, "holds"),
        ({"has_selection_bias": False}, {}, "holds, no bias now"),
        ({"after": Loads(3.0, 1.0)}, {}, "none"),
        ({"after": Loads(3.0, 1.0), "is_grouped": True}, {}, "none found"),
        ({"held_out": ()}, {}, "few"),
        ({}, {"num_units": 1}, "few"),
        ({}, {"reduction_p": 0.2}, "few"),
        ({}, {"reduction": -0.1}, "documents"),
        ({}, {"after": Loads(9.0, 1.0)}, "partly"),
    ):
        halves = tuple(dataclasses.replace(h, **of_halves) for h in uneven.evening.held_out)
        one = dataclasses.replace(uneven.evening, **({"held_out": halves} | changes))
        assert study.meaning_of(one, uneven.cause, 0.0, 0.05) == meaning
        assert MEANINGS[meaning]
        assert [study.meaning_of(one, c, 0.0, 0.05) for c in ("few", "even")] == [
            "unknown",
            "balanced",
        ]


def test_each_cause_has_its_condition(uneven):
    part = attributed({"isotropic": 1.0, "mean": 3.0, "covariance": 1.5, "gaussian": 3.5}, 3.4)
    router = router_of()  # MaxVio is 7 at most
    for max_vio, limit, parts, fall, cause in (
        (3.4, 0.5, {"max_vio": part}, 2.9, "mean input"),
        (3.4, 0.5, {"max_vio": part}, 0.9, "rows"),  # the mean makes no more than is taken
        (3.4, 0.5, {}, 2.9, "unknown"),
        (0.4, 0.5, {"max_vio": part}, 2.9, "even"),
        (0.9, 1.0, {"max_vio": part}, 2.9, "few"),
        (3.4, 1.0, {"max_vio": part}, 2.9, "mean input"),
        (3.4, 9.0, {"max_vio": part}, 2.9, "few"),
    ):
        assert study.cause_of(max_vio, limit, 64, router, parts, fall) == cause
        assert cause in CAUSES
    # one token of a fair share of 0.125 is as even as whole tokens can be
    assert study.cause_of(7.0, 0.5, 1, router, {"max_vio": part}, 0.0) == "even"


@pytest.fixture(scope="module")
def collapsed():
    return dataclasses.replace(whole(OF_COLLAPSED), routers=whole(OF_COLLAPSED).routers[:2])


def test_the_collapsed_sample_can_be_balanced_and_the_balanced_one_is_even(collapsed):
    for router in collapsed.routers:
        assert router.evening.meaning == "holds, no bias now"
        assert router.tokens.max_vio > 1.5
        assert router.evening.after.max_vio < 0.02
        assert router.evening.largest_change > router.evening.spread
    meanings = [router.evening.meaning for router in whole(OF_BALANCED).routers]
    assert meanings == ["balanced"] * 3
    # one verdict, with its price, and no word of documents where runs of tokens are the unit
    runs = dataclasses.replace(collapsed, unit="run of 256 tokens")
    result, *_ = unwrapped(shown(runs, width=80)).split("step_1500")
    assert result.count("all layers") == 1
    assert re.search(r"on other runs of 256 tokens too, but reroutes 9\d to 9\d %", result)
    captions = [(f.panels, f.shows, f.alt) for f in imbalance_figures(runs)]
    assert "document" not in f"{result}{captions}"


def test_a_screen_shows_the_least_even_routers_and_a_page_all_of_them_with_the_cv(collapsed):
    first, *_ = collapsed.routers
    *laws, tokens = first.laws
    routers = []
    for n in range(14):
        figures = dataclasses.replace(tokens.figures, max_vio=2.0 + n)
        own = (*laws, dataclasses.replace(tokens, figures=figures))
        routers.append(dataclasses.replace(first, router=f"text/{n}", laws=own))
    record = dataclasses.replace(collapsed, routers=tuple(routers))
    screens = [shown(record, width=100, detail=detail) for detail in (False, True)]
    tables = [next(p for p in s.split("\n\n") if p.lstrip().startswith("MaxVio")) for s in screens]
    some, every = ([*map(int, re.findall(r"^(\d+) ", t, re.MULTILINE))] for t in tables)
    assert every == [*range(14)]
    assert some == every[-len(some) :]
    assert f"and {14 - len(some)} more that were more even: --detail" in screens[0]
    for page in ("md", "html"):
        text = shown(record, page)
        assert text.count(f"{1.0 + 14:.2f}") >= 1
        assert "--detail" not in text
    for width, detail in ((80, False), (80, True), (120, False)):
        text = shown(collapsed, width=width, detail=detail)
        assert widest(text) <= width
        heads = [line for line in text.splitlines() if line.strip().startswith("a bias leaves")]
        assert ["CV" in line for line in heads] == [True] * detail


def test_the_files_hold_both_biases_in_both_precisions(tmp_path):
    files = tmp_path / "bias.npz", tmp_path / "bias.safetensors"
    checkpoint, (one,) = sides(GROUPED)[0], whole(GROUPED.name).routers
    (router, *_) = load_routers(open_checkpoint(str(checkpoint))).routers
    for file in files:
        study.write_biases(file, [router], [one])
    stored = np.array(load_file(checkpoint / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ])  # fmt: skip
    for arrays in (dict(np.load(files[0])), load_file(files[1])):
        for prefix, record in (("", one.evening), ("centring_", one.centring)):
            change = arrays[f"text/1/{prefix}change_float64"]
            np.testing.assert_array_equal(change, record.change)
            added = arrays[f"text/1/{prefix}selection_bias_float64"] - change
            np.testing.assert_allclose(added, stored, atol=1e-15)
            assert arrays[f"text/1/{prefix}selection_bias_float32"].dtype == np.float32


class Partial:
    """A source of some experts: no choices of the model, and the largest logits."""

    def __init__(self, stage: str) -> None:
        base = ArraySource({"text/0": np.zeros((64, 64), np.float32)})
        self.facts = dataclasses.replace(base.facts, stage=stage)

    def read_top_logits(self, router, start, stop) -> TopLogits:
        random = np.random.default_rng(0)
        ids = np.argsort(random.random((64, 16)), axis=1)[:, :8].astype(np.int32)
        values = -np.sort(-random.standard_normal((64, 8)), axis=1).astype(np.float32)
        return TopLogits(values[start:stop], ids[start:stop])


OF_ANOTHER = ArraySource({"text/9": np.zeros((64, 64), np.float32)})
UNANSWERED = "cannot say what makes the loads uneven at router text/0: needs"


def test_what_cannot_be_answered_is_refused_and_what_was_not_recorded_told():
    with pytest.raises(RecordingError, match="none of the routers"):
        sample(BALANCED, tokens=OF_ANOTHER)
    for stage in ("ids", "top_logits"):
        with pytest.raises(RecordingError, match=UNANSWERED):
            sample(BALANCED, tokens=Partial(stage), layers="0")
    inputs = inputs_of(4)
    inputs[5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="token 5"):
        looked_at(router_of(), inputs)
    inputs = np.random.default_rng(5).standard_normal((1024, 64)).astype(np.float32)
    source = ArraySource({"text/1": inputs}, document_tokens=64)
    record = sample(BALANCED, tokens=source, unverified=True)
    assert [router.router for router in record.routers] == ["text/1"]
    assert [name for name, _ in record.left_out] == ["text/0", "text/2"]
    assert "not looked at" in shown(record)


def test_one_long_token_is_left_out_and_said_and_turns_no_result():
    """A token 400 times as long as the others outweighs the mean and the variance of all of them."""
    checkpoint, tokens = map(str, sides(BALANCED))
    source = open_tokens(tokens)
    name = source.facts.routers[1]
    inputs = source.read_values(name, 0, 4096).copy()
    inputs[17] *= 400.0

    def looked(values: np.ndarray) -> Imbalance:
        request = ImbalanceRequest(
            checkpoint, tokens=hold({name: values}), stage="router_input", layers="1"
        )
        return study.imbalance(request)

    long, usual = looked(inputs), looked(np.delete(inputs, 17, axis=0))
    assert (long.sample.num_outliers, long.sample.num_drawn) == (1, 4096)
    assert "1 outlier left out" in shown(long) and "outlier" not in shown(usual)
    one, other = long.routers[0], usual.routers[0]
    assert one.cause == other.cause and one.num_tokens == other.num_tokens == 4095
    assert one.tokens.max_vio == other.tokens.max_vio
    for name, part in vars(other.parts["max_vio"]).items():
        assert getattr(one.parts["max_vio"], name) == pytest.approx(part, abs=0.03), name
