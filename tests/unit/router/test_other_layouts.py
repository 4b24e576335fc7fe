"""The same routers under the names and in the shapes of other trainers and of original files."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.router.expert_samples import read_expert_samples
from moegeom.router.load import load_routers
from moegeom.router.plain_names import plain_name, with_plain_names
from moegeom.router.requested_family import RequestedFamily
from tests.unit.router.conftest import CONFIG, loaded, write_arrays

EXPERTS, HIDDEN = 6, 16

_RANDOM = np.random.default_rng(0)
WEIGHT = _RANDOM.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)
BIAS = _RANDOM.normal(size=EXPERTS).astype(np.float32)
GAIN = _RANDOM.normal(size=HIDDEN).astype(np.float32)


@dataclass(frozen=True)
class Layout:
    config: dict[str, Any]
    weight: str
    norm: str
    stored: Callable[[np.ndarray], np.ndarray] = lambda weight: weight
    bias: str = ""


_OLMOE = CONFIG | {"num_hidden_layers": 2, "hidden_size": HIDDEN}
_ORIGINAL = {"dim": HIDDEN, "n_layers": 2, "norm_eps": 1e-5}
_GPT_OSS = {"num_hidden_layers": 2, "num_experts": EXPERTS, "experts_per_token": 2,
            "hidden_size": HIDDEN, "swiglu_limit": 7.0}  # fmt: skip
_DEEPSEEK = {"model_type": "deepseek_v3", "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
             "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
             "rms_norm_eps": 1e-6, "num_hidden_layers": 2, "first_k_dense_replace": 1,
             "hidden_size": HIDDEN}  # fmt: skip

LAYOUTS = {
    "OLMo-core": Layout(
        _OLMOE, "blocks.1.feed_forward_moe.router.weight", "blocks.1.feed_forward_norm.weight",
        lambda weight: weight.reshape(-1),
    ),
    "Llama 4, original": Layout(
        _ORIGINAL
        | {"moe_args": {"num_experts": EXPERTS, "top_k": 1, "interleave_moe_layer_step": 1}},
        "layers.1.feed_forward.router_DE", "layers.1.ffn_norm.weight",
        lambda weight: np.ascontiguousarray(weight.T),
    ),
    "Mixtral, consolidated": Layout(
        _ORIGINAL | {"moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2}},
        "layers.1.feed_forward.gate.weight", "layers.1.ffn_norm.weight",
    ),
    "gpt-oss, original": Layout(
        _GPT_OSS, "block.1.mlp.gate.weight", "block.1.mlp.norm.scale", bias="block.1.mlp.gate.bias"
    ),
    "torchtitan": Layout(
        _DEEPSEEK, "layers.1.moe.router.gate.weight", "layers.1.ffn_norm.weight",
        bias="layers.1.moe.expert_bias_E",
    ),
}  # fmt: skip


def _router(layout: Layout, folder: Path) -> Router:
    tensors = {layout.weight: layout.stored(WEIGHT), layout.norm: GAIN}
    tensors |= {layout.bias: BIAS} if layout.bias else {}
    write_arrays(folder, tensors, layout.config)
    if "dim" in layout.config:
        (folder / "config.json").rename(folder / "params.json")
    (router,) = loaded(folder).routers
    return router


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_router_is_the_same_wherever_it_comes_from(name, tmp_path):
    router = _router(LAYOUTS[name], tmp_path)
    assert (router.name, router.weight.flags.c_contiguous) == ("text/1", True)
    np.testing.assert_array_equal(router.weight, WEIGHT)
    np.testing.assert_array_equal(router.gain, GAIN)
    bias = router.logit_bias if router.selection_bias is None else router.selection_bias
    np.testing.assert_array_equal(bias, BIAS if LAYOUTS[name].bias else None)


def test_a_flat_weight_that_does_not_divide_is_refused(tmp_path):
    cut = replace(LAYOUTS["OLMo-core"], stored=lambda weight: weight.reshape(-1)[:-1])
    with pytest.raises(RouterError, match=r"has shape \(95,\), expected \(experts \* hidden,\)"):
        _router(cut, tmp_path)


def _renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    file = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)
    return folder


_WRAPPED: dict[str, Callable[[str], str]] = {
    "data parallel": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"_orig_mod.module.{name}",
    "fsdp": lambda name: "_fsdp_wrapped_module." + name.replace(
        ".mlp.", "._fsdp_wrapped_module.mlp."
    ),
    "checkpointed": lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "lightning": lambda name: f"state_dict.{name}",
    "megatron": lambda name: f"model_state_dict.module.{name}",
    "adapter": lambda name: f"base_model.model.{name}",
    "dictionary": lambda name: f"model.{name}",
}  # fmt: skip


@pytest.mark.parametrize("rename", _WRAPPED.values(), ids=_WRAPPED)
def test_a_wrapped_model_has_the_same_routers(rename, make_olmoe):
    plain_store = open_checkpoint(make_olmoe())
    plain = load_routers(plain_store)
    samples = read_expert_samples(plain_store, plain.routers).digests
    store = open_checkpoint(_renamed(make_olmoe(), rename))
    found = load_routers(store)
    assert found.fingerprint == plain.fingerprint
    assert found.skipped == ()
    assert read_expert_samples(store, found.routers).digests == samples
    for mine, theirs in zip(found.routers, plain.routers, strict=True):
        assert mine.name == theirs.name
        np.testing.assert_array_equal(mine.weight, theirs.weight)
        np.testing.assert_array_equal(mine.gain, theirs.gain)


def test_experts_in_one_tensor_are_told_apart_by_its_matrices_and_never_by_a_vector(make_olmoe):
    folder = make_olmoe()
    file = folder / "model.safetensors"
    plain = {name: t for name, t in load_file(file).items() if ".experts." not in name}
    (router, *_) = load_routers(open_checkpoint(folder)).routers
    start = router.provenance.tensors[0].removesuffix("gate.weight") + "experts."
    vector = {f"{start}a_scale": torch.randn(router.num_experts)}
    matrices = {f"{start}down": torch.randn(router.num_experts, 4, 2)}
    for tensors, is_told in ((vector, False), (vector | matrices, True)):
        save_file(plain | tensors, file)
        samples = read_expert_samples(open_checkpoint(folder), [router]).digests[router.name]
        assert (samples is not None) is is_told
    assert len({*samples}) == router.num_experts


def test_names_are_those_of_the_unwrapped_modules_of_torch_and_stay_so():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = list(inner.state_dict())
    inner[1] = checkpoint_wrapper(inner[1])
    wrapped = torch.nn.DataParallel(inner)
    names = [name for name, _ in wrapped.named_parameters()]
    assert names != expected
    assert [plain_name(name) for name in names] == expected
    for rename in _WRAPPED.values():
        once = plain_name(rename("model.layers.0.mlp.gate.weight"))
        assert plain_name(once) == once
    assert plain_name("model.modules.0.module.weight") == "model.modules.0.module.weight"


def test_tensors_that_would_share_a_name_keep_their_own(make_olmoe):
    own = torch.full((6, 16), 2.0)
    folder = make_olmoe({"module.model.layers.0.mlp.gate.weight": own, "module.other": own + 1})
    store = with_plain_names(open_checkpoint(folder))
    assert {"module.model.layers.0.mlp.gate.weight", "other"} < set(store.names())
    np.testing.assert_array_equal(store.read("other"), (own + 1).numpy())
    np.testing.assert_array_equal(store.read("module.model.layers.0.mlp.gate.weight"), own.numpy())
    assert (store.read("model.layers.0.mlp.gate.weight") != own.numpy()).all()
    folder = _renamed(make_olmoe(), lambda name: f"module.{name}")
    pattern = r"module\.model\.layers\.([0-9]+)\.mlp\.gate\.weight"
    asked = RequestedFamily(pattern=pattern, top_k=2, score="softmax")
    assert len(load_routers(open_checkpoint(folder), asked=asked).routers) == 3


def _cut(folder: Path, target: Path, num_shards: int) -> Path:
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    file_of = {n: f"m-{i % num_shards}.safetensors" for i, n in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({n: tensors[n] for n in tensors if file_of[n] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def test_one_changed_bit_of_a_router_and_no_expert_changes_the_fingerprint(make_olmoe):
    before = loaded(make_olmoe()).fingerprint
    assert before.startswith("sha256:")
    assert len(before) == 7 + 64
    for leaf in ("mlp.gate.weight", "post_attention_layernorm.weight"):
        name = f"model.layers.1.{leaf}"
        changed = load_file(make_olmoe() / "model.safetensors")[name].clone()
        changed.view(torch.int32).flatten()[0] ^= 1
        assert loaded(make_olmoe({name: changed})).fingerprint != before
    expert = {"model.layers.1.mlp.experts.0.gate_proj.weight": torch.zeros(8, 16)}
    assert loaded(make_olmoe(expert)).fingerprint == before


def test_of_a_hundred_gigabytes_next_to_nothing_is_read(make_olmoe, tmp_path):
    make_olmoe()
    folder = tmp_path / "large"
    folder.mkdir()
    layers, per_shard, expert_bytes = 8, 4, 3 * 2**30
    weight_map, needed, headers = {}, 0, 0
    for shard in range(layers):
        file = f"m-{shard}.safetensors"
        at = f"model.layers.{shard}"
        experts = [f"{at}.mlp.experts.{e}.up_proj.weight" for e in range(per_shard)]
        shapes = {name: [expert_bytes // 4] for name in experts}
        shapes |= {f"{at}.mlp.gate.weight": [6, 16], f"{at}.post_attention_layernorm.weight": [16]}
        header, end = {}, 0
        for name, shape in shapes.items():
            stop = end + 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, stop]}
            end, weight_map[name] = stop, file
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + end)  # sparse: nothing is written
        needed += 6 * 16 * 4 + 16 * 4
        headers += 8 + len(raw)
    # A shard without routers: not even its header is read.
    weight_map["lm_head.weight"] = "m-8.safetensors"
    (folder / "m-8.safetensors").write_bytes(b"never read")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))

    found = loaded(folder)
    assert len(found.routers) == layers
    assert found.bytes_total > 96 * 2**30
    small = index.stat().st_size + (folder / "config.json").stat().st_size
    assert found.bytes_read == needed + headers + small


def test_shards_are_read_in_order_and_change_no_fingerprint(make_olmoe, tmp_path):
    whole = loaded(make_olmoe())
    store: Any = open_checkpoint(_cut(tmp_path, tmp_path / "cut", 2))
    planned = len(store.log.ranges)
    assert load_routers(store).fingerprint == whole.fingerprint
    reads = [(r.file, r.offset) for r in store.log.ranges[planned:] if r.offset > 8]
    assert reads == sorted(reads)
    assert len(reads) == len(set(reads)) == 6
