"""The fused kernel gives what the kernels of the reference give one after the other.

Its sources run on the processor. Logits are random, tied, huge, tiny and not finite; rows are
ordinary, equal, all zero, and too near or too far for float32.
"""

import numpy as np
import pytest

from moegeom.core.router import GroupMask
from moegeom.geometry.boundary.linear import RowDistances, row_distances
from moegeom.kernels.cuda.parts import device_rows
from moegeom.kernels.cuda.program import MAX_EXPERTS, MAX_TOP_K, NOT_COUNTED
from moegeom.kernels.cuda.route import RouteRule
from tests.by_day import IS_NIGHT, by_day
from tests.unit.scan.engines.fused import Case, disagreements, fused, in_parts, rule_of

TOKENS = 40
INF = np.inf


#: Factors of normal numbers; where rows are far apart, quotients of the small ones are subnormal.
SCALES = {"overflowing": 2e38, "huge": 1e30, "small": 1e-26, "tiny": 1e-35, "subnormal": 1e-43}


def logits_of(kind: str, shape: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(list(shape))
    drawn = random.standard_normal(shape).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        match kind:
            case "ties":
                return np.rint(drawn) * random.choice(np.float32([-1.0, 1.0]), shape)
            case "zeros":
                return np.where(drawn < 0, np.float32(-0.0), np.float32(0.0))
            case "equal rows":
                return np.broadcast_to(drawn[:1], shape).copy()
            case "neighbours":  # of 1: next to it, or one number on
                return (1 + np.rint(drawn) * np.float32(2.0**-23)).astype(np.float32)
            case "of all sizes":
                return (drawn * np.exp(random.uniform(-80, 80, shape))).astype(np.float32)
            case "not finite":
                for value in (np.nan, INF, -INF):
                    rows = np.flatnonzero(random.random(len(drawn)) < 0.2)
                    drawn[rows, random.integers(0, shape[1], len(rows))] = value
        return drawn * np.float32(SCALES.get(kind, 1.0))


LOGITS = ("normal", "ties", "zeros", "equal rows", "overflowing", "huge", "small", "tiny")
LOGITS += ("subnormal", "neighbours", "of all sizes", "not finite")


def rows_of(kind: str, experts: int) -> RowDistances:
    weight = np.random.default_rng(experts).standard_normal((experts, 6))
    bias = 0.5 * np.arange(experts) if kind.startswith("biased") else None
    if "duplicate" in kind:
        weight[[experts // 2, -1]] = weight[0]
    changed = {"on a grid": np.rint(weight), "equally far": np.eye(experts)}.get(kind, weight)
    scales = {"far": 1e15, "near": 1e-35, "beside": 1e-60, "zeros": 0.0, "biased zeros": 0.0}
    return row_distances(scales.get(kind, 1.0) * changed, bias)


ROWS = ("ordinary", "duplicates", "biased duplicate rows", "zeros", "biased zeros", "far", "near")
ROWS += ("beside", "on a grid", "equally far")


def case_of(
    rule: RouteRule, kind: str, rows: str = "", tokens: int = TOKENS, turn: int = 0
) -> Case:
    """Labels are mostly those of the first token, some others, some not counted, or not given."""
    random = np.random.default_rng([rule.num_experts, rule.top_k, turn])
    experts = rule.num_experts
    logits = logits_of(kind, (tokens, experts))
    if rule.terms == 3:
        logits = np.concatenate([logits, logits * 0.003, logits * 1e-5], 1, dtype=np.float32)
    label = random.integers(0, 48, tokens).astype(np.uint16)
    drawn = random.random(tokens)
    label = np.where(drawn < 0.5, label[0], np.where(drawn < 0.6, NOT_COUNTED, label))
    norm = np.abs(3.0 * random.standard_normal(tokens)) * (random.random(tokens) > 0.1)
    return Case(
        rule,
        logits,
        rows_of(rows, experts) if rows else None,
        random.standard_normal(experts).astype(np.float32) if rule.has_logit_bias else None,
        None if rule.is_affine else 0.25 * np.rint(random.standard_normal(experts)),
        norm if turn % 2 == 0 else None,
        label.astype(np.uint16) if turn % 3 else None,
        typical_norm=float(turn % 2 == 0),
        start=12_345 * turn,
    )


def check(rule: RouteRule, kinds=LOGITS, rows=ROWS, tokens: int = TOKENS) -> None:
    wrong = {}
    for turn, (kind, boundaries) in enumerate((k, r) for k in kinds for r in rows):
        if found := disagreements(case_of(rule, kind, boundaries, tokens, turn)):
            wrong[kind, boundaries] = found
    assert wrong == {}


#: Where rows differ, are equal, and are as far from each other as others.
SOME_ROWS = ("ordinary", "biased duplicate rows", "on a grid")

STRAIGHT = {
    "12 experts": rule_of(12, 3),
    "one": rule_of(1, 1),
    "all chosen": rule_of(5, 5, "sqrt_softplus", has_bias=True),
    "a lane more than fits": rule_of(9, 4, "identity"),
    "lanes without experts": rule_of(24, 4, has_bias=True),
    "all but one": rule_of(16, 15, "sigmoid"),
    "64 experts": rule_of(64, 8),
    "three terms": rule_of(60, 4, "sqrt_softplus", has_bias=True, terms=3),
}


@pytest.mark.parametrize(
    "name", by_day(STRAIGHT, ["12 experts", "all chosen", "a lane more than fits", "three terms"])
)
def test_straight_rules_agree_with_the_reference_for_nasty_logits_and_rows(name):
    rows = ROWS if name == "12 experts" or IS_NIGHT else SOME_ROWS
    check(STRAIGHT[name], rows=rows)


@pytest.mark.parametrize(("experts", "top_k"), by_day([(100, 6), (256, 8), (512, 10)], [(100, 6)]))
def test_many_experts_agree_with_the_reference(experts, top_k):
    check(rule_of(experts, top_k), rows=("on a grid",), tokens=33)


def curved(experts: int, top_k: int, score: str, *groups, has_bias: bool = False) -> RouteRule:
    mask = GroupMask(*groups) if groups else None
    return rule_of(experts, top_k, score, False, groups=mask, has_bias=has_bias)


CURVED = {
    **{score: curved(12, 3, score) for score in ("identity", "softmax", "sigmoid")},
    "sqrt_softplus": curved(12, 3, "sqrt_softplus", has_bias=True),
    "DeepSeek-V3": curved(256, 8, "sigmoid", 8, 4, "top2_sum", -INF, has_bias=True),
    "more groups than bits": curved(128, 8, "sigmoid", 64, 40, "top2_sum", 0.0),
    "a group a lane": curved(32, 6, "identity", 4, 2, "top2_sum", -INF),
    "two lanes a group": curved(64, 8, "sigmoid", 4, 3, "max", 0.0),
    "groups of one": curved(32, 6, "softmax", 32, 7, "top2_sum", 0.0),
    "one group": curved(32, 6, "identity", 1, 1, "max", -INF),
    "fewer kept than chosen, 0": curved(32, 6, "identity", 16, 2, "max", 0.0),
    "fewer kept than chosen, -inf": curved(32, 6, "identity", 16, 1, "top2_sum", -INF),
    "all groups kept": curved(32, 6, "sqrt_softplus", 8, 8, "max", -INF),
}


@pytest.mark.parametrize(
    "name",
    by_day(
        CURVED,
        [
            "softmax",
            "sqrt_softplus",
            "more groups than bits",
            "two lanes a group",
            "groups of one",
            "fewer kept than chosen, 0",
            "fewer kept than chosen, -inf",
        ],
    ),
)
def test_curved_and_masked_rules_agree_with_the_reference_for_nasty_logits(name):
    check(CURVED[name], rows=("",))


def test_the_limits_of_the_layout_agree_with_the_reference():
    """As many slots as there are at most, and as many experts; both is too long to compile."""
    check(rule_of(128, MAX_TOP_K), LOGITS[:4], ("on a grid",), tokens=33)
    check(curved(MAX_EXPERTS, 8, "softmax"), LOGITS[:4], ("",), tokens=33)


@pytest.mark.nightly
@pytest.mark.parametrize("is_affine", [True, False])
def test_both_limits_at_once_agree_with_the_reference(is_affine):
    rule = rule_of(MAX_EXPERTS, MAX_TOP_K, is_affine=is_affine)
    check(rule, rows=("ordinary", "zeros") if is_affine else ("",), tokens=33)


def test_some_of_these_logits_and_rows_are_what_their_names_say():
    """The search in float32 is left where it must be, and taken where it can be."""
    fits = {kind: device_rows(rows_of(kind, 12)).fits_float32 for kind in ROWS}
    assert [kind for kind in ROWS if not fits[kind]] == ["far", "near", "beside"]
    rule = STRAIGHT["12 experts"]
    lost = {kind: fused(case_of(rule, kind, "ordinary"))["is_lost"].mean() for kind in LOGITS}
    assert [kind for kind in LOGITS if lost[kind] > 0.0] == ["overflowing", "not finite"]
    tied = in_parts(case_of(rule, "ties", "ordinary"))["margin"] == 0.0
    assert 0.2 < tied.mean() < 1.0


@pytest.mark.parametrize("tokens", [1, 31, 32, 255, 256, 257, 1025])
def test_no_token_at_the_border_of_a_warp_or_a_block_is_lost(tokens):
    for turn in (0, 1):
        case = case_of(STRAIGHT["12 experts"], "normal", "ordinary", tokens, turn)
        assert disagreements(case) == {}


def test_the_largest_labels_and_streams_that_begin_far_on_are_counted():
    """Populations times blocks stay below what stands for a token that is not counted."""
    rule, populations = STRAIGHT["12 experts"], NOT_COUNTED // 16
    random = np.random.default_rng(0)
    label = random.choice([0, 16 * populations - 1, NOT_COUNTED], TOKENS).astype(np.uint16)
    case = Case(rule, logits_of("normal", (TOKENS, 12)), label=label, populations=populations)
    found = fused(case, ("token_counts",))["token_counts"][..., 0].reshape(-1)
    assert found[0] == (label == 0).sum()
    assert found[-1] == (label == 16 * populations - 1).sum()
    assert found.sum() == (label != NOT_COUNTED).sum()
    # numbers of tokens are 64 bits wide
    rule = STRAIGHT["12 experts"]
    for start in (2**31 - 100, 2**32 + 7, 2**40):
        case = Case(rule, logits_of("normal", (700, 12)), start=start)
        assert disagreements(case) == {}
