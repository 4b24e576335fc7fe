"""What a file of a family may say, and which tensors are routers by it."""

from importlib import resources

import pytest

from moegeom.core.errors import InternalError, RouterError, UsageError
from moegeom.router.family import (
    PREFIXES,
    Family,
    Setting,
    families,
    family_of,
    load_family,
    parse_family,
)
from moegeom.router.plan import Matches, match_routers, without_absent_biases
from moegeom.router.settings import Settings
from tests.ends import work_ends

_FILES = resources.files("moegeom.router.families")
_PLAIN = _FILES.joinpath("mellum.toml").read_text("utf-8")

#: Whose code families without a class in transformers follow, by the beginning of their name.
_OTHER_SOURCES = {
    "gguf": "llama.cpp ",
    "gmoe": "microsoft/tutel ",
    "megatron": "Megatron-Core ",
    "swin": "microsoft/Swin-Transformer ",
    "xmoe": "microsoft/torchscale ",
}


def test_families_are_listed_by_file_name_and_found_by_it_or_a_model_type():
    files = [f.name for f in _FILES.iterdir() if f.name.endswith(".toml")]
    assert families() == tuple(sorted(name.removesuffix(".toml") for name in files))
    for model_type in ("deepseek_v32", "kimi_k25"):
        family = family_of(model_type)
        assert family is not None
        assert family.name == "deepseek_v3"
    assert family_of("llama") is None
    with pytest.raises(UsageError, match="Unknown family 'olmo'. Did you mean olmoe"):
        load_family("olmo")


def test_families_cite_their_source_and_claim_model_types_of_their_own():
    types = []
    for name in families():
        family = load_family(name)
        types += family.model_types
        if family.source.startswith("transformers 5.23.0 "):
            assert any(t.replace("-", "_").startswith(name) for t in family.model_types), name
        else:
            assert family.source.startswith(_OTHER_SOURCES[name.partition("_")[0]]), name
            assert family.model_types, name
    assert len(types) == len(set(types))


def test_the_file_parses_to_what_it_says_strings_being_keys_and_numbers_values():
    stack = load_family("mixtral").stacks[0]
    assert stack.top_k == Setting(("num_experts_per_tok", "moe.num_experts_per_tok"))
    assert stack.num_experts == Setting(("num_local_experts", "num_experts", "moe.num_experts"))
    assert stack.weights.renormalise == Setting(value=True)


_PROJECTION = """score = "softmax"
projection = { weight = ["{layer}.P"], largest_scale = -1.0 }
"""

_COSINES = """score = "softmax"
selection_bias = ["{layer}.b"]
projection = { weight = ["{layer}.P"], log_scale = ["{layer}.t"] }
"""

_SPOILT = {
    "unknown key": ('score = "softmax"', 'score = "softmax"\nhard_cap = 30.0',
                    "stacks[0]: unknown key 'hard_cap'"),
    "unknown score": ('score = "softmax"', 'score = "sparsemax"', "score 'sparsemax' is no step"),
    "unknown source": ('source = "scores"', 'source = "logits"',
                       "weights.source 'logits' is no step"),
    "unknown norm": ('kind = "rms"', 'kind = "batch"', "norm.kind 'batch' is no step"),
    "pattern": ("layers.{layer}.mlp.gate.weight", "layers.mlp.gate.weight",
                "must hold '{layer}.' once"),
    "layout": ('["layers.{layer}.mlp.gate.weight"]',
               '[{ name = "layers.{layer}.mlp.gate.weight", layout = "diagonal" }]',
               "layout is 'diagonal', expected one of flat, rows, transposed"),
    "placeholder": ("top {top_k}", "top {k}", "text has an unknown placeholder ('k')"),
    "modules": ('"mtp.layers.{layer}."', '"mtp.layers."', "must hold '{layer}.' once"),
    "projection": ("[stacks.weights]", "[stacks.projection]\nweight = ['P']\n[stacks.weights]",
                   "must hold '{layer}.' once"),
    "largest scale": ('score = "softmax"', _PROJECTION,
                      "largest_scale is -1.0, expected more than 0"),
    "bias beside cosines": ('score = "softmax"', _COSINES,
                            "a selection bias beside logits that are cosines"),
    "setting": ('top_k = "num_experts_per_tok"', "top_k = 1979-05-27", "stacks[0].top_k is datetime.date(1979, 5, 27), expected"),
    "no stacks": (_PLAIN[_PLAIN.index("[[stacks]]"):], "stacks = []", "stacks is a list of 0, expected a list of at least 1 entry"),
    "not TOML": ("[[stacks]]", "[[stacks]", "is not TOML"),
}  # fmt: skip


@pytest.mark.parametrize("case", _SPOILT)
def test_a_family_file_cannot_say_what_is_not_understood(case):
    old, new, sentence = _SPOILT[case]
    assert old in _PLAIN
    with pytest.raises(InternalError) as caught:
        parse_family("mellum", _PLAIN.replace(old, new))
    assert caught.value.message.startswith("mellum.toml: ")
    assert sentence in caught.value.message


