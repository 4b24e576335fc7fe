"""Each kind of what-if against its definition, another router, or somebody else's code."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy.stats import sem

from moegeom.core.documents import record_of_file
from moegeom.core.errors import InternalError, MoeGeomError, RouterRuleError, UsageError
from moegeom.core.router import Weights
from moegeom.engine.route import route
from moegeom.geometry.load import dropped_slot_share, expert_capacity
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.emulated import Arithmetic, arithmetic, arithmetic_names, describe_arithmetics
from moegeom.variants.what_if import WHAT_IFS, FittedGate, WhatIfChoice, parse_what_ifs
from moegeom.variants.whatif._choices import OF_CHOICE, OF_SCORES, admitted_scores, members, rows_of
from tests.by_day import by_day
from tests.oracle.helpers import extra_experts
from tests.unit.variants.conftest import BATCH, EXPERTS, RULES, TOKENS, TOP_K

BIASES = ("logit_bias", "selection_bias")

#: Groups keep their places: rules of which another router or product says all.
ungrouped = pytest.mark.parametrize(
    "rule", ["softmax", "softmax renormalised", "logits", "biased sigmoid"]
)


def exact_logits(made) -> np.ndarray:
    """Of a matrix product in float64."""
    logits = made.inputs.astype(np.float64) @ made.router.weight.T.astype(np.float64)
    return logits if made.router.logit_bias is None else logits + made.router.logit_bias


def test_the_rules_have_what_they_are_named_for(made_by):
    assert made_by["fill decides"].tokens.fill_decides.any()
    assert not made_by["groups at 0"].tokens.fill_decides.any()
    for made in made_by.values():
        assert made.router.rule.groups is None or made.tokens.group_margin.min() > 0.0


def test_smoothing_runs_the_extra_experts_that_the_budget_asks_for(made):
    gate = made.gate("smooth:extra=0.5")
    admitted = admitted_scores(made.router, made.tokens)
    extra = extra_experts(admitted, TOP_K, gate.reached["eps"])
    counts = (gate.choose(made.tokens).chosen >= 0).sum(axis=1)
    np.testing.assert_array_equal(counts, TOP_K + extra)
    np.testing.assert_allclose(gate.reached["experts_mean"], TOP_K + 0.5, rtol=1e-12)
    np.testing.assert_allclose(gate.reached["flop_factor"], 3.5 / 3, rtol=1e-12)
    np.testing.assert_allclose(gate.reached["smoothed_share"], (extra > 0).mean())
    assert gate.reached["extra_experts_p99"] == np.sort(extra)[int(np.ceil(0.99 * 191))]
    np.testing.assert_allclose(
        gate.reached["calmed_below"], gate.reached["eps"] / 17.756, rtol=1e-4
    )
    assert "eps / 18" in gate.notes[0]
    # only groups leave something that still jumps
    share, groups = gate.reached.get("still_discontinuous_share"), made.router.rule.groups
    assert (share is None) == (groups is None)
    if groups is not None:
        times = 2.0 if groups.score == "top2_sum" else 1.0
        within = np.sort(admitted, axis=1)
        within = within[:, -TOP_K] - within[:, -TOP_K - 1]
        np.testing.assert_allclose(share, (made.tokens.group_margin / times < within).mean())
        assert 0.0 < share < 1.0


def test_smoothed_weights_sum_to_what_those_of_the_rule_do(made):
    choice = made.gate("smooth:extra=2").choose(made.tokens)
    if made.router.rule.weights.renormalise or made.router.rule.score == "identity":
        sums = made.tokens.weights.sum(axis=1)
        np.testing.assert_allclose(choice.weights.sum(axis=1), sums, rtol=1e-12)
    else:
        more = choice.weights.sum(axis=1) - made.tokens.weights.sum(axis=1)
        assert ((more > 0.0) == (choice.chosen[:, TOP_K] >= 0)).all()
        own = choice.weights[:, :TOP_K]
        np.testing.assert_allclose(own, made.tokens.weights, rtol=1e-14)


@pytest.mark.parametrize(
    ("rule", "text", "message"),
    [
        ("softmax", "smooth", "either eps or extra"),
        ("softmax", "smooth:eps=0.1,extra=1", "either eps or extra"),
        ("softmax", "smooth:extra=10", "10 extra experts of 9"),
        ("groups", "smooth:extra=4", "4 extra experts of 3"),
        ("softmax", "topk", "topk.: it needs"),
        ("softmax", "topk:13", "12 experts at most"),
        ("groups", "topk:7", "6 experts at most"),
        ("softmax", "temperature", "temperature.: it needs"),
        ("softmax", "without:0,1,2,3,4,5,6,7,8,9", "2 experts are left, and a token takes 3"),
        ("groups", "without:0,1,3,4", "2 experts are left in some groups"),
        ("softmax", "without:3,12", "no expert 12: they are 0 to 11"),
    ],
)
def test_what_a_kind_or_a_rule_has_no_room_for_is_refused(made_by, rule, text, message):
    with pytest.raises((UsageError, RouterRuleError), match=message):
        made_by[rule].gate(text)


@ungrouped
def test_weights_at_a_temperature_are_those_of_divided_logits(made_by, rule):
    made = made_by[rule]
    batch = made.batch(made.gate("temperature:0.5").router)
    z = torch.tensor(exact_logits(made)) / 0.5
    rule, chosen = made.router.rule, torch.tensor(batch.chosen.astype(np.int64))
    if rule.score == "sigmoid":
        scores = z.sigmoid()
        best = (scores + torch.tensor(made.router.selection_bias)).topk(TOP_K).indices
        np.testing.assert_array_equal(np.sort(batch.chosen), np.sort(best))
    else:
        scores = z.softmax(-1)
        np.testing.assert_array_equal(batch.chosen, made.tokens.chosen)
    picked = scores.gather(1, chosen)
    if rule.weights.renormalise or rule.score == "identity":
        picked = picked / picked.sum(-1, keepdim=True)
    np.testing.assert_allclose(batch.weights, picked * rule.weights.scale, rtol=1e-5)


def test_more_experts_begin_with_the_ones_of_fewer(made):
    few, many = (made.batch(made.gate(f"topk:{k}").router) for k in (2, 5))
    np.testing.assert_array_equal(few.chosen, made.tokens.chosen[:, :2])
    np.testing.assert_array_equal(many.chosen[:, :TOP_K], made.tokens.chosen)
    if made.router.rule.weights.renormalise:
        np.testing.assert_allclose(few.weights.sum(1), made.tokens.weights.sum(1), rtol=1e-6)
    room = EXPERTS if made.router.rule.groups is None else EXPERTS // 2
    assert made.gate(f"topk:{room}").router.rule.top_k == room


def test_centred_logits_have_mean_0(made):
    gate = made.gate("centred")
    mean = exact_logits(made).mean(axis=0)
    batch = made.batch(gate.router)
    rule = made.router.rule
    if rule.is_affine:
        np.testing.assert_allclose(batch.logits.mean(axis=0), 0.0, atol=1e-5)
        best = torch.tensor(exact_logits(made) - mean).topk(TOP_K).indices
        np.testing.assert_array_equal(batch.chosen, best)
    np.testing.assert_allclose(batch.mapped, exact_logits(made) - mean, atol=1e-5)
    np.testing.assert_allclose(gate.reached["mean_logit_rms"], mean.std(), rtol=1e-5)


def test_a_router_without_mean_logits_is_centred_already(made_by):
    made = made_by["softmax"]
    mirrored = np.stack([made.inputs, -made.inputs], axis=1).reshape(-1, made.inputs.shape[1])
    sample = made.sample(made.batch(made.router, mirrored))
    assert made.fitted("centred", made.router, sample).router is made.router


@ungrouped
def test_cosines_are_those_of_torch(made_by, rule):
    made = made_by[rule]
    choice = made.gate("cosine:scale=3").choose(made.tokens)
    rows, inputs = torch.tensor(made.router.weight), torch.tensor(made.inputs)
    compared = 3.0 * torch.nn.functional.cosine_similarity(inputs[:, None], rows[None], dim=-1)
    if made.router.logit_bias is not None:
        compared = compared + torch.tensor(made.router.logit_bias)
    if made.router.rule.score == "sigmoid":
        compared = compared.sigmoid() + torch.tensor(made.router.selection_bias)
    np.testing.assert_array_equal(choice.chosen, compared.topk(TOP_K).indices)
    np.testing.assert_allclose(choice.quantities["selection"], compared, atol=2e-5)


def test_with_rows_and_inputs_of_one_length_cosines_decide_as_logits_do(made):
    router = made.router
    length = np.linalg.norm(router.weight, axis=1, keepdims=True)
    even = dataclasses.replace(router, weight=(router.weight / length).astype(np.float32))
    inputs = made.inputs / np.linalg.norm(made.inputs, axis=1, keepdims=True)
    batch = made.batch(even, inputs.astype(np.float32))
    gate = made.fitted("cosine", even, made.sample(batch))
    np.testing.assert_allclose(gate.reached["scale"], 1.0, rtol=1e-6)
    choice = gate.choose(batch)
    np.testing.assert_array_equal(choice.chosen, batch.chosen)
    np.testing.assert_allclose(choice.weights, batch.weights, rtol=1e-5)


def test_experts_above_the_threshold_run_with_what_they_are_above_it(made):
    for text in ("relu", "relu:experts=2.5"):
        gate = made.gate(text)
        theta = gate.reached["threshold"]
        choice = gate.choose(made.tokens)
        dense = np.zeros((TOKENS, EXPERTS))
        token, slot = np.nonzero(choice.chosen >= 0)
        dense[token, choice.chosen[token, slot]] = choice.weights[token, slot]
        expected = torch.relu(torch.tensor(exact_logits(made)) - theta)
        np.testing.assert_allclose(dense, expected, atol=1e-5)
        empty = (choice.chosen < 0).all(axis=1).mean()
        np.testing.assert_allclose(gate.reached["no_expert_share"], empty)
    np.testing.assert_allclose(gate.reached["experts_mean"], 2.5, atol=0.5 / TOKENS)


@ungrouped
def test_a_router_without_experts_is_the_one_whose_rows_are_cut_out(made_by, rule):
    made, left = made_by[rule], np.setdiff1d(np.arange(EXPERTS), [1, 7, 10])
    tables = {name: getattr(made.router, name) for name in ("weight", *BIASES)}
    cut = {name: table[left] for name, table in tables.items() if table is not None}
    expected = route(dataclasses.replace(made.router, **cut), made.inputs)
    choice = made.gate("without:10,1,7").choose(made.tokens)
    np.testing.assert_array_equal(choice.chosen, left[expected.chosen])
    np.testing.assert_allclose(choice.weights, expected.weights, rtol=1e-5)
    near = {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(choice.quantities["margin"], expected.margin, **near)
    np.testing.assert_allclose(choice.quantities["distance"], expected.boundary_distance, **near)


@pytest.mark.parametrize("rule", ["groups", "groups at 0"])
def test_groups_keep_their_places_without_some_of_their_experts(made_by, rule):
    made = made_by[rule]
    chosen, before = made.gate("without:0,4").choose(made.tokens).chosen, made.tokens.chosen
    assert not np.isin(chosen, [0, 4]).any()
    assert max(len(set(row)) for row in chosen // 3) == 2
    # groups 2 and 3 alone were kept: another expert is only gone where it might have competed
    alone = np.flatnonzero((before >= 6).all(axis=1))[:20]
    assert (chosen[alone] == before[alone]).all(axis=1).mean() > 0.9


def test_heirs_are_the_experts_that_were_not_chosen_before(made):
    gate = made.gate("without:2")
    figures, after = gate.measure(made.sample()), gate.choose(made.tokens).chosen
    before = made.tokens.chosen
    had = (before == 2).any(axis=1)
    np.testing.assert_allclose(figures.pop("chose_2_share"), had.mean())
    heirs = np.zeros(EXPERTS)
    for token in np.flatnonzero(had):
        new = list(set(after[token]) - set(before[token]))
        heirs[new] += 1 / len(new) / had.sum()
    top = np.argsort(-heirs, kind="stable")[:3]
    np.testing.assert_allclose(heirs.sum(), 1.0)
    assert list(figures) == [f"2_to_{expert}_share" for expert in top if heirs[expert] > 0]
    np.testing.assert_allclose(list(figures.values()), heirs[top][heirs[top] > 0])


def test_jitter_moves_logits_by_at_most_its_share(made_by):
    made = made_by["softmax"]
    z = made.tokens.logits.astype(np.float64)
    factors = made.gate("jitter:0.1").choose(made.tokens).quantities["selection"] / z
    assert (np.abs(factors - 1.0) <= 0.1 + 1e-12).all()
    np.testing.assert_allclose(factors.mean(), 1.0, atol=4 * 0.1 / np.sqrt(3 * z.size))
    np.testing.assert_allclose(factors.std(), 0.1 / np.sqrt(3), rtol=0.05)
    assert abs(np.corrcoef(factors[:, 0], factors[:, 1])[0, 1]) < 0.3
    assert abs(np.corrcoef(factors[:-1, 0], factors[1:, 0])[0, 1]) < 0.3


def test_jitter_of_inputs_is_what_disturbed_inputs_give(made):
    """Which coordinates moved is what least squares say: more experts than coordinates."""
    if not made.router.rule.is_affine:
        return
    moved = made.gate("jitter:0.1,on=input").choose(made.tokens).quantities["selection"]
    rows = made.router.weight.astype(np.float64)
    inputs, left, _, _ = np.linalg.lstsq(rows, (moved - made.tokens.logits).T, rcond=None)
    np.testing.assert_allclose(left, 0.0, atol=1e-20)
    factors = inputs.T / made.inputs
    assert (np.abs(factors) <= 0.1 + 1e-6).all()
    np.testing.assert_allclose(factors.std(), 0.1 / np.sqrt(3), rtol=0.05)


def test_the_share_of_flips_is_near_that_of_independent_draws(made_by):
    made = made_by["softmax"]
    figures = made.gate("jitter:0.1").measure(made.sample())
    random = np.random.default_rng(5)
    z = made.tokens.logits.astype(np.float64)
    drawn = z * random.uniform(0.9, 1.1, (400, *z.shape))
    best = np.sort(np.argsort(-drawn, axis=2)[:, :, :TOP_K], axis=2)
    flipped = (best != np.sort(made.tokens.chosen, axis=1)).any(axis=2).mean(axis=0)
    assert figures["flipped_tokens"] == TOKENS
    # the same tokens: only the draws differ
    sigma = np.sqrt((flipped * (1 - flipped)).sum() / 16) / TOKENS
    assert abs(figures["flipped_share"] - flipped.mean()) < 4 * sigma


def test_the_error_of_the_share_of_flips_is_that_of_documents(made_by):
    """Of the means of equal documents; of runs of 256 tokens where none is known: there is one."""
    made = made_by["softmax"]
    quantities = vars(rows_of(made.tokens, np.arange(TOKENS)))
    document = np.arange(TOKENS) // 16
    gate = made.gate("jitter:0.1")

    def figures_of(tokens: TokenBatch) -> dict[str, float]:
        return gate.measure(made.sample(tokens))

    figures = figures_of(TokenBatch(**{**quantities, "document": document}))
    shares = [
        figures_of(rows_of(made.tokens, np.flatnonzero(document == d)))["flipped_share"]
        for d in range(TOKENS // 16)
    ]
    np.testing.assert_allclose(figures["flipped_share"], np.mean(shares), rtol=1e-12)
    np.testing.assert_allclose(figures["flipped_share_se"], sem(shares), rtol=1e-12)
    for none in (None, np.full(TOKENS, -1)):
        alone = figures_of(TokenBatch(**{**quantities, "document": none}))
        assert "flipped_share_se" not in alone


def test_draws_differ_between_seeds_and_routers(made_by):
    made = made_by["softmax"]
    other = dataclasses.replace(made.router, name="text/1")
    seeded = dataclasses.replace(made.sample(), seed=1)
    first, of_other, of_seed, again = (
        made.fitted("jitter:0.3", router, sample).choose(made.tokens).weights
        for router, sample in (
            (made.router, made.sample()),
            (other, made.sample()),
            (made.router, seeded),
            (made.router, made.sample()),
        )
    )
    np.testing.assert_array_equal(again, first)
    assert (of_other != first).all() and (of_seed != first).all()


def test_experts_never_take_tokens_that_leave_their_groups_out(made_by):
    for rule in ("groups", "groups at 0"):
        made = made_by[rule]
        allowed = ~np.isneginf(admitted_scores(made.router, made.tokens))
        is_on = members(made.gate("expert-choice:2").choose(made.tokens), EXPERTS)
        assert (is_on <= allowed).all()


def test_each_expert_chooses_its_share_of_a_batch(made):
    gate, room = made.gate("expert-choice:1"), expert_capacity(BATCH, EXPERTS, TOP_K, 1.0)
    for start in range(0, TOKENS, BATCH):
        batch = rows_of(made.tokens, np.arange(start, start + BATCH))
        loads = members(gate.choose(batch), EXPERTS).sum(axis=0)
        assert loads.max() <= room
        assert (loads == room).all() or made.router.rule.groups is not None


@ungrouped
def test_experts_with_room_for_all_tokens_take_them_all(made_by, rule):
    made = made_by[rule]
    everyone = made.gate("expert-choice:inf").choose(made.tokens)
    expected = made.batch(made.gate(f"topk:{EXPERTS}").router)
    np.testing.assert_array_equal(np.sort(everyone.chosen), np.sort(expected.chosen))
    weights = [
        np.take_along_axis(of.weights, np.argsort(of.chosen, axis=1), axis=1)
        for of in (everyone, expected)
    ]
    np.testing.assert_allclose(*weights, rtol=1e-5)


def test_a_token_that_is_taken_by_its_own_set_has_its_own_weights(made):
    choice = made.gate("expert-choice:1").choose(made.tokens)
    own = members(choice, EXPERTS) == members(
        made.gate("smooth:eps=1e-12").choose(made.tokens), EXPERTS
    )
    same = own.all(axis=1)
    assert same.any()
    np.testing.assert_array_equal(choice.weights[same, :TOP_K], made.tokens.weights[same])


@pytest.mark.parametrize("order", ["position", "score"])
def test_capacity_drops_what_is_over_and_leaves_the_other_weights(made, order):
    choice = made.gate(f"capacity:0.8,order={order}").choose(made.tokens)
    counts = np.bincount(made.tokens.chosen.ravel(), minlength=EXPERTS)
    room = expert_capacity(TOKENS, EXPERTS, TOP_K, 0.8)
    dropped = (choice.chosen < 0).mean()
    np.testing.assert_allclose(dropped, dropped_slot_share(counts, room), rtol=1e-12)
    stored, token = np.full((TOKENS, EXPERTS), np.nan), np.arange(TOKENS)[:, None]
    stored[token, made.tokens.chosen] = made.tokens.weights
    is_filled = choice.chosen >= 0
    np.testing.assert_array_equal(
        choice.weights[is_filled], stored[token, choice.chosen][is_filled]
    )


def test_dependence_on_neighbours_is_counted(made_by):
    made = made_by["softmax"]
    figures = made.gate("expert-choice:1").measure(made.sample())
    assert 0.9 < figures["other_set_alone_share"] <= 1.0
    assert 0.0 < figures["other_set_elsewhere_share"] < 1.0


def test_weights_by_the_order_of_picks_are_refused_where_sets_differ_in_size(made_by):
    router = made_by["softmax"].router
    rule = dataclasses.replace(router.rule, weights=Weights("sparsemixer", jitter=0.01))
    picked = dataclasses.replace(router, rule=rule)
    for text in ("smooth:extra=0.5", "expert-choice"):
        with pytest.raises(RouterRuleError, match="order in which"):
            made_by["softmax"].gate(text, picked)


def test_weights_count_shared_experts_and_scales_of_experts(made_by):
    made = made_by["softmax renormalised"]
    random = np.random.default_rng(0)
    shared = random.standard_normal((2, made.inputs.shape[1])).astype(np.float32)
    scale = random.uniform(0.5, 2.0, EXPERTS).astype(np.float32)
    router = dataclasses.replace(made.router, shared_rows=shared, expert_scale=scale)
    batch = made.batch(router)
    scores = torch.tensor(exact_logits(made)).softmax(-1).numpy()
    outside = torch.tensor(made.inputs @ shared.T).softmax(-1).sum(-1).numpy()
    for text in ("smooth:extra=1", "expert-choice:1", "jitter:1e-12"):
        choice = made.fitted(text, router, made.sample(batch)).choose(batch)
        for token in range(40):
            chosen = choice.chosen[token][choice.chosen[token] >= 0]
            if text.startswith("smooth") and len(chosen) > TOP_K:
                continue
            expected = scores[token, chosen] / (scores[token, chosen].sum() + outside[token])
            np.testing.assert_allclose(
                choice.weights[token, : len(chosen)], expected * scale[chosen], rtol=1e-4
            )


# ---------------------------------------------------------------------------------------- all kinds
#: How a kind is written that says nothing without a parameter, and other forms worth a look.
WRITTEN = {
    "smooth": ("smooth:extra=0.5", "smooth:eps=0.2,a=2,b=9"),
    "topk": ("topk:2", "topk:5"),
    "temperature": ("temperature:0.5",),
    "without": ("without:1,7",),
    "relu": ("relu", "relu:experts=2.5"),
    "capacity": ("capacity:0.8", "capacity:0.8,order=score"),
    "jitter": ("jitter:0.1", "jitter:0.1,on=input"),
}

TEXTS = [text for name in WHAT_IFS.names() for text in WRITTEN.get(name, (name.replace("_", "-"),))]
CHOOSING = [
    t for t in TEXTS if t.split(":")[0] not in ("random-rows", "topk", "temperature", "centred")
]


def rows_in(choice: WhatIfChoice, rows: np.ndarray) -> list[tuple[tuple, tuple]]:
    """Experts and weights of some tokens, without empty slots."""
    return [
        (tuple(chosen[chosen >= 0]), tuple(weights[chosen >= 0]))
        for chosen, weights in zip(choice.chosen[rows], choice.weights[rows], strict=True)
    ]


def is_hard_choice(gate: FittedGate, made) -> bool:
    """Whether a gate chooses for each token as stored, bit for bit."""
    choice = made.batch(gate.router) if gate.router is not None else gate.choose(made.tokens)
    stored = made.tokens
    is_same = np.array_equal(choice.chosen, stored.chosen)
    return is_same and np.array_equal(choice.weights, stored.weights)


def test_the_texts_cover_every_kind():
    assert {asked.kind.name for asked in parse_what_ifs(TEXTS)} == set(WHAT_IFS.names())
    assert len(WHAT_IFS.names()) >= 11


def test_a_kind_has_texts_for_people():
    for name in WHAT_IFS.names():
        kind = WHAT_IFS[name]
        assert kind.text.endswith(".") and len(kind.text) > 30, name
        assert [p.name for p in kind.parameters if not p.text or p.text.endswith(".")] == []
        assert sum(p.is_first for p in kind.parameters) <= 1, name


def under_rules(texts):
    """A what-if under every rule; by day under one, rules in turn."""
    day = list(zip(texts, itertools.cycle(RULES), strict=False))
    return pytest.mark.parametrize(("text", "rule"), by_day(itertools.product(texts, RULES), day))


@under_rules(TEXTS)
def test_a_gate_is_another_router_or_chooses(made_by, text, rule):
    made = made_by[rule]
    gate = made.gate(text)
    assert (gate.router is None) != (gate.choose is None)
    assert all(np.isfinite(list(gate.reached.values())))
    assert all(note.endswith(".") for note in gate.notes)
    if gate.router is not None:
        batch = made.batch(gate.router)
        assert batch.chosen.shape == (TOKENS, gate.router.rule.top_k)
        assert np.isfinite(batch.weights).all()
    if gate.measure is not None:
        figures = gate.measure(made.sample(rows_of(made.tokens, np.arange(2 * BATCH))))
        assert figures
        assert np.isfinite(list(figures.values())).all()
        assert {type(value) for value in figures.values()} == {float}


@under_rules(CHOOSING)
def test_a_choice_is_sets_filled_from_the_left_with_weights_and_quantities(made_by, text, rule):
    made = made_by[rule]
    gate = made.gate(text)
    choice = gate.choose(made.tokens)
    assert choice.chosen.dtype == np.int32
    assert choice.weights.dtype == np.float64
    assert choice.chosen.shape == choice.weights.shape
    filled = choice.chosen >= 0
    assert (choice.chosen < EXPERTS).all()
    assert (np.diff(filled.astype(int), axis=1) <= 0).all(), "a hole on the left"
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in choice.chosen)
    np.testing.assert_array_equal(choice.weights[~filled], 0.0)
    assert np.isfinite(choice.weights).all()
    assert (choice.weights[filled] >= 0.0).all()
    if gate.has_fixed_size:
        np.testing.assert_array_equal(filled.sum(axis=1), TOP_K)
    # every quantity is there or has a reason
    given, missing = set(choice.quantities), set(gate.absent)
    optional = {"group_margin"} if made.router.rule.groups is None else set()
    assert given & missing == set()
    assert set(OF_CHOICE) - given - missing - optional == set()
    assert given <= set(OF_CHOICE)
    assert all(reason and not reason.endswith(".") for reason in gate.absent.values())
    for name, values in choice.quantities.items():
        assert len(values) == TOKENS, name
        assert not np.isnan(values).any(), name


@pytest.mark.parametrize("text", ["smooth:extra=0.5", "expert-choice", "capacity:0.8"])
def test_a_gate_that_takes_the_scores_as_they_are_leaves_what_follows_from_them(made, text):
    quantities = made.gate(text).choose(rows_of(made.tokens, np.arange(TOKENS))).quantities
    for name in OF_SCORES:
        np.testing.assert_array_equal(quantities[name], getattr(made.tokens, name), err_msg=name)


@under_rules(CHOOSING)
def test_a_gate_depends_on_other_and_later_tokens_where_it_says_so(made_by, text, rule):
    made = made_by[rule]
    gate, order = made.gate(text), np.random.default_rng(1).permutation(TOKENS)

    def rows_at(tokens: np.ndarray, rows=slice(None)) -> list:
        return rows_in(gate.choose(rows_of(made.tokens, tokens)), rows)

    parts = [order[:5], order[5:6], order[6:77], order[77:]]
    rows = [row for part in parts for row in rows_at(part)]
    assert (rows == rows_in(gate.choose(made.tokens), order)) == gate.is_token_local
    is_causal, half = True, np.arange(BATCH // 2)
    for start in range(0, TOKENS - 2 * BATCH, BATCH):
        one, other = (
            rows_at(np.concatenate([start + half, later + half]), slice(0, BATCH // 2))
            for later in (start + BATCH // 2, 160)
        )
        is_causal &= one == other
    assert is_causal == gate.is_causal


LIMITS = """
    topk:3 temperature:1 smooth:eps=0 smooth:extra=0 smooth:eps=1e-12
    capacity:inf capacity:4 jitter:0 jitter:0,on=input without
