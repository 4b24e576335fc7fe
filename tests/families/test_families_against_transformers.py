"""Oracle: what the routers of transformers chose, for every family that it can build.

Tiny random models are saved in the hub's layout and in that of memory, in one file and in several,
in float32 and bfloat16, and as trainers wrap states; moegeom reads what was saved and routes what
the routers received.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router, RouterSet
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import SCORES, Routing, mapped_logits, route
from moegeom.router.family import families, family_of, load_family
from moegeom.router.load import load_routers
from tests.by_day import by_day
from tests.families.observed import observe
from tests.families.tiny_configs import tiny_config
from tests.families.tiny_models import (
    BY_DAY,
    LISTED,
    LOADED,
    NAMES,
    OWN_NORM,
    model_of,
    read,
    saved,
)


def routed(router: Router, inputs: np.ndarray, has_own_norm: bool) -> tuple[Routing, np.ndarray]:
    """The rule in float64, and the weights with the scales of experts."""
    y = inputs.astype(np.float64)
    if has_own_norm:
        assert router.norm is not None
        assert router.gain is not None
        y = normed(y, router.norm.kind, router.norm.eps, router.gain).astype(np.float64)
    logits = y @ router.weight.astype(np.float64).T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    shared_sum = None
    if router.shared_rows is not None:
        shared = mapped_logits(y @ router.shared_rows.T.astype(np.float64), router.rule.logit_map)
        shared_sum = SCORES[router.rule.score](shared).sum(axis=1)
    found = route(logits, router.rule, router.selection_bias, shared_sum)
    scale = 1.0 if router.expert_scale is None else router.expert_scale[found.chosen]
    return found, found.weights * scale


def by_place(routers: RouterSet) -> dict[tuple[str, int], Router]:
    return {
        (router.slot if router.slot == "attention" else router.stack, router.layer): router
        for router in routers.routers
    }


def assert_same_arrays(mine: Router, theirs: Router) -> None:
    for part in ("weight", "logit_bias", "selection_bias", "gain", "expert_scale"):
        np.testing.assert_array_equal(getattr(mine, part), getattr(theirs, part), part)


def assert_same_choices(routers: dict[tuple[str, int], Router], model: Any, name: str) -> None:
    """Sets and weights of every router that the model has and the file too, up to a tie or two."""
    num_ties = 0
    for observed in observe(model, name):
        # diffusion_gemma stores the routers that encoder and decoder share once
        stack = "decoder" if name == "diffusion_gemma" else observed.stack
        router = routers.get((stack, observed.layer))
        if router is None:
            assert observed.token_ids is not None  # looked up by token id: listed
            continue
        choice, weights = routed(router, observed.inputs, name in OWN_NORM)
        same = _is_same_choice(choice.chosen, observed.chosen)
        is_tied = np.minimum(choice.margin, choice.group_margin) < 1e-5
        num_ties += int((is_tied & ~same).sum())
        np.testing.assert_array_equal(same | is_tied, True, err_msg=f"{name} {observed.module}")
        # a token that an expert dropped has its weights made from what is left
        same &= (observed.chosen >= 0).all(axis=1)
        mine = _dense(choice.chosen, weights, router.num_experts)
        theirs = _dense(observed.chosen, observed.weights, router.num_experts)
        np.testing.assert_allclose(mine[same], theirs[same], rtol=1e-5, atol=1e-6)
    assert num_ties <= 2


@pytest.mark.parametrize("name", BY_DAY)
def test_chosen_sets_and_weights_are_those_of_the_model(name):
    assert_same_choices(by_place(read(name)), model_of(name), name)


def _is_same_choice(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Equal sets, but for experts that dropped the token because they were full (-1)."""
    is_mine = (theirs[:, :, None] == mine[:, None, :]).any(axis=2)
    return (is_mine | (theirs < 0)).all(axis=1) & (theirs.shape[1] == mine.shape[1])


def _dense(chosen: np.ndarray, values: np.ndarray, num_experts: int) -> np.ndarray:
    dense = np.zeros((len(chosen), num_experts + 1))  # the last column takes what was dropped
    np.put_along_axis(dense, chosen.astype(np.int64), values.astype(np.float64), axis=1)
    return dense[:, :num_experts]


#: By what the library writes otherwise on the hub than in memory.
LAYOUTS = {
    "the same": "olmoe",
    "experts one by one": "mixtral",
    "a bias kept in float32": "deepseek_v3",
    "tables beside routers": "deepseek_v4",
    "biases of logits": "gpt_oss",
    "experts in the rows of one matrix": "dbrx",
    "two routers in a layer": "jetmoe",
    "encoder and decoder": "switch_transformers",
    "under a prefix": "llava__mixtral",
    "layers of three kinds": "nemotron_h",
    "a scale of experts": "gemma4_text",
}


