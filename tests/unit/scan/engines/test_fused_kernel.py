"""The fused kernel gives what the kernels of the reference give one after the other, and rows as
sums of bfloat16 numbers lose nothing.

Its sources run on the processor. Logits are random, tied, huge, tiny and not finite; rows are
ordinary, equal, all zero, and too near or too far for float32.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moegeom.core.router import GroupMask
from moegeom.engine.devices.device_router import bf16_terms
from moegeom.geometry.boundary.linear import RowDistances, row_distances
from moegeom.geometry.histogram import NUM_BINS
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16, UNIT_FLOAT32
from moegeom.geometry.selection import LARGEST_SLOPE
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.cuda import route
from moegeom.kernels.cuda.parts import device_rows, selection_scores
from moegeom.kernels.cuda.program import MAX_EXPERTS, MAX_TOP_K, NOT_COUNTED
from moegeom.kernels.table import load_kernels
from tests.by_day import IS_NIGHT, by_day
from tests.emulator.emulated_device import EmulatedDevice

#: What the kernel writes of each token: dtype, and columns beyond one.
OUTPUTS: dict[str, tuple[type, str]] = {
    "is_lost": (np.uint8, ""),
    "logits": (np.float32, "experts"),
    "chosen": (np.int32, "top_k"),
    "margin": (np.float64, ""),
    "group_margin": (np.float64, ""),
    "distance": (np.float64, ""),
    "pair": (np.int32, "two"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Logits as the product gives them, and what is known about the router and the tokens."""

    rule: route.RouteRule
    logits: np.ndarray
    rows: RowDistances | None = None
    logit_bias: np.ndarray | None = None
    selection_bias: np.ndarray | None = None
    norm: np.ndarray | None = None
    label: np.ndarray | None = None
    populations: int = 3
    typical_norm: float = 0.0
    start: int = 0

    @property
    def own_bias(self) -> np.ndarray:
        given = self.selection_bias
        return np.zeros(self.rule.num_experts) if given is None else given.astype(np.float64)


def rule_of(
    experts: int,
    top_k: int,
    score: str = "softmax",
    is_affine: bool = True,
    has_bias: bool = False,
    groups: GroupMask | None = None,
    terms: int = 1,
) -> route.RouteRule:
    return route.RouteRule(experts, top_k, score, is_affine, has_bias, groups, terms)


def numbers(case: Case) -> route.RouteNumbers:
    fits = case.rows is not None and device_rows(case.rows).fits_float32
    return route.RouteNumbers(
        typical_norm=case.typical_norm,
        outlier_factor=4.0,
        two_gamma=1e-6,
        underflow=0.0,
        longest_row=2.0,
        largest_bias=0.5,
        noise_factor=ROUNDING_RMS * UNIT_BFLOAT16,
        root_hidden=3.0,
        slope=LARGEST_SLOPE[case.rule.score],
        unit=8.0 * UNIT_FLOAT32,
        largest_selection_bias=float(np.abs(case.own_bias).max()),
        outliers=float(case.populations - 1),
        fits_float32=float(fits),
        unlabelled=float(case.populations - 2),
    )


#: Names of the counters.
COUNTERS = tuple(field.name for field in dataclasses.fields(route.RouteCounters))


