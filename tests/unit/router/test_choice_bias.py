"""A bias of the choice is loaded, known to change nothing, or refused; it is never passed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.router.conftest import loaded, refusal

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
