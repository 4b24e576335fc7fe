"""Operators find what was done, scopes where, and noise is spread as noise."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
from scipy.special import log_expit, logsumexp

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TokenColumns
from moegeom.engine.choice import group_masked
from moegeom.engine.flipping import engine_logits
from moegeom.geometry.low_rank_fit import ChoicesOfScores, fitted_offsets, fitted_rows
from moegeom.geometry.number_formats import Code, decoded
from moegeom.geometry.rows import completed_sets
from moegeom.geometry.selection import sigmoid
from moegeom.geometry.set_code import fitted_bias, set_distances
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.studies.explain.record import VERDICTS
from moegeom.studies.faults._bits import STEP, bits_by_chance
from moegeom.studies.faults.behind import with_later
from moegeom.studies.faults.exchangeable import LEAST, FlippedRouter, spread
from moegeom.studies.faults.operator import AS_STORED, OPERATORS, ChoiceValues, Site, weights_of
from moegeom.studies.faults.operators.damaged import row_costs, rows_exchanged
from moegeom.studies.faults.operators.operands import edited_router
from moegeom.studies.faults.scope import SCOPES, Where, best_region, found_by_chance
from moegeom.studies.faults.score import (
    LEAST_BITS,
    Fault,
    believed,
    composed,
    faults,
    met_under,
    score_site,
    sources,
    with_composed,
)
from moegeom.tokens.traces.ids import empty_slots
from moegeom.variants.emulated import emulate
from tests.by_day import by_day
from tests.museum.healthy import softmax_model

TOKENS, LENGTH, EXPERTS, K = 2048, 64, 32, 4

NUMBER = np.arange(TOKENS)
DOCUMENT, POSITION = NUMBER // LENGTH, NUMBER % LENGTH
COLUMNS = TokenColumns(
    document=DOCUMENT,
    position=POSITION.astype(np.int32),
    token_id=np.full(TOKENS, -1, np.int32),
    domain=np.zeros(TOKENS, np.int16),
)

WHERE = Where.of(COLUMNS, NUMBER)

REGIONS = {
    "documents": np.isin(DOCUMENT, [3, 7, 8]),
    "positions from": POSITION >= 40,
    "positions before": POSITION < 12,
    "interval": (POSITION >= 20) & (POSITION < 31),
    "ranks": NUMBER % 5 == 2,
    "chunks": (POSITION % 16 == 0) & (POSITION > 0),
    "documents and positions": np.isin(DOCUMENT, [1, 9]) & (POSITION >= 32),
}


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_is_found_from_what_each_token_would_save(name):
    random = np.random.default_rng(1)
    planted = REGIONS[name]
    saved = np.where(planted, random.exponential(4.0, TOKENS), -random.exponential(0.5, TOKENS))
    region = best_region(saved, WHERE)
    np.testing.assert_array_equal(region.is_inside, planted)
    assert region.text
    assert region.bits > 0.0


def test_what_all_tokens_save_is_of_all_and_no_region_costs_less_than_its_name():
    for seed in range(5):
        random = np.random.default_rng(seed)
        saved = random.exponential(1.0, TOKENS) * (random.random(TOKENS) < 0.1)
        assert best_region(saved, WHERE).text == ""
    saved = np.where(REGIONS["documents"], 5.0, -1.0)
    regions = [region for scope in SCOPES.all() for region in scope.find(saved, WHERE)]
    assert min(region.bits for region in regions) >= 1.0


@pytest.mark.parametrize("seed", by_day(range(8), range(3)))
def test_lucky_tokens_at_any_places_save_no_more_beyond_all_than_chance_does(seed):
    random = np.random.default_rng(seed)
    saved = random.standard_normal(TOKENS) - 0.5
    lucky = random.random(TOKENS) < 0.02
    saved[lucky] += random.exponential(30.0, int(lucky.sum()))
    region = best_region(saved, WHERE)
    gained = float(saved[region.is_inside].sum()) - region.bits
    beyond = gained - max(float(saved.sum()), 0.0)
    assert beyond - found_by_chance(saved, WHERE) < LEAST_BITS


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    path = softmax_model(layers=1).write(tmp_path_factory.mktemp("faults") / "model")
    return load_routers(open_checkpoint(path)).routers[0]


def chosen_of(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :K].astype(np.int32)


def site(router, rows=None, noise: float = 0.0, theirs=None, tells: str = "") -> Site:
    """B routes with other ``rows``, on inputs with noise; it ``tells`` logits, weights or nothing."""
    random = np.random.default_rng(3)
    inputs = random.standard_normal((TOKENS, router.hidden_size)).astype(np.float32)
    moved = inputs + np.float32(noise) * random.standard_normal(inputs.shape, np.float32)
    logits = inputs @ router.weight.T
    other = moved @ (router.weight if rows is None else rows).T
    chosen = [chosen_of(z) for z in (logits, other)]
    told = None
    if tells == "logits":
        told = ChoiceValues(other.astype(np.float64), True)
    elif tells == "weights":
        told = ChoiceValues.of_weights(weights_of(router, other, chosen[1]))
    return Site(
        router=router,
        number=0,
        routers=[router],
        other=None,
        logits=logits,
        scores=logits,
        selection=logits,
        mine=chosen[0],
        theirs=chosen[1] if theirs is None else theirs,
        columns=COLUMNS,
        matching=np.arange(router.num_experts),
        kernels=load_kernels("cpu"),
        has_inputs=True,
        has_logits=True,
        recorded=told,
        chosen_at=lambda number: chosen[0],
        values_at=lambda number: lambda some: inputs[some],
        is_of_b=False,
        decides=np.ones(TOKENS, bool),
    )


def biased_site(router, bias: np.ndarray, read: np.ndarray) -> Site:
    """A router with a logit bias; B chooses by the logits that are ``read``."""
    plain = site(router, theirs=chosen_of(read))
    logits = plain.logits + bias
    return dataclasses.replace(
        plain,
        router=dataclasses.replace(router, logit_bias=bias),
        **dict.fromkeys(("logits", "scores", "selection"), logits),
        mine=chosen_of(logits),
        chosen_at=lambda number: chosen_of(logits),
    )


def faults_of(one: Site) -> list[Fault]:
    return faults([score_site(one, one.values_at(0))], WHERE)


def best_of(one: Site) -> Fault:
    best = believed(faults_of(one))
    assert best is not None
    return best


def test_operators_have_names_of_their_own_and_are_no_faults_behind_the_logits_of_b(router):
    one = site(router, noise=0.02)
    every = [c for operator in OPERATORS.all() for c in operator.candidates(one)]
    assert len(every) == len({c.name for c in every})
    assert {c.cause for c in every} <= VERDICTS.keys()
    assert emulate(router, AS_STORED).router.weight.shape == router.weight.shape
    one = site(router, 1.3 * router.weight + 0.2 * router.weight[::-1], tells="logits")
    assert one.is_of_logits
    causes = {fault.cause for fault in faults_of(one)}
    assert not causes & {"bias missing", "bias differs", "rule differs", "ties broken by number"}
    renamed = np.random.default_rng(0).permutation(EXPERTS)[one.mine].astype(np.int32)
    assert not site(router, theirs=renamed, tells="logits").is_of_logits


@pytest.mark.parametrize("tells", by_day(["logits", "weights"], ["weights"]))
def test_a_few_flips_suffice_where_b_tells_how_it_chose(router, tells):
    weight = np.ascontiguousarray(router.weight, np.float32)
    rows = decoded(weight, Code("int8", 1, 0, 127.0))
    silent, telling = site(router, rows), site(router, rows, tells=tells)
    assert 0 < telling.differs.mean() < 0.1
    best = best_of(telling)
    assert "int8 by row, scale amax/127" in best.text
    assert best.bits > 100.0 * max(one.bits for one in faults_of(silent))


#: Rows that are damaged, how much noise there is, what B tells, and the fault that is believed.
DAMAGED = [
    ([2, 9, 17], lambda w: 0.0 * w[:3], 0.005, "", "3 of 32 experts (2, 9, 17)"),
    ([4, 21], lambda w: w[[11, 30]], 0.002, "", "rows_copied"),
    ([5, 20], lambda w: 1.1 * w[[5, 20]], 0.0, "weights", "times 1.1, 2 of 32 experts (5, 20)"),
]


@pytest.mark.parametrize(("experts", "change", "noise", "tells", "words"), DAMAGED)
def test_rows_of_some_experts_are_found(router, experts, change, noise, tells, words):
    rows = router.weight.copy()
    rows[experts] = change(rows)
    one = site(router, rows, noise, tells=tells)
    best = best_of(one)
    assert best.cause == "rows damaged"
    assert words in f"{best.name} {best.text}"
    if words == "rows_copied":
        assert row_costs(one)[4].argmin() in (4, 11)


def test_rows_that_left_their_biases_are_proposed_and_rows_read_as_columns_of_any_router(router):
    bias = np.random.default_rng(1).permutation(np.linspace(-0.5, 0.5, EXPERTS, dtype=np.float32))
    turned = np.ascontiguousarray(router.weight).reshape(-1, EXPERTS).T
    cycled, copied = np.roll(np.arange(EXPERTS), 1), np.r_[0, 0, 2:EXPERTS]
    inputs = site(router).values_at(0)(NUMBER)
    for name, weight, added in (
        ("rows_in_other_order", router.weight[cycled], bias),
        ("rows_copied", router.weight[copied], bias),
        ("rows_copied_with_bias", router.weight[copied], bias[copied]),
        ("transposed", turned, bias),
    ):
        one = biased_site(router, bias, inputs @ weight.T + added)
        every = itertools.chain(rows_exchanged.candidates(one), edited_router.candidates(one))
        edited = next(p.routed.router for p in every if p.name == name)
        np.testing.assert_array_equal(edited.weight, weight)
        np.testing.assert_array_equal(edited.logit_bias, added)


@pytest.mark.parametrize("tells", by_day(["", "logits", "weights"], [""]))
def test_rows_in_another_order_are_experts_with_other_numbers(router, tells):
    rows = router.weight[np.random.default_rng(4).permutation(EXPERTS)]
    assert best_of(site(router, rows, 0.01, tells=tells)).cause == "experts renamed"


def rows_of(by: np.ndarray | int, sets: np.ndarray) -> np.ndarray:
    """Sets of the tokens that stand ``by`` further on in the same document, else their own."""
    there = NUMBER + by
    inside = (there >= 0) & (there < TOKENS)
    inside &= DOCUMENT[np.clip(there, 0, TOKENS - 1)] == DOCUMENT
    return np.where(inside[:, None], sets[np.clip(there, 0, TOKENS - 1)], sets)


OF_DOCUMENTS = (np.random.default_rng(4).permutation(TOKENS // LENGTH) - 40)[DOCUMENT]
SHIFTS = {"-45": -45, "-1": -1, "+7": 7, "_own": OF_DOCUMENTS}


@pytest.mark.parametrize("name", by_day(SHIFTS, ["-45", "_own"]))
def test_a_shift_of_any_length_and_one_of_each_document_is_one_fault(router, name):
    one = site(router)
    best = best_of(dataclasses.replace(one, theirs=rows_of(SHIFTS[name], one.mine)))
    assert (best.cause, best.name) == ("tokens shifted", f"tokens{name}")


def routed_otherwise(one: Site, columns=slice(None), factor=1.0, change=lambda x: x) -> np.ndarray:
    """B's choices behind rows with some columns times a factor, for changed inputs."""
    weight = one.router.weight.copy()
    weight[:, columns] *= np.float32(factor)
    return chosen_of(change(one.values_at(0)(NUMBER)) @ weight.T)


