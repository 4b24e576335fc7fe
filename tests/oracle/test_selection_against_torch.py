"""Oracles: torch, scipy.special and all subsets, for norms, scores, entropies and choices; modules
of transformers: a router with random weights, a whole sample model.

Chosen sets must be equal wherever the margin is above rounding, routing weights within 1e-5. Of the
model, forward hooks see the very tensors that a recording must return bit by bit.
"""

import itertools
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less, assert_equal
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter
from transformers.utils import logging as transformers_logging

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.core.tokens import TokenColumns
from moegeom.geometry import number_formats
from moegeom.geometry.load import entropy_nats, log_sum_exp, normalised_scores
from moegeom.geometry.rounding import score_resolution
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import SCORES, mapped_logits, margin, route, top_k
from moegeom.geometry.set_code import set_distances
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_router_inputs_are_torchs_norms(kind, eps):
    random = np.random.default_rng(1)
    x = (random.standard_normal((30, 40)) + 0.7).astype(np.float32)
    gain = random.standard_normal(40)
    tensor, weight = torch.from_numpy(x).double(), torch.from_numpy(gain)
    if kind == "rms":
        expected = torch.nn.functional.rms_norm(tensor, (40,), weight, eps)
    else:
        expected = torch.nn.functional.layer_norm(tensor, (40,), weight, None, eps)
    found = normed(x, kind, eps, gain)
    assert found.dtype == np.float32
    assert_allclose(found, expected.numpy(), rtol=1.2e-7, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("experts", "k"), [(2, 1), (5, 5), (64, 8), (256, 8), (17, 16)])
def test_top_k_and_the_margin_are_those_of_torchs_values(experts, k, dtype):
    z = np.random.default_rng([experts, k]).standard_normal((300, experts)).astype(dtype)
    assert (np.diff(np.sort(z, axis=1)) > 0).all()
    assert_array_equal(top_k(z, k), torch.topk(torch.from_numpy(z), k, dim=1).indices.numpy())
    if k < experts:
        values = torch.topk(torch.from_numpy(z).double(), k + 1, dim=1).values.numpy()
        assert_array_equal(margin(z, k), values[:, k - 1] - values[:, k])


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("levels", [2, 3, 50])
def test_a_set_is_admitted_exactly_if_no_expert_left_out_is_better(k, levels):
    generator = np.random.default_rng([k, levels])
    sets = list(itertools.combinations(range(6), k))
    for _ in range(40):
        scores = generator.integers(0, levels, 6).astype(np.float64)
        shuffled = np.array([generator.permutation(chosen) for chosen in sets])
        is_met = [
            min(scores[list(chosen)]) >= max(np.delete(scores, chosen), default=-np.inf)
            for chosen in sets
        ]
        assert_array_equal(set_distances(np.tile(scores, (len(sets), 1)), shuffled).is_met, is_met)


def test_sets_and_scores_at_the_corners():
    scores = np.array([[1.0, -np.inf, 2.0, -np.inf]])
    assert set_distances(scores, np.array([[2, 0]])).is_met[0]
    assert set_distances(scores, np.array([[2, 0, 3]])).is_met[0]
    assert not set_distances(scores, np.array([[2, 3]])).is_met[0]
    assert not set_distances(np.array([[1.0, np.nan, 0.0]]), np.array([[0]])).is_met[0]
    # Spaced by 1, so that the float64 scores at z = 20 still differ by thousands of ulps.
    apart = np.diff(SCORES["sigmoid"](np.array([[20.0, 21.0]])))
    theirs = scipy.special.expit(-20) - scipy.special.expit(-21)
    assert_allclose(apart, [[theirs]], rtol=1e-6)
    assert sorted(ORACLES) == sorted(THEIRS) == sorted(SCORES)
    assert_array_equal(entropy_nats(np.eye(4)), 0.0)
    assert not np.signbit(entropy_nats(np.eye(4))).any()
    assert_allclose(entropy_nats(np.full((2, 8), 0.125)), np.log(8), rtol=1e-15)
    assert_array_equal(entropy_nats(np.array([[np.nan, 1.0]])), np.nan)
    assert entropy_nats(np.zeros((0, 4))).shape == (0,)
    zero = np.zeros(2)
    assert_array_equal(score_resolution("identity", zero, zero, zero), zero)


