from __future__ import annotations

import pytest

from moegeom.core.errors import RouterError
from moegeom.router.family import PREFIXES, Family
from moegeom.router.family_file import load_family, parse_family
from moegeom.router.match import Matches, match_routers, without_absent_biases
from moegeom.router.settings import Settings
from tests.ends import work_ends

_OLMOE = load_family("olmoe")
_NORM = "post_attention_layernorm.weight"


def _layer(layer: int, prefix: str = "model.", gate: str = "mlp.gate") -> dict[str, None]:
    at = f"{prefix}layers.{layer}."
    return dict.fromkeys([f"{at}{gate}.weight", f"{at}{_NORM}"])


def test_layers_come_in_natural_order():
    names = {n: None for i in (10, 9, 2, 0) for n in _layer(i)}
    found = match_routers(names, _OLMOE, Settings({}))
    assert [m.name for m in found.routers] == ["text/0", "text/2", "text/9", "text/10"]
    assert found.skipped == ()


def test_the_prefix_of_a_name_does_not_matter():
    for prefix in PREFIXES:
        (match,) = match_routers(_layer(3, prefix), _OLMOE, Settings({})).routers
        assert match.name == "text/3"
        assert match.parts["gain"].name == f"{prefix}layers.3.{_NORM}"


@pytest.mark.parametrize("gate", ["mlp.gate", "block_sparse_moe.gate"])
def test_mixtral_is_found_by_both_of_its_names(gate):
    matches = match_routers(_layer(0, gate=gate), load_family("mixtral"), Settings({}))
    assert [match.tensors for match in matches.routers] == [(f"model.layers.0.{gate}.weight",)]
    assert matches.skipped == ()


def test_other_gates_are_never_routers():
    for leaf in (
        "mlp.gate_proj.weight",
        "mlp.experts.gate_up_proj",
        "mlp.shared_expert_gate.weight",
        "mlp.experts.3.gate_proj.weight",
        "self_attn.gate.weight",
    ):
        names = {f"model.layers.0.{leaf}": None}
        assert match_routers(names, _OLMOE, Settings({})) == Matches((), ()), leaf


def _reasons(names: dict[str, None], family: Family = _OLMOE) -> list[tuple[str, str]]:
    """Which tensors are skipped, and why."""
    skipped = match_routers(names, family, Settings({})).skipped
    return [(one.tensor, one.reason) for one in skipped]


def test_routers_that_cannot_be_placed_are_listed_with_the_reason():
    assert _reasons(_layer(0, "optim.state.model.")) == [
        (
            "optim.state.model.layers.0.mlp.gate.weight",
            "'optim.state.model.' in front of its layer is no known prefix",
        )
    ]
    name = "model.layers.mlp.gate.weight"
    reason = "its name has no layer number where the family has one"
    assert _reasons({name: None}) == [(name, reason)]
    names = {"layers.0.ffn.gate.weight": None, "layers.0.ffn.gate.tid2eid": None}
    assert _reasons(names, load_family("deepseek_v4")) == [
        (
            "layers.0.ffn.gate.weight",
            (
                "its experts are looked up by token id in 'layers.0.ffn.gate.tid2eid'; "
                "the weight only mixes them"
            ),
        )
    ]
    matches = match_routers(names, load_family("deepseek_v4"), Settings({}))
    assert (matches.routers, [r.place for r in matches.listed]) == ((), [("text", 0)])


def test_of_a_router_stored_twice_one_counts_and_the_other_is_a_copy():
    names = _layer(0) | _layer(0, "language_model.model.")
    found = match_routers(names, _OLMOE, Settings({}))
    (match,), ((kept, other),) = found.routers, found.copies
    assert match == kept
    assert kept.tensors == ("model.layers.0.mlp.gate.weight",)
    assert other.tensors == ("language_model.model.layers.0.mlp.gate.weight",)


@pytest.mark.parametrize("leaf", ["qweight", "weight_packed", "weight.absmax"])
def test_a_packed_router_is_not_overlooked(leaf):
    names = _layer(0) | {f"model.layers.0.mlp.gate.{leaf}": None}
    del names["model.layers.0.mlp.gate.weight"]
    (match,) = match_routers(names, _OLMOE, Settings({})).routers
    assert match.tensors == (f"model.layers.0.mlp.gate.{leaf}",)


