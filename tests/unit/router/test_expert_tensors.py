"""What a file of a family may say; experts of a layer: what is read, what is refused, and what they
are as functions; the rule that the settings of a config say.

Families are held against their library in tests/families.
"""

import json
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import InternalError, RouterError, UsageError
from moegeom.core.router import RouterSet, Rule, Weights
from moegeom.geometry.experts import expert_output
from moegeom.router import expert_functions, expert_tensors
from moegeom.router.expert_functions import ExpertFunctions, open_expert_functions
from moegeom.router.expert_tensors import ExpertTensors, open_experts
from moegeom.router.family import (
    PREFIXES,
    Family,
    Setting,
    families,
    family_of,
    load_family,
    parse_family,
)
from moegeom.router.load import load_routers
from moegeom.router.plan import Matches, match_routers, without_absent_biases
from moegeom.router.rule import (
    build_rule,
    check_required,
    describe_routers,
    expected_layers,
    rule_in_words,
    rule_origin,
    rule_text,
)
from moegeom.router.settings import Settings
from tests.ends import work_ends
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf
from tests.unit.router.conftest import CONFIG, write_arrays
from tests.unit.scan.made import router_with

SAMPLE = Path(__file__).resolve().parents[3] / "sample_ckpts/olmoe-balanced/step_1500"
EXPERTS, HIDDEN, WIDTH = 4, 64, 32


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def written(folder: Path, tensors: dict[str, np.ndarray]) -> ExpertTensors:
    at = "model.layers.0."
    stored = {f"{at}mlp.{name}": values for name, values in tensors.items()}
    stored[f"{at}mlp.gate.weight"] = drawn(EXPERTS, HIDDEN)
    stored[f"{at}post_attention_layernorm.weight"] = drawn(HIDDEN)
    config = {"num_experts": EXPERTS, "num_hidden_layers": 1, "hidden_act": "silu"}
    store = open_checkpoint(write_arrays(folder, stored, CONFIG | config))
    return open_experts(store, load_routers(store).routers[0])


def each(leaf: str, *shape: int, experts: int = EXPERTS) -> dict[str, np.ndarray]:
    return {f"experts.{e}.{leaf}.weight": drawn(*shape) + e for e in range(experts)}


