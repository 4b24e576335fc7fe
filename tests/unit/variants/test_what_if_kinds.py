"""Each kind of what-if against its definition, another router, or somebody else's code."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import sem

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Weights
from moegeom.engine.route import route
from moegeom.geometry.boundary.orders import extra_experts
from moegeom.geometry.load import dropped_slot_share, expert_capacity
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import parse_what_ifs
from moegeom.variants.whatif._choices import admitted_scores, members, rows_of
from tests.unit.variants.conftest import BATCH, EXPERTS, TOKENS, TOP_K

AFFINE = ("softmax", "softmax renormalised", "logits")
UNGROUPED = (*AFFINE, "biased sigmoid")


def ungrouped(made) -> None:
    if made.router.rule.groups is not None:
        pytest.skip("groups keep their places")


def exact_logits(made) -> np.ndarray:
    """Of a matrix product in float64."""
    found = made.inputs.astype(np.float64) @ made.router.weight.T.astype(np.float64)
    return found if made.router.logit_bias is None else found + made.router.logit_bias


def test_the_rules_have_what_they_are_named_for(made_by):
    assert made_by["fill decides"].tokens.fill_decides.any()
    assert not made_by["groups at 0"].tokens.fill_decides.any()
    for made in made_by.values():
        assert made.router.rule.groups is None or made.tokens.group_margin.min() > 0.0


# ------------------------------------------------------------------------------------------- smooth
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


def test_smoothing_wants_a_width_or_a_budget_and_not_both(made_by):
    for text in ("smooth", "smooth:eps=0.1,extra=1"):
        with pytest.raises(UsageError, match="either eps or extra"):
            made_by["softmax"].gate(text)
    with pytest.raises(RouterRuleError, match="10 extra experts of 9"):
        made_by["softmax"].gate("smooth:extra=10")
    with pytest.raises(RouterRuleError, match="4 extra experts of 3"):
        made_by["groups"].gate("smooth:extra=4")


def test_only_groups_leave_something_that_still_jumps(made):
    found = made.gate("smooth:extra=0.5").reached.get("still_discontinuous_share")
    assert (found is None) == (made.router.rule.groups is None)
    if found is not None:
        batch = made.tokens
        times = 2.0 if made.router.rule.groups.score == "top2_sum" else 1.0
        within = np.sort(admitted_scores(made.router, batch), axis=1)
        within = within[:, -TOP_K] - within[:, -TOP_K - 1]
        np.testing.assert_allclose(found, (batch.group_margin / times < within).mean())
        assert 0.0 < found < 1.0


# ------------------------------------------------------------------------------- temperature, topk
def test_weights_at_a_temperature_are_those_of_divided_logits(made):
    ungrouped(made)
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


def test_more_experts_than_a_token_can_have_are_refused(made_by):
    for rule, room in (("softmax", 12), ("groups", 6)):
        assert made_by[rule].gate(f"topk:{room}").router.rule.top_k == room
        with pytest.raises(RouterRuleError, match=f"{room} experts at most"):
            made_by[rule].gate(f"topk:{room + 1}")


@pytest.mark.parametrize("text", ["topk", "temperature"])
def test_a_kind_whose_number_is_missing_says_so(made_by, text):
    with pytest.raises(UsageError, match=f"{text}.: it needs"):
        made_by["softmax"].gate(text)


# ---------------------------------------------------------------------------------- centred, cosine
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
    (asked,) = parse_what_ifs(["centred"])
    sample = made.sample(made.batch(made.router, mirrored))
    assert asked.kind.make(made.router, {}, sample).router is made.router


def test_cosines_are_those_of_torch(made):
    ungrouped(made)
    found = made.gate("cosine:scale=3").choose(made.tokens)
    rows, inputs = torch.tensor(made.router.weight), torch.tensor(made.inputs)
    cosine = torch.nn.functional.cosine_similarity(inputs[:, None], rows[None], dim=-1)
    logits = 3.0 * cosine
    if made.router.logit_bias is not None:
        logits = logits + torch.tensor(made.router.logit_bias)
    if made.router.rule.score == "sigmoid":
        compared = logits.sigmoid() + torch.tensor(made.router.selection_bias)
    else:
        compared = logits
    np.testing.assert_array_equal(found.chosen, compared.topk(TOP_K).indices)
    np.testing.assert_allclose(found.quantities["selection"], compared, atol=2e-5)


def test_with_rows_and_inputs_of_one_length_cosines_decide_as_logits_do(made):
    router = made.router
    length = np.linalg.norm(router.weight, axis=1, keepdims=True)
    even = dataclasses.replace(router, weight=(router.weight / length).astype(np.float32))
    inputs = made.inputs / np.linalg.norm(made.inputs, axis=1, keepdims=True)
    batch = made.batch(even, inputs.astype(np.float32))
    (asked,) = parse_what_ifs(["cosine"])
    gate = asked.kind.make(even, asked.values, made.sample(batch))
    np.testing.assert_allclose(gate.reached["scale"], 1.0, rtol=1e-6)
    found = gate.choose(batch)
    np.testing.assert_array_equal(found.chosen, batch.chosen)
    np.testing.assert_allclose(found.weights, batch.weights, rtol=1e-5)


# --------------------------------------------------------------------------------------------- relu
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


# ----------------------------------------------------------------------------------------- without
def without_rows(made, gone):
    """The router with rows cut out, through the engine."""
    router = made.router
    kept = np.setdiff1d(np.arange(EXPERTS), gone)
    cut = {
        name: None if getattr(router, name) is None else getattr(router, name)[kept]
        for name in ("weight", "logit_bias", "selection_bias")
    }
    return kept, route(dataclasses.replace(router, **cut), made.inputs)


def test_a_router_without_experts_is_the_one_whose_rows_are_cut_out(made):
    ungrouped(made)
    gone = [1, 7, 10]
    kept, expected = without_rows(made, gone)
    found = made.gate("without:10,1,7").choose(made.tokens)
    np.testing.assert_array_equal(found.chosen, kept[expected.chosen])
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-5)
    np.testing.assert_allclose(found.quantities["margin"], expected.margin, rtol=1e-4, atol=1e-6)
    distance = found.quantities["distance"]
    np.testing.assert_allclose(distance, expected.boundary_distance, rtol=1e-4, atol=1e-6)


def test_groups_keep_their_places_without_some_of_their_experts(made_by):
    for rule in ("groups", "groups at 0"):
        made = made_by[rule]
        found = made.gate("without:0,4").choose(made.tokens)
        assert not np.isin(found.chosen, [0, 4]).any()
        groups = found.chosen // 3
        assert max(len(set(row)) for row in groups) == 2
        had = np.isin(made.tokens.chosen, [0, 1, 2, 3, 4, 5]).any(axis=1)
        # groups 2 and 3 alone were kept: another expert is only gone where it might have competed
        alone = np.flatnonzero(~had)[:20]
        same = (found.chosen[alone] == made.tokens.chosen[alone]).all(axis=1)
        assert same.mean() > 0.9


def test_heirs_are_the_experts_that_were_not_chosen_before(made):
    gate = made.gate("without:2")
    found, after = gate.measure(made.sample()), gate.choose(made.tokens)
    before = made.tokens.chosen
    had = (before == 2).any(axis=1)
    np.testing.assert_allclose(found.pop("chose_2_share"), had.mean())
    heirs = np.zeros(EXPERTS)
    for token in np.flatnonzero(had):
        new = set(after.chosen[token]) - set(before[token])
        for expert in new:
            heirs[expert] += 1 / len(new) / had.sum()
    top = np.argsort(-heirs, kind="stable")[:3]
    np.testing.assert_allclose(heirs.sum(), 1.0)
    assert list(found) == [f"2_to_{expert}_share" for expert in top if heirs[expert] > 0]
    np.testing.assert_allclose(list(found.values()), heirs[top][heirs[top] > 0])


def test_too_few_experts_left_and_experts_that_are_not_there_are_refused(made_by):
    most = ",".join(str(expert) for expert in range(10))
    with pytest.raises(RouterRuleError, match="2 experts are left, and a token takes 3"):
        made_by["softmax"].gate(f"without:{most}")
    with pytest.raises(RouterRuleError, match="2 experts are left in some groups"):
        made_by["groups"].gate("without:0,1,3,4")
    with pytest.raises(RouterRuleError, match="no expert 12: they are 0 to 11"):
        made_by["softmax"].gate("without:3,12")


# ------------------------------------------------------------------------------------ jitter, random
def test_jitter_moves_logits_by_at_most_its_share(made_by):
    made = made_by["softmax"]
    found = made.gate("jitter:0.1").choose(made.tokens)
    z = made.tokens.logits.astype(np.float64)
    factors = found.quantities["selection"] / z
    assert (np.abs(factors - 1.0) <= 0.1 + 1e-12).all()
    np.testing.assert_allclose(factors.mean(), 1.0, atol=4 * 0.1 / np.sqrt(3 * z.size))
    np.testing.assert_allclose(factors.std(), 0.1 / np.sqrt(3), rtol=0.05)
    assert abs(np.corrcoef(factors[:, 0], factors[:, 1])[0, 1]) < 0.3
    assert abs(np.corrcoef(factors[:-1, 0], factors[1:, 0])[0, 1]) < 0.3


def test_jitter_of_inputs_is_what_disturbed_inputs_give(made):
    """Which coordinates moved is found by least squares: more experts than coordinates."""
    gate = made.gate("jitter:0.1,on=input")
    if not made.router.rule.is_affine:
        return
    moved = gate.choose(made.tokens).quantities["selection"] - made.tokens.logits
    rows = made.router.weight.astype(np.float64)
    inputs, left, _, _ = np.linalg.lstsq(rows, moved.T, rcond=None)
    np.testing.assert_allclose(left, 0.0, atol=1e-20)
    factors = inputs.T / made.inputs
    assert (np.abs(factors) <= 0.1 + 1e-6).all()
    np.testing.assert_allclose(factors.std(), 0.1 / np.sqrt(3), rtol=0.05)


def test_the_share_of_flips_is_near_that_of_independent_draws(made_by):
    made = made_by["softmax"]
    found = made.gate("jitter:0.1").measure(made.sample())
    random = np.random.default_rng(5)
    z = made.tokens.logits.astype(np.float64)
    drawn = z * random.uniform(0.9, 1.1, (400, *z.shape))
    best = np.sort(np.argsort(-drawn, axis=2)[:, :, :TOP_K], axis=2)
    flipped = (best != np.sort(made.tokens.chosen, axis=1)).any(axis=2).mean(axis=0)
    assert found["flipped_tokens"] == TOKENS
    # the same tokens: only the draws differ
    sigma = np.sqrt((flipped * (1 - flipped)).sum() / 16) / TOKENS
    assert abs(found["flipped_share"] - flipped.mean()) < 4 * sigma


def test_the_error_of_the_share_of_flips_is_that_of_documents(made_by):
    """Of the means of equal documents; of runs of 256 tokens where none is known: there is one."""
    made = made_by["softmax"]
    told = vars(rows_of(made.tokens, np.arange(TOKENS)))
    document = np.arange(TOKENS) // 16
    (asked,) = parse_what_ifs(["jitter:0.1"])
    gate = asked.kind.make(made.router, asked.values, made.sample())
    found = gate.measure(made.sample(TokenBatch(**{**told, "document": document})))
    each = [
        gate.measure(made.sample(rows_of(made.tokens, np.flatnonzero(document == d))))
        for d in range(TOKENS // 16)
    ]
    shares = [one["flipped_share"] for one in each]
    np.testing.assert_allclose(found["flipped_share"], np.mean(shares), rtol=1e-12)
    np.testing.assert_allclose(found["flipped_share_se"], sem(shares), rtol=1e-12)
    for none in (None, np.full(TOKENS, -1)):
        alone = gate.measure(made.sample(TokenBatch(**{**told, "document": none})))
        assert "flipped_share_se" not in alone


def test_draws_differ_between_seeds_and_routers(made_by):
    made = made_by["softmax"]
    (asked,) = parse_what_ifs(["jitter:0.3"])
    other = dataclasses.replace(made.router, name="text/1")
    seeded = dataclasses.replace(made.sample(), seed=1)
    weights = [
        asked.kind.make(router, asked.values, sample).choose(made.tokens).weights
        for router, sample in (
            (made.router, made.sample()),
            (other, made.sample()),
            (made.router, seeded),
            (made.router, made.sample()),
        )
    ]
    np.testing.assert_array_equal(weights[0], weights[3])
    assert (weights[0] != weights[1]).all()
    assert (weights[0] != weights[2]).all()


def test_a_random_router_keeps_lengths_and_rule(made):
    found = made.gate("random").router
    assert found.rule is made.router.rule
    lengths = [np.linalg.norm(r.weight, axis=1) for r in (found, made.router)]
    np.testing.assert_allclose(*lengths, rtol=1e-6)


# --------------------------------------------------------------------------------- plans and quotas
def test_of_a_token_alone_the_lowest_numbers_win(made_by):
    alone = rows_of(made_by["softmax"].tokens, np.array([5]))
    found = made_by["softmax"].gate("sinkhorn:log").choose(alone)
    np.testing.assert_array_equal(found.chosen, [[0, 1, 2]])


def test_many_steps_balance_the_plan_and_more_so_the_loads(made):
    gates = [made.gate(f"sinkhorn:eps=0.2,steps={steps},log") for steps in (0, 3, 30)]
    sample = made.sample(rows_of(made.tokens, np.arange(BATCH)))
    errors = [gate.measure(sample)["column_error"] for gate in gates]
    assert errors[0] > errors[1] > errors[2]
    if made.router.rule.groups is None:
        assert errors[2] < 0.1
    counts = [
        np.bincount(gate.choose(made.tokens).chosen.ravel(), minlength=EXPERTS) for gate in gates
    ]
    assert counts[2].max() < counts[0].max()


def test_a_plan_never_leaves_the_groups_that_a_token_keeps(made_by):
    for rule in ("groups", "groups at 0"):
        made = made_by[rule]
        allowed = ~np.isneginf(admitted_scores(made.router, made.tokens))
        for text in ("sinkhorn:steps=50", "sinkhorn:steps=50,log", "osr", "expert-choice:2"):
            is_on = members(made.gate(text).choose(made.tokens), EXPERTS)
            assert (is_on <= allowed).all()


def test_the_weights_of_a_plan_are_its_shares(made_by):
    choice = made_by["softmax"].gate("osr").choose(made_by["softmax"].tokens)
    np.testing.assert_allclose(choice.weights.sum(axis=1), 1.0, rtol=1e-12)
    assert (np.diff(choice.weights, axis=1) <= 0.0).all()


def test_without_penalty_and_steps_osr_chooses_as_cosines_do(made_by):
    made = made_by["softmax"]
    osr = made.gate("osr:lambda=0,beta=0,steps=0,log").choose(made.tokens)
    cosine = made.gate("cosine:scale=20").choose(made.tokens)
    np.testing.assert_array_equal(osr.chosen, cosine.chosen)
    chosen = np.take_along_axis(cosine.quantities["selection"], osr.chosen.astype(int), axis=1)
    expected = torch.tensor(chosen).softmax(-1)  # eps is a twentieth
    np.testing.assert_allclose(osr.weights, expected, rtol=1e-9)


def test_each_expert_chooses_its_share_of_a_batch(made):
    gate = made.gate("expert-choice:1")
    for start in range(0, TOKENS, BATCH):
        batch = rows_of(made.tokens, np.arange(start, start + BATCH))
        is_on = members(gate.choose(batch), EXPERTS)
        room = expert_capacity(BATCH, EXPERTS, TOP_K, 1.0)
        if made.router.rule.groups is None:
            np.testing.assert_array_equal(is_on.sum(axis=0), room)
        else:
            assert is_on.sum(axis=0).max() <= room


def test_experts_with_room_for_all_tokens_take_them_all(made):
    ungrouped(made)
    everyone = made.gate("expert-choice:inf").choose(made.tokens)
    expected = made.batch(made.gate(f"topk:{EXPERTS}").router)
    np.testing.assert_array_equal(np.sort(everyone.chosen), np.sort(expected.chosen))
    for found, own in ((everyone, expected),):
        order = np.argsort(found.chosen, axis=1), np.argsort(own.chosen, axis=1)
        weights = [
            np.take_along_axis(w, o, axis=1)
            for w, o in zip((found.weights, own.weights), order, strict=True)
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
    gate = made.gate(f"capacity:0.8,order={order}")
    choice = gate.choose(made.tokens)
    counts = np.bincount(made.tokens.chosen.ravel(), minlength=EXPERTS)
    room = expert_capacity(TOKENS, EXPERTS, TOP_K, 0.8)
    dropped = (choice.chosen < 0).mean()
    np.testing.assert_allclose(dropped, dropped_slot_share(counts, room), rtol=1e-12)
    stored = [
        dict(zip(c, w, strict=True))
        for c, w in zip(made.tokens.chosen, made.tokens.weights, strict=True)
    ]
    for token in range(TOKENS):
        for expert, weight in zip(choice.chosen[token], choice.weights[token], strict=True):
            assert expert < 0 or weight == stored[token][expert]


def test_dependence_on_neighbours_is_counted(made_by):
    made = made_by["softmax"]
    found, log = (made.gate(text).measure(made.sample()) for text in ("sinkhorn", "sinkhorn:log"))
    assert log["other_set_alone_share"] > 0.9  # the lowest numbers win
    assert (
        0.0 < found["other_set_alone_share"] < log["other_set_alone_share"]
    )  # the guard keeps an order
    assert 0.0 < found["other_set_elsewhere_share"] < 1.0
    none = made.gate("sinkhorn:steps=0,log").measure(made.sample())
    assert (none["other_set_alone_share"], none["other_set_elsewhere_share"]) == (0.0, 0.0)


# ---------------------------------------------------------------------------- rules of other shapes
def test_weights_by_the_order_of_picks_are_refused_where_sets_differ_in_size(made_by):
    router = made_by["softmax"].router
    rule = dataclasses.replace(router.rule, weights=Weights("sparsemixer", jitter=0.01))
    picked = dataclasses.replace(router, rule=rule)
    for text in ("smooth:extra=0.5", "sinkhorn", "expert-choice", "osr"):
        with pytest.raises(RouterRuleError, match="order in which"):
            made_by["softmax"].gate(text, picked)


def test_weights_count_shared_experts_and_scales_of_experts(made_by):
    made = made_by["softmax renormalised"]
    random = np.random.default_rng(0)
    shared = random.standard_normal((2, made.inputs.shape[1])).astype(np.float32)
    scale = random.uniform(0.5, 2.0, EXPERTS).astype(np.float32)
    router = dataclasses.replace(made.router, shared_rows=shared, expert_scale=scale)
    batch = made.batch(router)
    for text in ("smooth:extra=1", "expert-choice:1", "jitter:1e-12", "sinkhorn:steps=0"):
        (asked,) = parse_what_ifs([text])
        choice = asked.kind.make(router, asked.values, made.sample(batch)).choose(batch)
        scores = torch.tensor(exact_logits(made)).softmax(-1).numpy()
        outside = torch.tensor(made.inputs @ shared.T).softmax(-1).sum(-1).numpy()
        for token in range(40):
            chosen = choice.chosen[token][choice.chosen[token] >= 0]
            if text.startswith("smooth") and len(chosen) > TOP_K:
                continue
            expected = scores[token, chosen] / (scores[token, chosen].sum() + outside[token])
            np.testing.assert_allclose(
                choice.weights[token, : len(chosen)], expected * scale[chosen], rtol=1e-4
            )
