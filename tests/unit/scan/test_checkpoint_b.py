"""The routers of a second checkpoint on the inputs of the first. Oracle: NumPy in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import NonFiniteError, RouterError, RouterRuleError
from moegeom.core.router import Norm, Projection, Router, RouterSet
from moegeom.core.row_keys import CHECKPOINT_B
from moegeom.core.tokens import TILE
from moegeom.engine.checkpoint_b import CheckpointB, routers_of_b
from moegeom.geometry.selection import route
from moegeom.metrics import METRICS
from moegeom.metrics.near_flips import NEAR

KINDS = ("softmax", "sigmoid")
COMPARING = [metric for metric in METRICS.all() if metric.scope == "flip"]


def checkpoint(*routers: Router, label: str = "second") -> RouterSet:
    return RouterSet(routers, label, "made", "softmax, top 3 of 12", "xxh128:0")


def beside(mine: Router, its: Router) -> CheckpointB:
    return routers_of_b(checkpoint(its), [mine])


def turned(router: Router) -> Router:
    """The rows of four experts in another order, biases left where they were."""
    order = [1, 0, 2, 3, 9, 5, 6, 7, 8, 4, 10, 11]
    return dataclasses.replace(router, weight=router.weight[order])


def without_duplicates(router: Router) -> Router:
    weight = router.weight.copy()
    weight[7] = np.random.default_rng(6).standard_normal(router.hidden_size)
    return dataclasses.replace(router, weight=weight)


def row_of(made, mine: Router, its: Router, **changes) -> dict:
    """The row of ``layers`` on all tokens."""
    second = beside(mine, its).routers[mine.name]
    rows = made.measured(made.recording(), mine, checkpoint_b=second, metrics=COMPARING, **changes)[
        "layers"
    ]
    return next(r for r in rows if (r["variant"], r["population"]) == (CHECKPOINT_B, "all"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_against_itself_flips_nothing(made, kind):
    router = made.router(kind, norm=True)
    row = row_of(made, router, router)
    assert (row["flipped_share"], row["weight_moved_mean"], row["reordered_share"]) == (0, 0, 0)
    assert beside(router, router).equal == (router.name,)
    assert (row["flipped_near_share"], row["flipped_margin_rank"]) == (None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_changed_places_flip_what_numpy_says(made, kind):
    mine = made.router(kind)
    its = turned(mine)
    row, values = row_of(made, mine, its), made.recording().values.astype(np.float64)
    before, after = (
        route(values @ router.weight.T.astype(np.float64), router.rule, router.selection_bias)
        for router in (mine, its)
    )
    sets = [np.sort(found.chosen) for found in (before, after)]
    differs = (sets[0] != sets[1]).any(axis=1)
    assert 0.1 < differs.mean() < 1.0
    assert row["flipped_share"] == pytest.approx(differs.mean(), abs=2.0 / len(differs))
    stays = (before.chosen[:, :, None] == after.chosen[:, None, :]).any(axis=2)
    moved = (before.weights * ~stays).sum(axis=1) / before.weights.sum(axis=1)
    assert row["weight_moved_mean"] == pytest.approx(moved.mean(), abs=2.0 / len(differs))
    reordered = ~differs & (before.chosen != after.chosen).any(axis=1)
    assert row["reordered_share"] == pytest.approx(reordered.mean(), abs=2.0 / len(differs))
    assert row["proved_share"] is None
    assert row["predicted_flipped_share"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_its_rule_is_its_own(made, kind):
    mine, its = made.router("softmax"), made.router("sigmoid")
    mine, its = (mine, its) if kind == "softmax" else (its, mine)
    row, values = row_of(made, mine, its), made.recording().values.astype(np.float64)
    chosen = [
        np.sort(route(values @ r.weight.T.astype(np.float64), r.rule, r.selection_bias).chosen)
        for r in (mine, its)
    ]
    differs = (chosen[0] != chosen[1]).any(axis=1).mean()
    assert row["flipped_share"] == pytest.approx(differs, abs=2.0 / len(values))
    assert not beside(mine, its).has_same_rule


@pytest.mark.parametrize("kind", KINDS)
def test_a_gain_folded_into_the_rows_flips_nothing_but_ties(made, kind):
    mine = without_duplicates(made.router(kind, norm=True))
    factor = np.random.default_rng(5).uniform(0.5, 2.0, mine.hidden_size).astype(np.float32)
    assert mine.gain is not None
    its = dataclasses.replace(mine, weight=mine.weight / factor, gain=mine.gain * factor)
    found = beside(mine, its)
    assert (found.regained, found.equal) == ((mine.name,), ())
    np.testing.assert_allclose(found.routers[mine.name].weight, mine.weight, rtol=3e-7)
    assert row_of(made, mine, its)["flipped_share"] == 0.0


def test_a_gain_that_is_not_followed_flips_tokens(made):
    mine = made.router("softmax", norm=True)
    assert mine.gain is not None
    its = dataclasses.replace(mine, gain=mine.gain[::-1].copy())
    effective = mine.weight.astype(np.float64) * (mine.gain[::-1] / mine.gain)
    values = made.recording().values.astype(np.float64)
    chosen = [np.sort(route(values @ w.T, mine.rule).chosen) for w in (mine.weight, effective)]
    differs = (chosen[0] != chosen[1]).any(axis=1).mean()
    assert differs > 0.1
    found = row_of(made, mine, its)["flipped_share"]
    assert found == pytest.approx(differs, abs=4.0 / len(values))


def test_a_gain_that_is_0_in_both_changes_nothing(made):
    mine = made.router("softmax", norm=True)
    assert mine.gain is not None
    gain = mine.gain.copy()
    gain[3] = 0.0
    mine = dataclasses.replace(mine, gain=gain)
    its = dataclasses.replace(mine, gain=2.0 * gain)
    np.testing.assert_array_equal(
        np.delete(beside(mine, its).routers[mine.name].weight, 3, axis=1),
        np.delete(2.0 * mine.weight, 3, axis=1),
    )


def test_a_gain_that_only_one_checkpoint_knows_is_named(made):
    mine, its = made.router("softmax", norm=True), made.router("softmax")
    found = beside(mine, its)
    assert (found.unknown_gain, found.regained) == ((mine.name,), ())
    assert found.routers[mine.name] is its


def narrower(router: Router) -> Router:
    return dataclasses.replace(router, weight=router.weight[:, 1:])


def of_fewer_experts(router: Router) -> Router:
    return dataclasses.replace(router, weight=router.weight[1:])


def of_another_top_k(router: Router) -> Router:
    return dataclasses.replace(router, rule=dataclasses.replace(router.rule, top_k=2))


def elsewhere(router: Router) -> Router:
    return dataclasses.replace(router, name="text/5")


def damaged(router: Router) -> Router:
    weight = router.weight.copy()
    weight[4, 1] = np.nan
    return dataclasses.replace(router, weight=weight)


def behind_a_projection(router: Router) -> Router:
    inner = Projection(np.eye(router.hidden_size, dtype=np.float32))
    return dataclasses.replace(router, projection=inner)


def without_gain(router: Router) -> Router:
    return dataclasses.replace(router, gain=np.zeros_like(router.gain))


def behind_a_layer_norm(router: Router) -> Router:
    return dataclasses.replace(router, norm=Norm("layer", 1e-6, "norm.weight"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (elsewhere, r"second: has no router text/0; its 1 router is text/5"),
        (of_fewer_experts, r"second: router text/0 has 11 experts; that of the first .* has 12"),
        (narrower, r"has 7 coordinates of the input; that of the first checkpoint has 8"),
        (of_another_top_k, r"has 2 chosen experts; that of the first checkpoint has 3"),
        (damaged, r"second: router text/0: the row of expert 4 is not finite"),
        (behind_a_projection, r"stands behind a projection"),
        (behind_a_layer_norm, r"norm of kind layer .*first checkpoint one of kind rms"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_both_values(made, change, said):
    mine = made.router("softmax", norm=True)
    with pytest.raises(RouterError, match=said):
        beside(mine, change(mine))


def test_an_input_that_the_first_gain_has_lost_is_refused(made):
    its = made.router("softmax", norm=True)
    with pytest.raises(RouterRuleError, match=r"0\.5 at coordinate 0; .* it is 0 \(8 coord"):
        beside(without_gain(its), its)


def test_layer_norms_with_another_gain_are_refused(made):
    mine = behind_a_layer_norm(made.router("softmax", norm=True))
    assert mine.gain is not None
    with pytest.raises(RouterRuleError, match="layer norm"):
        beside(mine, dataclasses.replace(mine, gain=2.0 * mine.gain))
    assert beside(mine, mine).equal == (mine.name,)


def test_a_gain_ratio_beyond_float32_is_refused(made):
    mine = made.router("softmax", norm=True)
    assert mine.gain is not None
    tiny = dataclasses.replace(mine, gain=np.full_like(mine.gain, 1e-30))
    huge = dataclasses.replace(mine, gain=np.full_like(mine.gain, 1e30))
    with pytest.raises(RouterRuleError, match="times its gain over that of the first"):
        beside(tiny, huge)


def test_logits_that_overflow_in_the_second_alone_are_not_finite(made):
    mine = made.router()
    its = dataclasses.replace(mine, weight=np.full_like(mine.weight, 3e38))
    with pytest.raises(NonFiniteError):
        row_of(made, mine, its)


@pytest.mark.parametrize("kind", KINDS)
def test_near_flips_are_those_of_sorted_margins(made, kind):
    mine, random = without_duplicates(made.router(kind)), np.random.default_rng(9)
    noise = 0.05 * random.standard_normal(mine.weight.shape).astype(np.float32)
    its = dataclasses.replace(mine, weight=mine.weight + noise)
    row, values = row_of(made, mine, its), made.recording().values.astype(np.float64)
    before, after = (
        route(values @ router.weight.T.astype(np.float64), router.rule, router.selection_bias)
        for router in (mine, its)
    )
    tight = before.margin
    if before.group_margin is not None:
        tight = np.minimum(tight, before.group_margin / 2.0)
    differs = (np.sort(before.chosen) != np.sort(after.chosen)).any(axis=1)
    near = tight <= np.quantile(tight, NEAR)
    rank = (tight[differs][:, None] > tight).mean()
    assert row["flipped_near_share"] == pytest.approx(near[differs].mean(), abs=0.02)
    assert row["flipped_margin_rank"] == pytest.approx(rank, abs=0.002)
    # small changes flip near tokens; those of another router do not
    assert row["flipped_near_share"] > 0.3
    other = row_of(made, mine, turned(mine))
    assert other["flipped_near_share"] < 0.2
    assert other["flipped_margin_rank"] > 0.35


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_threads_change_nothing(made, kind):
    mine, its = made.router(kind, norm=True), turned(made.router(kind, norm=True))
    expected = row_of(made, mine, its, exclude_first=3)
    for batch_tokens, num_workers in ((2 * TILE, 1), (10**9, 2), (1, 3)):
        found = row_of(
            made,
            mine,
            its,
            exclude_first=3,
            batch_tokens=batch_tokens,
            num_workers=num_workers,
        )
        np.testing.assert_equal(found, expected)
