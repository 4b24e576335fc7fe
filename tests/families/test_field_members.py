"""Members of the field have the tensors of transformers' own models, but for how experts are stored."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.field.members import MEMBERS

#: What is compared elsewhere, or is no tensor of a model in memory.
APART = (".experts.", "_scale_inv")


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_tensors_beside_the_experts_are_those_of_transformers(name):
    member = MEMBERS[name].small()
    facts = {k: v for k, v in member.config.items() if k != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    ours = {
        key.replace("block_sparse_moe", "mlp"): shape
        for key, _, shape in member.tensors()
        if not key.startswith(f"model.layers.{member.num_layers}.")  # they leave it out
    }
    beside = [
        {k: v for k, v in one.items() if not any(a in k for a in APART)} for one in (ours, theirs)
    ]
    assert beside[0] == beside[1]


@pytest.mark.parametrize("name", sorted(set(MEMBERS) - {"gpt-oss-120b"}))
def test_experts_have_as_many_numbers_as_those_of_transformers(name):
    member = MEMBERS[name].small()
    facts = {k: v for k, v in member.config.items() if k != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
    theirs = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    ours = sum(
        torch.Size(shape).numel()
        for key, _, shape in member.tensors()
        if ".experts." in key and "scale" not in key
        if not key.startswith(f"model.layers.{member.num_layers}.")
    )
    assert ours == theirs
