"""What flips, and jumps of a sample and of what flips; the routers of a second checkpoint on the inputs
of the first. Oracles: torch's own bfloat16 layer, products in many orders, NumPy in float64.
"""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import rankdata

from moegeom.core.errors import NonFiniteError, RouterError
from moegeom.core.router import GroupMask, Norm, Projection, Router, RouterSet, Rule, Weights
from moegeom.core.row_keys import CHECKPOINT_B
from moegeom.core.tokens import TILE
from moegeom.engine import flipping
from moegeom.engine.checkpoint_b import CheckpointB, routers_of_b
from moegeom.engine.flipping import ReferenceChoice, emulated_choice, flip_of
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.selection import Routing, route
from moegeom.kernels.table import load_kernels
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from moegeom.metrics.flips import NEAR
from moegeom.variants.emulated import arithmetic, emulate
from tests.unit.scan import made
from tests.unit.scan.made import SUM_TO_ONE, router_with

TOKENS, WIDTH, EXPERTS, TOP_K = 2 * TILE + 77, 192, 24, 4
BIASED = {"has_selection_bias": True}
RULES = {
    "softmax": Rule(TOP_K, "softmax", SUM_TO_ONE),
    "softmax with logit bias": Rule(
        TOP_K, "softmax", Weights("softmax_of_selected_logits"), has_logit_bias=True
    ),
    "sigmoid with bias": Rule(TOP_K, "sigmoid", SUM_TO_ONE, **BIASED),
    "sigmoid in groups": Rule(
        TOP_K, "sigmoid", SUM_TO_ONE, **BIASED, groups=GroupMask(4, 2, "top2_sum", -np.inf)
    ),
    "sqrt softplus with bias": Rule(TOP_K, "sqrt_softplus", SUM_TO_ONE, **BIASED),
    "softmax with bias": Rule(TOP_K, "softmax", SUM_TO_ONE, **BIASED),
}
KERNELS = load_kernels("cpu")


