from __future__ import annotations

import os
from importlib import resources
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, UsageError
from moegeom.router import load as load_module
from moegeom.router.family_file import families, parse_family
from moegeom.router.load import load_routers
from tests.unit.router.conftest import loaded, refusal, write_arrays

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


def test_a_router_on_its_side_is_told_from_another_revision(make_olmoe):
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
    monkeypatch.setattr("moegeom.router.storage._MOST_BYTES", 100)
    assert "too many for a router" in refusal(make_olmoe()).message


def test_a_truncated_file_is_an_error_of_the_checkpoint(make_olmoe):
    path = make_olmoe() / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    error = refusal(path.parent, kind=CheckpointError)
    assert error.message.startswith("model.safetensors: truncated, has ")


def test_no_router_names_family_patterns_and_what_looks_like_one(make_olmoe):
    none = {f"model.layers.{i}.mlp.gate.weight": None for i in range(3)}
    odd = {f"model.layers.{i}.moe.router.weight": torch.ones(6, 16) for i in range(3)}
    folder = make_olmoe(none | odd)
    assert refusal(folder).message == (
        f"{folder.name}: none of 9 tensors is a router of family olmoe "
        "('layers.{layer}.mlp.gate.weight', 'blocks.{layer}.feed_forward_moe.router.weight'). "
        "Tensors that look like routers: model.layers.{i}.moe.router.weight (6, 16) "
        "(its name, 6 experts in the config, the same in 3 layers)."
    )


def test_a_dense_model_has_nothing_like_a_router(make_olmoe):
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
        f"`moegeom families` lists the {len(families())} families that are known."
    )


def test_a_checkpoint_without_config_or_model_type_is_refused(make_olmoe):
    for model_type in (..., 3, None):
        message = refusal(make_olmoe(config={"model_type": model_type})).message
        assert "expected a config.json with a model_type" in message
    folder = make_olmoe()
    (folder / "config.json").unlink()
    assert refusal(folder).message.startswith(f"{folder.name}: found no config.json, expected")


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


def test_missing_and_surplus_layers_are_noted(make_olmoe):
    for count, expected, notes in (
        (5, 5, ("text: no router in layers 3-4, where config.json implies one",)),
        (2, 2, ("text: routers in layer 2, where config.json implies none",)),
        (..., None, ()),
    ):
        routers = loaded(make_olmoe(config={"num_hidden_layers": count}))
        assert len(routers.routers) == 3
        assert (routers.num_expected, routers.notes) == (expected, notes)


def test_layers_select_and_only_they_are_read(make_olmoe):
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


def test_a_router_that_predicts_further_tokens_counts_as_expected(tmp_path):
    tensors = {}
    for layer in (1, 2, 3):
        at = f"model.layers.{layer}"
        tensors[f"{at}.mlp.gate.weight"] = np.ones((8, 4), np.float32)
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = np.ones(8, np.float32)
        tensors[f"{at}.post_attention_layernorm.weight"] = np.ones(4, np.float32)
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    routers = loaded(write_arrays(tmp_path, tensors, config))
    assert [r.name for r in routers.routers] == ["text/1", "text/2", "mtp/3"]
    assert (routers.num_expected, routers.notes) == (3, ())
    assert routers.family_text == "sigmoid + selection bias, top 2 of 8"
    assert routers.family == "deepseek_v3"


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


# ----------------------------------------------------------------------------- biases of the choice
_OPTIONS: dict[str, Any] = {
    "pattern": r"model\.layers\.([0-9]+)\.mlp\.gate\.weight",
    "top_k": 2,
    "score": "sigmoid",
}


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_a_bias_of_the_choice_that_the_family_lacks_is_refused(shape, make_olmoe):
    for leaf in (
        "mlp.e_score_correction_bias",
        "mlp.expert_bias",
        "mlp.expert_bias_E",
        "mlp.experts.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
        "mlp.router.balancing_bias",
        "mlp.routing.bias",
        "exp_probs_b.bias",
    ):
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


def test_a_bias_that_a_family_file_calls_harmless_is_passed_over(make_olmoe, tmp_path):
    folder = make_olmoe({f"model.layers.{i}.mlp.expert_bias": torch.ones(6) for i in range(3)})
    file = tmp_path / "mine.toml"
    file.write_text(
        "text = 'softmax, top {top_k} of {num_experts}'\n"
        "[[stacks]]\nname = 'text'\nweight = ['layers.{layer}.mlp.gate.weight']\n"
        "beside = ['layers.{layer}.mlp.expert_bias']\n"
        "top_k = 1\nscore = 'softmax'\nweights.source = 'scores'\n"
    )
    assert len(loaded(folder, file=file).routers) == 3


def test_a_bias_inside_the_router_says_how_to_name_it(make_olmoe):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    error = refusal(make_olmoe({name: torch.ones(6)}))
    assert error.message.startswith(f"model.safetensors: tensor '{name}' stands beside")
    assert "--selection-bias or --logit-bias" in error.hint
