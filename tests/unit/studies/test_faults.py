"""Operators find what was done, scopes where, and noise is spread as noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.geometry.codes import Code, decoded
from moegeom.geometry.set_code import fitted_bias
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.studies.faults.compose import met_under, with_composed
from moegeom.studies.faults.exchangeable import LEAST, FlippedRouter, spread
from moegeom.studies.faults.operator import AS_STORED, OPERATORS, Site
from moegeom.studies.faults.operators.damaged import row_costs
from moegeom.studies.faults.scope import SCOPES, Where, best_region, found_by_chance
from moegeom.studies.faults.score import LEAST_BITS, believed, faults, score_site
from moegeom.studies.faults.told import Told, weights_of
from moegeom.variants.emulated import emulate
from tests.museum.checkpoint import Checkpoint
from tests.museum.healthy import softmax_model

TOKENS, LENGTH, EXPERTS, K = 2048, 64, 32, 4


def columns(tokens: int = TOKENS) -> TokenColumns:
    number = np.arange(tokens)
    return TokenColumns(
        document=number // LENGTH,
        position=(number % LENGTH).astype(np.int32),
        token_id=np.full(tokens, -1, np.int32),
        domain=np.zeros(tokens, np.int16),
    )


def where() -> Where:
    return Where.of(columns(), np.arange(TOKENS))


NUMBER = np.arange(TOKENS)
DOCUMENT, POSITION = NUMBER // LENGTH, NUMBER % LENGTH

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
    region = best_region(saved, where())
    np.testing.assert_array_equal(region.is_inside, planted)
    assert region.text
    assert region.bits > 0.0


@pytest.mark.parametrize("seed", range(5))
def test_what_all_tokens_save_is_of_all_tokens(seed):
    random = np.random.default_rng(seed)
    saved = random.exponential(1.0, TOKENS) * (random.random(TOKENS) < 0.1)
    assert best_region(saved, where()).text == ""


def test_no_region_costs_less_than_naming_one_of_its_kind():
    saved = np.where(REGIONS["documents"], 5.0, -1.0)
    for scope in SCOPES.all():
        assert all(region.bits >= 1.0 for region in scope.find(saved, where()))


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    model: Checkpoint = softmax_model(layers=1)
    path = model.write(tmp_path_factory.mktemp("faults") / "model")
    return load_routers(open_checkpoint(path)).routers[0]


def site(
    router, rows=None, tokens: int = TOKENS, noise: float = 0.0, theirs=None, tells: str = ""
) -> Site:
    """B routes with other ``rows``, on inputs with noise; it ``tells`` logits, weights or nothing."""
    random = np.random.default_rng(3)
    inputs = random.standard_normal((tokens, router.hidden_size)).astype(np.float32)
    moved = inputs + np.float32(noise) * random.standard_normal(inputs.shape, np.float32)
    k = router.rule.top_k
    logits = inputs @ router.weight.T
    other = moved @ (router.weight if rows is None else rows).T
    chosen = [
        np.argsort(-z, axis=1, kind="stable")[:, :k].astype(np.int32) for z in (logits, other)
    ]
    told = None
    if tells == "logits":
        told = Told(other.astype(np.float64), True)
    elif tells == "weights":
        told = Told.of_weights(weights_of(router, other, chosen[1]))
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
        columns=columns(tokens),
        matching=np.arange(router.num_experts),
        kernels=load_kernels("cpu"),
        has_inputs=True,
        has_logits=True,
        told=told,
        chosen_at=lambda number: chosen[0],
        values_at=lambda number: lambda some: inputs[some],
    )


def found(one: Site):
    scores = score_site(one, one.values_at(0))
    return faults([scores], Where.of(one.columns, np.arange(len(one.theirs))))


def test_operators_have_names_of_their_own_and_offer_what_fits_the_site(router):
    one = site(router, noise=0.02)
    names = [c.name for operator in OPERATORS.all() for c in operator.candidates(one)]
    assert len(names) == len(set(names))
    assert emulate(router, AS_STORED).router.weight.shape == router.weight.shape


def test_rows_of_some_experts_are_found_with_their_experts(router):
    rows = router.weight.copy()
    rows[[2, 9, 17]] = 0.0
    best = believed(found(site(router, rows, noise=0.005)))
    assert best is not None
    assert best.cause == "rows damaged"
    assert "3 of 32 experts (2, 9, 17)" in best.text


def test_rows_that_are_copies_are_found(router):
    rows = router.weight.copy()
    rows[[4, 21]] = rows[[11, 30]]
    one = site(router, rows, noise=0.002)
    cost = row_costs(one)
    assert cost[4].argmin() in (4, 11)
    best = believed(found(one))
    assert best is not None
    assert (best.cause, best.name) == ("rows damaged", "rows_copied")


@pytest.mark.parametrize("tells", ["logits", "weights"])
def test_a_few_flips_suffice_where_b_tells_how_it_chose(router, tells):
    weight = np.ascontiguousarray(router.weight, np.float32)
    rows = decoded(weight, Code("int8", 1, 0, 127.0))
    silent, telling = site(router, rows), site(router, rows, tells=tells)
    assert 0 < telling.differs.mean() < 0.1
    best = believed(found(telling))
    assert best is not None
    assert "int8 by row, scale amax/127" in best.text
    assert best.bits > 100.0 * max(one.bits for one in found(silent))


def test_rows_of_some_experts_are_known_by_their_weights(router):
    rows = router.weight.copy()
    rows[[5, 20]] *= 1.1
    best = believed(found(site(router, rows, tells="weights")))
    assert best is not None
    assert "rows times 1.1, 2 of 32 experts (5, 20)" in best.text


def test_what_b_chose_by_its_own_logits_is_no_fault_behind_them(router):
    one = site(router, 1.3 * router.weight + 0.2 * router.weight[::-1], tells="logits")
    assert one.is_of_logits
    causes = {fault.cause for fault in found(one)}
    assert not causes & {"bias missing", "bias differs", "rule differs", "ties broken by number"}
    renamed = np.random.default_rng(0).permutation(EXPERTS)[one.mine].astype(np.int32)
    assert not site(router, theirs=renamed, tells="logits").is_of_logits


def test_equal_rows_tie_whatever_a_product_makes_of_them(router):
    weight = router.weight.copy()
    weight[1::3], weight[2::3] = weight[::3], weight[:-2:3]
    twins = dataclasses.replace(router, weight=weight)
    one = site(twins)
    order = np.argsort(-one.logits[:, ::-1].astype(np.float64).round(4), axis=1, kind="stable")
    theirs = (EXPERTS - 1 - order[:, : twins.rule.top_k]).astype(np.int32)
    best = believed(found(site(twins, theirs=theirs)))
    assert best is not None
    assert (best.cause, best.name) == ("ties broken by number", "ties_highest")


def test_small_noise_is_no_fault(router):
    assert believed(found(site(router, noise=0.01))) is None


def test_a_bias_is_fitted_up_to_a_common_number(router):
    one = site(router)
    bias = 0.3 * one.logits.std() * np.random.default_rng(0).standard_normal(router.num_experts)
    moved = np.argsort(-(one.logits + bias), axis=1)[:, : router.rule.top_k]
    fit = fitted_bias(one.logits, moved)
    apart = (fit - bias) - np.median(fit - bias)
    assert np.abs(apart).max() < 0.2 * bias.std()


def test_a_small_bias_that_was_left_out_is_found_beside_a_large_one(router):
    random = np.random.default_rng(1)
    plain = site(router)
    bias = (plain.logits.std() * random.uniform(0.5, 1.0, router.num_experts)).astype(np.float32)
    left_out = [4, 20]
    bias[4] *= 0.1
    logits = plain.logits + bias
    read = logits + 0.2 * plain.logits.std() * random.standard_normal(logits.shape)
    read[:, left_out] -= bias[left_out]
    k = router.rule.top_k
    mine, theirs = (np.argsort(-z, axis=1)[:, :k].astype(np.int32) for z in (logits, read))
    one = dataclasses.replace(
        plain, router=dataclasses.replace(router, logit_bias=bias), logits=logits, scores=logits,
        selection=logits, mine=mine, theirs=theirs, chosen_at=lambda number: mine,
    )  # fmt: skip
    assert "logit bias left out, 2 of 32 experts (4, 20)" in [fault.text for fault in found(one)]


@pytest.mark.parametrize("tells", ["", "logits", "weights"])
def test_rows_in_another_order_are_experts_with_other_numbers(router, tells):
    rows = router.weight[np.random.default_rng(4).permutation(EXPERTS)]
    best = believed(found(site(router, rows, noise=0.01, tells=tells)))
    assert best is not None
    assert best.cause == "experts renamed"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tells", ["", "logits", "weights"])
@pytest.mark.parametrize("rank", [1, 2])
def test_an_update_of_low_rank_is_found(router, rank, tells):
    random = np.random.default_rng(rank)
    update = random.standard_normal((EXPERTS, rank)) @ random.standard_normal(
        (rank, router.hidden_size)
    )
    update *= 0.4 * np.linalg.norm(router.weight) / np.linalg.norm(update)
    rows = (router.weight + update).astype(np.float32)
    best = believed(found(site(router, rows, noise=0.01, tells=tells)))
    assert best is not None
    assert best.name == f"low_rank_{rank}"
    assert best.cause == "rows damaged"
    assert best.repaired > 0.4


def test_a_router_of_another_training_is_no_update_of_low_rank(router):
    random = np.random.default_rng(5)
    rows = router.weight + random.standard_normal(router.weight.shape).astype(np.float32)
    best = believed(found(site(router, rows)))
    assert best is None or not best.name.startswith("low_rank")


@pytest.mark.parametrize("order", ["later", "weaker"])
@pytest.mark.parametrize("size", [TOKENS, 256])
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
    best = believed(found(dataclasses.replace(one, theirs=theirs)))
    assert best is not None
    assert best.cause == "capacity"
    assert order in best.name
    assert ("all tokens" if size == TOKENS else f"each batch of {size}") in best.text


@pytest.mark.parametrize("seed", range(8))
def test_lucky_tokens_at_any_places_save_no_more_than_chance_does(seed):
    random = np.random.default_rng(seed)
    saved = random.standard_normal(TOKENS) - 0.5
    lucky = random.random(TOKENS) < 0.02
    saved[lucky] += random.exponential(30.0, int(lucky.sum()))
    region = best_region(saved, where())
    gained = float(saved[region.is_inside].sum()) - region.bits
    assert gained - found_by_chance(saved, where()) < LEAST_BITS


def rows_of(by: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Sets of the tokens that stand ``by`` further on in the same document, else their own."""
    there = NUMBER + by
    inside = (there >= 0) & (there < TOKENS)
    inside &= DOCUMENT[np.clip(there, 0, TOKENS - 1)] == DOCUMENT
    return np.where(inside[:, None], sets[np.clip(there, 0, TOKENS - 1)], sets)