def test_a_module_with_nothing_but_a_bias_is_refused():
    names = _layer(0) | {"model.layers.0.mlp.gate.e_score_correction_bias": None}
    del names["model.layers.0.mlp.gate.weight"]
    with pytest.raises(RouterError) as caught:
        match_routers(names, load_family("deepseek_v3"), Settings({"num_hidden_layers": 4}))
    assert caught.value.message == (
        "router text/0: there is no tensor 'model.layers.0.mlp.gate.weight', only "
        "model.layers.0.mlp.gate.e_score_correction_bias, "
        "model.layers.0.post_attention_layernorm.weight."
    )


def test_two_routers_of_one_module_share_no_tensor():
    at = "model.layers.1.mlp."
    names = dict.fromkeys(
        [f"{at}gate.weight", f"{at}gate.weight_1", f"{at}moe_statics.e_score_correction_bias",
         f"model.layers.1.{_NORM}"]
    )  # fmt: skip
    text, vision = match_routers(names, load_family("ernie4_5_vl_moe"), Settings({})).routers
    assert (text.name, text.tensors) == ("text/1", (f"{at}gate.weight",))
    assert (vision.name, vision.tensors) == ("vision/1", (f"{at}gate.weight_1",))
    assert (text.weight.layout, vision.weight.layout) == ("transposed", "transposed")


def test_a_missing_norm_or_selection_bias_is_an_error():
    with pytest.raises(RouterError) as caught:
        match_routers({"model.layers.0.mlp.gate.weight": None}, _OLMOE, Settings({}))
    assert caught.value.message == (
        f"router text/0: tensor 'model.layers.0.{_NORM}' is missing; "
        "routers of family olmoe have a norm in front."
    )
    with pytest.raises(RouterError, match="routers of family deepseek_v3 have a selection bias"):
        match_routers(_layer(0), load_family("deepseek_v3"), Settings({"num_hidden_layers": 4}))


def test_layers_behind_the_last_are_a_stack_of_their_own():
    names = {n: None for i in (61, 3, 60) for n in _layer(i)}
    names |= {f"model.layers.{i}.mlp.gate.e_score_correction_bias": None for i in (3, 60, 61)}
    settings = Settings({"num_hidden_layers": 61})
    matches = match_routers(names, load_family("deepseek_v3"), settings).routers
    assert [m.name for m in matches] == ["text/3", "text/60", "mtp/61"]


def test_two_routers_of_a_layer_are_told_apart_by_their_slot():
    stack = """
[[stacks]]
name = "text"
slot = "{slot}"
weight = ["layers.{{layer}}.{slot}.gate.weight"]
num_experts = "e"
top_k = 1
score = "softmax"
weights.source = "scores"
"""
    text = "source = 's'\nmodel_types = ['t']\ntext = 't'\n"
    text += stack.format(slot="attn") + stack.format(slot="mlp")
    names = [f"layers.{i}.{slot}.gate.weight" for i in (1, 0) for slot in ("mlp", "attn")]
    found = match_routers(dict.fromkeys(names), parse_family("t", text), Settings({}))
    matches = found.routers
    assert [m.name for m in matches] == [
        "text/0/attn", "text/0/mlp", "text/1/attn", "text/1/mlp",
    ]  # fmt: skip


def test_ninety_thousand_names_have_the_sixty_routers():
    experts = (
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight"
        for i in range(60)
        for e in range(500)
        for p in ("gate", "up", "down")
    )
    names = dict.fromkeys(experts) | {n: None for i in range(60) for n in _layer(i)}
    assert len(match_routers(names, _OLMOE, Settings({})).routers) == 60


def test_a_hostile_name_is_turned_down():
    name = "layers.1" * 100_000 + ".mlp.gate.weight"
    with work_ends():
        assert match_routers({name: None}, _OLMOE, Settings({})).routers == ()


def test_a_selection_bias_in_a_dictionary_is_not_absent():
    """Else a state in ``{"model": ...}`` would be loaded without it."""
    family = load_family("gguf_deepseek2")
    for front in ("", "model.", "model.model."):
        gate, bias = f"{front}blk.3.ffn_gate_inp.weight", f"{front}blk.3.exp_probs_b.bias"
        assert without_absent_biases(family, {gate, bias}).stacks[0].selection_bias
        assert not without_absent_biases(family, {gate}).stacks[0].selection_bias