_OLMOE = load_family("olmoe")
_NORM = "post_attention_layernorm.weight"


def _layer(layer: int, prefix: str = "model.", gate: str = "mlp.gate") -> dict[str, None]:
    at = f"{prefix}layers.{layer}."
    return dict.fromkeys([f"{at}{gate}.weight", f"{at}{_NORM}"])


def test_names_come_in_natural_order_under_any_prefix_layers_behind_the_last_apart():
    names = {n: None for i in (10, 9, 2, 0) for n in _layer(i)}
    found = match_routers(names, _OLMOE, Settings({}))
    assert [m.name for m in found.routers] == ["text/0", "text/2", "text/9", "text/10"]
    assert found.skipped == ()
    for prefix in PREFIXES:
        (match,) = match_routers(_layer(3, prefix), _OLMOE, Settings({})).routers
        assert match.name == "text/3"
        assert match.parts["gain"].name == f"{prefix}layers.3.{_NORM}"
    # mixtral has two names
    for gate in ("mlp.gate", "block_sparse_moe.gate"):
        matches = match_routers(_layer(0, gate=gate), load_family("mixtral"), Settings({}))
        assert [match.tensors for match in matches.routers] == [(f"model.layers.0.{gate}.weight",)]
        assert matches.skipped == ()
    names = {n: None for i in (61, 3, 60) for n in _layer(i)}
    names |= {f"model.layers.{i}.mlp.gate.e_score_correction_bias": None for i in (3, 60, 61)}
    settings = Settings({"num_hidden_layers": 61})
    matches = match_routers(names, load_family("deepseek_v3"), settings).routers
    assert [m.name for m in matches] == ["text/3", "text/60", "mtp/61"]


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


def test_a_router_stored_twice_counts_once_and_a_packed_one_is_not_overlooked():
    names = _layer(0) | _layer(0, "language_model.model.")
    found = match_routers(names, _OLMOE, Settings({}))
    (match,), ((kept, other),) = found.routers, found.copies
    assert match == kept
    assert kept.tensors == ("model.layers.0.mlp.gate.weight",)
    assert other.tensors == ("language_model.model.layers.0.mlp.gate.weight",)
    for leaf in ("qweight", "weight_packed", "weight.absmax"):
        names = {f"model.layers.0.{_NORM}": None, f"model.layers.0.mlp.gate.{leaf}": None}
        (match,) = match_routers(names, _OLMOE, Settings({})).routers
        assert match.tensors == (f"model.layers.0.mlp.gate.{leaf}",)


def test_what_a_router_lacks_is_an_error():
    names = _layer(0) | {"model.layers.0.mlp.gate.e_score_correction_bias": None}
    del names["model.layers.0.mlp.gate.weight"]
    with pytest.raises(RouterError) as caught:
        match_routers(names, load_family("deepseek_v3"), Settings({"num_hidden_layers": 4}))
    assert caught.value.message == (
        "router text/0: there is no tensor 'model.layers.0.mlp.gate.weight', only "
        "model.layers.0.mlp.gate.e_score_correction_bias, "
        "model.layers.0.post_attention_layernorm.weight."
    )
    with pytest.raises(RouterError) as caught:
        match_routers({"model.layers.0.mlp.gate.weight": None}, _OLMOE, Settings({}))
    assert caught.value.message == (
        f"router text/0: tensor 'model.layers.0.{_NORM}' is missing; "
        "routers of family olmoe have a norm in front."
    )
    with pytest.raises(RouterError, match="routers of family deepseek_v3 have a selection bias"):
        match_routers(_layer(0), load_family("deepseek_v3"), Settings({"num_hidden_layers": 4}))


def test_routers_of_one_module_or_layer_are_told_apart():
    at = "model.layers.1.mlp."
    names = dict.fromkeys(
        [f"{at}gate.weight", f"{at}gate.weight_1", f"{at}moe_statics.e_score_correction_bias",
         f"model.layers.1.{_NORM}"]
    )  # fmt: skip
    text, vision = match_routers(names, load_family("ernie4_5_vl_moe"), Settings({})).routers
    assert (text.name, text.tensors) == ("text/1", (f"{at}gate.weight",))
    assert (vision.name, vision.tensors) == ("vision/1", (f"{at}gate.weight_1",))
    assert (text.weight.layout, vision.weight.layout) == ("transposed", "transposed")
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


def test_many_names_and_a_hostile_one_are_no_burden():
    experts = (
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight"
        for i in range(60)
        for e in range(500)
        for p in ("gate", "up", "down")
    )
    names = dict.fromkeys(experts) | {n: None for i in range(60) for n in _layer(i)}
    assert len(match_routers(names, _OLMOE, Settings({})).routers) == 60
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
