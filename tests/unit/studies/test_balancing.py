"""What was done to a router is what `balance` says about it."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.core.router import GroupMask, Router
from moegeom.core.tokens import TopLogits
from moegeom.engine.request import ComputeOptions
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.studies.balance.document import document
from moegeom.studies.balance.record import SENTENCES, Loads
from moegeom.studies.balance.router import balance_router, meaning_of, read_sample
from moegeom.studies.balance.study import BalanceRequest, balance, write_changes
from moegeom.testing.array_source import ArraySource
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
    assert_cut,
    balance_of_balanced,
    sides,
    widest,
    worded,
)

KERNELS = load_kernels("cpu")

shown = functools.partial(worded, document)


def balanced(router: Router, inputs: np.ndarray, level: float = 0.002):
    """At a level at which chance fails no test of what is meant; 5 % is tested by itself."""
    sample = read_sample(router, source_of(inputs), ComputeOptions())
    return balance_router(router, sample, KERNELS, level, 0)


ROWS = router_of().weight
WRONG_BIAS = 0.2 * np.random.default_rng(3).standard_normal(EXPERTS)
NO_BIAS = np.zeros(EXPERTS)


@pytest.fixture(scope="module")
def uneven():
    return balanced(router_of(WRONG_BIAS), inputs_of(128))


def test_a_bad_update_of_the_bias_is_told_from_a_bad_router(uneven):
    assert uneven.meaning == "holds"
    assert uneven.before.max_vio > 1.0
    assert uneven.after.max_vio <= 1 / 512 + 1e-12
    assert all(half.after.max_vio < 0.4 for half in uneven.held_out)
    # what was done wrong is undone, up to what the true router needs on these tokens
    right = balanced(router_of(NO_BIAS), inputs_of(128))
    undone = np.array(uneven.change) - right.change + WRONG_BIAS - WRONG_BIAS.mean()
    assert np.abs(undone).max() < 0.01 * np.abs(WRONG_BIAS).max()
    assert [half.num_units for half in uneven.held_out] == [64, 64]
    assert sum(half.num_tokens for half in uneven.held_out) == uneven.num_tokens
    # held out is worse than in sample, and no worse than the limit
    assert all(uneven.after.max_vio < half.after.max_vio < half.limit for half in uneven.held_out)


def test_displaced_weight_and_changed_sets_are_those_of_the_new_choice(uneven):
    router = router_of(WRONG_BIAS)
    score = 1.0 / (1.0 + np.exp(-(inputs_of(128) @ router.weight.T).astype(np.float64)))
    q = score + router.selection_bias.astype(np.float64)
    first, second = (np.argsort(-b, axis=1)[:, :TOP_K] for b in (q, q + uneven.change))
    lost = (first[:, :, None] != second[:, None, :]).all(axis=2)
    weight = np.take_along_axis(score, first, axis=1)
    weight /= weight.sum(axis=1, keepdims=True)
    displaced = (weight * lost).sum(axis=1).mean()
    np.testing.assert_allclose(uneven.displaced_weight, displaced, rtol=1e-6)
    np.testing.assert_allclose(uneven.changed_share, lost.any(axis=1).mean())
    np.testing.assert_allclose(np.mean(uneven.change), 0.0, atol=1e-15)


def test_an_even_router_is_left_alone_and_one_without_a_bias_told_so():
    lean = 0.6 * np.random.default_rng(4).standard_normal((64, HIDDEN))
    one = balanced(router_of(NO_BIAS), inputs_of(64, lean))
    assert one.meaning == "balanced"
    assert one.before.cv > 1.1 * one.cv_floor  # documents differ, tokens are not independent
    assert one.limit > one.max_vio_floor
    lean = np.broadcast_to(0.6 * ROWS[3], (64, HIDDEN))
    one = balanced(router_of(), inputs_of(64, lean))
    assert (one.meaning, one.score_unit) == ("holds, no bias now", "logit")
    assert 3 in (expert for expert, *_ in one.pushes()[-2:])
    assert one.change[3] == min(one.change)


def test_documents_of_two_kinds_in_the_two_halves_are_seen():
    """Even blocks lean to one expert and odd blocks to another: a bias for one is wrong for both."""
    half = (np.arange(128) + np.arange(128) // 16) % 2
    lean = np.where(half[:, None] == 0, 1.5 * ROWS[2], -1.5 * ROWS[2] + 1.5 * ROWS[9])
    one = balanced(router_of(), inputs_of(128, lean))
    assert one.meaning == "documents"
    assert one.after.max_vio < 0.01


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
        assert balanced(router, inputs_of(16)).duplicates == duplicates


def test_tokens_that_are_all_alike_cannot_be_balanced_and_few_documents_tell_nothing():
    one = balanced(router_of(), np.tile(inputs_of(1)[:1], (64 * LENGTH, 1)))
    assert (one.meaning, one.num_tied) == ("none", 64 * LENGTH)
    assert len(one.duplicates[0][0]) == EXPERTS
    lean = np.broadcast_to(2.0 * ROWS[3], (2, HIDDEN))
    assert balanced(router_of(), inputs_of(1, lean[:1])).meaning == "unknown"
    assert balanced(router_of(), inputs_of(2, lean)).meaning in ("unknown", "few")
    assert balanced(router_of(experts=TOP_K), inputs_of(64)).meaning == "balanced"


GROUPS = [(score, fill) for score in ("max", "top2_sum") for fill in (-np.inf, 0.0)]


@pytest.mark.parametrize(
    ("score", "fill"), by_day(GROUPS, {"masked": ("max", -np.inf), "zeros": ("top2_sum", 0.0)})
)
def test_groups_are_balanced_by_the_true_rule(score, fill):
    one = balanced(router_of(WRONG_BIAS + 1.0, GroupMask(4, 2, score, fill)), inputs_of(128))
    assert one.is_grouped
    assert (one.gap, one.num_tied) == (None, None)
    assert one.before.max_vio > 1.0
    assert one.after.max_vio < 0.05
    assert one.meaning == "holds"


def test_groups_without_bias_are_balanced_in_the_unit_of_their_score():
    one = balanced(router_of(None, GroupMask(4, 2, "max", 0.0)), inputs_of(64))
    assert (one.score_unit, one.has_selection_bias) == ("sigmoid score + bias", False)
    assert one.after.max_vio < 0.1


def test_each_meaning_has_its_condition(uneven):
    for changes, of_halves, meaning in (
        ({}, {}, "holds"),
        ({"has_selection_bias": False}, {}, "holds, no bias now"),
        ({"limit": 9.0}, {}, "unknown"),
        ({"limit": 6.9}, {}, "balanced"),
        ({"after": Loads(3.0, 1.0)}, {}, "none"),
        ({"after": Loads(3.0, 1.0), "is_grouped": True}, {}, "none found"),
        ({"held_out": ()}, {}, "few"),
        ({}, {"num_units": 1}, "few"),
        ({}, {"reduction_p": 0.2}, "few"),
        ({}, {"reduction": -0.1}, "documents"),
        ({}, {"after": Loads(9.0, 1.0)}, "partly"),
    ):
        halves = tuple(dataclasses.replace(half, **of_halves) for half in uneven.held_out)
        one = dataclasses.replace(uneven, **({"held_out": halves} | changes))
        assert meaning_of(one, 0.05) == meaning
        assert meaning in SENTENCES


def request(sample: Path, **changes) -> BalanceRequest:
    checkpoint, tokens = map(str, sides(sample))
    return BalanceRequest(checkpoint, **({"tokens": tokens} | changes))


@pytest.fixture(scope="module")
def collapsed():
    return balance(request(COLLAPSED, layers="0-1"))


def test_the_collapsed_sample_can_be_balanced_and_the_balanced_one_is_even(collapsed):
    for router in collapsed.routers:
        assert router.meaning == "holds, no bias now"
        assert router.before.max_vio > 1.5
        assert router.after.max_vio < 0.02
        assert router.largest_change > router.spread
    meanings = [router.meaning for router in balance_of_balanced().value.routers]
    assert meanings == ["balanced"] * 2


def test_a_screen_shows_the_least_even_routers_and_a_page_all_a_wide_one_the_cv(collapsed):
    first, *_ = collapsed.routers
    routers = tuple(
        dataclasses.replace(first, router=f"text/{n}", before=Loads(2.0 + n, 1.0))
        for n in range(14)
    )
    record = dataclasses.replace(collapsed, routers=routers)
    some = assert_cut(document, record, "", "more that were more even")
    assert some == [*range(14)][-len(some) :]
    for width in (80, 100):
        text = shown(collapsed, width=width)
        assert widest(text) <= width
        heading = next(line for line in text.splitlines() if line.strip().startswith("MaxVio"))
        assert ("CV" in heading) == (width > 80)


def test_the_file_holds_the_bias_in_both_precisions(tmp_path):
    out, other = tmp_path / "bias.npz", tmp_path / "bias.safetensors"
    (one,) = balance(request(GROUPED, layers="1", out=out)).routers
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    with pytest.raises(UsageError, match="exists already"):
        balance(request(GROUPED, layers="1", out=out))
    checkpoint = sides(GROUPED)[0]
    (router, *_) = load_routers(open_checkpoint(str(checkpoint))).routers
    write_changes(other, [router], [one.change], [one.score_unit])
    stored = np.array(load_file(checkpoint / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ])  # fmt: skip
    for arrays in (dict(np.load(out)), load_file(other)):
        np.testing.assert_array_equal(arrays["text/1/change_float64"], one.change)
        added = arrays["text/1/selection_bias_float64"] - arrays["text/1/change_float64"]
        np.testing.assert_allclose(added, stored, atol=1e-15)
        assert arrays["text/1/selection_bias_float32"].dtype == np.float32


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
UNANSWERED = "cannot say which bias balances router text/0: needs"


def test_what_cannot_be_answered_is_refused_and_what_was_not_recorded_told():
    with pytest.raises(RecordingError, match="none of the routers"):
        balance(request(BALANCED, tokens=OF_ANOTHER))
    for stage in ("ids", "top_logits"):
        with pytest.raises(RecordingError, match=UNANSWERED):
            balance(request(BALANCED, tokens=Partial(stage), layers="0"))
    inputs = inputs_of(4)
    inputs[5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="token 5"):
        balanced(router_of(), inputs)
    inputs = np.random.default_rng(5).standard_normal((1024, 64)).astype(np.float32)
    source = ArraySource({"text/1": inputs}, document_tokens=64)
    record = balance(request(BALANCED, tokens=source, unverified=True))
    assert [router.router for router in record.routers] == ["text/1"]
    assert [name for name, _ in record.left_out] == ["text/0", "text/2"]
    assert "not checked" in shown(record)
