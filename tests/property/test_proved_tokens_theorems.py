"""A token that is proved to keep its experts keeps them, however an engine rounds and adds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.router import GroupMask, LogitMap, Router, Rule, Weights
from moegeom.engine.choice import float_bound
from moegeom.engine.flipping import ReferenceChoice, flip_of
from moegeom.engine.prepared import prepare
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.selection import route
from moegeom.kernels.table import load_kernels
from moegeom.variants.emulated import arithmetic, arithmetic_names, emulate
from tests.unit.scan.made import router_with

SEEDS = st.integers(0, 2**32 - 1)
KERNELS = load_kernels("cpu")
EXPERTS, WIDTH, TOKENS = 8, 48, 64

GROUPS = GroupMask(4, 2, "top2_sum", -np.inf)
CAPS = ((1.0, 30.0), (4.0, np.inf), (0.18, 5.0), (2.0, 0.5), (1.0, 1e-3))
MAPS = tuple(LogitMap(multiplier, cap) for multiplier, cap in CAPS)
#: Rules without a map; each is tried behind every map too.
RULES = {
    "softmax": Rule(2, "softmax", Weights("scores")),
    "raw logits": Rule(2, "identity", Weights("scores")),
    "sigmoid": Rule(2, "sigmoid", Weights("scores"), has_logit_bias=True),
    "root of softplus": Rule(2, "sqrt_softplus", Weights("scores")),
    "sigmoid with bias": Rule(2, "sigmoid", Weights("scores"), has_selection_bias=True),
    "raw logits with bias": Rule(2, "identity", Weights("scores"), has_selection_bias=True),
    "raw logits in groups": Rule(2, "identity", Weights("scores"), groups=GROUPS),
    "softmax with bias": Rule(2, "softmax", Weights("scores"), has_selection_bias=True),
}


def drawn(seed: int, rule: Rule, scale: float, bias_scale: float):
    """A router and inputs whose logits have about the size ``scale``, with near ties among them."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((EXPERTS, WIDTH))
    near = random.integers(0, EXPERTS, 4)
    weight[near] = weight[near[::-1]] * (1.0 + 2.0 ** -random.integers(4, 24))
    values = random.standard_normal((TOKENS, WIDTH))
    both = 2.0 ** random.uniform(-4, 4)
    # half the exponent in each, so that products fall out of the range and operands do not
    root = np.sqrt(scale / np.sqrt(WIDTH))
    bias = (bias_scale * random.standard_normal(EXPERTS)).astype(np.float32)
    made = router_with(
        (weight * root * both).astype(np.float32),
        rule,
        logit_bias=bias if rule.has_logit_bias else None,
        selection_bias=bias if rule.has_selection_bias else None,
    )
    return made, (values * root / both).astype(np.float32), random