def test_an_expert_of_a_sample_is_what_its_file_holds():
    store = open_checkpoint(SAMPLE)
    tensors = open_experts(store, load_routers(store).routers[1])
    assert (tensors.num_experts, tensors.width, tensors.hidden) == (16, 32, 64)
    assert (tensors.is_gated, tensors.activation) == (True, "silu")
    assert tensors.bytes_of() == 16 * 3 * 32 * 64 * 2
    assert tensors.bytes_of([3], gate_alone=True) == 32 * 64 * 2
    stored = load_file(SAMPLE / "model.safetensors")
    found = tensors.read(3)
    for part in ("gate", "up", "down"):
        expected = stored[f"model.layers.1.mlp.experts.3.{part}_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(getattr(found, part), expected)
    before = store.bytes_read
    np.testing.assert_array_equal(tensors.read_gate(3)[0], found.gate)
    assert store.bytes_read - before == tensors.bytes_of([3], gate_alone=True)


def test_bands_of_a_gate_are_runs_of_its_rows_and_no_other_byte_is_read(tmp_path):
    store = open_checkpoint(SAMPLE)
    tensors = open_experts(store, load_routers(store).routers[1])
    whole, before = tensors.read_gate(3)[0], store.bytes_read
    assert tensors.gate_bands == 32
    np.testing.assert_array_equal(tensors.read_gate(3, [4, 30])[0], whole[[4, 30]])
    assert store.bytes_read - before == 2 * 64 * 2
    # bytes with a scale for each 128 x 128 of them: runs are as long as blocks
    draw, made = np.random.default_rng(0), {}
    for e in range(EXPERTS):
        for leaf, shape in (
            ("gate", (384, HIDDEN)),
            ("up", (384, HIDDEN)),
            ("down", (HIDDEN, 384)),
        ):
            blocks = -(-shape[0] // 128), -(-shape[1] // 128)
            eight = draw.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
            made[f"experts.{e}.{leaf}_proj.weight"] = eight
            scale = draw.uniform(0.5, 2.0, blocks).astype(np.float32)
            made[f"experts.{e}.{leaf}_proj.weight_scale_inv"] = scale
    for name in ("eight", "fused"):
        (tmp_path / name).mkdir()
    tensors = written(tmp_path / "eight", made)
    assert tensors.gate_bands == 3
    gate = tensors.read_gate(1, [0, 2])[0]
    np.testing.assert_array_equal(gate, tensors.read(1).gate[np.r_[:128, 256:384]])
    fused = written(tmp_path / "fused", {**each("gate_up_proj", 2 * WIDTH, HIDDEN),
                                         **each("down_proj", HIDDEN, WIDTH)})  # fmt: skip
    assert fused.gate_bands == 1
    np.testing.assert_array_equal(fused.read_gate(2, [0])[0], fused.read(2).gate)


def test_four_bit_experts_of_gpt_oss_are_decoded_one_by_one(tmp_path):
    draw = np.random.default_rng(0)
    tensors = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        shape = (EXPERTS, rows, columns // 32)
        tensors[f"experts.{leaf}_blocks"] = draw.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"experts.{leaf}_scales"] = draw.integers(120, 130, shape, np.uint8)
        tensors[f"experts.{leaf}_bias"] = drawn(EXPERTS, rows)
    found = written(tmp_path, tensors)
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    packed = tensors["experts.down_proj_blocks"][2].reshape(HIDDEN, WIDTH // 2)
    scale = 2.0 ** (tensors["experts.down_proj_scales"][2].astype(np.float32) - 127.0)
    expected = value[np.stack([packed & 15, packed >> 4], -1)].reshape(HIDDEN, WIDTH) * scale
    expert = found.read(2)
    np.testing.assert_array_equal(expert.down, expected)
    np.testing.assert_array_equal(expert.up_bias, tensors["experts.gate_up_proj_bias"][2, WIDTH:])
    assert expert.gate.shape == (WIDTH, HIDDEN)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_of_gguf_are_those_that_its_package_reads(tmp_path, kind):
    quantised = gguf.GGMLQuantizationType[kind]
    tensors = {
        "blk.0.ffn_gate_inp.weight": drawn(EXPERTS, HIDDEN),
        "blk.0.ffn_norm.weight": drawn(HIDDEN),
    }
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    names = {part: f"blk.0.ffn_{part}_exps.weight" for part in shapes}
    for part, shape in shapes.items():
        tensors[names[part]] = gguf.quants.quantize(drawn(EXPERTS, *shape), quantised)
    types = dict.fromkeys(names.values(), quantised)
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", tensors, types, keys=moe_keys(EXPERTS, HIDDEN)
    )
    store = open_checkpoint(path)
    expert = open_experts(store, load_routers(store).routers[0]).read(1)
    for part, name in names.items():
        expected = gguf.quants.dequantize(tensors[name], quantised)[1]
        np.testing.assert_array_equal(getattr(expert, part), expected)


def test_values_must_be_finite(tmp_path):
    tensors = each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH)
    tensors["experts.1.up_proj.weight"][0, 0] = np.inf
    found = written(tmp_path, tensors)
    found.read(0)
    with pytest.raises(RouterError, match="not finite"):
        found.read(1)


FUSED = ("experts.up_proj", "experts.down_proj")
PACKED = [
    f"experts.{e}.{leaf}.qweight" for e in range(EXPERTS) for leaf in ("up_proj", "down_proj")
]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensors of experts"),
        (each("up_proj", WIDTH, HIDDEN), "no tensors of experts"),
        (each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH, experts=3), "3 experts"),
        (each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, 48), "contradict"),
        (each("up_proj", WIDTH, 48) | each("down_proj", HIDDEN, WIDTH), "reads inputs of 64"),
        (dict.fromkeys(FUSED, drawn(EXPERTS, HIDDEN, HIDDEN)), "square"),
        (dict.fromkeys(PACKED, np.zeros((8, HIDDEN), np.int32)), "no storage known"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, tensors, words):
    with pytest.raises(RouterError, match=words):
        written(tmp_path, tensors)


def opened(folder: Path = SAMPLE, layer: int = 1) -> ExpertFunctions:
    store = open_checkpoint(folder)
    return open_expert_functions(store, load_routers(store).routers[layer])


def test_a_mixture_reads_each_of_its_experts_once():
    experts, inputs = opened(), drawn(12, 64).astype(np.float64)
    chosen = np.stack([np.random.default_rng(t).permutation(16)[:4] for t in range(12)])
    chosen[0, 2:] = -1
    weights = np.abs(drawn(12, 4))
    store = experts.tensors.store
    before = store.bytes_read
    experts.mixed(inputs, chosen, weights)
    assert store.bytes_read - before == experts.bytes_of(set(chosen[chosen >= 0].tolist()))