""".split()


@pytest.mark.parametrize("text", LIMITS)
def test_the_hard_limit_is_the_router_bit_for_bit(made, text):
    assert is_hard_choice(made.gate(text), made)


def test_what_is_no_limit_is_another_choice(made):
    for text in ("topk:2", "smooth:extra=0.5", "expert-choice", "capacity:0.8"):
        assert not is_hard_choice(made.gate(text), made), text


def test_a_rule_without_a_fixed_number_is_refused_or_answered(made_by):
    made = made_by["softmax"]
    listed = dataclasses.replace(made.router, listed="a table chooses")
    varying = dataclasses.replace(made.router.rule, pick="varying")
    for text in TEXTS:
        with pytest.raises(MoeGeomError, match="a table chooses"):
            made.gate(text, listed)
        with pytest.raises(MoeGeomError, match="no fixed number"):
            made.gate(text, dataclasses.replace(made.router, rule=varying))


def test_each_preset_says_what_it_copies_and_its_row_says_its_steps() -> None:
    for name in arithmetic_names():
        how = arithmetic(name)
        assert how.name == name and how.text and how.source
        assert how.engine.startswith("none") or how.version
    rows = {row["name"]: row for row in describe_arithmetics()}
    assert tuple(rows) == arithmetic_names()
    assert rows["bf16-logits"]["steps"].endswith("output bfloat16")
    assert "0487d5c2" in rows["bf16-gemm-fp32-out"]["engine"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="bf15") as caught:
        arithmetic("bf15")
    assert "bf16" in (caught.value.hint or "")


def test_a_preset_with_a_word_that_is_not_known_is_an_error() -> None:
    preset = 'text = "t"\nengine = "none"\nversion = ""\nsource = "s"\n'
    with pytest.raises(InternalError, match=r"made.toml: input is 'bfloat17', expected one of"):
        record_of_file(Arithmetic, "made", preset + 'input = "bfloat17"')
    with pytest.raises(InternalError, match="unknown key 'scores'.\n  hint: Did you mean score"):
        record_of_file(Arithmetic, "made", preset + 'scores = "red"')
