"""Wrapped models: the same routers, the same experts and the same fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.expert_samples import read_expert_samples
from moegeom.router.load import load_routers
from moegeom.router.plain_names import plain_name, with_plain_names
from moegeom.router.requested_family import RequestedFamily


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


def test_names_are_those_of_the_unwrapped_modules_of_torch():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = list(inner.state_dict())
    inner[1] = checkpoint_wrapper(inner[1])
    wrapped = torch.nn.DataParallel(inner)
    names = [name for name, _ in wrapped.named_parameters()]
    assert names != expected
    assert [plain_name(name) for name in names] == expected


def test_a_plain_name_stays_as_it_is():
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


def test_patterns_are_for_names_as_they_stand(make_olmoe):
    folder = _renamed(make_olmoe(), lambda name: f"module.{name}")
    pattern = r"module\.model\.layers\.([0-9]+)\.mlp\.gate\.weight"
    asked = RequestedFamily(pattern=pattern, top_k=2, score="softmax")
    assert len(load_routers(open_checkpoint(folder), asked=asked).routers) == 3
