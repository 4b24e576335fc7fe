"""Oracle: what the expert blocks of transformers give, for every family that it can build, and its
attention, for every family whose gates or sinks are known.

A tiny random model is saved as the hub has it, and read again; blocks get the same random inputs, and
a pass over random tokens shows what each layer projects, what heads give, and what the output matrix
receives.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.geometry.attention_heads import FIRST_QUERY, product_spectra
from moegeom.recorder.attention import AttentionRecorder
from moegeom.research.attention.study import layer_on_tokens
from moegeom.router.attention.tensors import (
    AttentionTensors,
    attention_families,
    attention_layers,
    recognise_attention,
)
from moegeom.router.expert_functions import open_expert_functions, open_shared_experts
from moegeom.router.family import families
from moegeom.tokens.attention_record import AttentionRecord, LayerSums, read_attention_record
from tests.by_day import by_day
from tests.families.observed import FIRST_ORDINARY, VOCABULARY
from tests.families.test_families_against_transformers import families_of, routed
from tests.families.tiny_models import (
    ATTENTION,
    BY_DAY,
    LISTED,
    LOADED,
    OWN_NORM,
    attention_model,
    model_of,
    read,
    repeatable,
    routers_of,
    saved,
)

TOKENS, HIDDEN = 96, 64

#: Experts whose outputs do not follow from the router input, and shared experts that are not read,
#: by family, with the words of the refusal.
REFUSED = {("jetmoe", "attention"): "attention, which mixes tokens"}
SHARED_REFUSED = {"inkling": "weighted by the router", "inkling_text": "weighted by the router"}

#: Shared experts are halved with the routed ones where the strategy is to average.
HALVED = {"cohere2_moe__sigmoid"}

SHARED = re.compile(r"(?:.*\.)?shared?_(?:experts?|mlp)")


def inputs_of(name: str) -> torch.Tensor:
    with repeatable(name):
        return torch.randn(1, TOKENS, HIDDEN)


def _experts(block: Any, y: torch.Tensor, chosen: Any, weights: Any) -> torch.Tensor:
    return block.experts(y[0], torch.tensor(chosen, dtype=torch.int64), weights.float())


def _behind_own_norm(block: Any, y: torch.Tensor, chosen: Any, weights: Any) -> torch.Tensor:
    """The layer is the block; its experts read another norm of the state."""
    state = block.pre_feedforward_layernorm_2(y)
    return _experts(block, state, chosen, weights)


def _nllb(block: Any, y: torch.Tensor, chosen: Any, weights: Any) -> torch.Tensor:
    """One by one: the block takes the mask of its router for numbers of experts."""
    total = torch.zeros(TOKENS, HIDDEN)
    for expert in range(block.experts.num_experts):
        one = block.experts[f"expert_{expert}"](y[0])
        total += (weights * torch.tensor(chosen == expert)).sum(1, keepdim=True) * one
    return total.float() * (1.0 - block.experts.moe_token_dropout)


#: Blocks whose sum of experts is not seen at their end: a norm stands behind it, or worse.
OWN: dict[str, Callable[[Any, torch.Tensor, Any, torch.Tensor], torch.Tensor]] = {
    "axk1": _experts,
    "diffusion_gemma": _behind_own_norm,
    "gemma4": _behind_own_norm,
    "gemma4_text": _behind_own_norm,
    "nllb_moe": _nllb,
    "nllb_moe__bias_cap": _nllb,
}


def of_block(block: Any, name: str, y: torch.Tensor) -> torch.Tensor:
    """The output of the block less that of its shared experts, and less a bias behind the sum."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, out, path=path: seen.update({path: out.clone()}))
        for path, module in block.named_children()
        if SHARED.fullmatch(path) or path == "shared_expert_gate"
    ]
    found = block(y)
    for handle in handles:
        handle.remove()
    found = (found[0] if isinstance(found, tuple) else found).reshape(TOKENS, HIDDEN)
    gate = torch.sigmoid(seen.pop("shared_expert_gate", torch.full((1,), torch.inf)))
    for shared in seen.values():
        found = found - (gate * shared).reshape(TOKENS, HIDDEN) * (0.5 if name in HALVED else 1.0)
    return found - getattr(block, "bias", 0.0)