def engine(emulated, values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """What top-k looks at when products are added one by one in a random order."""
    entering = emulated.inputs(values)
    logits = np.zeros((len(values), EXPERTS), np.float32)
    for column in random.permutation(WIDTH):
        logits += entering[:, [column]] * emulated.columns[[column]]
    if emulated.logit_bias is not None:
        logits += emulated.logit_bias.astype(np.float32)
    how, logit_map = emulated.arithmetic, emulated.router.rule.logit_map
    if logit_map is None or how.score != "float32":
        return emulated.compared(logits)
    # the map step by step in float32, as an engine takes it
    z = rounded_to(logits, how.output) * np.float32(logit_map.multiplier)
    if np.isfinite(logit_map.soft_cap):
        z = np.tanh(z / np.float32(logit_map.soft_cap)) * np.float32(logit_map.soft_cap)
    plain = dataclasses.replace(emulated.router.rule, logit_map=None)
    kept = dataclasses.replace(how, output="float32")
    router = dataclasses.replace(emulated.router, rule=plain)
    if plain.is_affine and plain.has_selection_bias:
        return rounded_to(z.astype(np.float64) + emulated.selection_bias, how.selection)
    return dataclasses.replace(emulated, router=router, arithmetic=kept).compared(z)


def logits_of(router: Router, values: np.ndarray) -> np.ndarray:
    logits = values.astype(np.float64) @ router.weight.T.astype(np.float64)
    return logits if router.logit_bias is None else logits + router.logit_bias


def proved_tokens(
    router: Router, values: np.ndarray, name: str, output: str | None, score: str | None = None
):
    """Which tokens are proved, the reference choice and the engine."""
    formats = {"output": output, "score": score}
    how = dataclasses.replace(arithmetic(name), **{key: v for key, v in formats.items() if v})
    emulated, logits = emulate(router, how), logits_of(router, values)
    choice = route(logits, router.rule, router.selection_bias)
    before = ReferenceChoice(values, logits, choice.chosen, choice.margin, choice.weights, None)
    return flip_of(emulated, before, KERNELS).proved, choice.chosen, emulated


def keeps(proved, before, emulated, values, random) -> None:
    """No proved token is chosen otherwise, nor by a tie."""
    for _ in range(2):
        compared = engine(emulated, values, random)
        groups = emulated.router.rule.groups
        if groups is not None:
            compared, _ = KERNELS["group_mask"](compared, groups)
        chosen, margin = KERNELS["top_k"](compared, emulated.router.rule.top_k)
        same = (np.sort(chosen) == np.sort(before)).all(axis=1)
        assert same[proved].all()
        assert (margin[proved] > 0.0).all()


#: Exponents of the size of logits: subnormal numbers, usual ones, and the end of the range.
SIZES = st.one_of(
    *(st.integers(*ends) for ends in ((-149, -140), (-150, -120), (-30, 30), (100, 130)))
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=settings().max_examples // 2)
@given(
    seed=SEEDS,
    size=SIZES,
    bias=st.integers(-8, 4),
    name=st.sampled_from(arithmetic_names()),
    logit_map=st.sampled_from((None, None, *MAPS)),
    output=st.sampled_from((None, None, "float16", "bfloat16")),
)
def test_a_proved_token_never_flips(rule, seed, size, bias, name, logit_map, output):
    made = dataclasses.replace(RULES[rule], logit_map=logit_map)
    bias_scale = 2.0 ** (size + bias) if size < 60 else 1.0
    router, values, random = drawn(seed, made, 2.0**size, bias_scale)
    proved, before, emulated = proved_tokens(router, values, name, output)
    with np.errstate(all="ignore"):
        keeps(proved, before, emulated, values, random)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=settings().max_examples // 2)
@given(
    seed=SEEDS,
    size=st.integers(-6, 3),
    logit_map=st.sampled_from(MAPS),
    score=st.sampled_from(("float16", "bfloat16")),
)
def test_a_token_proved_behind_a_coarse_map_never_flips(rule, seed, size, logit_map, score):
    """The product is in float32, so that the rounding of the map is all that a token can lose."""
    made = dataclasses.replace(RULES[rule], logit_map=logit_map)
    router, values, random = drawn(seed, made, 2.0**size, 2.0**size)
    proved, before, emulated = proved_tokens(router, values, "float32-sequential", None, score)
    with np.errstate(all="ignore"):
        keeps(proved, before, emulated, values, random)


@pytest.mark.parametrize("rule", RULES)
def test_most_tokens_of_usual_size_are_proved(rule):
    for logit_map in (None, *MAPS[:3]):
        made = dataclasses.replace(RULES[rule], logit_map=logit_map)
        shares = []
        for seed in range(5):
            router, values, _ = drawn(seed, made, 1.0, 0.1)
            shares.append(proved_tokens(router, values, "float32-blocks", None)[0].mean())
        assert np.mean(shares) > 0.6, logit_map


def test_nothing_is_proved_of_the_smallest_logits_those_beyond_the_range_and_at_a_cap():
    """At 2^-147 a logit has three bits; beyond 20 caps an engine sees one number for all."""
    tiny, huge = 2.0**-147, 2.0**129
    for rule, scale, name in (
        ("softmax", tiny, "float32-any-order"),
        *(("raw logits", tiny, "float32-any-order"), ("raw logits", huge, "float32-any-order")),
        *(("raw logits", huge, "bias-bf16"), ("raw logits", huge, "megatron-fp64")),
    ):
        router, values, _ = drawn(1, RULES[rule], scale, 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            assert not proved_tokens(router, values, name, None)[0].any(), (rule, scale, name)
    capped = dataclasses.replace(RULES["softmax"], logit_map=LogitMap(1.0, 1e-3))
    router, values, _ = drawn(1, capped, 1.0, 1.0)
    router, values = dataclasses.replace(router, weight=np.abs(router.weight)), np.abs(values)
    assert not proved_tokens(router, values, "float32-blocks", None)[0].any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=settings().max_examples // 2)
@given(seed=SEEDS, size=SIZES, logit_map=st.sampled_from((None, *MAPS)))
def test_a_margin_beyond_the_bound_is_kept_by_every_float32_engine(rule, seed, size, logit_map):
    made = dataclasses.replace(RULES[rule], logit_map=logit_map, groups=None)
    router, values, random = drawn(seed, made, 2.0**size, 2.0 ** min(size, 4))
    with np.errstate(all="ignore"):
        logits, bias = logits_of(router, values), router.selection_bias
        if made.is_affine and bias is not None:
            logits, bias = logits + bias, None
        choice = route(logits, made, bias)
        norm = np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))
    bound = float_bound(prepare(router), norm, logits, choice.chosen, choice.margin, None)
    how = dataclasses.replace(arithmetic("float32-any-order"), compared="scores")
    with np.errstate(all="ignore"):
        keeps(choice.margin > bound, choice.chosen, emulate(router, how), values, random)
