"""Oracle: the attention of transformers, for every family whose gates or sinks are known.

A tiny random model is saved as the hub has it, and read again; a pass over random tokens shows what
each layer projects, what heads give, and what the output matrix receives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.geometry.value_output import product_spectra
from moegeom.router.attention.family import attention_families
from moegeom.router.attention.tensors import (
    AttentionTensors,
    attention_layers,
    recognise_attention,
)
from tests.families.attention_models import ATTENTION, attention_model
from tests.families.observed import FIRST_ORDINARY, VOCABULARY
from tests.families.tiny_models import repeatable

#: What a gate projects, by the attribute of the module: the first that is there.
GATES = ("q_gate_proj", "g_proj", "gate_proj", "q_proj")

FUNCTIONS = {"sigmoid": torch.sigmoid, "softplus": torch.nn.functional.softplus}

#: Modules of layers in one another's place.
STACKS = {"L_module": "low", "H_module": "high"}

#: Behind the sum over tokens and before the gate.
NORMED = {"muse_spark"}


def test_every_family_has_a_model():
    assert set(attention_families()) == {name.partition("__")[0] for name in ATTENTION}


@pytest.mark.parametrize("name", ATTENTION)
def test_gates_sinks_and_products_are_those_of_transformers(name: str, tmp_path: Path):
    model = attention_model(name)
    model.save_pretrained(tmp_path)
    store = open_checkpoint(tmp_path)
    family = recognise_attention(store.config)
    assert family is not None and family.name == name.partition("__")[0]
    layers = {layer.name: layer for layer in attention_layers(store, family)}
    seen = _seen(model)
    assert layers.keys() == seen.keys()
    assert any(layer.gate or layer.sinks for layer in layers.values()) == ("without" not in name)
    for place, layer in layers.items():
        _check_gate(name, layer, seen[place])
        _check_sinks(layer, seen[place])
        _check_products(layer, seen[place]["module"])


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
    """Singular values of each head are those of the product written out."""
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
    """The matrix of the values of a head, as its module uses it."""
    if hasattr(module, "kv_b_proj"):
        matrix = module.kv_b_proj.weight.view(number, -1, module.kv_lora_rank)[head, -width:]
        latent = module.kv_a_proj_with_mqa.weight[: module.kv_lora_rank]
        normed = matrix.double() * module.kv_a_layernorm.weight.double()
        return normed.numpy() @ latent.double().numpy()
    shared = head // module.num_key_value_groups
    return module.v_proj.weight[shared * width : (shared + 1) * width].double().numpy()


# ------------------------------------------------------------------------------- one pass
def _seen(model: Any) -> dict[str, dict[str, Any]]:
    """What passes through each attention layer with an output matrix, by its name."""
    found: dict[str, dict[str, Any]] = {}
    with repeatable("attention"), _watched(model, found):
        ids = torch.randint(FIRST_ORDINARY, VOCABULARY, (2, 24))
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
            by_module[module] |= {"heads": heads.clone(), "sinks": sinks}
        return heads, weights

    return forward