ORACLES = {
    "identity": lambda z: z,
    "softmax": lambda z: scipy.special.softmax(z, axis=1),
    "sigmoid": scipy.special.expit,
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(0.0, z)),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_the_oracles_and_of_float32_logits_too(name):
    for scale in (1e-3, 1.0, 30.0, 700.0, 1e4):
        z = logits(scale)
        assert_allclose(SCORES[name](z), ORACLES[name](z), rtol=1e-12, atol=1e-300)
    z = logits(3.0).astype(np.float32)
    assert SCORES[name](z).dtype == np.float64
    assert_allclose(SCORES[name](z), ORACLES[name](z.astype(np.float64)), rtol=1e-13)


THEIRS = {
    "identity": lambda z: torch.softmax(z, dim=1),
    "softmax": lambda z: torch.softmax(z, dim=1),
    "sigmoid": lambda z: torch.nn.functional.normalize(torch.sigmoid(z), p=1, dim=1),
    "sqrt_softplus": lambda z: torch.nn.functional.normalize(
        torch.nn.functional.softplus(z, threshold=1e9).sqrt(), p=1, dim=1
    ),
}


def logits(scale, seed=0, tokens=200, experts=17):
    return np.random.default_rng(seed).standard_normal((tokens, experts)) * scale


@pytest.mark.parametrize("score", THEIRS)
def test_normalised_scores_are_torchs(score):
    for scale in (1e-3, 1.0, 30.0):
        z = logits(scale)
        shares = normalised_scores(z, score)
        expected = THEIRS[score](torch.from_numpy(z)).numpy()
        assert_allclose(shares, expected, rtol=1e-11, atol=1e-300)
        assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-13)


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("level", [-2000.0, -800.0, -31.0, -30.0, -29.0, -5.0, 0.0, 40.0, 2000.0])
def test_scores_that_underflow_keep_their_ratio(score, level):
    z = [level, level + 1.0, level - 2.5]
    function = {
        "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
        "sqrt_softplus": lambda x: mpmath.sqrt(mpmath.log1p(mpmath.exp(x))),
    }[score]
    with mpmath.workdps(60):
        scores = [function(mpmath.mpf(x)) for x in z]
        expected = [float(s / mpmath.fsum(scores)) for s in scores]
    assert_allclose(normalised_scores(np.array([z]), score)[0], expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 700.0, 1e6])
def test_entropies_and_logarithms_of_sums_are_scipys_and_torchs(scale):
    z = logits(scale)
    p = normalised_scores(z, "softmax")
    entropy = entropy_nats(p)
    assert_allclose(entropy, scipy.stats.entropy(p, axis=1), rtol=1e-12, atol=1e-13)
    theirs = torch.special.entr(torch.from_numpy(p)).sum(dim=1).numpy()
    assert_allclose(entropy, theirs, rtol=1e-12, atol=1e-13)
    assert 0.0 <= entropy.min() <= entropy.max() <= np.log(17) * (1 + 1e-15)
    assert_allclose(log_sum_exp(z), scipy.special.logsumexp(z, axis=1), rtol=1e-14)
    assert_allclose(log_sum_exp(z), torch.logsumexp(torch.from_numpy(z), 1).numpy(), rtol=1e-14)


IN_FLOAT32 = {"softmax": lambda z: torch.softmax(z, dim=1), "sigmoid": torch.sigmoid}


@pytest.mark.parametrize("score", IN_FLOAT32)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 60.0])
def test_scores_order_as_logits_that_are_further_apart_than_the_resolution(score, scale):
    generator = np.random.default_rng(3)
    near = (10.0 ** generator.uniform(-8, 0, (20_000, 1))) * generator.choice([-1, 1], (20_000, 1))
    last = scale * generator.standard_normal((20_000, 1))
    logits = np.concatenate([last, last - np.abs(near)], axis=1).astype(np.float32)
    top = np.maximum(scale * np.abs(generator.standard_normal((20_000, 1))), logits.max(1)[:, None])
    logits = np.concatenate([top.astype(np.float32), logits], axis=1)
    first, kth, following = logits.astype(np.float64).T
    apart = kth - following > score_resolution(score, first, kth, following)
    scores = IN_FLOAT32[score](torch.from_numpy(logits)).numpy()
    assert apart.sum() > 1000
    assert_array_less(scores[apart, 2], scores[apart, 1])


