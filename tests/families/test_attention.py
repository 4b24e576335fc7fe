"""Oracle: the attention of transformers, for every family whose gates or sinks are known.

A tiny random model is saved as the hub has it, and read again; a pass over random tokens shows what
each layer projects, what heads give, and what the output matrix receives.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.geometry.attention_heads import FIRST_QUERY, product_spectra
from moegeom.recorder.attention import AttentionRecorder
from moegeom.research.attention.study import layer_on_tokens
from moegeom.router.attention.tensors import (
    AttentionTensors,
    attention_families,
    attention_layers,
    recognise_attention,
)
from moegeom.tokens.attention_record import AttentionRecord, LayerSums, read_attention_record
from tests.by_day import by_day
from tests.families.attention_models import ATTENTION, attention_model
from tests.families.observed import FIRST_ORDINARY, VOCABULARY
from tests.families.tiny_models import repeatable

#: What a gate projects, by the attribute of the module: the first that is there.
GATES = ("q_gate_proj", "g_proj", "gate_proj", "q_proj")

FUNCTIONS = {"sigmoid": torch.sigmoid, "softplus": torch.nn.functional.softplus}

#: Two sequences of one pass.
TOKENS = 48

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
    assert sums.tokens.sum() == seen["calls"] * TOKENS
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
        ids = torch.randint(FIRST_ORDINARY, VOCABULARY, (2, TOKENS // 2))
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
