"""Oracle: what the routers of transformers chose, for every family that it can build.

Tiny random models are saved in the hub's layout and in that of memory, in one file and in several,
in float32 and bfloat16; moegeom reads what was saved and routes what the routers received.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import SCORES, Routing, mapped_logits, route
from moegeom.router.family_file import families, family_of, load_family
from moegeom.router.load import load_routers
from tests.families.observed import observe
from tests.families.tiny_configs import tiny_config
from tests.families.tiny_models import NAMES, build

#: Routers whose choice does not follow from their input.
LISTED = {"doge", "zaya", "zaya__skip"}

#: Routers that read the residual stream and scale it themselves: what they received is not normed.
OWN_NORM = {"gemma4", "gemma4_text", "diffusion_gemma"}

LOADED = [name for name in NAMES if name not in LISTED]


@cache
def model_of(name: str) -> Any:
    """The tiny model, built once."""
    return build(name)


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


def _stack_and_layer(router: Router) -> tuple[str, int]:
    return (router.slot if router.slot == "attention" else router.stack), router.layer


def _loaded(model: Any, folder: Path, **options: Any) -> dict[tuple[str, int], Router]:
    model.save_pretrained(folder, **options)
    found = load_routers(open_checkpoint(folder))
    return {_stack_and_layer(router): router for router in found.routers}


@pytest.mark.parametrize("name", LOADED)
def test_chosen_sets_and_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    routers = _loaded(model_of(name), tmp_path)
    num_ties = 0
    for observed in observe(model_of(name), name):
        key = (observed.stack, observed.layer)
        if name == "deepseek_v4" and key not in routers:
            continue  # looked up by token id: listed, see below
        router = routers[_key(name, key)]
        found, weights = routed(router, observed.inputs, name in OWN_NORM)
        same = _is_same_choice(found.chosen, observed.chosen)
        is_tied = np.minimum(found.margin, found.group_margin) < 1e-5
        num_ties += int((is_tied & ~same).sum())
        np.testing.assert_array_equal(same | is_tied, True, err_msg=f"{name} {observed.module}")
        # a token that an expert dropped has its weights made from what is left
        same &= (observed.chosen >= 0).all(axis=1)
        if observed.weights is not None:
            mine, theirs = (
                _dense(chosen, values, router.num_experts)[same]
                for chosen, values in (
                    (found.chosen, weights),
                    (observed.chosen, observed.weights),
                )
            )
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert num_ties <= 2


def _is_same_choice(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Equal sets, but for experts that dropped the token because they were full (-1)."""
    is_mine = (theirs[:, :, None] == mine[:, None, :]).any(axis=2)
    return (is_mine | (theirs < 0)).all(axis=1) & (theirs.shape[1] == mine.shape[1])


def _key(name: str, key: tuple[str, int]) -> tuple[str, int]:
    """diffusion_gemma stores the routers that encoder and decoder share once."""
    return ("decoder", key[1]) if name == "diffusion_gemma" else key


def _dense(chosen: np.ndarray, values: np.ndarray, num_experts: int) -> np.ndarray:
    dense = np.zeros((len(chosen), num_experts + 1))  # the last column takes what was dropped
    np.put_along_axis(dense, chosen.astype(np.int64), values.astype(np.float64), axis=1)
    return dense[:, :num_experts]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LOADED)
def test_every_layout_and_dtype_holds_the_same_routers(name: str, tmp_path: Path) -> None:
    """Hub names in float32, names in memory in shards, hub names in bfloat16."""
    hub = _loaded(model_of(name), tmp_path / "hub")
    shards = _loaded(
        model_of(name), tmp_path / "shards", save_original_format=False, max_shard_size="40KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    half = _loaded(_in_bfloat16(model_of(name)), tmp_path / "bfloat16")
    assert hub.keys() == shards.keys() == half.keys()
    for key, router in hub.items():
        assert router.rule == shards[key].rule == half[key].rule
        for part in ("weight", "logit_bias", "selection_bias", "gain", "expert_scale"):
            np.testing.assert_array_equal(getattr(shards[key], part), getattr(router, part), part)
        rounded = torch.from_numpy(router.weight.copy()).bfloat16().float().numpy()
        is_kept = np.array_equal(half[key].weight, router.weight)  # kept in float32 by the family
        assert is_kept or np.array_equal(half[key].weight, rounded)


def _in_bfloat16(model: Any) -> Any:
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    return rounded


@pytest.mark.parametrize("name", [name for name in NAMES if name in LISTED])
def test_routers_that_are_no_function_of_their_input_are_listed(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path)
    with pytest.raises(RouterError, match="cannot be measured: it"):
        load_routers(open_checkpoint(tmp_path))


def test_layers_that_look_experts_up_are_listed(tmp_path: Path) -> None:
    model_of("deepseek_v4").save_pretrained(tmp_path)
    found = load_routers(open_checkpoint(tmp_path))
    assert [s.reason.partition(" in '")[0] for s in found.skipped] == [
        "its experts are looked up by token id"
    ]
    assert len(found.routers) == found.num_expected


def test_every_family_of_transformers_is_held_against_it() -> None:
    types = {kind for name in NAMES for kind in _types(tiny_config(name).to_dict())}
    held = {family.name for kind in types if (family := family_of(kind)) is not None}
    known = {name for name in families() if load_family(name).source.startswith("transformers")}
    assert known - held == set()


def _types(config: Any) -> set[str]:
    """The type of a config and those of its parts, which are held against the whole."""
    if not isinstance(config, dict):
        return set()
    own = {config["model_type"]} if config.get("model_type") else set()
    return own.union(*map(_types, config.values()))