def of_rows(one: Site, place: np.ndarray) -> np.ndarray:
    return one.mine[place]


EXCHANGED = np.where(DOCUMENT == 3, NUMBER + 5 * LENGTH, NUMBER)
EXCHANGED = np.where(DOCUMENT == 8, NUMBER - 5 * LENGTH, EXCHANGED)
IN_CHUNKS = NUMBER - NUMBER % 8 + np.array([3, 0, 1, 2, 7, 4, 6, 5])[NUMBER % 8]
SLIPPING = np.maximum(NUMBER - POSITION // 16 * 3, DOCUMENT * LENGTH)

#: What B does to A's choices, the cause, and words of the fault that is believed.
PLANTED = {
    "a run of columns of zeros": (
        partial(routed_otherwise, columns=slice(32, 64), factor=0.0),
        ("columns damaged", "columns 32-63 of 256 read as zeros"),
    ),
    "a quarter of the columns doubled": (
        partial(routed_otherwise, columns=slice(0, 64), factor=2.0),
        ("columns damaged", "columns 0-63 of 256 twice as large"),
    ),
    "every fourth column of zeros": (
        partial(routed_otherwise, columns=slice(1, None, 4), factor=0.0),
        ("columns damaged", "modulo 4 of 256 read as zeros"),
    ),
    "blocks of columns scaled otherwise": (
        partial(routed_otherwise, factor=np.repeat([0.4, 1.0, 1.9, 1.0], 64)),
        ("columns damaged", "blocks of 4 columns weighed otherwise"),
    ),
    "inputs cut off": (
        partial(routed_otherwise, change=lambda x: np.clip(x, -0.7, 0.7)),
        ("inputs differ", "router inputs cut off at 0.6"),
    ),
    "documents exchanged": (
        partial(of_rows, place=EXCHANGED),
        ("tokens shifted", "3 holds 8, 8 holds 3"),
    ),
    "an order in chunks": (partial(of_rows, place=IN_CHUNKS), ("tokens shifted", "each 8 pos")),
    "a shift that grows": (partial(of_rows, place=SLIPPING), ("tokens shifted", "along the text")),
    "a softmax over tokens": (
        lambda one: chosen_of(one.logits - logsumexp(one.logits, axis=0)),
        ("rule differs", "over the tokens of everything instead of the experts"),
    ),
    "numbers of a rank": (lambda one: one.mine % 16, ("experts renamed", "modulo 16")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named(router, name):
    plant, (cause, words) = PLANTED[name]
    one = site(router)
    best = best_of(dataclasses.replace(one, theirs=plant(one).astype(np.int32)))
    assert best.cause == cause
    assert words in best.text


GROUPED = Rule(4, "sigmoid", Weights("scores"), True, groups=GroupMask(8, 3, "top2_sum", -np.inf))


def of_grouped(router, rule: Rule, theirs=None) -> Site:
    """A router with groups and a bias; its own choices are B's unless others are."""
    bias = np.random.default_rng(2).uniform(-1.2, -0.2, EXPERTS)
    biased = dataclasses.replace(router, rule=rule, selection_bias=bias)
    plain = site(router)
    scores = emulate(biased, AS_STORED).compared(plain.logits)
    selection, _ = group_masked(rule, scores, plain.kernels)
    mine = chosen_of(selection)
    moved = dataclasses.replace(plain, router=biased, scores=scores, selection=selection, mine=mine)
    return dataclasses.replace(moved, theirs=mine if theirs is None else theirs(moved))


def in_turn(one: Site) -> np.ndarray:
    best = -np.sort(-one.scores.reshape(TOKENS, -1, 8), axis=1)[:, :2].sum(axis=1)
    kept = np.argsort(-best, axis=1)[:, :3]
    is_kept = (np.arange(EXPERTS) % 8 == kept[:, :, None]).any(axis=1)
    return chosen_of(np.where(is_kept, one.scores, -np.inf))


def unbiased(one: Site) -> np.ndarray:
    plain = one.scores - one.router.selection_bias
    best = -np.sort(-plain.reshape(TOKENS, 8, -1), axis=2)[:, :, :2].sum(axis=2)
    kept = np.argsort(-best, axis=1)[:, :3]
    is_kept = (np.arange(EXPERTS) // 4 == kept[:, :, None]).any(axis=1)
    return chosen_of(np.where(is_kept, one.scores, -np.inf))


def from_zero(one: Site) -> np.ndarray:
    return chosen_of(np.maximum(one.selection, 0.0))


UNGROUPED = dataclasses.replace(GROUPED, groups=None)
RULES = {
    "groups that take turns": (GROUPED, in_turn, "e modulo 8 instead of e divided by 4"),
    "groups without the bias": (GROUPED, unbiased, "groups chosen by scores without the bias"),
    "a maximum from 0": (UNGROUPED, from_zero, "scores below 0 lost"),
    "another score": (
        UNGROUPED,
        lambda one: chosen_of(np.sqrt(np.logaddexp(0.0, one.logits)) + one.router.selection_bias),
        "sqrt(softplus) in place of sigmoid",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_another_rule_is_named(router, name):
    rule, theirs, words = RULES[name]
    best = best_of(of_grouped(router, rule, theirs))
    assert (best.cause, words in best.text) == ("rule differs", True)


def test_sets_that_do_not_depend_on_the_token_and_ties_of_equal_rows_are_told(router):
    load = np.random.default_rng(2).dirichlet(np.full(EXPERTS, 0.1))
    drawn = np.log(load + 1e-9) + np.random.default_rng(5).gumbel(size=(TOKENS, EXPERTS))
    theirs = chosen_of(drawn)
    best = faults_of(site(router, theirs=theirs))[0]
    assert (best.cause, best.name) == ("unrelated", "loads")
    weight = router.weight.copy()
    weight[1::3], weight[2::3] = weight[::3], weight[:-2:3]
    twins = dataclasses.replace(router, weight=weight)
    one = site(twins)
    order = np.argsort(-one.logits[:, ::-1].astype(np.float64).round(4), axis=1, kind="stable")
    theirs = (EXPERTS - 1 - order[:, : twins.rule.top_k]).astype(np.int32)
    best = best_of(site(twins, theirs=theirs))
    assert (best.cause, best.name) == ("ties broken by number", "ties_highest")


def test_small_noise_and_another_training_are_no_faults_of_low_rank(router):
    assert believed(faults_of(site(router, noise=0.01))) is None
    random = np.random.default_rng(5)
    rows = router.weight + random.standard_normal(router.weight.shape).astype(np.float32)
    best = believed(faults_of(site(router, rows)))
    assert best is None or not best.name.startswith("low_rank")


def test_a_bias_is_fitted_up_to_a_common_number(router):
    one = site(router)
    bias = 0.3 * one.logits.std() * np.random.default_rng(0).standard_normal(router.num_experts)
    moved = np.argsort(-(one.logits + bias), axis=1)[:, : router.rule.top_k]
    fit = fitted_bias(one.logits, moved)
    apart = (fit - bias) - np.median(fit - bias)
    assert np.abs(apart).max() < 0.2 * bias.std()


def test_a_small_bias_that_was_left_out_is_found_beside_a_large_one(router):
    random = np.random.default_rng(1)
    logits = site(router).logits
    bias = (logits.std() * random.uniform(0.5, 1.0, router.num_experts)).astype(np.float32)
    left_out = [4, 20]
    bias[4] *= 0.1
    read = logits + bias + 0.2 * logits.std() * random.standard_normal(logits.shape)
    read[:, left_out] -= bias[left_out]
    one = biased_site(router, bias, read)
    assert "logit bias left out, 2 of 32 experts (4, 20)" in [
        fault.text for fault in faults_of(one)
    ]


def planted(seed: int, tells: str) -> tuple[np.ndarray, np.ndarray, ChoicesOfScores]:
    """Inputs, other rows of eight experts, and the choices by these with the values beside them."""
    random = np.random.default_rng(seed)
    inputs, rows, update = (random.standard_normal(size) for size in ((800, 12), (8, 12), (8, 12)))
    logits, theirs = inputs @ rows.T, inputs @ (rows + update).T
    score = sigmoid if tells == "weights" else np.asarray
    chosen = np.argsort(-score(theirs), axis=1)[:, :3].astype(np.int32)
    values = np.full(logits.shape, np.nan)
    own = np.log(sigmoid(theirs)) if tells == "weights" else theirs
    np.put_along_axis(values, chosen, np.take_along_axis(own, chosen, 1) + 1.0, axis=1)
    how = {"is_sigmoid": tells == "weights", "are_log_sigmoids": tells == "weights"}
    return inputs, theirs, ChoicesOfScores(logits, chosen, values=values if tells else None, **how)


@pytest.mark.parametrize("tells", ["", "logits", "weights"])
def test_rows_of_any_rank_foretell_the_choices_of_other_tokens(tells):
    inputs, theirs, choices = planted(0, tells)
    half, parts = np.arange(800) < 400, {}
    for name in ("logits", "chosen", "values"):
        part = getattr(choices, name)
        parts[name] = None if part is None else part[half]
    update = fitted_rows(inputs[half], dataclasses.replace(choices, **parts))

    def share(logits: np.ndarray) -> float:
        best, own = (np.sort(np.argsort(-of, axis=1)[:, :3]) for of in (logits, theirs))
        return float((best == own).all(axis=1)[~half].mean())

    assert share(choices.logits) < 0.4
    assert share(choices.logits + inputs @ update.T) > (0.8 if tells else 0.7)


def test_offsets_of_groups_are_fitted_up_to_a_common_number():
    random = np.random.default_rng(3)
    logits, offsets = random.standard_normal((4000, 6)), np.array([0.0, 0.5, -0.5, 1.0, 0.0, 0.2])
    chosen = np.argsort(-(logits + offsets), axis=1)[:, :2].astype(np.int32)
    fit = fitted_offsets(ChoicesOfScores(logits, chosen))
    np.testing.assert_allclose(fit - fit[0], offsets, atol=0.05)


def test_empty_slots_hold_what_the_others_chose_and_they_lack():
    mine = np.array([[3, 1, 2], [0, 5, 4], [6, 7, 1], [2, 4, 6]], np.int32)
    theirs = np.array([[1, -1, 3], [5, 0, 4], [2, 2, 6], [2, 5, 6]], np.int32)
    is_empty = empty_slots(theirs, 8, mine)
    assert is_empty.tolist() == [
        [False, True, False], [False] * 3, [True, True, False], [False] * 3,
    ]  # fmt: skip
    whole = completed_sets(theirs, mine, is_empty)
    assert np.sort(whole, axis=1).tolist() == [[1, 2, 3], [0, 4, 5], [1, 6, 7], [2, 5, 6]]


UPDATES = [(rank, tells) for rank in (1, 2) for tells in ("", "logits", "weights")]


@pytest.mark.parametrize(
    ("rank", "tells"), by_day(UPDATES, {"by sets": (2, ""), "by logits": (1, "logits")})
)
def test_an_update_of_low_rank_is_found(router, rank, tells):
    random = np.random.default_rng(rank)
    update = random.standard_normal((EXPERTS, rank)) @ random.standard_normal(
        (rank, router.hidden_size)
    )
    update *= 0.4 * np.linalg.norm(router.weight) / np.linalg.norm(update)
    rows = (router.weight + update).astype(np.float32)
    best = best_of(site(router, rows, noise=0.01, tells=tells))
    assert best.name == f"low_rank_{rank}"
    assert best.cause == "rows damaged"
    assert best.repaired > 0.4


BATCHES = [(size, order) for size in (TOKENS, 256) for order in ("later", "weaker")]


@pytest.mark.parametrize(
    ("size", "order"), by_day(BATCHES, {"all": (TOKENS, "weaker"), "batches": (256, "later")})
)
def test_full_experts_are_found_with_their_batch(router, size, order):
    one = site(router, noise=0.01)
    theirs = np.empty_like(one.theirs)
    places = int(1.1 * size * K / EXPERTS)
    for start in range(0, TOKENS, size):
        z = one.logits[start : start + size]
        taken = np.zeros(EXPERTS, int)
        if order == "later":
            for row in range(size):
                open_ones = np.where(taken < places, z[row], -np.inf)
                theirs[start + row] = np.argsort(-open_ones)[:K]
                taken[theirs[start + row]] += 1
        else:  # pairs of a token and an expert, the strongest first
            chosen: list[list[int]] = [[] for _ in range(size)]
            for pair in np.argsort(-z, axis=None):
                row, expert = divmod(int(pair), EXPERTS)
                if len(chosen[row]) < K and taken[expert] < places:
                    chosen[row].append(expert)
                    taken[expert] += 1
            theirs[start : start + size] = chosen
    assert not np.array_equal(np.sort(theirs), np.sort(one.mine))
    best = best_of(dataclasses.replace(one, theirs=theirs))
    assert best.cause == "capacity"
    assert order in best.name
    assert ("all tokens" if size == TOKENS else f"each batch of {size}") in best.text


def test_faults_of_different_tokens_compose(router):
    one = site(router)
    by = np.where(REGIONS["interval"], -10, np.where(REGIONS["positions from"], -3, 0))
    theirs = rows_of(by, one.mine)
    scores = score_site(site(router, theirs=theirs), one.values_at(0))
    alone = faults([scores], WHERE)
    assert {"tokens-10", "tokens-3"} <= {fault.name for fault in alone}
    best = believed(with_composed(alone, [scores], WHERE))
    assert best is not None
    assert sorted(part.name for part in best.parts) == ["tokens-10", "tokens-3"]
    assert best.bits == pytest.approx(sum(part.bits for part in best.parts))
    assert best.bits > max(fault.bits for fault in alone)
    np.testing.assert_array_equal(
        best.region.is_inside, REGIONS["interval"] | REGIONS["positions from"]
    )
    assert met_under(best.parts, scores).mean() > 0.95
    single = faults_of(site(router, theirs=rows_of(by * 0, one.mine)))
    assert with_composed(single, [scores], WHERE) == single


def test_a_second_fault_of_the_same_tokens_is_looked_for_behind_the_first(router):
    weight = router.weight.copy()
    weight[:, :128] *= np.float32(0.0)
    one = site(router)
    logits = one.values_at(0)(NUMBER) @ weight.T
    logits[:, [3, 17, 30]] *= -1.0
    two = dataclasses.replace(one, theirs=chosen_of(logits))
    scores = [score_site(two, two.values_at(0))]
    pool = faults(scores, WHERE)
    best = believed(with_later(pool, {"text/0": (two, two.values_at(0))}, scores, WHERE))
    assert best is not None
    assert "columns 0-127 of 256 read as zeros" in best.text
    assert "rows turned round, 3 of 32 experts (3, 17, 30)" in best.text
    assert best.reproduced["text/0"] > 0.99 > 0.9 > max(one.reproduced["text/0"] for one in pool)
    assert met_under((best,), scores[0]).mean() > 0.99
    # nothing is looked for behind one that leaves nothing
    alone = dataclasses.replace(one, theirs=chosen_of(one.values_at(0)(NUMBER) @ weight.T))
    scores = [score_site(alone, alone.values_at(0))]
    pool = faults(scores, WHERE)
    assert with_later(pool, {"text/0": (alone, alone.values_at(0))}, scores, WHERE) == pool


def flipped(router, chance: np.ndarray, seed: int = 0) -> FlippedRouter:
    """Tokens go to a neighbour of the boundary, each with its chance."""
    one, random = site(router), np.random.default_rng(seed)
    flips = random.random(TOKENS) < chance
    order, k = np.argsort(-one.logits, axis=1), router.rule.top_k
    mine = order[:, :k].astype(np.int32)
    theirs = np.column_stack([mine[:, :-1], np.where(flips, order[:, k], mine[:, -1])])
    return FlippedRouter(
        dataclasses.replace(one, theirs=theirs.astype(np.int32)), flips, np.ones(TOKENS, bool)
    )


@pytest.mark.parametrize("seed", by_day(range(20), range(5)))
def test_even_flips_are_spread_as_noise_is(router, seed):
    how = spread([flipped(router, np.full(TOKENS, 0.04), seed)])
    assert how.is_tested
    assert how.uneven == ()


@pytest.mark.parametrize("name", ["documents", "positions before", "ranks"])
def test_flips_of_some_tokens_are_not(router, name):
    how = spread([flipped(router, np.where(REGIONS[name], 0.3, 0.005))])
    assert name.split()[0] in [one.test for one in how.uneven]


def test_too_few_flips_tell_nothing(router):
    one = flipped(router, np.where(NUMBER < LEAST - 5, 1.0, 0.0))
    how = spread([one])
    assert (how.is_tested, how.num_flips) == (False, LEAST - 5)
    assert spread([one, one]).is_tested


#: Share of sets that have nothing to do with their scores.
EPSILON = 2.0**-10


@pytest.mark.parametrize(("experts", "k"), [(5, 2), (64, 8), (384, 6), (256, 96), (16, 16)])
def test_bits_are_those_of_independent_logistic_choices_or_of_any_set(experts, k):
    random = np.random.default_rng(experts)
    scores = random.standard_normal((50, experts))
    noise = np.geomspace(1e-3, 1.0, len(scores))[:, None] * random.standard_normal(scores.shape)
    chosen = np.argsort(-(scores + noise))[:, :k]
    scores[0, :2], scores[1, chosen[1, 0]] = -np.inf, np.nan
    sets = set_distances(scores, chosen)
    for step, bits in enumerate(bits_by_chance(sets, 4.0, 5)):
        scaled = np.clip(sets.wrong.astype(np.float64) * STEP**step / 4.0, -60.0, 60.0)
        own = log_expit(-scaled).sum(axis=1) / np.log(2.0)
        expected = -np.logaddexp2(own + np.log2(1.0 - EPSILON), -10.0 - sets.outright)
        np.testing.assert_allclose(bits, expected, rtol=1e-9, atol=1e-12)


def test_sets_of_very_many_experts_are_no_dearer_than_their_names():
    scores = np.random.default_rng(0).standard_normal((6, 1200))
    chosen = np.argsort(-scores)[:, :600]
    chosen[3:] = np.argsort(scores[3:])[:, :600]
    sets = set_distances(scores, chosen)
    (bits,) = bits_by_chance(sets, 1e-3 * sets.spacing, 1)
    assert bits[:3].max() < 0.1
    np.testing.assert_allclose(bits[3:], 10.0 + sets.outright)


SHARED, HIDDEN = 24, 200


@pytest.fixture
def pair():
    random = np.random.default_rng(0)
    weight = random.standard_normal((2, SHARED, HIDDEN))
    bias = random.standard_normal((2, SHARED))
    rule, of = Rule(4, "softmax", Weights("scores"), True), Provenance("made up", (), "", "F32")
    plain = Router("text/0", "text", 0, weight[0], rule, of, logit_bias=bias[0])
    return plain, dataclasses.replace(plain, weight=weight[1], logit_bias=bias[1])


def mixed(pair, is_some):
    plain, edited = pair
    weight = np.where(is_some[:, None], edited.weight, plain.weight)
    bias = np.where(is_some, edited.logit_bias, plain.logit_bias)
    return dataclasses.replace(plain, weight=weight, logit_bias=bias)


def test_logits_of_shared_rows_are_those_of_the_product_and_others_are_not_shared(pair):
    is_some = np.arange(SHARED) % 5 == 1
    inputs = np.random.default_rng(1).standard_normal((1500, HIDDEN)).astype(np.float32)
    both = [emulate(one, AS_STORED) for one in pair]
    mixture = emulate(mixed(pair, is_some), AS_STORED)
    source = sources(mixture, both)
    np.testing.assert_array_equal(source, is_some.astype(int))
    logits = composed(source, [engine_logits(one, inputs) for one in both])
    np.testing.assert_array_equal(logits, engine_logits(mixture, inputs))
    own = mixed(pair, np.zeros(SHARED, bool))
    weight, bias = own.weight.copy(), own.logit_bias.copy()
    weight[3, 7] += 1.0
    bias[2] += 1.0
    assert sources(emulate(dataclasses.replace(own, weight=weight), AS_STORED), both) is None
    assert sources(emulate(dataclasses.replace(own, logit_bias=bias), AS_STORED), both) is None
    how = dataclasses.replace(AS_STORED, input="bfloat16")
    assert sources(emulate(own, how), both) is None
    assert sources(emulate(own, AS_STORED), both) is not None