@pytest.mark.parametrize(
    ("score", "logits"),
    [("softmax", (110.0, 2.0, 1.0)), ("sigmoid", (40.0, 30.0, 25.0)), ("sigmoid", (1, -120, -121))],
)
def test_the_resolution_is_wider_than_the_gap_where_float32_scores_tie(score, logits):
    scores = IN_FLOAT32[score](torch.tensor([logits], dtype=torch.float32))[0]
    assert scores[1] == scores[2], "the case must be a tie to say anything"
    first, kth, following = (np.array([value], dtype=np.float64) for value in logits)
    assert_array_less(kth - following, score_resolution(score, first, kth, following))


MAPS = [
    LogitMap(multiplier, cap)
    for multiplier, cap in (
        (1.0, 30.0),
        (0.18, 5.0),
        (3.0, 0.7),
        (2.0**-20, 2.0**-30),
        (0.18, np.inf),
    )
]


def _of_numpy(z: np.ndarray, multiplier: float, cap: float) -> np.ndarray:
    scaled = z * np.float32(multiplier)
    return scaled if np.isinf(cap) else np.tanh(scaled / np.float32(cap)) * np.float32(cap)


def _of_one_constant(z: np.ndarray, multiplier: float, cap: float) -> np.ndarray:
    if np.isinf(cap):
        return z / np.float32(1.0 / multiplier)
    return np.float32(cap) * np.tanh(z * np.float32(multiplier / cap))


def _of_torch(z: np.ndarray, multiplier: float, cap: float) -> np.ndarray:
    scaled = torch.from_numpy(z) * multiplier
    return (scaled if np.isinf(cap) else torch.tanh(scaled / cap) * cap).numpy()


ENGINES = {"numpy": _of_numpy, "numpy, constants joined": _of_one_constant, "torch": _of_torch}


