"""Routers of a checkpoint are loaded as a known family, or options, say, or refused with the gap:
under the names and in the shapes of other trainers and of original files, and with every
positive logit chosen.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, RouterError, RouterRuleError, UsageError
from moegeom.core.router import Router, RouterSet
from moegeom.engine.prepared import prepare
from moegeom.engine.route import route
from moegeom.engine.trust import examine
from moegeom.kernels.table import load_kernels
from moegeom.router import load as load_module
from moegeom.router.expert_samples import read_expert_samples
from moegeom.router.family import families, parse_family
from moegeom.router.load import load_routers
from moegeom.router.plain_names import plain_name, with_plain_names
from moegeom.router.requested_family import RequestedFamily
from tests.array_source import ArraySource
from tests.unit.router.conftest import CONFIG, family_file, loaded, refusal, write_arrays

_GATE = "model.layers.1.mlp.gate.weight"
_NORM = "model.layers.1.post_attention_layernorm.weight"


def test_config_and_tensor_that_disagree_on_experts_are_both_named(make_olmoe):
    error = refusal(make_olmoe(config={"num_experts": 128}))
    assert error.message == (
        "model.safetensors: tensor 'model.layers.0.mlp.gate.weight' has shape (6, 16); "
        "config.json says 128 experts."
    )
    assert error.hint == (
        "Is the config from another revision, or the tensor a slice of a sharded save?"
    )
    assert error.exit_code == 3
    sides = {f"model.layers.{i}.mlp.gate.weight": torch.ones(16, 6) for i in range(3)}
    error = refusal(make_olmoe(sides))
    assert error.message.endswith("has shape (16, 6); config.json says 6 experts.")
    assert 'layout = "transposed"' in error.hint


def test_shapes_that_no_router_or_gain_has_are_refused(make_olmoe, monkeypatch):
    for shape in ((6,), (6, 16, 1), (0, 16), (6, 0)):
        assert refusal(make_olmoe({_GATE: torch.ones(shape)})).message == (
            f"model.safetensors: tensor '{_GATE}' has shape {shape}, expected (experts, hidden)."
        )
    assert refusal(make_olmoe({_NORM: torch.ones(15)})).message == (
        f"model.safetensors: tensor '{_NORM}' (gain of the norm in front) has shape (15,); "
        "its router needs (16,)."
    )
    monkeypatch.setattr("moegeom.router.storage.ROUTER_BYTES", 100)
    assert "too many for a router" in refusal(make_olmoe()).message


def test_a_truncated_file_or_no_config_is_an_error(make_olmoe):
    path = make_olmoe() / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    error = refusal(path.parent, kind=CheckpointError)
    assert error.message.startswith("model.safetensors: truncated, has ")
    for model_type in (..., 3, None):
        message = refusal(make_olmoe(config={"model_type": model_type})).message
        assert "expected a config.json with a model_type" in message
    folder = make_olmoe()
    (folder / "config.json").unlink()
    assert refusal(folder).message.startswith(f"{folder.name}: found no config.json, expected")


def test_no_router_names_family_patterns_and_what_looks_like_one_if_anything_does(make_olmoe):
    none = {f"model.layers.{i}.mlp.gate.weight": None for i in range(3)}
    odd = {f"model.layers.{i}.moe.router.weight": torch.ones(6, 16) for i in range(3)}
    folder = make_olmoe(none | odd)
    assert refusal(folder).message == (
        f"{folder.name}: none of 9 tensors is a router of family olmoe "
        "('layers.{layer}.mlp.gate.weight', 'blocks.{layer}.feed_forward_moe.router.weight'). "
        "Tensors that look like routers: model.layers.{i}.moe.router.weight (6, 16) "
        "(its name, 6 experts in the config, the same in 3 layers)."
    )
    folder = make_olmoe({f"model.layers.{i}.mlp.gate.weight": None for i in range(3)})
    assert "No tensor of 6 looks like a router." in refusal(folder).message


def test_an_unknown_model_type_shows_evidence_and_the_known_families(make_olmoe):
    folder = make_olmoe(config={"model_type": "novel_moe"})
    error = refusal(folder)
    assert error.message == (
        f"{folder.name}: the selection rule of model_type 'novel_moe' is not known. "
        "Tensors that look like routers: model.layers.{i}.mlp.gate.weight (6, 16) "
        "(its name, 6 experts in the config, the same in 3 layers, experts beside it)."
    )
    assert error.hint == (
        "If that is what they are, say how they choose: --router-pattern "
        r"'model\.layers\.([0-9]+)\.mlp\.gate\.weight' --top-k 2 --score NAME; --family FILE says "
        "more. Not said by these options: NAME: the config names no score; how weights are made: "
        "softmax or sigmoid of the chosen, divided by their sum (--renormalise) or not, a scale "
        "without a key, small constants; the norm in front. "
        f"`moegeom list families` lists the {len(families())} families that are known."
    )


def test_rows_that_are_not_finite_are_noted_and_loaded(make_olmoe):
    weight = torch.ones(6, 16)
    weight[5, 3], weight[2, 0] = float("nan"), float("inf")
    gain = torch.ones(16)
    gain[7] = float("nan")
    found = loaded(make_olmoe({_GATE: weight, _NORM: gain}))
    assert found.notes == (
        "text/1: 2 rows hold non-finite values, first row 2",
        "text/1: the gain of the norm in front holds 1 non-finite value, first at index 7",
    )
    np.testing.assert_array_equal(found.routers[1].weight, weight.numpy())


def test_missing_and_surplus_layers_are_noted_and_only_the_selected_read(make_olmoe):
    for count, expected, notes in (
        (5, 5, ("text: no router in layers 3-4, where config.json implies one",)),
        (2, 2, ("text: routers in layer 2, where config.json implies none",)),
        (..., None, ()),
    ):
        routers = loaded(make_olmoe(config={"num_hidden_layers": count}))
        assert len(routers.routers) == 3
        assert (routers.num_expected, routers.notes) == (expected, notes)
    store: Any = open_checkpoint(make_olmoe())
    routers = load_routers(store, "1-7")
    assert [r.layer for r in routers.routers] == [1, 2]
    assert (routers.num_expected, routers.notes) == (2, ())
    unread = store.info("model.layers.0.mlp.gate.weight").offset
    assert unread not in [r.offset for r in store.log.ranges]
    error = refusal(make_olmoe(), "7-9,12", UsageError)
    assert error.message == "Layers 7-9,12: no router is there."
    assert error.hint == "Layers with routers: 0-2."


def test_the_gain_is_the_stored_tensor_plus_the_offset_of_the_family(make_olmoe, monkeypatch):
    text = resources.files("moegeom.router.families").joinpath("olmoe.toml").read_text("utf-8")
    shifted = parse_family("olmoe", text.replace('kind = "rms"', 'kind = "rms"\ngain_offset = 1.0'))
    monkeypatch.setattr(load_module, "recognise_family", lambda store: shifted)
    gain = torch.rand(16)
    router = loaded(make_olmoe({_NORM: gain})).routers[1]
    np.testing.assert_array_equal(router.gain, (1 + gain).numpy(), strict=True)
    assert router.norm is not None
    assert (router.norm.kind, router.norm.eps, router.norm.gain_offset) == ("rms", 1e-5, 1.0)


def test_the_set_says_what_was_read_without_a_path(make_olmoe):
    folder = make_olmoe()
    found = loaded(folder)
    assert found.checkpoint == folder.name
    files = ("model.safetensors", "config.json")
    assert found.bytes_total == sum((folder / file).stat().st_size for file in files)
    assert 0 < found.bytes_read < found.bytes_total + 10_000
    assert found.seconds > 0


def test_a_bias_that_is_one_row_of_a_matrix_is_not_read_from_anything_else(tmp_path):
    """Row 0 of a vector would be one number for all experts."""
    layer = "model.layers.0."
    config = {"model_type": "ernie4_5_vl_moe", "moe_num_experts": 4, "moe_k": 2}
    config |= {"hidden_size": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    for shape in ((), (4,), (1, 3), (2, 4, 1)):
        tensors = {
            f"{layer}mlp.gate.weight": np.ones((8, 4), np.float32),
            f"{layer}mlp.moe_statics.e_score_correction_bias": np.ones(shape, np.float32),
            f"{layer}post_attention_layernorm.weight": np.ones(8, np.float32),
        }
        message = refusal(write_arrays(tmp_path, tensors, config)).message
        assert "its router needs (1 or more rows, 4)." in message


_OPTIONS: dict[str, Any] = {
    "pattern": r"model\.layers\.([0-9]+)\.mlp\.gate\.weight",
    "top_k": 2,
    "score": "sigmoid",
}


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_a_bias_of_the_choice_that_the_family_lacks_is_refused(shape, make_olmoe):
    for leaf in """
        mlp.e_score_correction_bias mlp.expert_bias mlp.expert_bias_E mlp.routing.bias
        mlp.experts.e_score_correction_bias mlp.moe_statics.e_score_correction_bias
        mlp.router.balancing_bias exp_probs_b.bias
    """.split():
        name = f"model.layers.1.{leaf}"
        error = refusal(make_olmoe({name: torch.ones(shape)}))
        assert error.message == (
            f"model.safetensors: tensor '{name}' has one number for each expert and may change "
            "which are chosen, but the rule does not name it."
        )
        assert "--selection-bias 'model\\.layers\\.([0-9]+)\\." in error.hint


def test_the_same_holds_for_routers_that_options_describe(make_olmoe):
    folder = make_olmoe({f"model.layers.{i}.mlp.expert_bias": torch.arange(6.0) for i in range(3)})
    hint = refusal(folder, **_OPTIONS).hint
    advised = hint.partition("--selection-bias '")[2].partition("'")[0]
    routers = loaded(folder, **_OPTIONS, selection_bias=advised).routers
    assert all(router.rule.has_selection_bias for router in routers)


def test_other_tensors_do_not_stand_in_the_way(make_olmoe):
    for name, values in (
        ("model.layers.1.mlp.expert_bias", torch.ones(7)),
        ("model.layers.1.mlp.expert_bias", torch.ones(6, dtype=torch.int64)),
        ("model.layers.1.mlp.experts.0.router_bias", torch.ones(6)),
        ("model.layers.1.mlp.shared_expert_gate.bias", torch.ones(6)),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(6)),
        ("model.layers.7.mlp.expert_bias", torch.ones(6)),
        ("model.expert_bias", torch.ones(6)),
    ):
        assert len(loaded(make_olmoe({name: values})).routers) == 3, name


def test_a_bias_says_how_to_name_it_unless_a_family_calls_it_harmless(make_olmoe, tmp_path):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    error = refusal(make_olmoe({name: torch.ones(6)}))
    assert error.message.startswith(f"model.safetensors: tensor '{name}' stands beside")
    assert "--selection-bias or --logit-bias" in error.hint
    folder = make_olmoe({f"model.layers.{i}.mlp.expert_bias": torch.ones(6) for i in range(3)})
    file = family_file(tmp_path, "beside = ['layers.{layer}.mlp.expert_bias']\n")
    assert len(loaded(folder, file=file).routers) == 3


_PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"


_ASKED: dict[str, Any] = {"pattern": _PATTERN, "top_k": 2, "score": "softmax"}
_NAME = "model.layers.0.mlp.gate.weight"


def _refused(*names: str, **asked: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        RequestedFamily(**asked).family(names or (_NAME,))
    return caught.value


def test_a_pattern_or_a_name_loads_what_the_known_family_loads(make_olmoe):
    known = loaded(make_olmoe())
    folder = make_olmoe(config={"model_type": "mystery"})
    described = loaded(folder, **_ASKED)
    assert [r.name for r in described.routers] == [r.name for r in known.routers]
    for mine, theirs in zip(described.routers, known.routers, strict=True):
        np.testing.assert_array_equal(mine.weight, theirs.weight)
        assert mine.rule.top_k == theirs.rule.top_k
        assert mine.gain is None
    assert described.family_text.endswith("as described by options")
    named = loaded(folder, file=Path("olmoe"))
    assert (named.family, named.fingerprint) == ("olmoe", known.fingerprint)


_ALONE = "--family FILE says everything: leave out the other options."
_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"pattern": _PATTERN}, "--top-k and --score missing: "),
    ({"pattern": _PATTERN, "top_k": 2}, "--score missing: "),
    ({"top_k": 2, "score": "softmax"}, "--router-pattern missing: "),
    ({"renormalise": True}, "--router-pattern and --top-k and --score missing: "),
    (_ASKED | {"pattern": "gate"}, "--router-pattern 'gate': fits none of 1 tensor names."),
    (_ASKED | {"pattern": "("}, "--router-pattern '(': is no regular expression"),
    (
        _ASKED | {"score": "sparsemax"},
        "--score sparsemax: expected one of identity, relu, sigmoid, softmax, sqrt_softplus.",
    ),
    ({"file": Path("mine.toml"), "top_k": 2}, _ALONE),
    ({"file": Path("mine.toml"), "renormalise": True}, _ALONE),
]


@pytest.mark.parametrize(("asked", "beginning"), _REFUSALS)
def test_what_is_not_given_is_not_guessed_and_what_is_is_not_dropped(asked, beginning):
    assert _refused(**asked).message.startswith(beginning)


def test_a_layer_that_is_not_clear_or_has_two_routers_is_an_error_of_the_pattern():
    name = "block.3.layer.1.router.weight"
    message = _refused(name, **(_ASKED | {"pattern": r"block\..*"})).message
    assert message.endswith(f"which number of '{name}' is the layer is not clear.")
    family = RequestedFamily(**(_ASKED | {"pattern": r"block\.(\d+)\.layer.*"})).family([name])
    assert family is not None
    assert family.stacks[0].weight[0].name == "block.{layer}.layer.1.router.weight"
    names = [f"{end}.block.{i}.router.weight" for end in ("encoder", "decoder") for i in (1, 3)]
    error = _refused(*names, **(_ASKED | {"pattern": r".*block\.([0-9]+)\.router\.weight"}))
    assert error.message == (
        "--router-pattern: fits 'encoder.block.1.router.weight' and "
        "'decoder.block.1.router.weight', two routers of layer 1."
    )
    assert error.exit_code == 2
    assert "fits none" in _refused("a" * 100_000, **(_ASKED | {"pattern": r"(a+)+b"})).message
    assert RequestedFamily().family(["a"]) is None


@pytest.mark.parametrize(
    "pattern",
    [r"model\.layers\.([0-9]+)\.mlp\.router\.weight", r"layers\.(\d+)\.mlp\.gate\.weight",
     "model.layers.([1-9][0-9]*).mlp.gate"],
)  # fmt: skip
def test_a_pattern_that_fits_none_names_those_that_are_like_it(pattern, make_olmoe):
    with pytest.raises(UsageError, match="fits none") as caught:
        loaded(make_olmoe(), **(_ASKED | {"pattern": pattern}))
    assert caught.value.hint.startswith("It must fit the whole name: the nearest")
    assert "'model.layers.{i}.mlp.gate.weight'" in caught.value.hint
    with pytest.raises(UsageError, match="fits none") as caught:
        loaded(make_olmoe(), **(_ASKED | {"pattern": "xyz"}))
    assert "such as" in caught.value.hint


def test_a_file_of_ones_own_says_everything_or_is_refused_as_it_is_called(make_olmoe, tmp_path):
    folder = make_olmoe(config={"model_type": "mystery"})
    routers = loaded(folder, file=family_file(tmp_path))
    assert (routers.family, routers.routers[0].rule.top_k) == ("mine", 1)
    for beginning, raw in _FILES.items():
        file = tmp_path / beginning.partition(":")[0]
        file.write_bytes(raw)
        assert _refused(file=file).message.startswith(beginning)
    for file in (tmp_path / "none.toml", tmp_path):
        assert "cannot be read" in _refused(file=file).message


_FILES = {
    "mine.toml: key 'stacks' is missing.": b"text = '3'",
    "mine.toml: unknown key 'colour'.": b"colour = 'red'",
    "mine.toml: is not TOML": b"[[stacks]",
    "mine.toml: is not UTF-8 at byte 0": b"\xff",
    "config.json: is not TOML": b"{}",
}


def test_what_a_pattern_leaves_out_and_a_number_of_experts_that_is_not_known_are_noted(make_olmoe):
    asked = _ASKED | {"pattern": r"model\.layers\.([12])\..*gate\.weight"}
    gate = "model.layers.0.mlp.gate."
    for change in (
        {},
        {f"{gate}weight": None, f"{gate}weight_packed": torch.ones(3)},
        {f"{gate}scale": torch.ones(3)},
    ):
        routers = loaded(make_olmoe(change), **asked)
        assert [router.layer for router in routers.routers] == [1, 2]
        if not change:
            (note,) = routers.notes
            assert note == (f"not loaded: 1 tensor like '{gate}weight', which may be routers too")
    others = {f"model.vision.blocks.{i}.mlp.gate.weight": torch.rand(6, 16) for i in range(2)}
    assert loaded(make_olmoe(), **_ASKED).notes == ()
    (note,) = loaded(make_olmoe(others), **_ASKED).notes
    assert note.startswith("not loaded: 2 tensors like 'model.vision.blocks.0.mlp.gate.weight'")
    asked = _ASKED | {"pattern": r"model\.layers\.([0-9]+)\.self_attn\.o_proj\.weight"}
    for width, hint in ((16, ""), (6, " (stored transposed?)")):
        odd = {f"model.layers.{i}.self_attn.o_proj.weight": torch.rand(16, width) for i in range(3)}
        assert loaded(make_olmoe(odd), **asked).notes[0] == (
            f"text/0: 16 rows count as experts, where config.json says 6{hint}"
        )


def test_a_bias_is_used_in_every_layer_or_in_none_and_no_more_experts_than_there_are(make_olmoe):
    folder = make_olmoe({f"model.layers.{i}.mlp.gate.bias": torch.ones(6) for i in range(3)})
    pattern = r"model\.layers\.([01])\.mlp\.gate\.bias"
    assert refusal(folder, kind=UsageError, **_ASKED, logit_bias=pattern).message == (
        f"--logit-bias '{pattern}': does not fit 'model.layers.2.mlp.gate.bias', the bias of a "
        "router that is loaded."
    )
    error = refusal(make_olmoe(), kind=UsageError, **(_ASKED | {"top_k": 99}))
    assert error.message == (
        "router text/0: 99 experts are to be chosen, as --top-k or the family file says; "
        "the router has 6."
    )


LAYERS, EXPERTS, HIDDEN = 2, 6, 16

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
_LING = {"model_type": "bailing_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
         "num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": HIDDEN}  # fmt: skip

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
    "Ling 2.0": Layout(
        _LING | {"score_function": "sigmoid", "n_group": 2, "topk_group": 1}, _GATE, _NORM,
        bias="model.layers.1.mlp.gate.expert_bias",
    ),
    "Ling 2.0 of mlx-lm": Layout(
        _LING | {"score_function": "sigmoid"}, "model.layers.1.mlp.gate.gate_proj.weight", _NORM,
        bias="model.layers.1.mlp.gate.expert_bias",
    ),
    "Ling": Layout(_LING, _GATE, _NORM),
    "DeepSeekMoE": Layout(_DEEPSEEK | {"model_type": "deepseek"}, _GATE, _NORM),
    "Hunyuan-Large": Layout(
        _LING | {"model_type": "hunyuan", "moe_topk": 1}, "model.layers.1.mlp.gate.wg.weight", _NORM
    ),
    "MiniMax-Text-01": Layout(
        _LING | {"model_type": "minimax_text_01", "num_local_experts": EXPERTS},
        "model.layers.1.block_sparse_moe.gate.weight", _NORM,
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


def _by_definition(
    logits: np.ndarray, sigmoid: bool, k: int, bias: Any, groups: Any, divides: bool, factor: float
) -> list[dict[int, float]]:
    """Experts and weights of each token, one number at a time."""
    rows = []
    for row in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row) / np.exp(row).sum()
        ranks = scores + (0.0 if bias is None else bias)
        if groups:
            blocks = ranks.reshape(groups[0], -1)
            best = np.sort(blocks, axis=1)[:, -2:].sum(axis=1)
            stays = np.isin(np.arange(groups[0]), np.argsort(-best)[: groups[1]])
            ranks = np.where(np.repeat(stays, blocks.shape[1]), ranks, -np.inf)
        chosen = np.argsort(-ranks)[:k]
        total = scores[chosen].sum() if divides and k > 1 else 1.0
        rows.append({int(e): float(factor * scores[e] / total) for e in chosen})
    return rows


#: Score, experts, groups, whether weights are divided by their sum, their factor.
DEFINITIONS = {
    "Ling 2.0": (True, 2, (2, 1), True, 2.5),
    "Ling 2.0 of mlx-lm": (True, 2, None, True, 2.5),
    "Ling": (False, 2, None, True, 2.5),
    "DeepSeekMoE": (False, 2, None, True, 1.0),
    "Hunyuan-Large": (False, 1, None, True, 1.0),
    "MiniMax-Text-01": (False, 2, None, True, 1.0),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_types_outside_of_transformers_choose_by_their_definition(name, tmp_path):
    router, (sigmoid, k, groups, divides, factor) = (
        _router(LAYOUTS[name], tmp_path),
        DEFINITIONS[name],
    )
    inputs = np.random.default_rng(1).standard_normal((50, HIDDEN)).astype(np.float32)
    routes = route(router, inputs)
    expected = _by_definition(
        inputs @ WEIGHT.T, sigmoid, k, router.selection_bias, groups, divides, factor
    )
    for chosen, weights, row in zip(routes.chosen, routes.weights, expected, strict=True):
        assert dict(zip(chosen.tolist(), weights.tolist(), strict=True)) == pytest.approx(row, 1e-5)


def test_a_sigmoid_of_ling_without_its_bias_is_refused_and_a_softmax_has_none(tmp_path):
    layout = LAYOUTS["Ling 2.0"]
    with pytest.raises(RouterError, match=r"gate\.expert_bias' is missing"):
        _router(replace(layout, bias=""), tmp_path)
    with pytest.raises(RouterError, match="stands beside the router weight"):
        _router(replace(layout, config=_LING), tmp_path)


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
    "a container of its own": lambda name: f"app.{name}",
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
    assert len(load_routers(open_checkpoint(folder), requested_family=asked).routers) == 3


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


ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_router_topk": 1,
    "moe_router_load_balancing_type": "aux_loss", "normalization": "RMSNorm", "norm_epsilon": 1e-5,
    "gain_offset": 0.0,
}  # fmt: skip

RULES = ["megatron-softmax", "megatron-softmax-first", "megatron-sigmoid"]


ALLOWED = {"stale_inputs": True, "unverified": True}


def _loaded(folder: Path, **arguments: Any) -> RouterSet:
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        weight = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
        tensors[f"{at}mlp.router.weight"] = weight
        tensors[f"{at}pre_mlp_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    return loaded(write_arrays(folder, tensors, ARGUMENTS | arguments))


def _inputs(seed: int, tokens: int) -> np.ndarray:
    """Of length 1 in each channel on the average, as a norm leaves them."""
    inputs = np.random.default_rng(seed).standard_normal((tokens, HIDDEN)).astype(np.float32)
    return inputs / np.sqrt((inputs**2).mean(axis=1, keepdims=True))


@pytest.fixture
def relu(tmp_path: Path) -> RouterSet:
    return _loaded(tmp_path, model_type=RULES[0], moe_relu_routing=True)


@pytest.mark.parametrize("rule", RULES)
def test_relu_routing_takes_every_expert_with_a_positive_logit(rule, tmp_path):
    found = _loaded(tmp_path, model_type=rule, moe_relu_routing=True)
    assert {router.rule.pick for router in found.routers} == {"threshold"}
    assert {router.rule.num_chosen for router in found.routers} == {None}
    assert found.family_text == "ReLU of logits, those above 0 of 6 (training aims at 1)"
    # without the flag the rule is that of the family
    for flag in (False, None):
        routers = _loaded(tmp_path, model_type=rule, moe_relu_routing=flag)
        assert [router.name for router in routers.routers] == ["text/0", "text/1"]
        assert {router.rule.pick for router in routers.routers} == {"top_k"}
        assert routers.skipped == ()
    with pytest.raises(RouterError, match="'moe_relu_routing' is 'yes' .*expected true or false"):
        _loaded(tmp_path, model_type=rule, moe_relu_routing="yes")


def test_the_choice_the_weights_and_the_distance_are_those_of_torch_relu(relu):
    router = relu.routers[0]
    inputs = np.random.default_rng(1).standard_normal((500, HIDDEN)).astype(np.float32)
    routed = route(router, inputs)
    logits = (
        torch.from_numpy(inputs).double() @ torch.from_numpy(router.weight.astype(np.float64)).T
    )
    gate = torch.relu(logits).numpy()
    dense = np.zeros((500, EXPERTS))
    token, slot = np.nonzero(routed.chosen >= 0)
    dense[token, routed.chosen[token, slot]] = routed.weights[token, slot]
    assert_allclose(dense, gate, atol=1e-6)
    assert (routed.num_chosen == (gate > 0.0).sum(axis=1)).all()
    lengths = np.linalg.norm(router.weight.astype(np.float64), axis=1)
    assert_allclose(
        routed.boundary_distance, (abs(logits.numpy()) / lengths).min(axis=1), atol=1e-6
    )
    assert (routed.boundary_distance_upper == routed.boundary_distance).all()


def test_recorded_choices_of_any_number_are_held_against_the_rule(relu):
    routers, inputs = relu.routers, _inputs(3, 300)
    chosen = {r.name: route(r, inputs).chosen for r in routers}
    shares = []
    for shift in (0, 1):
        turned = {n: np.roll(ids, shift, axis=0)[:, ::-1].copy() for n, ids in chosen.items()}
        source = ArraySource({router.name: inputs for router in routers}, chosen=turned)
        shares += [
            examine([prepare(r)], source, "", load_kernels("cpu"), ALLOWED).share_reproduced
            for r in routers
        ]
    assert shares[:2] == [1.0, 1.0]
    assert max(shares[2:]) < 0.2


def test_a_scan_has_sizes_of_sets_and_loads_and_says_what_it_lacks(relu, tmp_path):
    inputs = _inputs(4, 600)
    report = mg.scan(str(tmp_path), {"text/0": inputs, "text/1": inputs}, stage="router_input")
    (row, _) = report.layers().to_pylist()
    gate = inputs @ relu.routers[0].weight.T > 0.0
    assert row["num_chosen_mean"] == pytest.approx(gate.sum(axis=1).mean(), abs=0.01)
    assert row["no_expert_share"] == pytest.approx((~gate.any(axis=1)).mean(), abs=0.002)
    load = gate.sum(axis=0)
    assert row["max_vio_global"] == pytest.approx(load.max() / load.mean() - 1.0, abs=0.01)
    assert row.get("max_vio_floor") is None
    assert row["boundary_distance_p50"] > 0.0
    (part, _) = report.value.run["parts"].values()
    assert part["reasons"]["routing_entropy"] == "this rule takes every expert above a threshold"


@pytest.mark.parametrize("command", ["imbalance", "perturb", "cells", "regions"])
def test_commands_about_the_k_best_refuse_it_by_name(command, relu, tmp_path):
    inputs = np.ones((8, HIDDEN), np.float32)
    tokens = {router.name: inputs for router in relu.routers}
    with pytest.raises(RouterRuleError, match="takes every expert above a threshold"):
        getattr(mg, command)(str(tmp_path), tokens, stage="router_input")


def test_relu_is_a_score_that_options_may_name(relu, tmp_path):
    pattern = r"decoder\.layers\.(\d+)\.mlp\.router\.weight"
    routers = loaded(tmp_path, pattern=pattern, top_k=2, score="relu").routers
    assert [router.rule.pick for router in routers] == ["threshold", "threshold"]