def near(mine: np.ndarray, theirs: torch.Tensor) -> None:
    expected = theirs.double().numpy()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def shared_of(model: Any, path: str, name: str, y: torch.Tensor) -> torch.Tensor | None:
    layer = re.match(r"(?:.*\.)?(?:layers|blocks|block)\.\d+\.", path)
    assert layer
    modules = dict(model.named_modules())
    found = [p for p in modules if p.startswith(layer[0]) and SHARED.fullmatch(p) and modules[p]]
    if not found:
        return None
    out = modules[found[0]](y)
    gate = modules.get(found[0] + "_gate")
    out = out if gate is None else torch.sigmoid(gate(y)) * out
    return out.reshape(TOKENS, HIDDEN) * (0.5 if name in HALVED else 1.0)


def opened(name: str) -> list[tuple[Any, Router]]:
    """The last router of every stack: where it is in the model, and as it is read."""
    routers = {(r.slot or r.stack, r.layer): r for r in read(name).routers}
    routers |= {("text", r.layer): r for r in routers.values() if r.slot == "mlp"}
    last = {place.stack: place for place in routers_of(model_of(name), name)}
    stacks = {"encoder": "decoder"} if name == "diffusion_gemma" else {}
    return [
        (place, routers[stacks.get(place.stack, place.stack), place.layer])
        for place in last.values()
    ]


#: Ways to lay out experts that files of families say nothing of: names and shapes do.
LAYOUTS = {
    "gate_proj, up_proj, down_proj of each expert": "olmoe",
    "w1, w3, w2 of each expert": "mixtral",
    "one transposed matrix of two halves": "llama4_text",
    "the same with biases, cut off": "openai_privacy_filter",
    "fc1 and fc2 of all experts, transposed": "aria_text",
    "input_linear and output_linear of all experts": "granitemoe",
    "shared experts outside of the block": "granitemoeshared",
    "a number that gates the shared expert": "qwen2_moe",
}


@pytest.mark.parametrize("name", by_day(LOADED, {*BY_DAY, *LAYOUTS.values()}))
def test_experts_of_a_file_give_what_the_block_gives(name):
    model, y, store = model_of(name), inputs_of(name), open_checkpoint(saved(name))
    for place, router in opened(name):
        if reason := REFUSED.get((name, router.slot)):
            with pytest.raises(RouterError, match=reason):
                open_expert_functions(store, router)
            continue
        block = model.get_submodule(place.name.rpartition(".")[0])
        choice, weights = routed(router, y[0].numpy(), name in OWN_NORM)
        inputs = y[0].double().numpy()
        if name in OWN_NORM:  # what the router norms for itself
            assert router.norm is not None
            assert router.gain is not None
            scale = np.sqrt((inputs**2).mean(axis=1, keepdims=True) + router.norm.eps)
            inputs = inputs / scale * router.gain
        experts, before = open_expert_functions(store, router), store.bytes_read
        experts.tensors.read(0)
        assert store.bytes_read - before == experts.bytes_of([0]) > 0
        with torch.no_grad():
            own = OWN.get(name)
            if own is None:
                expected = of_block(block, name, y)
            else:
                expected = own(block, y, choice.chosen, torch.tensor(weights))
            mine = experts.mixed(inputs, choice.chosen, weights)
            if router.rule.capacity is not None:  # experts that were full dropped the token
                mine[(expected == 0.0).all(dim=1).numpy()] = 0.0
            near(mine, expected)
            if reason := SHARED_REFUSED.get(name):
                with pytest.raises(RouterError, match=reason):
                    open_shared_experts(store, router)
                continue
            of_model = shared_of(model, place.name, name, y)
            shared = open_shared_experts(store, router)
            assert (of_model is None) == (shared is None)
            if of_model is not None and shared is not None:
                near(shared.apply(inputs), of_model)