def test_what_is_applied_is_near_in_single_precision_and_few_experts_stay_in_memory(monkeypatch):
    experts, inputs = opened(), drawn(12, 64).astype(np.float64)
    found = experts.apply(3, inputs.astype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, experts.apply(3, inputs), rtol=1e-4, atol=1e-6)
    experts = opened()
    monkeypatch.setattr(expert_functions, "_CACHE_BYTES", 2 * 3 * 32 * 64 * 4)
    for expert in (0, 1, 0, 2):
        experts.apply(expert, drawn(1, 64))
    assert list(experts._cache) == [0, 2]


@pytest.mark.parametrize("rows", [384, 300, 8])
@pytest.mark.parametrize("leaves", [("gate", "up"), ("gate_up",)])
def test_an_expert_that_is_read_in_parts_gives_what_the_whole_gives(
    rows, leaves, tmp_path, monkeypatch
):
    draw, made = np.random.default_rng(rows), {}
    shapes = {"gate": (rows, HIDDEN), "gate_up": (2 * rows, HIDDEN), "down": (HIDDEN, rows)}
    shapes["up"] = shapes["gate"]
    for expert in range(EXPERTS):
        for leaf in (*leaves, "down"):
            eight = draw.standard_normal(shapes[leaf]).astype(ml_dtypes.float8_e4m3fn)
            scale = draw.uniform(0.5, 2.0, [-(-size // 128) for size in shapes[leaf]])
            made[f"experts.{expert}.{leaf}_proj.weight"] = eight
            made[f"experts.{expert}.{leaf}_proj.weight_scale_inv"] = scale.astype(np.float32)
    tensors, inputs = written(tmp_path, made), draw.standard_normal((5, HIDDEN))
    monkeypatch.setattr(expert_tensors, "_AT_ONCE", 130 * HIDDEN)
    one = tensors.read(2)
    whole = expert_output(inputs, one.gate, one.up, one.down, tensors.neurons)
    np.testing.assert_allclose(tensors.output(2, inputs), whole, rtol=1e-12, atol=1e-9)
    assert tensors.output(2, inputs.astype(np.float32)).dtype == np.float32


def test_experts_above_64_mb_are_never_in_memory(monkeypatch):
    experts, inputs = opened(), drawn(3, 64)
    whole = [experts.apply(expert, inputs) for expert in range(3)]
    experts = opened()
    monkeypatch.setattr(expert_functions, "_WIDE_BYTES", 4 * experts.tensors.num_values - 1)
    for expert, outputs in enumerate(whole):
        np.testing.assert_allclose(experts.apply(expert, inputs), outputs, rtol=1e-5, atol=1e-7)
    assert not experts._cache


def test_an_unknown_activation_is_an_error_that_names_those_that_are_known(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SAMPLE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "mish"}))
    with pytest.raises(RouterError, match="is 'mish'; known are .*silu"):
        opened(folder)


def test_experts_of_gpt_oss_in_gguf_give_what_the_library_gives(tmp_path):
    experts, hidden, width = 4, 64, 32
    draw = torch.Generator().manual_seed(0)
    config = GptOssConfig(
        num_local_experts=experts, hidden_size=hidden, intermediate_size=width, hidden_act="silu"
    )
    module = GptOssExperts(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=draw)
        both, bias = module.gate_up_proj.transpose(1, 2), module.gate_up_proj_bias
        tensors = {
            "ffn_gate_inp.weight": torch.randn(experts, hidden, generator=draw),
            "ffn_gate_inp.bias": torch.zeros(experts),
            "post_attention_norm.weight": torch.ones(hidden),
            "ffn_gate_exps.weight": both[:, ::2],
            "ffn_gate_exps.bias": bias[:, ::2],
            "ffn_up_exps.weight": both[:, 1::2],
            "ffn_up_exps.bias": bias[:, 1::2],
            "ffn_down_exps.weight": module.down_proj.transpose(1, 2),
            "ffn_down_exps.bias": module.down_proj_bias,
        }
    stored = {f"blk.0.{n}": t.detach().contiguous().numpy() for n, t in tensors.items()}
    write_gguf(tmp_path / "m.gguf", "gpt-oss", stored, keys=moe_keys(experts, hidden))
    read = opened(tmp_path / "m.gguf", 0)
    inputs = torch.randn(20, hidden, generator=draw)
    for expert in range(experts):
        with torch.no_grad():
            expected = module(inputs, torch.full((20, 1), expert), torch.ones(20, 1)).numpy()
        mine = read.apply(expert, inputs.double().numpy())
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


_FILES = resources.files("moegeom.router.families")
_PLAIN = _FILES.joinpath("mellum.toml").read_text("utf-8")

#: Whose code families without a class in transformers follow, by the beginning of their name.
_OTHER_SOURCES = {
    "bailing": "vLLM ",
    "deepseek": "vLLM ",
    "gguf": "llama.cpp ",
    "gmoe": "microsoft/tutel ",
    "hunyuan": "vLLM ",
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


@pytest.mark.parametrize(("old", "new", "sentence"), _SPOILT.values(), ids=_SPOILT)
def test_a_family_file_cannot_say_what_is_not_understood(old, new, sentence):
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
    for leaf in """
        mlp.gate_proj.weight mlp.experts.gate_up_proj mlp.shared_expert_gate.weight
        mlp.experts.3.gate_proj.weight self_attn.gate.weight
    """.split():
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


# --------------------------------------------------------------------------------- rules of configs
_DEEPSEEK = load_family("deepseek_v3")
_STACK = _DEEPSEEK.stacks[0]
_CONFIG: dict[str, Any] = {
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def _settings(**changes: Any) -> Settings:
    merged = {k: v for k, v in (_CONFIG | changes).items() if v is not ...}
    return Settings(merged, _DEEPSEEK.config_roots)


def _rule(**changes: Any) -> Rule:
    return build_rule(_STACK, _settings(**changes), 16, "r")


def test_groups_of_all_are_no_mask_and_a_nested_config_has_the_same_rule():
    for num_groups in (0, 1):
        rule = _rule(n_group=num_groups, topk_group=1)
        assert rule.groups is None
        text = rule_text(_DEEPSEEK, rule, 16, _STACK)
        assert text == "sigmoid + selection bias, top 4 of 16"
    assert _rule(topk_group=4).groups is None
    nested = Settings({"text_config": _CONFIG}, _DEEPSEEK.config_roots)
    assert build_rule(_STACK, nested, 16, "s") == _rule()


_WRONG = {
    "missing": ({"num_experts_per_tok": ...},
                "config.json: key 'num_experts_per_tok' is missing or null."),
    "null": ({"norm_topk_prob": None}, "config.json: key 'norm_topk_prob' is missing or null."),
    **{
        f"{key} of {value!r:.9}": (
            {key: value},
            f"config.json: '{key}' is {value!r} ({type(value).__name__}), expected {expected}.",
        )
        for key, values, expected in (
            ("num_experts_per_tok", ("4", 4.0, 0), "an integer from 1 to 1e+09"),
            ("topk_group", (True,), "an integer from 0 to 1e+09"),
            ("norm_topk_prob", (1,), "true or false"),
            ("routed_scaling_factor", (float("inf"), True, "2", 0, -1, 1e300),
             "a number from 1e-06 to 1e+06"),
        )
        for value in values
    },
    "more chosen than there are": ({"num_experts_per_tok": 17},
        "r: config.json says that 17 experts are chosen; the router has 16."),
    "uneven groups": ({"n_group": 3}, "r: 16 experts do not divide into 3 groups."),
    "none kept": ({"topk_group": 0}, "r: 0 of 4 groups cannot be kept."),
    "too many kept": ({"topk_group": 5}, "r: 5 of 4 groups cannot be kept."),
    "groups of one": ({"n_group": 16}, "r: groups of 1 have no sum of two largest scores."),
    "too few left": ({"topk_group": 1, "num_experts_per_tok": 5},
        "r: 1 group of 4 experts to be kept, fewer than the 5 experts to choose."),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), _WRONG.values(), ids=_WRONG)
def test_a_config_that_makes_no_rule_is_refused_by_key(changes, sentence):
    with pytest.raises(RouterError) as caught:
        _rule(**changes)
    assert caught.value.message == sentence
    with pytest.raises(RouterError, match="expected a number from"):
        _rule(routed_scaling_factor=10**400)


def test_aliases_may_agree_and_must_not_disagree_and_expected_layers_follow_their_keys():
    num_experts = _STACK.num_experts
    assert Settings({"num_local_experts": 8}).integer(num_experts) == 8
    assert Settings({"num_local_experts": 8, "n_routed_experts": 8}).integer(num_experts) == 8
    with pytest.raises(RouterError) as caught:
        Settings({"num_local_experts": 8, "n_routed_experts": 9}).integer(num_experts)
    assert caught.value.message == (
        "config.json: 'n_routed_experts' is 9 and 'num_local_experts' is 8, but they mean the same."
    )
    layers = load_family("qwen3_moe").stacks[0].layers
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert expected_layers(layers, Settings(config)) == {1, 5}
    assert expected_layers(layers, Settings(config | {"mlp_only_layers": None})) == {1, 3, 5}
    assert expected_layers(layers, Settings({"decoder_sparse_step": 1})) is None
    first = {"num_hidden_layers": 5, "first_k_dense_replace": 3}
    assert expected_layers(_STACK.layers, Settings(first)) == {3, 4}


def test_another_rule_under_the_same_model_type_is_refused():
    check_required(_DEEPSEEK, _settings(scoring_func="sigmoid", topk_method="noaux_tc"))
    with pytest.raises(RouterError) as caught:
        check_required(_DEEPSEEK, _settings(scoring_func="softmax"))
    assert caught.value.message == (
        "config.json: 'scoring_func' is 'softmax'; the rule of family deepseek_v3 is known for "
        "'sigmoid'."
    )
    for family in ("deepseek_v2", "deepseek_ocr2", "unlimited_ocr"):
        for known in ("greedy", "group_limited_greedy"):
            check_required(load_family(family), Settings({"topk_method": known}))
        with pytest.raises(RouterError) as caught:
            check_required(load_family(family), Settings({"topk_method": "noaux_tc"}))
        assert caught.value.message == (
            f"config.json: 'topk_method' is 'noaux_tc'; the rule of family {family} is known for "
            "'greedy' or 'group_limited_greedy'."
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("decoder_sparse_step", 0),
        ("num_hidden_layers", -1),
        ("mlp_only_layers", "1"),
        ("mlp_only_layers", [True]),
    ],
)
def test_layer_keys_that_make_no_sense_are_refused(key, value):
    layers = load_family("qwen3_moe").stacks[0].layers
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 1, key: value}
    with pytest.raises(RouterError, match=f"^config.json: '{key}' is "):
        expected_layers(layers, Settings(config))


