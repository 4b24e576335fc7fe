from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

import pytest

from moegeom.core.errors import InternalError, UsageError
from moegeom.router.family import Setting
from moegeom.router.family_file import families, family_of, load_family, parse_family

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


def test_families_are_listed_by_file_name():
    files = [f.name for f in _FILES.iterdir() if f.name.endswith(".toml")]
    assert families() == tuple(sorted(name.removesuffix(".toml") for name in files))


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


def test_a_family_has_its_name_or_is_that_of_a_model_type():
    for model_type in ("deepseek_v32", "kimi_k25"):
        family = family_of(model_type)
        assert family is not None
        assert family.name == "deepseek_v3"
    assert family_of("llama") is None
    with pytest.raises(UsageError, match="Unknown family 'olmo'. Did you mean olmoe"):
        load_family("olmo")


def test_a_string_is_a_config_key_and_a_number_a_value():
    stack = load_family("mixtral").stacks[0]
    assert stack.top_k == Setting(keys=("num_experts_per_tok", "moe.num_experts_per_tok"))
    assert stack.num_experts == Setting(
        keys=("num_local_experts", "num_experts", "moe.num_experts")
    )
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
    "unknown top key": ("text =", "colour = 'red'\ntext =", "unknown key 'colour'"),
    "unknown score": ('score = "softmax"', 'score = "sparsemax"', "score 'sparsemax' is no step"),
    "unknown source": ('source = "scores"', 'source = "logits"',
                       "weights.source 'logits' is no step"),
    "unknown norm": ('kind = "rms"', 'kind = "batch"', "norm.kind 'batch' is no step"),
    "missing key": ('score = "softmax"', "", "stacks[0]: key 'score' is missing"),
    "wrong type": ('score = "softmax"', "score = 3", "stacks[0]: score is 3, expected a string or a table"),
    "pattern": ("layers.{layer}.mlp.gate.weight", "layers.mlp.gate.weight",
                "must hold '{layer}.' once"),
    "layout": ('["layers.{layer}.mlp.gate.weight"]',
               '[{ name = "layers.{layer}.mlp.gate.weight", layout = "diagonal" }]',
               "'diagonal' is no layout"),
    "small table": ('"num_experts_per_tok"', '{ key = "k", otherwise = 3 }',
                    "expected a table of key, default, plus, minus, over, zero"),
    "placeholder": ("top {top_k}", "top {k}", "text has an unknown placeholder ('k')"),
    "meanings": ('"num_experts_per_tok"', '{ key = "k", values = [1] }',
                 "top_k.values is [1], expected a table"),
    "a reason": ('score = "softmax"', 'score = "softmax"\nnot_a_function_when.relu = 3',
                 "not_a_function_when.relu is 3, expected a string"),
    "number": ('source = "scores"', 'source = "scores"\nrenormalise_from = "two"',
               "renormalise_from is 'two', expected an integer"),
    "modules": ('"mtp.layers.{layer}."', '"mtp.layers."', "must hold '{layer}.' once"),
    "projection": ("[stacks.weights]", "[stacks.projection]\nweight = ['P']\n[stacks.weights]",
                   "must hold '{layer}.' once"),
    "largest scale": ('score = "softmax"', _PROJECTION,
                      "largest_scale is -1.0, expected more than 0"),
    "bias beside cosines": ('score = "softmax"', _COSINES,
                            "a selection bias beside logits that are cosines"),
    "setting": ('top_k = "num_experts_per_tok"', "top_k = 1979-05-27", "expected a config key"),
    "no stacks": (_PLAIN[_PLAIN.index("[[stacks]]"):], "stacks = []", "at least one [[stacks]]"),
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


def test_the_file_parses_to_what_it_says():
    table: dict[str, Any] = tomllib.loads(_PLAIN)
    family = parse_family("mellum", _PLAIN)
    assert family.text == table["text"]
    assert [t.name for t in family.stacks[0].weight] == table["stacks"][0]["weight"]