def test_the_page_counts_every_family_once():
    held = families_of(LOADED)
    listed = families_of(LISTED) - held
    gguf = {name for name in families() if name.startswith("gguf_")}
    others = set(families()) - held - listed - gguf
    page = (Path(__file__).resolve().parents[2] / "docs/outputs.md").read_text("utf-8")
    table = re.findall(r"^\| ([^|]+) \| (\d+) \|", page, re.MULTILINE)
    counts = {what: int(number) for what, number in table}
    assert counts.pop("of transformers") == len(held)
    assert counts.pop("of GGUF files") == len(gguf)
    named = {name for what in counts for name in what.split(", ")}
    assert named == listed | others
    assert sum(counts.values()) == len(named)
    assert {name for name, _ in REFUSED} | SHARED_REFUSED.keys() | OWN.keys() <= set(LOADED)


# ------------------------------------------------------------------- attention with gates and sinks
#: What a gate projects, by the attribute of the module: the first that is there.
GATES = ("q_gate_proj", "g_proj", "gate_proj", "q_proj")

FUNCTIONS = {"sigmoid": torch.sigmoid, "softplus": torch.nn.functional.softplus}

#: Two sequences of one pass.
ATTENTION_TOKENS = 48

#: Modules of layers in one another's place.
STACKS = {"L_module": "low", "H_module": "high"}

#: Behind the sum over tokens and before the gate.
NORMED = {"muse_spark"}


def test_every_family_has_a_model():
    assert set(attention_families()) == {name.partition("__")[0] for name in ATTENTION}


MECHANISMS = {
    "a gate of each channel": "afmoe",
    "of the compressed query": "axk2",
    "of each head": "bailing_hybrid",
    "with a bias": "beam",
    "sinks, and no products": "deepseek_v4",
    "sinks": "gpt_oss",
    "heads of a share of the width": "granite_swa",
    "two stacks": "hrm_text",
    "gates and sinks": "hy_v4",
    "sinks of a projection, heads of two widths": "inkling2__widths",
    "softplus": "laguna",
    "softplus of each channel": "laguna__channels",
    "neither": "lfm3__without",
    "of normed heads": "muse_spark",
    "in the rows of the query, with a bias": "qwen3_next__bias",
}


@pytest.mark.parametrize("name", by_day(ATTENTION, MECHANISMS))
def test_gates_sinks_products_and_what_is_recorded_are_those_of_transformers(name, tmp_path):
    model = attention_model(name)
    model.save_pretrained(tmp_path / "model")
    store = open_checkpoint(tmp_path / "model")
    family = recognise_attention(store.config)
    assert family is not None and family.name == name.partition("__")[0]
    layers = {layer.name: layer for layer in attention_layers(store, family)}
    recorded = {n for n, layer in layers.items() if layer.gate or layer.sinks}
    assert bool(recorded) == ("without" not in name)
    if recorded:
        with AttentionRecorder(model, tmp_path / "rec", checkpoint=tmp_path / "model") as recorder:
            passed = _seen(model, recorder)
    else:
        passed = _seen(model)
    assert layers.keys() == passed.keys()
    for place, layer in layers.items():
        _check_gate(name, layer, passed[place])
        _check_sinks(layer, passed[place])
        _check_products(layer, passed[place]["module"])
    if recorded:
        record = read_attention_record(tmp_path / "rec")
        assert {layer.name for layer in record.layers} == recorded
        for sums in record.layers:
            _check_sums(name, sums, record, layers[sums.name], passed[sums.name])


def _check_sums(
    name: str,
    sums: LayerSums,
    record: AttentionRecord,
    layer: AttentionTensors,
    seen: dict[str, Any],
) -> None:
    assert sums.tokens.sum() == seen["calls"] * ATTENTION_TOKENS
    if seen["calls"] > 1:
        return  # what was seen is the last call
    figures = layer_on_tokens(layer, record)
    assert figures is not None
    theirs = _definitions(name, layer, seen)
    assert figures.heads[0].keys() - NOT_DEFINED == theirs.keys()
    for figure, values in theirs.items():
        ours = [head[figure] for head in figures.heads]
        np.testing.assert_allclose(ours, values, rtol=1e-5, atol=2e-6, err_msg=figure)


#: Figures without a counterpart in transformers: of random rows, and from histograms.
NOT_DEFINED = {
    *("gate_mean_random", "gate_closed_share_random", "gate_pull_random"),
    *("gate_decile_1", "gate_median", "gate_decile_9"),
}


