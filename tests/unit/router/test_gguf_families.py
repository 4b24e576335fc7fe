"""Oracle: package gguf 0.19.0 writes the files and says which tensors an architecture has.

What llama.cpp does with logits is written down here a second time, from ``build_moe_ffn`` in its
``src/llama-graph.cpp`` and what the file of each architecture passes to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES

from moegeom.core.errors import GATING_UNSAID, RouterError
from moegeom.core.router import Router, RouterSet
from moegeom.geometry.selection import route
from moegeom.router.family import families, family_of, load_family
from tests.by_day import by_day, one_of_each
from tests.unit.checkpoint.gguf_file import write_gguf
from tests.unit.router.conftest import loaded

NUM_EXPERTS, HIDDEN, TOP_K, NUM_LAYERS = 16, 24, 4, 4

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SQRT_SOFTPLUS, AS_THE_KEY_SAYS = 1, 2, 3, 4, -1


@dataclass(frozen=True)
class Call:
    """What an architecture passes to ``build_moe_ffn``; ``unset`` is its gate without the key."""

    gate: int = SOFTMAX
    unset: int = 0
    normed: bool | str = False
    is_scaled: bool = False
    bias: str = ""
    norm: str = "ffn_norm"
    eps: str = "rms"


_NORMED = Call(normed=True)
_KEYED = Call(AS_THE_KEY_SAYS, 0, "key", is_scaled=True, bias="exp_probs_b.bias")
_BY_SIGMOID = Call(AS_THE_KEY_SAYS, SIGMOID, "key", is_scaled=True, bias="exp_probs_b.bias")
_BEHIND_ATTENTION = Call(normed=True, norm="post_attention_norm")

CALLS: dict[str, Call] = {
    **dict.fromkeys(
        [
            "llama", "llama-embed", "mistral3", "grok", "granite", "granitemoe", "granitehybrid",
            "granite_swa", "minicpm", "hunyuan-moe", "minimax-01", "mellum", "maple", "rnd1",
            "qwen3moe", "qwen3vlmoe", "grovemoe",
        ],
        _NORMED,
    ),
    **dict.fromkeys(["qwen3next", "qwen35moe"], _BEHIND_ATTENTION),
    **dict.fromkeys(["olmoe", "qwen2moe", "llada-moe", "jamba"], Call()),
    **dict.fromkeys(
        ["deepseek2", "mistral4", "deepseek32", "bailingmoe2", "bailingmoe3", "dots1",
         "dots3note", "exaone-moe", "hy_v4", "kimi-k3", "minimax-m3"],
        _KEYED,
    ),
    **dict.fromkeys(["glm-dsa", "glm5-next", "afmoe", "laguna", "step35"], _BY_SIGMOID),
    "arctic": Call(normed=True, norm="ffn_norm_exps"),
    "bailingmoe": Call(normed="key", is_scaled=True),
    "cohere2moe": Call(
        AS_THE_KEY_SAYS, SIGMOID, "key", is_scaled=True, norm="attn_norm", eps="layer"
    ),
    "dbrx": Call(normed=True, norm="attn_output_norm", eps="layer"),
    "deepseek": Call(is_scaled=True),
    "deepseek2-ocr": Call(
        AS_THE_KEY_SAYS, SOFTMAX, "key", is_scaled=True, bias="exp_probs_b.bias"
    ),
    "deepseek4": Call(SQRT_SOFTPLUS, 0, "key", is_scaled=True, bias="exp_probs_b.bias"),
    "ernie4_5-moe": Call(normed=True, bias="exp_probs_b.bias"),
    "gemma4": Call(normed=True, norm="ffn_gate_inp.scale"),
    "glm4moe": Call(
        AS_THE_KEY_SAYS, SIGMOID, "key", is_scaled=True, bias="exp_probs_b.bias",
        norm="post_attention_norm",
    ),
    "gpt-oss": Call(SOFTMAX_OF_CHOSEN, norm="post_attention_norm"),
    "hy_v3": Call(AS_THE_KEY_SAYS, SIGMOID, "key", is_scaled=True, bias="exp_probs_b"),
    "kimi-linear": Call(AS_THE_KEY_SAYS, 0, normed=True, is_scaled=True, bias="exp_probs_b.bias"),
    "lfm2moe": Call(AS_THE_KEY_SAYS, 0, normed=True, bias="exp_probs_b.bias"),
    "llama4": Call(SIGMOID),
    "mimo2": Call(SIGMOID, normed=True, bias="exp_probs_b.bias"),
    "minimax-m2": Call(AS_THE_KEY_SAYS, 0, normed=True, bias="exp_probs_b.bias"),
    "nemotron_h_moe": Call(
        SIGMOID, 0, "key", is_scaled=True, bias="exp_probs_b.bias", norm="attn_norm"
    ),
    "nomic-bert-moe": Call(norm="attn_output_norm", eps="layer"),
    "qwen4exp": Call(normed=True, norm=""),
    "smallthinker": Call(AS_THE_KEY_SAYS, 0, normed=True, norm=""),
}  # fmt: skip

#: Known to package gguf with a router, and left out: docs/gguf.md says why.
LEFT_OUT = {"deci", "phimoe"}

_HAVE_A_ROUTER = {
    MODEL_ARCH_NAMES[arch]: {TENSOR_NAMES[t] for t in tensors}
    for arch, tensors in MODEL_TENSORS.items()
    if MODEL_TENSOR.FFN_GATE_INP in tensors
}

#: Every key that says something about routing, at a value that is not its default.
KEYS: dict[str, Any] = {
    "expert_count": NUM_EXPERTS, "expert_used_count": TOP_K, "embedding_length": HIDDEN,
    "block_count": NUM_LAYERS, "expert_gating_func": SIGMOID, "expert_weights_norm": True,
    "expert_weights_scale": 2.5, "layer_norm_rms_eps": 1e-5, "layer_norm_eps": 1e-3,
    "interleave_moe_layer_step": 2, "moe_every_n_layers": 2,
}  # fmt: skip


def _keys(architecture: str, **changes: Any) -> dict[str, Any]:
    found = KEYS | changes
    if architecture == "deepseek4":
        found["expert_gating_func"] = changes.get("expert_gating_func", SQRT_SOFTPLUS)
    # llama.cpp takes the norm in front for an RMS norm where a file has an epsilon for one
    absent = "layer_norm_rms_eps" if CALLS[architecture].eps == "layer" else "layer_norm_eps"
    return {key: value for key, value in found.items() if value is not None and key != absent}


def _tensors(architecture: str, layer: int) -> dict[str, np.ndarray]:
    call, draw = CALLS[architecture], np.random.default_rng(layer)
    found = {"ffn_gate_inp.weight": draw.normal(size=(NUM_EXPERTS, HIDDEN))}
    if call.bias:
        found[call.bias] = draw.normal(size=NUM_EXPERTS) / 5
    if call.norm:
        found[call.norm if "." in call.norm else f"{call.norm}.weight"] = draw.random(HIDDEN) + 0.5
    if architecture == "nomic-bert-moe":
        found["attn_output_norm.bias"] = draw.normal(size=HIDDEN)
    if architecture == "gpt-oss":
        found["ffn_gate_inp.bias"] = draw.normal(size=NUM_EXPERTS)
    if architecture == "gemma4":
        found["ffn_down_exps.scale"] = draw.random(NUM_EXPERTS) + 0.5
    return {f"blk.{layer}.{name}": values.astype(np.float32) for name, values in found.items()}


def _write(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]
) -> RouterSet:
    def by_name(writer: gguf.GGUFWriter) -> None:
        if "expert_gating_func" in keys:  # the method takes only the first two of four gates
            name = gguf.Keys.LLM.EXPERT_GATING_FUNC.format(arch=architecture)
            writer.add_uint32(name, keys["expert_gating_func"])
        for key, value in keys.items():
            if isinstance(value, list):
                writer.add_array(f"{architecture}.{key}", value)

    plain = {
        key: value
        for key, value in keys.items()
        if key != "expert_gating_func" and not isinstance(value, list)
    }
    write_gguf(path / "m.gguf", architecture, tensors, settings=by_name, keys=plain)
    return loaded(path / "m.gguf")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RouterSet]:
    def make(architecture: str, layers=(1,), tensors=None, **changes: Any) -> RouterSet:
        every: dict[str, Any] = {}
        for layer in layers:
            every |= _tensors(architecture, layer)
        every = {n: v for n, v in (every | dict(tensors or {})).items() if v is not None}
        return _write(tmp_path, architecture, _keys(architecture, **changes), every)

    return make


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-z))


def _softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


_PROBS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    SOFTMAX: _softmax,
    SIGMOID: _sigmoid,
    SOFTMAX_OF_CHOSEN: lambda z: z,
    SQRT_SOFTPLUS: lambda z: np.sqrt(np.log1p(np.exp(z))),
}


def _build_moe_ffn(architecture, logits, bias, gate, is_normed, scale, groups) -> np.ndarray:
    """The weight of every expert, 0 where it is not chosen."""
    probs = _PROBS[gate](logits)
    compared = probs if bias is None else probs + bias
    if architecture == "llama4":
        compared = logits
    if architecture == "grovemoe":
        compared = _sigmoid(logits)
    num_groups, num_kept = groups
    if num_groups > 1:
        split = compared.reshape(len(logits), num_groups, -1)
        group_scores = np.sort(split, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-group_scores, axis=1)[:, :num_kept]
        masked = np.full_like(split, -np.inf)
        for token, groups_of_token in enumerate(kept):
            masked[token, groups_of_token] = split[token, groups_of_token]
        compared = masked.reshape(logits.shape)
    chosen = np.argsort(-compared, axis=1)[:, :TOP_K]
    weights = np.take_along_axis(probs, chosen, axis=1)
    if gate == SOFTMAX_OF_CHOSEN:
        weights = _softmax(weights)
    if is_normed:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 6.103515625e-5)
    if scale not in (0.0, 1.0):
        weights = weights * scale
    dense = np.zeros(logits.shape)
    np.put_along_axis(dense, chosen, weights, axis=1)
    return dense


def _logits(low: float = 0.0) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(500, NUM_EXPERTS)) * 2.0 + low


@pytest.fixture
def compared(load: Callable[..., RouterSet]) -> Callable[..., Router]:
    """The one router of a file, which chooses and weighs as llama.cpp does with its keys."""

    def compare(architecture: str, tensors=None, lows=(0.0,), **changes: Any) -> Router:
        (router,) = load(architecture, tensors=tensors, **changes).routers
        call, keys = CALLS[architecture], _keys(architecture, **changes)
        gate = keys.get("expert_gating_func") or call.unset
        for low in lows:
            logits = _logits(low)
            truth = _build_moe_ffn(
                architecture,
                logits,
                router.selection_bias,
                gate if call.gate == AS_THE_KEY_SAYS else call.gate,
                keys.get("expert_weights_norm", False) if call.normed == "key" else call.normed,
                keys.get("expert_weights_scale", 0.0) if call.is_scaled else 0.0,
                (keys.get("expert_group_count", 0), keys.get("expert_group_used_count", 0)),
            )
            routing = route(logits, router.rule, router.selection_bias)
            dense = np.zeros(logits.shape)
            np.put_along_axis(dense, routing.chosen.astype(np.int64), routing.weights, axis=1)
            np.testing.assert_allclose(dense, truth, rtol=1e-12, atol=1e-300)
        return router

    return compare


def _those(applies: Callable[[Call], bool] = lambda call: True) -> list[str]:
    """Architectures to which something applies; by day one of each call of llama.cpp."""
    every = [architecture for architecture, call in sorted(CALLS.items()) if applies(call)]
    # grovemoe alone compares other scores than it weighs by
    return one_of_each(every, lambda name: (CALLS[name], name == "grovemoe"))


def test_the_files_hold_every_architecture_with_a_router_but_those_left_out():
    names = [name for name in families() if name.startswith("gguf_")]
    held = [t for name in names for t in load_family(name).model_types]
    assert sorted(held) == sorted(f"gguf-{architecture}" for architecture in CALLS)
    assert all(load_family(name).source.startswith("llama.cpp 0c1e57098 ") for name in names)
    assert _HAVE_A_ROUTER.keys() - CALLS.keys() == LEFT_OUT
    assert all(family_of(f"gguf-{architecture}") is None for architecture in LEFT_OUT)


def test_tensors_are_called_as_package_gguf_calls_them():
    for architecture in CALLS.keys() & _HAVE_A_ROUTER.keys():
        family = family_of(f"gguf-{architecture}")
        assert family is not None
        (stack,) = family.stacks
        gain = stack.norm.weight if stack.norm else ()
        known = {name.format(bid="{layer}") for name in _HAVE_A_ROUTER[architecture]}
        patterns = [p.name for p in (*stack.weight, *stack.selection_bias, *gain[-1:])]
        assert {name.rpartition(".")[0] for name in patterns} <= known, architecture
        assert bool(stack.selection_bias) == ("blk.{layer}.exp_probs_b" in known), architecture


@pytest.mark.parametrize("architecture", _those())
def test_a_router_has_all_its_parts(architecture, load):
    routers = load(architecture)
    (router,) = routers.routers
    assert (router.name, routers.skipped) == ("text/1", ())
    assert routers.num_expected in (None, NUM_LAYERS, NUM_LAYERS // 2)
    call, stored = CALLS[architecture], _tensors(architecture, 1)
    np.testing.assert_array_equal(router.weight, stored["blk.1.ffn_gate_inp.weight"])
    bias = stored[f"blk.1.{call.bias}"] if call.bias else None
    np.testing.assert_array_equal(router.selection_bias, bias)
    assert (router.norm is None) == (not call.norm)
    if router.norm is not None and router.gain is not None:
        assert router.norm.kind == call.eps
        np.testing.assert_allclose(router.norm.eps, 1e-5 if call.eps == "rms" else 1e-3, rtol=1e-6)
        root = HIDDEN**-0.5 if architecture == "gemma4" else 1.0
        np.testing.assert_allclose(router.gain, stored[router.norm.tensor] * root, rtol=1e-6)


@pytest.mark.parametrize("architecture", _those())
def test_weights_are_those_of_llama_cpp(architecture, compared):
    compared(architecture)
    if architecture != "grovemoe":
        # low scores plus bias are negative: less than a mask of zeros
        groups = {"expert_group_count": 4, "expert_group_used_count": 2}
        compared(architecture, lows=(0.0, -4.0), **groups)
    if CALLS[architecture].is_scaled:
        assert compared(architecture, expert_weights_scale=0.0).rule.weights.scale == 1.0


@pytest.mark.parametrize("architecture", _those(lambda call: call.gate == AS_THE_KEY_SAYS))
def test_the_gate_is_that_of_the_file(architecture, compared):
    for gate in (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SQRT_SOFTPLUS):
        compared(architecture, expert_gating_func=gate)


_OPTIONAL = ("expert_gating_func", "expert_weights_norm", "expert_weights_scale")


@pytest.mark.parametrize("architecture", _those(lambda call: 0 < call.gate < SQRT_SOFTPLUS))
def test_keys_that_llama_cpp_can_do_without_may_be_missing(architecture, compared):
    compared(architecture, **dict.fromkeys(_OPTIONAL))


@pytest.mark.parametrize("gate", [None, 0])
@pytest.mark.parametrize("architecture", _those(lambda call: call.unset > 0))
def test_a_gate_that_is_not_set_is_that_of_its_architecture(architecture, gate, compared):
    router = compared(architecture, expert_gating_func=gate)
    assert router.rule.score == ("softmax" if architecture == "deepseek2-ocr" else "sigmoid")


@pytest.mark.parametrize(
    "architecture", _those(lambda call: call.gate == AS_THE_KEY_SAYS and not call.unset)
)
def test_a_gate_that_llama_cpp_cannot_do_without_is_named(architecture, load):
    for gate, fault in ((None, "is not given"), (0, "is 0, which names no gating function")):
        with pytest.raises(RouterError, match=f"'expert_gating_func' {fault}") as caught:
            load(architecture, expert_gating_func=gate)
        assert caught.value.code == GATING_UNSAID


def test_one_group_is_no_mask_and_a_sum_too_small_to_divide_by_is_clamped(load, compared):
    (router,) = load("deepseek2", expert_group_count=1, expert_group_used_count=1).routers
    assert router.rule.groups is None
    router = compared("deepseek2", lows=(-20.0,))
    routing = route(_logits(low=-20.0), router.rule, router.selection_bias)
    assert routing.weights.sum(axis=1).max() < 0.1


def test_tensors_of_single_architectures_are_read(load):
    (router,) = load("gpt-oss").routers
    assert router.rule.has_logit_bias
    bias = _tensors("gpt-oss", 1)["blk.1.ffn_gate_inp.bias"]
    np.testing.assert_array_equal(router.logit_bias, bias)
    (router,) = load("gemma4").routers
    scale = _tensors("gemma4", 1)["blk.1.ffn_down_exps.scale"]
    np.testing.assert_array_equal(router.expert_scale, scale)
    second = np.full(HIDDEN, 3.0, np.float32)
    norms = {f"blk.{layer}.post_attention_norm.weight": second for layer in (1, 3)}
    routers = load("nemotron_h_moe", (1, 3), norms, expert_used_count=[0, 6, 0, 2]).routers
    assert [router.rule.top_k for router in routers] == [6, 2]
    np.testing.assert_array_equal(routers[0].gain, second)


def test_layers_that_look_experts_up_are_listed_and_a_missing_bias_of_some_is_an_error(load):
    table: dict[str, Any] = {"blk.0.ffn_gate_tid2eid.weight": np.zeros((40, TOP_K), np.int32)}
    routers = load("deepseek4", (0, 1), table | {"blk.0.exp_probs_b.bias": None})
    assert [router.name for router in routers.routers] == ["text/1"]
    assert [skipped.tensor for skipped in routers.skipped] == ["blk.0.ffn_gate_inp.weight"]
    with pytest.raises(RouterError, match=r"tensor 'blk\.2\.exp_probs_b\.bias' is missing"):
        load("deepseek2", (1, 2), {"blk.2.exp_probs_b.bias": None})


@pytest.mark.parametrize(
    ("architecture", "layers", "changes"),
    [
        ("qwen3moe", (0, 1, 2, 3), {}),
        ("deepseek", (2, 3), {"leading_dense_block_count": 2}),
        ("llama4", (1, 3), {}),
        ("llama4", (2,), {"interleave_moe_layer_step": 3}),
        ("nomic-bert-moe", (1, 3), {}),
        ("ernie4_5-moe", (3,), {"leading_dense_block_count": 2}),
        ("kimi-linear", (1, 2, 3), {"leading_dense_block_count": 1}),
        ("deepseek2", (1, 2, 3), {"leading_dense_block_count": 1}),
        ("exaone-moe", (1, 2), {"leading_dense_block_count": 1, "nextn_predict_layers": 1}),
    ],
)
def test_layers_with_a_router_are_known_beforehand(architecture, layers, changes, load):
    found = load(architecture, layers, **changes)
    assert [router.layer for router in found.routers] == list(layers)
    assert (found.num_expected, found.layer_notes) == (len(layers), ())


_MAY_LACK = [
    "bailingmoe2", "deepseek2", "deepseek2-ocr", "deepseek32", "dots1", "ernie4_5-moe",
    "exaone-moe", "glm-dsa", "hy_v3", "hy_v4", "mimo2", "mistral4", "step35",
]  # fmt: skip


@pytest.mark.parametrize("architecture", one_of_each(_MAY_LACK, CALLS.get))
def test_a_selection_bias_that_no_layer_has_is_none(architecture, load, compared):
    absent: dict[str, Any] = {f"blk.1.{CALLS[architecture].bias}": None}
    router = compared(architecture, absent)
    assert (router.selection_bias, router.rule.has_selection_bias) == (None, False)
    assert "bias" not in load(architecture, tensors=absent).family_text


@pytest.mark.parametrize(
    "architecture",
    one_of_each([a for a, c in CALLS.items() if c.bias and a not in _MAY_LACK], CALLS.get),
)
def test_a_selection_bias_that_llama_cpp_cannot_do_without_is_named(architecture, load):
    bias = f"blk.1.{CALLS[architecture].bias}"
    with pytest.raises(RouterError, match=f"tensor '{bias}' is missing"):
        load(architecture, tensors={bias: None})


_PREDICT = ["bailingmoe2", "deepseek2", "glm-dsa", "glm4moe", "mimo2", "qwen35moe"]


@pytest.mark.parametrize(
    "architecture", by_day(_PREDICT, {"with a bias": "deepseek2", "without one": "qwen35moe"})
)
def test_layers_that_predict_further_tokens_are_a_stack_of_their_own(architecture, load):
    found = load(architecture, layers=(1, 2, 3), nextn_predict_layers=1)
    assert [router.name for router in found.routers] == ["text/1", "text/2", "mtp/3"]


def test_keys_that_llama_cpp_would_refuse_are_refused(load, tmp_path):
    with pytest.raises(RouterError, match="'nextn_predict_layers' is 5"):
        load("glm4moe", nextn_predict_layers=5)
    with pytest.raises(RouterError, match="expert_group_count"):
        load("grovemoe", expert_group_count=4, expert_group_used_count=2)
    keys = _keys("cohere2moe") | {"layer_norm_rms_eps": 1e-5}
    with pytest.raises(RouterError, match="layer_norm_rms_epsilon"):
        _write(tmp_path, "cohere2moe", keys, _tensors("cohere2moe", 1))


@pytest.mark.parametrize("architecture", sorted(LEFT_OUT))
def test_an_architecture_that_is_left_out_is_refused_with_evidence(architecture, tmp_path):
    with pytest.raises(RouterError, match=r"not known.*ffn_gate_inp"):
        _write(tmp_path, architecture, _keys("llama"), _tensors("llama", 1))
