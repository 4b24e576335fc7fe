"""Tokens of another checkpoint, stage or rule are refused with the numbers, or labelled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TILE, TopLogits
from moegeom.engine.prepared import prepare
from moegeom.engine.trust import examine
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import route
from moegeom.kernels.table import load_kernels

STRICT = {"stale_inputs": False, "unverified": False}
TOKENS = 600


@pytest.fixture
def router(made):
    return made.router(norm=True)


@pytest.fixture
def source(made, router):
    """Inputs as the norm gives them, and the choices that follow from them."""
    values = normed(made.inputs(TOKENS), "rms", 1e-6, router.gain)
    chosen = route(values @ router.weight.T, router.rule).chosen
    return made.source("router_input", made.columns(TOKENS), values, chosen)


def examined(router, source, allow=STRICT, fingerprint="sha256:a"):
    prepared = [prepare(router)]
    return examine(prepared, source, fingerprint, load_kernels("cpu"), allow)


def test_true_inputs_are_believed(router, source):
    found = examined(router, source)
    assert (found.fingerprint, found.overridden) == ("unknown", ())
    np.testing.assert_allclose(found.rms_median, 1.0, rtol=1e-3)
    np.testing.assert_array_equal(found.share_reproduced, 1.0)


def test_another_checkpoint_is_refused_unless_stale_inputs_are_allowed(router, source):
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:b")
    with pytest.raises(RecordingError, match="recorded from another checkpoint"):
        examined(router, source)
    found = examined(router, source, STRICT | {"stale_inputs": True})
    assert found.fingerprint == "differs"
    assert len(found.overridden) == 1


def test_inputs_before_the_gain_are_refused_unless_unverified_is_allowed(router, source):
    source.values = source.values / router.gain * 3
    with pytest.raises(RecordingError, match="expected 1"):
        examined(router, source)
    found = examined(router, source, STRICT | {"unverified": True})
    np.testing.assert_array_less(1.5, found.rms_median)


def test_choices_of_another_rule_are_refused_with_the_share(router, source):
    source.chosen = (source.chosen + 1) % 12
    with pytest.raises(RecordingError, match="of the first recorded choices follow"):
        examined(router, source)


def test_choices_of_other_experts_on_a_tie_are_reproduced(router, source):
    """Rows 2 and 7 are duplicate rows: another engine may take either."""
    chosen = source.chosen
    swapped = np.where(chosen == 2, 7, np.where(chosen == 7, 2, chosen)).astype(np.int32)
    source.chosen = swapped
    np.testing.assert_array_equal(examined(router, source).share_reproduced, 1.0)


@pytest.fixture
def small(made, router, source):
    """Inputs of a norm that are as small as the root of its eps."""
    source.values = normed(made.inputs(TOKENS) * 1e-3, "rms", 1e-6, router.gain)
    source.chosen = route(source.values @ router.weight.T, router.rule).chosen
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:a")
    return source


def test_own_inputs_that_eps_makes_small_are_believed_for_the_choices_that_follow(router, small):
    found = examined(router, small)
    np.testing.assert_array_less(found.rms_median, 0.9)
    assert found.overridden == ()


@pytest.mark.parametrize("change", ["another checkpoint", "other choices", "no choices", "larger"])
def test_inputs_that_eps_may_make_small_are_refused_unless_all_speaks_for_them(
    change, router, small
):
    if change == "another checkpoint":
        small.facts = dataclasses.replace(small.facts, fingerprint="")
    if change == "other choices":
        small.chosen = (small.chosen + 1) % 12
    if change == "no choices":
        small.facts = dataclasses.replace(small.facts, has_chosen=False)
    if change == "larger":
        small.values = small.values * 2.5
    with pytest.raises(RecordingError, match="expected 1"):
        examined(router, small)


def test_inputs_behind_the_norm_are_not_taken_for_those_in_front_of_it(made, router, source):
    behind = made.source("pre_norm", made.columns(TOKENS), source.values)
    with pytest.raises(RecordingError, match="the norm was applied already") as caught:
        examined(router, behind)
    assert "--stage router_input" in caught.value.hint
    assert len(examined(router, behind, STRICT | {"unverified": True}).overridden) == 1
    # in bfloat16, as engines record them
    import ml_dtypes

    coarse = source.values.astype(ml_dtypes.bfloat16).astype(np.float32)
    with pytest.raises(RecordingError, match="the norm was applied already"):
        examined(router, made.source("pre_norm", made.columns(TOKENS), coarse))


def test_only_inputs_that_vary_in_size_are_taken_for_those_of_the_norm(router, source):
    behind = source.values
    for factor, is_guessed in (
        (np.float32(3.0), False),
        (np.linspace(0.5, 4.0, TOKENS, dtype=np.float32)[:, None], True),
    ):
        source.values = behind * factor
        with pytest.raises(RecordingError, match="expected 1") as caught:
            examined(router, source)
        assert ("--stage pre_norm" in caught.value.hint) == is_guessed
        assert ("stage pre_norm" in str(caught.value)) == is_guessed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_scores_are_not_taken_for_logits(made, kind, dtype):
    import ml_dtypes
    from scipy.special import expit, softmax

    router = made.router(kind)
    logits = made.inputs(TOKENS) @ router.weight.T
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    said = {
        "softmax": (softmax(logits, axis=1), "these are probabilities"),
        "sigmoid": (expit(logits), "these are scores behind the sigmoid"),
    }
    scores, sentence = said[kind]
    padded = scores.astype(stored).astype(np.float32)
    padded[3] = 0.0
    wrong = made.source("logits", made.columns(TOKENS), padded)
    with pytest.raises(RecordingError, match=sentence) as caught:
        examined(router, wrong)
    assert "np.log" in caught.value.hint
    assert len(examined(router, wrong, STRICT | {"unverified": True}).overridden) == 1


def test_logits_that_lie_between_0_and_1_are_believed(made):
    random = np.random.default_rng(2)
    for kind in ("softmax", "sigmoid"):
        router = made.router(kind)
        narrow = random.uniform(0.3, 0.7, (TOKENS, router.num_experts)).astype(np.float32)
        few = random.uniform(0.0, 1.0, (64, router.num_experts)).astype(np.float32)
        for values in (narrow, few):
            source = made.source("logits", made.columns(len(values)), values)
            assert examined(router, source).overridden == ()


def _blank_rows(values, rows, number=0.0):
    changed = values.copy()
    changed[rows] = number
    return changed


@pytest.mark.parametrize(
    ("number", "said"),
    [(0.0, "3 hold nothing but 0"), (0.7, "3 hold the same logit for every expert")],
)
def test_logits_of_rows_that_no_token_made_are_refused_unless_allowed(made, number, said):
    """Also behind the first tokens: padding may lie anywhere."""
    router, tokens = made.router(), 40 * TILE
    logits = made.inputs(tokens) @ router.weight.T
    wrong = _blank_rows(logits, [3, 20 * TILE, 35 * TILE + 7], number)
    source = made.source("logits", made.columns(tokens), wrong)
    with pytest.raises(RecordingError, match=f"of 8,192 tokens that were looked at, {said}"):
        examined(router, source)
    assert len(examined(router, source, STRICT | {"unverified": True}).overridden) == 1
    assert examined(router, made.source("logits", made.columns(tokens), logits)).overridden == ()


def test_zero_rows_are_refused_at_every_stage_that_holds_numbers(made, router):
    residual = made.inputs(TOKENS) * np.linspace(0.5, 4.0, TOKENS, dtype=np.float32)[:, None]
    expert = np.tile(np.arange(4, dtype=np.int32), (TOKENS, 1))
    largest = -np.sort(-made.inputs(TOKENS)[:, :4], axis=1)
    blank = [7, 8]
    for stage, values in (
        ("pre_norm", _blank_rows(residual, blank)),
        ("top_logits", TopLogits(_blank_rows(largest, blank), expert)),
    ):
        with pytest.raises(RecordingError, match="2 hold nothing but 0: padding"):
            examined(router, made.source(stage, made.columns(TOKENS), values))


def test_equal_logits_are_believed_of_a_router_whose_rows_are_equal(made):
    router = made.router()
    equal = dataclasses.replace(router, weight=np.zeros_like(router.weight))
    source = made.source("logits", made.columns(TOKENS), np.zeros((TOKENS, router.num_experts)))
    assert examined(equal, source).overridden == ()


def test_the_largest_logits_of_a_token_may_be_equal(made):
    """In bfloat16 the two largest are now and then; here at every token."""
    expert = np.tile(np.arange(4, dtype=np.int32), (TOKENS, 1))
    largest = np.repeat(made.inputs(TOKENS)[:, :1], 4, axis=1)
    source = made.source("top_logits", made.columns(TOKENS), TopLogits(largest, expert))
    assert examined(made.router(), source).overridden == ()


def test_inputs_in_front_of_the_norm_are_believed(made, router):
    residual = made.inputs(TOKENS) * np.linspace(0.5, 4.0, TOKENS, dtype=np.float32)[:, None]
    found = examined(router, made.source("pre_norm", made.columns(TOKENS), residual))
    assert found.overridden == ()
    # numbers of size one that no norm made: their sizes spread by 3.3 / sqrt(hidden size)
    gaussian = np.random.default_rng(3).standard_normal((TOKENS, router.hidden_size), np.float32)
    assert examined(router, made.source("pre_norm", made.columns(TOKENS), gaussian)) == found


def test_another_number_of_recorded_experts_is_said_as_that(made, router, source):
    wide = np.random.default_rng(1).permuted(
        np.tile(np.arange(router.num_experts, dtype=np.int32), (TOKENS, 1)), axis=1
    )[:, : router.rule.top_k + 2]
    many = made.source("router_input", made.columns(TOKENS), source.values, wide)
    top_k = router.rule.top_k
    with pytest.raises(
        RecordingError,
        match=f"{top_k + 2} experts are recorded for each token, and the rule chooses {top_k}",
    ) as caught:
        examined(router, many)
    assert f"If the recorded model chose {top_k + 2}, write that into config.json" in (
        caught.value.hint
    )
    assert "--top-k where --router-pattern is given" in caught.value.hint