@pytest.mark.parametrize("by", [-45, -1, 7])
def test_a_shift_of_any_length_is_found(router, by):
    one = site(router)
    theirs = rows_of(np.full(TOKENS, by), one.mine)
    best = believed(found(site(router, theirs=theirs)))
    assert best is not None
    assert (best.cause, best.name) == ("tokens shifted", f"tokens{by:+d}")


def test_shifts_of_each_document_are_one_fault(router):
    one = site(router)
    own = np.random.default_rng(4).permutation(TOKENS // LENGTH) - 40
    best = believed(found(site(router, theirs=rows_of(own[DOCUMENT], one.mine))))
    assert best is not None
    assert (best.cause, best.name) == ("tokens shifted", "tokens_own")


def test_faults_of_different_tokens_compose(router):
    one = site(router)
    by = np.where(REGIONS["interval"], -10, np.where(REGIONS["positions from"], -3, 0))
    theirs = rows_of(by, one.mine)
    scores = score_site(site(router, theirs=theirs), one.values_at(0))
    alone = faults([scores], where())
    assert {"tokens-10", "tokens-3"} <= {fault.name for fault in alone}
    best = believed(with_composed(alone, [scores], where()))
    assert best is not None
    assert sorted(part.name for part in best.parts) == ["tokens-10", "tokens-3"]
    assert best.bits == pytest.approx(sum(part.bits for part in best.parts))
    assert best.bits > max(fault.bits for fault in alone)
    np.testing.assert_array_equal(
        best.region.is_inside, REGIONS["interval"] | REGIONS["positions from"]
    )
    assert met_under(best.parts, scores).mean() > 0.95
    single = faults(
        [score_site(site(router, theirs=rows_of(by * 0, one.mine)), one.values_at(0))], where()
    )
    assert with_composed(single, [scores], where()) == single


def test_sets_that_do_not_depend_on_the_token_are_unrelated(router):
    load = np.random.default_rng(2).dirichlet(np.full(EXPERTS, 0.1))
    random = np.random.default_rng(5)
    k = router.rule.top_k
    drawn = np.log(load + 1e-9) + random.gumbel(size=(TOKENS, EXPERTS))
    theirs = np.argsort(-drawn, axis=1)[:, :k].astype(np.int32)
    best = found(site(router, theirs=theirs))[0]
    assert (best.cause, best.name) == ("unrelated", "loads")


def flipped(router, chance: np.ndarray, seed: int = 0):
    """FlippedRouter with a chance of each token, to a neighbour of the boundary."""
    one, random = site(router, tokens=len(chance)), np.random.default_rng(seed)
    flips = random.random(len(chance)) < chance
    order = np.argsort(-one.logits, axis=1)
    k = router.rule.top_k
    theirs = one.mine.copy()
    theirs[flips, -1] = order[flips, k]
    mine = order[:, :k].astype(np.int32)
    theirs = np.where(flips[:, None], theirs, mine)
    return FlippedRouter(
        site(router, tokens=len(chance), theirs=theirs), flips, np.ones(len(chance), bool)
    )


@pytest.mark.parametrize("seed", range(20))
def test_even_flips_are_spread_as_noise_is(router, seed):
    how = spread([flipped(router, np.full(TOKENS, 0.04), seed)])
    assert how.is_tested
    assert how.uneven == ()


@pytest.mark.parametrize("name", ["documents", "positions before", "ranks"])
def test_flips_of_some_tokens_are_not(router, name):
    chance = np.where(REGIONS[name], 0.3, 0.005)
    how = spread([flipped(router, chance)])
    assert name.split()[0] in [one.test for one in how.uneven]


def test_too_few_flips_tell_nothing(router):
    one = flipped(router, np.where(NUMBER < LEAST - 5, 1.0, 0.0))
    how = spread([one])
    assert not how.is_tested
    assert how.num_flips == LEAST - 5
    both = spread([one, one])
    assert both.is_tested