def _definitions(name: str, layer: AttentionTensors, seen: dict[str, Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    weights = seen["weights"].double().numpy()
    gates = None
    if layer.gate is not None:
        assert layer.family.gate is not None
        gate = layer.read_gate()
        inner = np.einsum("btw,hcw->bthc", seen["read"].double().numpy(), gate.rows) + gate.bias
        gates = FUNCTIONS[layer.family.gate.function](torch.from_numpy(inner)).numpy()
        found["gate_mean"] = gates.mean(axis=(0, 1, 3))
        found["gate_closed_share"] = (gates < 0.1).mean(axis=(0, 1, 3))
        mean = inner.mean(axis=(0, 1))
        found["gate_pull"] = np.sqrt(
            (mean**2).mean(axis=1) / ((inner - mean) ** 2).mean(axis=(0, 1, 3))
        )
        if layer.family.gate.function == "sigmoid":
            both = np.stack([gates, 1.0 - gates])
            found["gate_entropy_nats"] = scipy.stats.entropy(both).mean(axis=(0, 1, 3))
        given = seen["module"].o_norm(seen["heads"]) if name in NORMED else seen["heads"]
        given = given.double().numpy().reshape(*gates.shape[:3], -1)
        after = ((gates * given) ** 2).sum(axis=(0, 1, 3))
        found["energy_removed_share"] = 1.0 - after / (given**2).sum(axis=(0, 1, 3))
    later = weights[:, :, FIRST_QUERY:]
    if layer.sinks is not None:
        found["sink_mass"] = 1.0 - later.sum(axis=3).mean(axis=(0, 2))
    if weights.shape[2] != weights.shape[3]:
        return found
    first = later[..., 0]
    found["first_token_mass"] = first.mean(axis=(0, 2))
    found["first_4_mass"] = later[..., :4].sum(axis=3).mean(axis=(0, 2))
    found["uniform_mass"] = ((first > 0) / (later > 0).sum(axis=3)).mean(axis=(0, 2))
    if gates is not None:
        mean = gates[:, FIRST_QUERY:].mean(axis=3)
        found["gate_first_correlation"] = np.array(
            [
                scipy.stats.pearsonr(mean[:, :, head].ravel(), first[:, head].ravel()).statistic
                for head in range(gates.shape[2])
            ]
        )
    return found


def _check_gate(name: str, layer: AttentionTensors, seen: dict[str, Any]) -> None:
    """Gates are equal, and stand between the heads and the output matrix: position G1."""
    module, given, into = seen["module"], seen["heads"], seen["into"]
    if name in NORMED:
        given = module.o_norm(given)
    spec = layer.family.gate
    if spec is None or layer.gate is None:
        assert not any(hasattr(module, gate) and gate != "q_proj" for gate in GATES) or (
            module.g_proj is None
        )
        if hasattr(module, "o_proj"):
            torch.testing.assert_close(into, given.flatten(2))
        return
    assert spec.position == "G1"
    gate = layer.read_gate()
    assert (spec.reads == "the attention input") == (seen["read"].shape == seen["input"].shape)
    if spec.reads == "the attention input":
        torch.testing.assert_close(seen["read"], seen["input"], rtol=0, atol=0)
    x = seen["read"].double().numpy()
    inner = np.einsum("btw,hcw->bthc", x, gate.rows) + gate.bias
    ours = FUNCTIONS[spec.function](torch.from_numpy(inner))
    torch.testing.assert_close(
        (given.double() * ours).flatten(2), into.double(), rtol=2e-6, atol=1e-6
    )
    applied = into.double().reshape(given.shape) / given.double()
    large = given.abs() > 1e-4
    difference = (applied - ours).abs()[large]
    assert large.float().mean() > 0.9
    assert difference.max() <= 1e-6


def _check_sinks(layer: AttentionTensors, seen: dict[str, Any]) -> None:
    passed = seen["sinks"]
    if layer.sinks is None:
        assert passed is None
        return
    assert layer.family.sink is not None
    ours = torch.from_numpy(layer.read_sinks())
    if layer.family.sink.is_projection:
        ours = (seen["input"].double() @ ours.T).transpose(1, 2).unsqueeze(-1)
        torch.testing.assert_close(passed.double(), ours, rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(passed.double().reshape(-1), ours[:, 0], rtol=0, atol=0)


def _check_products(layer: AttentionTensors, module: Any) -> None:
    if layer.value is None:
        assert layer.family.no_products
        return
    heads = layer.read_heads()
    ours = product_spectra(heads.values, heads.outputs)
    output = module.o_proj.weight.double().numpy()
    width, number = layer.width, len(ours)
    assert output.shape[1] == width * number
    for head in range(number):
        value = _value(module, head, number, width)
        product = output[:, head * width : (head + 1) * width] @ value
        theirs = np.linalg.svd(product, compute_uv=False)
        np.testing.assert_allclose(ours[head], theirs[:width], atol=1e-12 * theirs[0])
        np.testing.assert_allclose(theirs[width:], 0.0, atol=1e-12 * theirs[0])


def _value(module: Any, head: int, number: int, width: int) -> np.ndarray:
    if hasattr(module, "kv_b_proj"):
        matrix = module.kv_b_proj.weight.view(number, -1, module.kv_lora_rank)[head, -width:]
        latent = module.kv_a_proj_with_mqa.weight[: module.kv_lora_rank]
        normed = matrix.double() * module.kv_a_layernorm.weight.double()
        return normed.numpy() @ latent.double().numpy()
    shared = head // module.num_key_value_groups
    return module.v_proj.weight[shared * width : (shared + 1) * width].double().numpy()


# ------------------------------------------------------------------------------- one pass
def _seen(model: Any, recorder: AttentionRecorder | None = None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with repeatable("attention"), _watched(model, found):
        ids = torch.randint(FIRST_ORDINARY, VOCABULARY, (2, ATTENTION_TOKENS // 2))
        if recorder is not None:
            recorder.tokens(ids)
        model(input_ids=ids, use_cache=False)
    return {place: seen for place, seen in found.items() if "heads" in seen}


@contextmanager
def _watched(model: Any, found: dict[str, dict[str, Any]]) -> Iterator[None]:
    handles: list[Any] = []
    patched: dict[Any, Any] = {}
    by_module: dict[Any, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if not path.endswith(".self_attn") or any(w in path for w in ("vision", "audio", "visual")):
            continue
        seen: dict[str, Any] = {"module": module}
        found[_place(path)] = by_module[module] = seen
        handles.append(module.register_forward_pre_hook(_input(seen), with_kwargs=True))
        last = getattr(module, "o_proj", None) or module.o_a_proj
        handles.append(last.register_forward_pre_hook(_first(seen, "into")))
        gate = next((g for g in GATES if getattr(module, g, None) is not None), None)
        if gate is not None:
            handles.append(getattr(module, gate).register_forward_pre_hook(_first(seen, "read")))
        source: Any = sys.modules[type(module).__module__]
        if source not in patched:
            patched[source] = source.eager_attention_forward
            source.eager_attention_forward = _eager(patched[source], by_module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for source, own in patched.items():
            source.eager_attention_forward = own


def _place(path: str) -> str:
    *_, stack, _, number, _ = f".{path}".split(".")  # L_module.layers.0.self_attn
    return f"{STACKS.get(stack, 'text')}/{number}"


def _first(seen: dict[str, Any], name: str) -> Any:
    def hook(_: Any, arguments: tuple[Any, ...]) -> None:
        seen[name] = arguments[0].clone()

    return hook


def _input(seen: dict[str, Any]) -> Any:
    def hook(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = arguments[0] if arguments else named["hidden_states"]
        seen["input"] = given.clone()

    return hook


def _eager(own: Any, by_module: dict[Any, dict[str, Any]]) -> Any:
    def forward(module: Any, *arguments: Any, **named: Any) -> Any:
        heads, weights = own(module, *arguments, **named)
        if module in by_module:
            sinks = named.get("s_aux", named.get("sinks"))
            by_module[module] |= {
                "heads": heads.clone(),
                "weights": weights,
                "sinks": sinks,
                "calls": by_module[module].get("calls", 0) + 1,
            }
        return heads, weights

    return forward
