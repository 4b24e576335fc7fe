"""The routers of a second checkpoint on the inputs of the first. Oracle: NumPy in float64."""

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import NonFiniteError, RouterError
from moegeom.core.router import Norm, Projection, Router, RouterSet
from moegeom.core.row_keys import CHECKPOINT_B
from moegeom.core.tokens import TILE
from moegeom.engine.checkpoint_b import CheckpointB, routers_of_b
from moegeom.geometry.selection import Routing, route
from moegeom.metrics import METRICS
from moegeom.metrics.flips import NEAR
from tests.unit.scan import made

COMPARING = [metric for metric in METRICS.all() if metric.scope == "flip"]
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
    tables = made.measured(
        made.recording(), mine, checkpoint_b=second, metrics=COMPARING, **changes
    )
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