def fused(case: Case, kept: tuple[str, ...] = COUNTERS) -> dict[str, np.ndarray]:
    """Everything that the kernel gives, by name: outputs of each token, and counters ``kept``."""
    rule, tokens, device = case.rule, len(case.logits), EmulatedDevice()
    put = lambda array: None if array is None else device.put(np.ascontiguousarray(array))
    boundaries = None if case.rows is None else device_rows(case.rows)
    tables = route.RouteTables(
        logit_bias=put(case.logit_bias),
        selection_bias=put(case.own_bias),
        number=put(numbers(case).array()),
        **{
            name: put(getattr(boundaries, name, None))
            for name in ("inverse", "rounded", "smallest")
        },
    )
    columns = {"experts": rule.num_experts, "top_k": rule.top_k, "two": 2}
    outputs = {
        name: put(np.zeros((tokens, columns[more]) if more else tokens, dtype))
        for name, (dtype, more) in OUTPUTS.items()
    }
    labels = (case.populations, NUM_BLOCKS)
    tail = {"token_counts": 2, "ambiguity": 2, "expert_counts": rule.num_experts}
    shapes = {name: (*labels, tail.get(name, NUM_BINS)) for name in kept}
    if "expert_pairs" in shapes:
        shapes["expert_pairs"] = (NUM_BLOCKS, rule.num_experts, rule.num_experts)
    counters = {name: put(np.zeros(shape, np.uint64)) for name, shape in shapes.items()}
    # held until the work is done: what nobody holds is given back
    logits, norm, label = put(case.logits), put(case.norm), put(case.label)
    queue = device.queue()
    written = route.RouteOutputs(**outputs), route.RouteCounters(**counters)
    route.launch_route(queue, rule, tokens, logits, tables, norm, label, *written, case.start)
    queue.finish()
    return {name: device.get(array) for name, array in (outputs | counters).items()}


def in_parts(case: Case) -> dict[str, np.ndarray]:
    """The same from kernels of the reference, with the device's own scores of curved rules."""
    reference, rule = load_kernels("reference"), case.rule
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        terms = case.logits.reshape(len(case.logits), rule.terms, rule.num_experts)
        logits = terms[:, 0] if rule.terms == 1 else (terms[:, 2] + terms[:, 1]) + terms[:, 0]
        if case.logit_bias is not None:
            logits = logits + case.logit_bias
        is_lost = ~np.isfinite(logits).all(axis=1)
        found: dict[str, Any] = {"is_lost": is_lost.astype(np.uint8), "logits": logits}
        z = np.where(is_lost[:, None], np.float32(0.0), logits)
        compared = z
        if not rule.is_affine:
            compared = selection_scores(z, rule.score, case.own_bias, EmulatedDevice())
        group_margin = np.full(len(z), np.inf)
        if rule.groups is not None:
            compared, group_margin = reference["group_mask"](compared, rule.groups)
        chosen, margin = reference["top_k"](compared, rule.top_k)
        distance, pair = np.full(len(z), np.inf), np.full((len(z), 2), -1, np.int32)
        if case.rows is not None:
            distance, pair = reference["boundary_distance"](z, chosen, margin, case.rows)
    found |= {"chosen": chosen, "margin": margin, "group_margin": group_margin}
    return found | {"distance": distance, "pair": pair} | _counted(case, found, distance)