@pytest.mark.parametrize("name", by_day(LOADED, LAYOUTS))
def test_every_layout_and_dtype_holds_the_same_routers(name, tmp_path):
    """Hub names in float32, names in memory in shards, hub names in bfloat16."""
    model_of(name).save_pretrained(
        tmp_path / "shards", save_original_format=False, max_shard_size="40KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    rounded = copy.deepcopy(model_of(name))
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    rounded.save_pretrained(tmp_path / "bfloat16")
    hub, shards, half = (
        by_place(routers)
        for routers in (
            read(name),
            *(load_routers(open_checkpoint(tmp_path / way)) for way in ("shards", "bfloat16")),
        )
    )
    assert hub.keys() == shards.keys() == half.keys()
    for key, router in hub.items():
        assert router.rule == shards[key].rule == half[key].rule
        assert_same_arrays(shards[key], router)
        short = torch.from_numpy(router.weight.copy()).bfloat16().float().numpy()
        is_kept = np.array_equal(half[key].weight, router.weight)  # kept in float32 by the family
        assert is_kept or np.array_equal(half[key].weight, short)


State = dict[str, torch.Tensor]


def _dcp(state: State, folder: Path) -> None:
    dcp.save({"model": state, "step": 7}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


#: What trainers write: a dictionary around the state, or a module around the model.
WRITERS: dict[str, Callable[[State, Path], None]] = {
    "model in DCP": _dcp,
    "model in .pt": lambda state, to: torch.save({"model": state, "step": 7}, to / "a.pt"),
    "state_dict in .pt": lambda state, to: torch.save({"state_dict": state}, to / "a.pt"),
    "Lightning": lambda state, to: torch.save(
        {"state_dict": {f"model.{name}": t for name, t in state.items()}}, to / "a.ckpt"
    ),
    "model in Lightning": lambda state, to: torch.save(
        {"state_dict": {f"model.model.{name}": t for name, t in state.items()}}, to / "a.ckpt"
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("written", "name"),
    by_day(
        [(written, name) for written in WRITERS for name in LOADED],
        {
            "a prefix of the model": ("model in DCP", "olmoe"),
            "biases": ("model in .pt", "deepseek_v3"),
            "no prefix": ("state_dict in .pt", "openai_privacy_filter"),
            "encoder and decoder": ("Lightning", "switch_transformers"),
            "a prefix of a part": ("model in Lightning", "llava__mixtral"),
        },
    ),
)
def test_a_wrapped_state_has_the_routers_and_the_fingerprint_of_the_bare_one(
    written, name, tmp_path
):
    bare, folder = read(name), saved(name)
    shutil.copy(folder / "config.json", tmp_path)
    state = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    WRITERS[written](state, tmp_path)
    wrapped = load_routers(open_checkpoint(tmp_path))
    assert wrapped.fingerprint == bare.fingerprint
    assert wrapped.num_expected == bare.num_expected
    assert len(wrapped.skipped) == len(bare.skipped)
    for mine, theirs in zip(wrapped.routers, bare.routers, strict=True):
        assert (mine.name, mine.rule) == (theirs.name, theirs.rule)
        assert_same_arrays(mine, theirs)


@pytest.mark.parametrize("name", sorted(LISTED))
def test_routers_that_are_no_function_of_their_input_are_listed(name):
    with pytest.raises(RouterError, match="cannot be measured: it"):
        read(name)


def test_layers_that_look_up_are_listed_and_every_family_is_held():
    (skipped,) = read("deepseek_v4").skipped
    assert skipped.reason.startswith("its experts are looked up by token id in '")
    assert len(read("deepseek_v4").routers) == read("deepseek_v4").num_expected
    of_library = {n for n in families() if load_family(n).source.startswith("transformers")}
    assert of_library - families_of(NAMES) == set()


def families_of(names: Iterable[str]) -> set[str]:
    """Families that these models are of, their parts included."""
    types = set().union(*map(_types_of, names))
    return {family.name for kind in types if (family := family_of(kind)) is not None}


@cache
def _types_of(name: str) -> set[str]:
    return _types(tiny_config(name).to_dict())


def _types(config: Any) -> set[str]:
    """The type of a config and those of its parts, which are held against the whole."""
    if not isinstance(config, dict):
        return set()
    own = {config["model_type"]} if config.get("model_type") else set()
    return own.union(*map(_types, config.values()))
