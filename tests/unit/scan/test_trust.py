"""Tokens of another checkpoint, stage or rule are refused with the numbers, or labelled."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from scipy.special import expit, softmax

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TILE, TopLogits
from moegeom.engine.prepared import prepare
from moegeom.engine.trust import examine
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import route
from moegeom.kernels.table import load_kernels
from tests.unit.scan import made

STRICT = {"stale_inputs": False, "unverified": False}
TOKENS = 600
ROUTER = made.router(norm=True)
COLUMNS = made.columns(TOKENS)

#: Factors by which residuals in front of a norm differ in size.
SIZES = np.linspace(0.5, 4.0, TOKENS, dtype=np.float32)[:, None]


def inputs_of(residual):
    """Inputs as the norm gives them, and the choices that follow from them."""
    values = normed(residual, "rms", 1e-6, ROUTER.gain)
    chosen = route(values @ ROUTER.weight.T, ROUTER.rule).chosen
    return made.source("router_input", COLUMNS, values, chosen)


@pytest.fixture
def source():
    return inputs_of(made.inputs(TOKENS))


@pytest.fixture
def small():
    """Inputs of a norm that are as small as the root of its eps, of this checkpoint."""
    source = inputs_of(made.inputs(TOKENS) * 1e-3)
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:a")
    return source


def examined(source, router=ROUTER, **allow):
    prepared = [prepare(router)]
    return examine(prepared, source, "sha256:a", load_kernels("cpu"), STRICT | allow)


def refusal(source, router=ROUTER, allowed_by="unverified") -> RecordingError:
    """The error, which becomes a label where it is allowed."""
    with pytest.raises(RecordingError) as refused:
        examined(source, router)
    if allowed_by:
        assert len(examined(source, router, **{allowed_by: True}).overridden) == 1
    return refused.value


def test_true_inputs_are_believed_and_small_ones_for_the_choices_that_follow(source, small):
    trust = examined(source)
    assert (trust.fingerprint, trust.overridden) == ("unknown", ())
    np.testing.assert_allclose(trust.rms_median, 1.0, rtol=1e-3)
    np.testing.assert_array_equal(trust.share_reproduced, 1.0)
    # rows 2 and 7 are duplicate rows: another engine may take either
    chosen = source.chosen
    source.chosen = np.where(chosen == 2, 7, np.where(chosen == 7, 2, chosen)).astype(np.int32)
    np.testing.assert_array_equal(examined(source).share_reproduced, 1.0)
    trust = examined(small)
    assert trust.rms_median < 0.9
    assert trust.overridden == ()


def test_another_checkpoint_is_refused_unless_stale_inputs_are_allowed(source):
    source.facts = dataclasses.replace(source.facts, fingerprint="sha256:b")
    assert "recorded from another checkpoint" in str(refusal(source, allowed_by="stale_inputs"))
    assert examined(source, stale_inputs=True).fingerprint == "differs"


def test_inputs_before_the_gain_are_refused_unless_unverified_is_allowed(source):
    source.values = source.values / ROUTER.gain * 3
    assert "expected 1" in str(refusal(source, allowed_by=""))
    assert examined(source, unverified=True).rms_median > 1.5


def test_choices_of_another_rule_are_refused_with_the_share_or_the_number(source):
    source.chosen = (source.chosen + 1) % 12
    message = str(refusal(source, allowed_by=""))
    assert "of the first recorded choices follow" in message
    experts = np.tile(np.arange(12, dtype=np.int32), (TOKENS, 1))
    wide = np.random.default_rng(1).permuted(experts, axis=1)[:, :5]
    refused = refusal(made.source("router_input", COLUMNS, source.values, wide), allowed_by="")
    message = "5 experts are recorded for each token, and the rule chooses 3"
    assert message in str(refused)
    assert "If the recorded model chose 5, write that into config.json" in refused.hint
    assert "--top-k where --router-pattern is given" in refused.hint


@pytest.mark.parametrize("change", ["another checkpoint", "other choices", "no choices", "larger"])
def test_inputs_that_eps_may_make_small_are_refused_unless_all_speaks_for_them(change, small):
    if change == "another checkpoint":
        small.facts = dataclasses.replace(small.facts, fingerprint="")
    if change == "other choices":
        small.chosen = (small.chosen + 1) % 12
    if change == "no choices":
        small.facts = dataclasses.replace(small.facts, has_chosen=False)
    if change == "larger":
        small.values = small.values * 2.5
    assert "expected 1" in str(refusal(small, allowed_by=""))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_inputs_behind_the_norm_are_not_taken_for_those_in_front_of_it(source, stored):
    """Also in bfloat16, as engines record them."""
    behind = made.source("pre_norm", COLUMNS, source.values.astype(stored).astype(np.float32))
    refused = refusal(behind)
    assert "the norm was applied already" in str(refused)
    assert "--stage router_input" in refused.hint


@pytest.mark.parametrize(("factor", "is_guessed"), [(np.float32(3.0), False), (SIZES, True)])
def test_only_inputs_that_vary_in_size_are_taken_for_those_of_the_norm(source, factor, is_guessed):
    source.values = source.values * factor
    refused = refusal(source)
    assert "expected 1" in str(refused)
    assert ("--stage pre_norm" in refused.hint) == is_guessed
    assert ("stage pre_norm" in str(refused)) == is_guessed


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_scores_are_not_taken_for_logits(kind, stored):
    router = made.router(kind)
    logits = made.inputs(TOKENS) @ router.weight.T
    scores = softmax(logits, axis=1) if kind == "softmax" else expit(logits)
    padded = scores.astype(stored).astype(np.float32)
    padded[3] = 0.0
    refused = refusal(made.source("logits", COLUMNS, padded), router)
    what = {"softmax": "probabilities", "sigmoid": "scores behind the sigmoid"}[kind]
    assert f"these are {what}" in str(refused)
    assert "np.log" in refused.hint


def with_rows(values, rows, number=0.0):
    changed = values.copy()
    changed[rows] = number
    return changed


def test_logits_of_rows_that_no_token_made_are_refused_unless_allowed():
    """Also behind the first tokens: padding may lie anywhere."""
    router, tokens = made.router(), 40 * TILE
    logits = made.inputs(tokens) @ router.weight.T
    for number, what in {0.0: "nothing but 0", 0.7: "the same logit for every expert"}.items():
        wrong = with_rows(logits, [3, 20 * TILE, 35 * TILE + 7], number)
        message = str(refusal(made.Recorded(wrong, "logits"), router))
        assert f"of 8,192 tokens that were looked at, 3 hold {what}" in message
    assert examined(made.Recorded(logits, "logits"), router).overridden == ()


FOUR = np.tile(np.arange(4, dtype=np.int32), (TOKENS, 1))


def test_zero_rows_are_refused_at_every_stage_that_holds_numbers():
    residual, largest = made.inputs(TOKENS) * SIZES, -np.sort(-made.inputs(TOKENS)[:, :4], axis=1)
    for stage, values in (
        ("pre_norm", with_rows(residual, [7, 8])),
        ("top_logits", TopLogits(with_rows(largest, [7, 8]), FOUR)),
    ):
        message = str(refusal(made.source(stage, COLUMNS, values), allowed_by=""))
        assert "2 hold nothing but 0: padding" in message


def uniform(low, high, tokens=TOKENS):
    drawn = np.random.default_rng(2).uniform(low, high, (tokens, 12))
    return made.Recorded(drawn.astype(np.float32), "logits")


EQUAL_ROWS = dataclasses.replace(made.router(), weight=np.zeros_like(made.router().weight))
EQUAL_LOGITS = np.repeat(made.inputs(TOKENS)[:, :1], 4, axis=1)


UNUSUAL = {
    **{f"narrow, {k}": (made.router(k), uniform(0.3, 0.7)) for k in ("softmax", "sigmoid")},
    **{f"few, {k}": (made.router(k), uniform(0.0, 1.0, 64)) for k in ("softmax", "sigmoid")},
    "equal rows": (EQUAL_ROWS, made.Recorded(np.zeros((TOKENS, 12)), "logits")),
    # in bfloat16 the two largest are equal now and then; here at every token
    "equal largest": (
        made.router(),
        made.source("top_logits", COLUMNS, TopLogits(EQUAL_LOGITS, FOUR)),
    ),
    "residual": (ROUTER, made.source("pre_norm", COLUMNS, made.inputs(TOKENS) * SIZES)),
    # numbers of size one that no norm made: their sizes spread by 3.3 / sqrt(hidden size)
    "of size one": (ROUTER, made.source("pre_norm", COLUMNS, made.inputs(TOKENS, seed=3))),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_only_unusual_is_believed(what):
    router, source = UNUSUAL[what]
    assert examined(source, router).overridden == ()