def _counted(
    case: Case, found: dict[str, np.ndarray], distance: np.ndarray
) -> dict[str, np.ndarray]:
    """Counters of the tokens that are neither lost nor left out."""
    reference, rule, tokens = load_kernels("reference"), case.rule, len(distance)
    if case.label is None:
        run = (case.start + np.arange(tokens)) // 256
        label = (case.populations - 2) * NUM_BLOCKS + (run + run // NUM_BLOCKS) % NUM_BLOCKS
    else:
        label = case.label.astype(np.int64)
    kept = (label != NOT_COUNTED) & (found["is_lost"] == 0)
    population, block = label[kept] // NUM_BLOCKS, label[kept] % NUM_BLOCKS
    norm = np.zeros(tokens) if case.norm is None else case.norm
    if case.typical_norm:
        far = (norm > 4.0 * case.typical_norm) | (norm * 4.0 < case.typical_norm)
        population = np.where(far[kept], case.populations - 1, population)
    population, block = population.astype(np.int32), block.astype(np.int32)
    effective_margin = np.minimum(found["margin"], found["group_margin"] / 2.0)
    scale = ROUNDING_RMS * UNIT_BFLOAT16 * norm / 3.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beyond = np.where(distance == 0.0, 0.0, np.inf)
        relative = np.where(norm > 0.0, distance / norm, beyond)
        sigmas = np.where(scale > 0.0, distance / scale, beyond)
    histograms = {
        "margin_histogram": found["margin"],
        "effective_margin_histogram": effective_margin,
        "distance_histogram": distance,
        "relative_distance_histogram": relative,
        "noise_sigmas_histogram": sigmas,
    }
    counts = {}
    for name, values in histograms.items():
        counts[name] = np.zeros((case.populations, NUM_BLOCKS, NUM_BINS), np.int64)
        reference["count_bins"](counts[name], values[kept], population, block)
    experts = np.zeros((case.populations, NUM_BLOCKS, rule.num_experts), np.int64)
    reference["count_experts"](experts, found["chosen"][kept], population, block)
    pairs = np.zeros((NUM_BLOCKS, rule.num_experts, rule.num_experts), np.int64)
    reference["count_pairs"](pairs, found["chosen"][kept], block)
    token_counts = np.zeros((case.populations, NUM_BLOCKS, 2), np.int64)
    np.add.at(token_counts[..., 0], (population, block), 1)
    np.add.at(token_counts[..., 1], (population, block), effective_margin[kept] == 0.0)
    return counts | {"expert_counts": experts, "expert_pairs": pairs, "token_counts": token_counts}


def disagreements(case: Case) -> dict[str, int]:
    """Entries that differ, by name; of a lost token its loss and its logits alone count."""
    found, expected = fused(case), in_parts(case)
    there = expected["is_lost"] == 0
    wrong = {}
    for name, theirs in expected.items():
        ours = found[name]
        if name in OUTPUTS and name not in ("is_lost", "logits"):
            ours, theirs = ours[there], theirs[there]
        is_equal = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        if not is_equal.all():
            wrong[name] = int((~is_equal).sum())
    return wrong


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
    rule: route.RouteRule, kind: str, rows: str = "", tokens: int = TOKENS, turn: int = 0
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


def check(rule: route.RouteRule, kinds=LOGITS, rows=ROWS, tokens: int = TOKENS) -> None:
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


def curved(
    experts: int, top_k: int, score: str, *groups, has_bias: bool = False
) -> route.RouteRule:
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


def terms_of(weight: np.ndarray) -> list[np.ndarray]:
    """The terms in float64, as many as are needed to be exact and 16 bits wide."""
    terms = bf16_terms(weight)
    is_exact = (weight == weight.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert len(terms) == (1 if is_exact else 3)
    assert all(term.dtype == np.uint16 and term.shape == weight.shape for term in terms)
    return [term.view(ml_dtypes.bfloat16).astype(np.float64) for term in terms]


def weights(least: float) -> st.SearchStrategy[np.ndarray]:
    """Rows of finite float32 numbers that are 0 or at least so large."""
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return arrays(np.float32, (2, 3), elements=numbers.filter(lambda x: x == 0 or abs(x) >= least))


@given(weights(2.0**-110))
def test_terms_add_up_to_the_weight_fall_in_size_and_have_its_sign(weight):
    """Cut off and not rounded: no term is larger than what is left, so none overflows."""
    rest = weight.astype(np.float64)
    for term in terms_of(weight):
        assert (np.abs(term) <= np.abs(rest)).all()
        assert ((term == 0) | (np.sign(term) == np.sign(rest))).all()
        rest = rest - term
        assert (np.abs(rest) <= 2.0**-7 * np.abs(term)).all()
    np.testing.assert_array_equal(rest, 0.0)


@given(weights(0.0))
def test_terms_of_the_smallest_weights_are_off_by_less_than_the_least_bfloat16(weight):
    error = sum(terms_of(weight)) - weight.astype(np.float64)
    assert (np.abs(error) < 2.0**-133).all()


def test_extreme_weights_are_exact_and_what_two_terms_hold_is_padded_to_three():
    largest = np.finfo(np.float32).max
    extreme = np.array([[largest, -largest, 2.0**-126, -(2.0**-110), 0.0, -0.0]], np.float32)
    padded = np.array([[1.0 + 2.0**-8, 3.0]], np.float32)
    for weight in (extreme, padded, np.asfortranarray(np.repeat(extreme, 3, axis=0))):
        before = weight.copy()
        np.testing.assert_array_equal(sum(terms_of(weight)), before.astype(np.float64))
        np.testing.assert_array_equal(weight, before)
    assert not terms_of(padded)[2].any()