@pytest.mark.parametrize("key", ["scoring_func", "score_function", "moe_router_activation_func"])
def test_a_fork_that_names_another_score_is_refused(key):
    family = load_family("glm4_moe")
    check_required(family, Settings({key: "sigmoid"}))
    check_required(family, Settings({key: "never heard of"}))
    with pytest.raises(RouterError, match="the rule of family glm4_moe scores by sigmoid"):
        check_required(family, Settings({key: "softmax"}))


ROUTER = router_with(np.eye(4, 8, dtype=np.float32), Rule(2, "softmax", Weights("scores")))
ROUTERS = RouterSet((ROUTER,), "model", "mixtral", "softmax, top 2 of 4", "sha256:0")

IN_WORDS = {
    "softmax, top 2": Weights("scores"),
    "softmax, top 2, weights sum to 1": Weights("scores", renormalise=True),
    "softmax, top 2, softmax over the chosen": Weights(
        "softmax_of_selected_logits", renormalise=True
    ),
    "softmax, top 2, sigmoid of each chosen": Weights("sigmoid_of_selected_logits"),
    "softmax, top 2, sigmoid of each chosen, weights sum to 1, x 2": Weights(
        "sigmoid_of_selected_logits", renormalise=True, scale=2.0
    ),
}


def test_words_of_a_rule_are_those_of_its_weights_and_of_where_it_comes_from():
    for words, weights in IN_WORDS.items():
        assert rule_in_words(replace(ROUTER, rule=replace(ROUTER.rule, weights=weights))) == words
    assert rule_in_words(replace(ROUTER, rule=replace(ROUTER.rule, top_k=4))) == "softmax, all 4"
    origins = {"mixtral": "config", "described": "options", "my_own": "the family file"}
    for family, origin in origins.items():
        assert rule_origin(family) == origin
        described = describe_routers(replace(ROUTERS, family=family))
        assert (described["rule_origin"], described["rule_status"]) == (origin, "assumed")