def near_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Logits of every size, each with one that is a few float32 numbers below."""
    random = np.random.default_rng(11)
    sizes = 2.0 ** np.concatenate([random.uniform(-40.0, 7.0, 60_000), np.full(20_000, -140.0)])
    low = (random.standard_normal(80_000) * sizes).astype(np.float32)
    steps = random.integers(1, 80, len(low)).astype(np.float32)
    return low + steps * np.spacing(np.abs(low)), low


@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_logits_whose_images_are_a_gap_apart_keep_their_order(engine, logit_map):
    """And there are logits that do not: a gap of nothing would keep too few apart."""
    high, low = near_pairs()
    one, other = (mapped_logits(z.astype(np.float64), logit_map) for z in (high, low))
    found = [ENGINES[engine](z, logit_map.multiplier, logit_map.soft_cap) for z in (high, low)]
    is_apart = one - other > number_formats.map_gap(one, other, logit_map, "float32")
    is_kept = found[0] > found[1]
    assert is_kept[is_apart].all()
    assert is_apart.any()
    assert not is_kept[one > other].all()


def values() -> np.ndarray:
    """Numbers of every size, ties between neighbours, and numbers next to ties."""
    random = np.random.default_rng(0)
    drawn = random.standard_normal(5000) * np.exp2(random.integers(-130, 120, 5000))
    stored = torch.arange(0, 0x7F80, 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = stored.double().numpy()
    ties = exact + np.array([number_formats.ulp_bfloat16(float(v)) for v in exact]) / 2
    near = [np.nextafter(ties.astype(np.float32), np.float32(to)) for to in (0, np.inf)]
    whole = np.concatenate([drawn, exact, ties, *near, [np.inf, np.nan, 1e300, 3.4e38]])
    return np.concatenate([whole, -whole])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_torchs(dtype):
    with np.errstate(over="ignore"):
        given = values().astype(dtype)
    expected = torch.from_numpy(given).to(torch.bfloat16).double().numpy()
    assert_array_equal(number_formats.to_bfloat16(given), expected)


def test_bfloat16_steps_and_counts_are_torchs():
    bits = torch.arange(1, 0x7F7F, dtype=torch.int32).to(torch.int16)
    number = bits.view(torch.bfloat16).double().numpy()
    following = (bits + 1).view(torch.bfloat16).double().numpy()
    for sign in (1.0, -1.0):
        steps = [number_formats.ulp_bfloat16(sign * float(value)) for value in number]
        assert_array_equal(steps, following - number)
    assert [number_formats.ulp_bfloat16(value) for value in (0.0, np.inf, np.nan)] == [0.0] * 3
    bias = np.random.default_rng(2).normal(7.0, 0.05, 256).astype(np.float32)
    found = number_formats.bias_precision(bias)
    tensor = torch.from_numpy(bias)
    middle = (tensor.double().max() + tensor.double().min()) / 2
    assert found.num_distinct == tensor.unique().numel()
    assert found.num_distinct_bf16 == tensor.bfloat16().unique().numel()
    recentred = (tensor.double() - middle).bfloat16()
    assert found.num_distinct_bf16_recentred == recentred.unique().numel()
    shift = (tensor.bfloat16().double() - tensor.double()).abs().max().item()
    assert_equal(found.largest_shift, shift)


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.5, 7.0])
def test_lost_updates_are_those_that_torch_loses(offset):
    bias = np.random.default_rng(1).normal(offset, 0.2, 400).astype(np.float32)
    start = torch.from_numpy(bias).to(torch.bfloat16)
    stays = [start + sign * number_formats.UPDATE_STEP == start for sign in (1, -1)]
    expected = (stays[0] & stays[1]).double().mean().item()
    assert_allclose(number_formats.bias_precision(bias).lost_update_share, expected, rtol=1e-15)


WIDTH, ROUTED, TOP_K, TOKENS = 24, 16, 4, 400

#: What a router of DeepSeek-V3 asks of a config.
CONFIG = SimpleNamespace(
    hidden_size=WIDTH,
    num_experts=ROUTED,
    num_local_experts=ROUTED,
    num_experts_per_tok=TOP_K,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)


def test_the_fill_of_the_mask_decides_which_experts_the_router_chooses():
    """The V3 router fills with -inf: a rule that fills with 0.0 must be caught."""
    router = DeepseekV3TopkRouter(CONFIG).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            # biases as large as the differences between scores, all of them negative
            tensor.normal_(0.0, 0.3, generator=generator)
        router.e_score_correction_bias -= 1.0
    y = torch.randn((TOKENS, WIDTH), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits, _, index = router(y)
    same = {}
    for fill in (0.0, -np.inf):
        groups = GroupMask(4, 2, "top2_sum", fill)
        rule = Rule(TOP_K, "sigmoid", Weights("scores"), True, groups=groups)
        found = route(logits.numpy(), rule, router.e_score_correction_bias.numpy()).chosen
        same[fill] = (np.sort(found, axis=1) == np.sort(index.numpy(), axis=1)).all(axis=1).mean()
    assert_array_equal([same[0.0] < 0.1, same[-np.inf] == 1.0], [True, True])


# --------------------------------------------------------------------------------- recorded outputs
MODEL = Path(__file__).resolve().parents[2] / "sample_ckpts" / "deepseek-tiny"
NUM_DOCUMENTS, HIDDEN, EXPERTS = 4, 64, 32
#: The documents are 64 tokens each; shards of other sizes cut through them.
SHARDS = (100, 1, 155)


@pytest.fixture(scope="module")
def documents():
    """The columns of the first four documents of the stored recording."""
    stored = open_tokens(MODEL / "rec" / "step_1500")
    columns = stored.read_columns(0, stored.facts.num_tokens)
    known = columns.document < NUM_DOCUMENTS
    # The domains of the stored recording are not named in the one made here.
    found = {name: array[known] for name, array in vars(columns).items()}
    return TokenColumns(**{**found, "domain": np.full(known.sum(), -1, np.int16)})


@pytest.fixture(scope="module")
def model():
    transformers_logging.disable_progress_bar()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    path = MODEL / "step_1500"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager).eval()


@pytest.fixture(scope="module")
def ran(model, documents):
    """Arrays by router: what went in, what the shared experts and the block gave, and more."""
    seen = defaultdict(lambda: defaultdict(list))

    def watched(module, name, router, pick):
        def hook(_, arguments, output):
            seen[name][router].append(pick(arguments, output).detach().clone())

        return module.register_forward_hook(hook)

    handles, blocks = [], {}
    for layer, whole in enumerate(model.model.layers):
        if isinstance(block := whole.mlp, DeepseekV3MoE):
            blocks[router := f"text/{layer}"] = block
            for name, module, pick in (
                ("input", block, lambda a, _: a[0].flatten(0, -2)),
                ("block", block, lambda _, o: o.flatten(0, -2)),
                ("shared", block.shared_experts, lambda _, o: o.flatten(0, -2)),
                ("routed", block.experts, lambda _, o: o.reshape(-1, o.shape[-1])),
                ("weights", block.gate, lambda _, o: o[1]),
                ("chosen", block.gate, lambda _, o: o[2]),
            ):
                handles.append(watched(module, name, router, pick))
    with torch.no_grad():
        for document in range(NUM_DOCUMENTS):
            ids = documents.token_id[documents.document == document]
            model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False)
    for handle in handles:
        handle.remove()
    arrays = {
        name: {router: torch.cat(parts).numpy() for router, parts in by_router.items()}
        for name, by_router in seen.items()
    }
    return SimpleNamespace(**arrays, blocks=blocks)


def each_expert(block, inputs):
    """(tokens, experts, width): every expert of the block on every token, without weight."""
    experts = block.experts
    with torch.no_grad():
        both = torch.einsum("th,eih->tei", torch.from_numpy(inputs), experts.gate_up_proj)
        gate, up = both.chunk(2, dim=-1)
        inner = experts.act_fn(gate) * up
        return torch.einsum("tei,ehi->teh", inner, experts.down_proj).numpy()


@pytest.fixture(scope="module")
def recorded(ran, documents, tmp_path_factory):
    """The arrays that were handed over, by kind and router, and the recording of them."""
    outputs = {
        "shared_output": ran.shared,
        "routed_output": {r: ran.block[r] - ran.shared[r] for r in ran.block},
        "expert_output": {r: each_expert(ran.blocks[r], ran.input[r]) for r in ran.block},
    }
    path = tmp_path_factory.mktemp("outputs") / "rec"
    first = 0
    with RecordingWriter(path, "router_input", tuple(ran.input), engine="transformers") as writer:
        for size in SHARDS:
            rows = slice(first, first + size)
            writer.append(
                TokenColumns(**{name: array[rows] for name, array in vars(documents).items()}),
                {router: values[rows] for router, values in ran.input.items()},
                {router: ids[rows].astype(np.int32) for router, ids in ran.chosen.items()},
                outputs={
                    kind: {router: values[rows] for router, values in by_router.items()}
                    for kind, by_router in outputs.items()
                },
            )
            first += size
    return outputs, open_tokens(path, "router_input", routers=tuple(ran.input))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def test_every_output_comes_back_with_its_shape_and_bits(recorded):
    outputs, source = recorded
    tokens = sum(SHARDS)
    assert source.facts.routers == ("text/1", "text/2", "text/3")
    assert source.facts.num_tokens == tokens == 64 * NUM_DOCUMENTS
    assert source.facts.outputs == tuple(outputs)
    shapes = {"shared_output": (HIDDEN,), "routed_output": (HIDDEN,)}
    shapes["expert_output"] = (EXPERTS, HIDDEN)
    for kind, by_router in outputs.items():
        for router, expected in by_router.items():
            found = source.read_output(router, kind, 0, tokens)
            assert found.shape == (tokens, *shapes[kind])
            assert_array_equal(bits(found), bits(expected), strict=True)
            part = source.read_output(router, kind, 60, 140)
            assert_array_equal(bits(part), bits(expected[60:140]), strict=True)


def test_outputs_of_experts_add_up_to_the_routed_one_and_that_to_the_block(recorded, ran):
    _, source = recorded
    for router, block in ran.block.items():
        shared = source.read_output(router, "shared_output", 0, len(block))
        routed = source.read_output(router, "routed_output", 0, len(block))
        # A difference of float32 added back: one rounding of each.
        assert_allclose(shared + routed, block, rtol=0, atol=2e-7 * np.abs(block).max())
    for router, routed in ran.routed.items():
        found = source.read_output(router, "routed_output", 0, len(routed))
        largest = max(np.abs(ran.block[router]).max(), np.abs(ran.shared[router]).max())
        assert_allclose(found, routed, rtol=0, atol=4e-7 * largest)
        assert np.abs(routed).max() > 1e-3 * largest
    for router, routed in ran.routed.items():
        experts = source.read_output(router, "expert_output", 0, len(routed)).astype(np.float64)
        chosen = np.take_along_axis(experts, ran.chosen[router][:, :, None], axis=1)
        found = (chosen * ran.weights[router][:, :, None]).sum(axis=1)
        assert_allclose(found, routed, rtol=0, atol=1e-5 * np.abs(routed).max())