def router_of(rule: str = "softmax", experts: int = EXPERTS, top_k: int = TOP_K) -> Router:
    random, of = np.random.default_rng(0), dataclasses.replace(RULES[rule], top_k=top_k)
    bias = (0.2 * random.standard_normal(EXPERTS)).astype(np.float32)
    weight = (random.standard_normal((EXPERTS, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
    return router_with(
        weight[:experts],
        of,
        logit_bias=bias if of.has_logit_bias else None,
        selection_bias=bias if of.has_selection_bias else None,
    )


def inputs(tokens: int = TOKENS) -> np.ndarray:
    """Some of the tokens are sinks: a thousand times as long."""
    values = np.random.default_rng(1).standard_normal((tokens, WIDTH)).astype(np.float32)
    values[::97] *= 1000.0
    return values


def reference_of(router: Router, values: np.ndarray) -> ReferenceChoice:
    logits = values @ router.weight.T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    of = route(logits, router.rule, router.selection_bias)
    return ReferenceChoice(values, logits, of.chosen, of.margin, of.weights, None)


def flips_of(router: Router, name: str, values: np.ndarray):
    """What flips under an arithmetic."""
    return flip_of(emulate(router, arithmetic(name)), reference_of(router, values), KERNELS)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_flips_where_nothing_is_changed(rule: str) -> None:
    flips = flips_of(router_of(rule), "float32-blocks", inputs())
    assert not flips.differs.any()
    assert flips.proved.mean() > 0.99
    assert not flips.weight_moved.any()


@pytest.mark.parametrize("experts", [1, TOP_K])
def test_where_every_expert_is_chosen_every_token_is_proved(experts: int) -> None:
    for name in ("float32-blocks", "bf16-logits"):
        assert flips_of(router_of("softmax", experts, experts), name, inputs()).proved.all()


def test_ties_of_coarse_logits_leave_a_range_and_no_token_that_flips_is_proved() -> None:
    flips = flips_of(router_of(), "bf16-logits", inputs())
    assert flips.tied.any()
    assert (flips.surely <= flips.differs).all()
    assert (flips.differs <= flips.perhaps).all()
    assert flips.surely.sum() < flips.differs.sum() < flips.perhaps.sum()
    assert not (flips.proved & flips.perhaps).any()
    one_left_out = flips_of(router_of("softmax", TOP_K + 1), "bf16-logits", inputs())
    assert one_left_out.differs.any()
    assert not (one_left_out.proved & one_left_out.differs).any()


def test_logits_are_those_of_a_bfloat16_layer_of_torch() -> None:
    router, values = router_of(), inputs()
    emulated = emulate(router, arithmetic("transformers-softmax"))
    logits, chosen, _ = emulated_choice(emulated, values, KERNELS)
    mine = rounded_to(logits, "bfloat16")
    layer = torch.nn.functional.linear(
        torch.from_numpy(values).bfloat16(), torch.from_numpy(router.weight).bfloat16()
    )
    theirs = layer.float().numpy()
    other = mine != theirs
    assert other.mean() < 1e-3
    # one step of bfloat16, where the last bit of the float32 sum decides
    assert (np.abs(mine - theirs)[other] <= 2.0**-7 * np.abs(theirs)[other]).all()
    scores = torch.softmax(layer, dim=-1, dtype=torch.float32)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :TOP_K].numpy()
    same = ~other.any(axis=1)
    np.testing.assert_array_equal(np.sort(chosen[same]), np.sort(order[same]))


def test_a_token_is_proved_where_exact_logits_are_further_apart_than_an_engine_errs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a float32 product errs by, which what all logits share makes more than gaps."""
    router, values = router_of("softmax with logit bias"), inputs(TILE)
    router.weight[:, 0], values[:, 0] = 1.0, np.geomspace(1.0, 1e5, TILE)
    exact = values.astype(np.float64) @ router.weight.T.astype(np.float64) + router.logit_bias
    routed = route(exact, router.rule, None)
    reference = dataclasses.replace(reference_of(router, values), chosen=routed.chosen)
    emulated = emulate(router, arithmetic("float32-blocks"))
    lengths = np.linalg.norm(values.astype(np.float64), axis=1)
    error, of_any = (emulated.sum_error(lengths, order) for order in ("blocks_of_16", "any"))
    off = np.random.default_rng(4).uniform(-0.9, 0.9, exact.shape) * of_any[:, None]
    monkeypatch.setattr(flipping, "engine_logits", lambda *_: (exact + off).astype(np.float32))
    proved = flip_of(emulated, reference, KERNELS).proved
    assert proved[routed.margin > 2.001 * error].all()
    sizes = (np.abs(values).astype(np.float64) @ np.abs(router.weight).T).max(axis=1)
    assert not proved[routed.margin < 2.0 * error * sizes / lengths / emulated.longest_row].any()
    # neither the product nor its logits would tell
    assert (proved & (routed.margin < of_any)).sum() > 50


@pytest.mark.parametrize("name", ["bf16", "int4", "fp8", "bias-bf16"])
def test_a_known_change_is_routed_anew(name: str) -> None:
    """What is certain about a change of rows and inputs is the choice of the changed ones."""
    router, values = router_of("sigmoid with bias"), inputs()
    emulated = emulate(router, arithmetic(name))
    flips = flips_of(router, name, values)
    logits = emulated.inputs(values).astype(np.float64) @ emulated.columns.astype(np.float64)
    anew = route(logits, router.rule, emulated.selection_bias)
    before = reference_of(router, values).chosen
    differs = (np.sort(anew.chosen) != np.sort(before)).any(axis=1)
    clear = anew.margin > 1e-5
    np.testing.assert_array_equal(flips.differs[clear], differs[clear])
    assert flips.differs.any()
    assert (flips.weight_moved > 0.0).sum() == flips.differs.sum()


COMPARING = [metric for metric in METRICS.all() if metric.scope == "flip"]


def rows_of(source, **changes) -> list[dict]:
    """The rows of ``layers`` under two arithmetics."""
    run = made.run(source, arithmetics=("bf16-logits", "int8"), metrics=COMPARING, **changes)
    return measure_router(run).rows["layers"]


def test_shares_are_those_of_the_tokens_whatever_the_pace() -> None:
    source, router = made.recording(), made.router()
    rows = rows_of(source)
    np.testing.assert_equal(rows_of(source, batch_tokens=4 * TILE, num_workers=2), rows)
    for name in ("bf16-logits", "int8"):
        row, flips = made.row_of(rows, name), flips_of(router, name, source.values)
        assert row["flipped_share"] == flips.differs.mean()
        assert row["proved_share"] == flips.proved.mean()
        np.testing.assert_allclose(row["weight_moved_mean"], flips.weight_moved.mean(), atol=1e-9)
        assert row["num_disproved"] == 0
        assert made.row_of(rows, f"random+{name}")["flipped_share"] > 0.0
        own = [r for r in rows if r["variant"] == name]
        assert {row["population"] for row in own} >= {"all", "domain=code"}
        assert all(row["flipped_share"] is not None for row in own)


def test_arithmetics_need_router_inputs_and_without_them_nothing_is_compared() -> None:
    logits = made.Recorded(made.inputs(300) @ made.router().weight.T, "logits")
    metrics = [METRICS["tokens"], *COMPARING]
    measured = measure_router(made.run(logits, arithmetics=("int8",), metrics=metrics))
    assert measured.facts["reasons"]["flips"].startswith("needs recorded router inputs")
    assert not [row for row in measured.rows["layers"] if row["variant"] == "int8"]
    measured = measure_router(made.run(made.recording(300)))
    assert not {m.name for m in COMPARING} & set(measured.facts["reasons"])
    assert {row["variant"] for row in measured.rows["layers"]} == {"as_stored", "random"}


#: What stands in the columns below.
METRICS_OF_JUMPS = [
    METRICS[name] for name in ("tokens", "boundaries", "jump", "flips", "flip_jump")
]
FLIPPING = ("bf16-logits",)
JUMP_TOKENS = 900


def expert(number: int, y: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(number)
    return np.tanh(y @ random.standard_normal((y.shape[-1], 4)))


def mixed(inputs, chosen, weights) -> np.ndarray:
    out = np.zeros((len(inputs), 4))
    for slot in range(chosen.shape[1]):
        for number in np.unique(chosen[:, slot]):
            if number >= 0:
                row = np.flatnonzero(chosen[:, slot] == number)
                out[row] += weights[row, slot, None] * expert(int(number), inputs[row])
    return out


def by_definition(router, y):
    """Jump, output and distance of each token of a renormalised softmax rule, token by token."""
    weight, k = router.weight.astype(np.float64), router.rule.top_k
    heights, outputs, distances, pairs = [], [], [], []
    for x in y.astype(np.float64):
        z = weight @ x
        ranks = rankdata(-z, method="ordinal")
        inside, outside = np.flatnonzero(ranks <= k), np.flatnonzero(ranks > k)
        apart = np.linalg.norm(weight[inside, None] - weight[None, outside], axis=2)
        gap = z[inside, None] - z[None, outside]
        distance = np.divide(gap, apart, out=np.full(gap.shape, np.inf), where=apart > 0.0)
        i, j = np.unravel_index(distance.argmin(), distance.shape)
        out, into = inside[i], outside[j]
        way = distance[i, j] * (weight[out] - weight[into]) / apart[i, j]
        at = np.exp(weight @ (x - way))
        share = at[out] / at[inside].sum()
        heights.append(share * np.linalg.norm(expert(out, x - way) - expert(into, x - way)))
        g = np.exp(z[inside]) / np.exp(z[inside]).sum()
        whole = sum(share * expert(e, x) for e, share in zip(inside, g, strict=True))
        outputs.append(np.linalg.norm(whole))
        distances.append(distance[i, j])
        pairs.append((int(out), int(into)))
    return np.array(heights), np.array(outputs), np.array(distances), pairs


def run_of(source, router=None, **changes):
    """Its tables; a router without its duplicate rows, whose boundary has no place."""
    if router is None:
        weight = made.router().weight.copy()
        weight[7] += 1.0
        router = dataclasses.replace(made.router(), weight=weight)
    metrics = {"metrics": METRICS_OF_JUMPS, "experts": mixed}
    return router, measure_router(made.run(source, router, **(metrics | changes)))


@pytest.fixture(scope="module")
def scanned():
    router, measured = run_of(made.recording(JUMP_TOKENS), arithmetics=FLIPPING)
    return made.tables(measured), by_definition(router, made.inputs(JUMP_TOKENS))


def test_columns_are_those_of_the_definition_token_by_token(scanned):
    rows, (height, output, distance, _) = scanned
    row = made.row_of(rows["layers"])
    assert (row["num_jump_tokens"], row["jump_known_share"]) == (JUMP_TOKENS, 1.0)
    noise = (
        0.4247 * 2.0**-8 * np.sqrt((made.inputs(JUMP_TOKENS).astype(np.float64) ** 2).mean(axis=1))
    )
    chance = ndtr(-distance / noise)
    for column, expected in {
        "jump_p50": np.median(height),
        "jump_p99": np.quantile(height, 0.99),
        "jump_over_output_p50": np.median(height / output),
        "expected_jump": (chance * height).mean(),
        "expected_jump_over_output": (chance * height / output).mean(),
    }.items():
        np.testing.assert_allclose(row[column], expected, rtol=1e-3, err_msg=column)


def test_a_pair_has_the_mean_jump_of_its_tokens_and_flips_cost_their_share_of_it(scanned):
    rows, (height, _, _, pairs) = scanned
    listed = made.rows_of(rows["pairs"])
    assert listed
    for one in listed[:10]:
        pair = one["expert_out"], one["expert_in"]
        own = [h for h, p in zip(height, pairs, strict=True) if p == pair]
        np.testing.assert_allclose(one["jump_mean"], np.mean(own), rtol=1e-3)
    rows, (height, _, _, _) = scanned
    row = made.row_of(rows["layers"], FLIPPING[0])
    share = row["flipped_share"]
    assert row["num_flip_jumps"] == round(share * JUMP_TOKENS) > 0
    np.testing.assert_allclose(row["flip_cost"], share * row["flip_jump_mean"])
    over_output = share * row["flip_jump_over_output_mean"]
    np.testing.assert_allclose(row["flip_cost_over_output"], over_output)
    assert height.min() <= row["flip_jump_mean"] <= height.max()


def test_without_experts_inputs_or_straight_boundaries_jumps_are_unknown():
    _, without = run_of(made.recording(300), experts=None, arithmetics=FLIPPING)
    assert without.facts["reasons"]["jump"] == "no experts were read (--experts)"
    assert without.facts["reasons"]["flip_jump"] == "no experts were read (--experts)"
    assert not any(row.get("jump_p50") for row in without.rows["layers"])
    logits = (made.inputs(300) @ made.router().weight.T).astype(np.float32)
    _, of_logits = run_of(made.Recorded(logits, "logits"))
    assert "needs recorded router inputs" in of_logits.facts["reasons"]["jump"]
    _, measured = run_of(made.recording(300), made.router("sigmoid"))
    row = made.row_of(made.tables(measured)["layers"])
    assert row["num_jump_tokens"] == 300
    assert 0.1 < row["jump_known_share"] < 1.0


# ------------------------------------------------------------------------------ a second checkpoint
BESIDE_B = [metric for metric in METRICS.all() if metric.scope == "flip"]
VALUES = made.recording().values.astype(np.float64)
NORMED = made.router(norm=True)


def beside(mine: Router, its: Router) -> CheckpointB:
    second = RouterSet((its,), "second", "made", "softmax, top 3 of 12", "sha256:0")
    return routers_of_b(second, [mine])


def changed(router: Router, **fields) -> Router:
    return dataclasses.replace(router, **fields)


def turned(router: Router) -> Router:
    """The rows of four experts in another order, biases left where they were."""
    return changed(router, weight=router.weight[[1, 0, 2, 3, 9, 5, 6, 7, 8, 4, 10, 11]])


def without_duplicates(router: Router) -> Router:
    weight = router.weight.copy()
    weight[7] = np.random.default_rng(6).standard_normal(router.hidden_size)
    return changed(router, weight=weight)


def row_of(mine: Router, its: Router, **changes) -> dict:
    """The row of ``layers`` on all tokens."""
    second = beside(mine, its).routers[mine.name]
    tables = made.measured(made.recording(), mine, checkpoint_b=second, metrics=BESIDE_B, **changes)
    return made.row_of(tables["layers"], CHECKPOINT_B)


def routed(router: Router, weight=None) -> Routing:
    """In float64."""
    rows = router.weight if weight is None else weight
    return route(VALUES @ rows.T.astype(np.float64), router.rule, router.selection_bias)


def differs(one: Routing, other: Routing) -> np.ndarray:
    return (np.sort(one.chosen) != np.sort(other.chosen)).any(axis=1)


def is_share(value: float, tokens: np.ndarray) -> bool:
    """Is it the mean, but for two tokens whose float32 logits decide otherwise?"""
    return value == pytest.approx(tokens.mean(), abs=2.0 / len(VALUES))


@pytest.fixture(params=["softmax", "sigmoid"])
def kind(request):
    return request.param


def test_a_router_against_itself_flips_nothing_and_its_rule_is_its_own(kind):
    router = made.router(kind, norm=True)
    row = row_of(router, router)
    assert (row["flipped_share"], row["weight_moved_mean"], row["reordered_share"]) == (0, 0, 0)
    for mine in (router, changed(router, **LAYER_NORM)):
        assert beside(mine, mine).equal == (router.name,)
    assert (row["flipped_near_share"], row["flipped_margin_rank"]) == (None, None)
    mine, its = made.router(kind), made.router("sigmoid" if kind == "softmax" else "softmax")
    assert is_share(row_of(mine, its)["flipped_share"], differs(routed(mine), routed(its)))
    assert not beside(mine, its).has_same_rule


def test_rows_that_changed_places_flip_what_numpy_says(kind):
    mine = made.router(kind)
    row, before, after = row_of(mine, turned(mine)), routed(mine), routed(turned(mine))
    flips = differs(before, after)
    assert 0.1 < flips.mean() < 1.0
    assert is_share(row["flipped_share"], flips)
    stays = (before.chosen[:, :, None] == after.chosen[:, None, :]).any(axis=2)
    moved = (before.weights * ~stays).sum(axis=1) / before.weights.sum(axis=1)
    assert is_share(row["weight_moved_mean"], moved)
    reordered = ~flips & (before.chosen != after.chosen).any(axis=1)
    assert is_share(row["reordered_share"], reordered)
    assert row["proved_share"] is row["predicted_flipped_share"] is None


def test_a_gain_folded_into_the_rows_flips_nothing_but_ties(kind):
    mine = without_duplicates(made.router(kind, norm=True))
    factor = np.random.default_rng(5).uniform(0.5, 2.0, mine.hidden_size).astype(np.float32)
    its = changed(mine, weight=mine.weight / factor, gain=mine.gain * factor)
    pair = beside(mine, its)
    assert (pair.regained, pair.equal) == ((mine.name,), ())
    np.testing.assert_allclose(pair.routers[mine.name].weight, mine.weight, rtol=3e-7)
    assert row_of(mine, its)["flipped_share"] == 0.0


def test_a_gain_that_is_0_in_both_changes_nothing_and_one_of_one_checkpoint_is_named():
    gain = NORMED.gain.copy()
    gain[3] = 0.0
    mine, its = changed(NORMED, gain=gain), changed(NORMED, gain=2.0 * gain)
    rows, twice = beside(mine, its).routers[mine.name].weight, 2.0 * mine.weight
    np.testing.assert_array_equal(np.delete(rows, 3, axis=1), np.delete(twice, 3, axis=1))
    its = made.router()
    pair = beside(NORMED, its)
    assert (pair.unknown_gain, pair.regained) == ((NORMED.name,), ())
    assert pair.routers[NORMED.name] is its


LAYER_NORM = {"norm": Norm("layer", 1e-6, "norm.weight")}
WEIGHT, GAIN = NORMED.weight, NORMED.gain
DAMAGED = np.where(np.arange(8) == 1, np.float32(np.nan), WEIGHT)
BEHIND = {"projection": Projection(np.eye(8, dtype=np.float32))}
TOP_2 = {"rule": dataclasses.replace(NORMED.rule, top_k=2)}

#: What is said -> what the two checkpoints have instead.
REFUSED = {
    "has no router text/0; its 1 router is text/5": ({}, {"name": "text/5"}),
    "second: router text/0 has 11 experts; that of the first .* 12": ({}, {"weight": WEIGHT[1:]}),
    "has 7 coordinates of the input; that of the first .* has 8": ({}, {"weight": WEIGHT[:, 1:]}),
    "has 2 chosen experts; that of the first checkpoint has 3": ({}, TOP_2),
    "second: router text/0: the row of expert 0 is not finite": ({}, {"weight": DAMAGED}),
    "stands behind a projection": ({}, BEHIND),
    "norm of kind layer .*first checkpoint one of kind rms": ({}, LAYER_NORM),
    r"0\.5 at coordinate 0; .* it is 0 \(8 coord": ({"gain": 0.0 * GAIN}, {}),
    "layer norm": (LAYER_NORM, {"gain": 2.0 * GAIN, **LAYER_NORM}),
    "times its gain over that of the first": ({"gain": 1e-30 * GAIN}, {"gain": 1e30 * GAIN}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_compared_is_refused_with_both_values(message):
    mine, its = (changed(NORMED, **fields) for fields in REFUSED[message])
    with pytest.raises(RouterError, match=message):
        beside(mine, its)


def test_logits_that_overflow_in_the_second_alone_are_not_finite():
    mine = made.router()
    with pytest.raises(NonFiniteError):
        row_of(mine, changed(mine, weight=np.full_like(mine.weight, 3e38)))


def test_near_flips_are_those_of_sorted_margins(kind):
    mine, random = without_duplicates(made.router(kind)), np.random.default_rng(9)
    noise = 0.05 * random.standard_normal(mine.weight.shape).astype(np.float32)
    its = changed(mine, weight=mine.weight + noise)
    row, before = row_of(mine, its), routed(mine)
    tight = before.margin
    if before.group_margin is not None:
        tight = np.minimum(tight, before.group_margin / 2.0)
    flips = differs(before, routed(its))
    near = tight <= np.quantile(tight, NEAR)
    rank = (tight[flips][:, None] > tight).mean()
    assert row["flipped_near_share"] == pytest.approx(near[flips].mean(), abs=0.02)
    assert row["flipped_margin_rank"] == pytest.approx(rank, abs=0.002)
    # small changes flip near tokens; those of another router do not
    assert row["flipped_near_share"] > 0.3
    other = row_of(mine, turned(mine))
    assert other["flipped_near_share"] < 0.2
    assert other["flipped_margin_rank"] > 0.35


def test_cuts_and_threads_change_nothing(kind):
    mine = made.router(kind, norm=True)
    rows = [
        row_of(mine, turned(mine), exclude_first=3, batch_tokens=tokens, num_workers=workers)
        for tokens, workers in ((2 * TILE, 1), (1, 3))
    ]
    np.testing.assert_equal(*rows)
