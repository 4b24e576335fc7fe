"""A key that config.json does not have means what the configuration class of transformers says.

For every family, every key that its file reads is taken away. What moegeom then says is what it
says with the library's own default written out, or an error that names the key; where it changes
the rule, the model of the library is built without the key and chooses the same sets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import RouterSet
from moegeom.router.family import Choice, Setting, StackSpec, TensorName
from moegeom.router.family_file import family_of
from moegeom.router.load import load_routers
from moegeom.router.rule import build_norm, build_rule, expected_layers
from moegeom.router.settings import Settings
from tests.families import tiny_models
from tests.families.by_day import some_by_day
from tests.families.observed import observe
from tests.families.test_families_against_transformers import OWN_NORM, routed
from tests.families.tiny_configs import tiny_config
from tests.families.tiny_families import FAMILIES
from tests.families.tiny_models import NAMES

#: Enough experts for the group masks that the classes have by default.
EXPERTS = 32
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")

#: The tensors say these.
_OF_SHAPES = {"num_experts", "hidden_size", "num_shared", "layers.count", "mtp_from"}

#: Families that are not loaded.
_LISTED = {"doge", "zaya", "zaya__skip"}


@dataclass(frozen=True)
class Case:
    """A key, with its aliases, of one stack of a family, and the config without it."""

    name: str
    stack: str
    what: str
    reduced: Mapping[str, Any]


def _widened(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: EXPERTS if key in _COUNTS and value == 12 else _widened(value)
        for key, value in config.items()
    }


def _keys(record: Any, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every setting of a stack that names keys, by its path."""
    for item in fields(record):
        value, here = getattr(record, item.name), f"{path}{item.name}"
        if isinstance(value, Setting | Choice) and value.keys:
            yield here, value.keys
        elif is_dataclass(value) and not isinstance(value, TensorName):
            yield from _keys(value, f"{here}.")
        elif item.name == "when":
            yield from ((f"{here}.{key}", (key,)) for key in value)


def _taken(stack: StackSpec) -> dict[str, tuple[str, ...]]:
    """What is taken away at a time: each key, and both that say how many groups there are."""
    each = dict(_keys(stack))
    both = each.get("groups.num_groups", ()) + each.get("groups.num_kept", ())
    return {**each, "groups": both} if both else each


def _without(
    config: Mapping[str, Any], roots: tuple[str, ...], keys: tuple[str, ...]
) -> dict[str, Any] | None:
    """The config without a key under all of its names; None where it has none of them."""
    reduced: dict[str, Any] = copy.deepcopy(dict(config))
    was_there = False
    for path in (
        [*filter(None, root.split(".")), *key.split(".")] for root in roots for key in keys
    ):
        table: Any = reduced
        for part in path[:-1]:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict) and path[-1] in table:
            del table[path[-1]]
            was_there = True
    return reduced if was_there else None


@cache
def _cases(name: str) -> tuple[Case, ...]:
    family = family_of(tiny_config(name).model_type)
    assert family is not None
    whole = _widened(tiny_config(name).to_dict())
    return tuple(
        Case(name, f"{stack.name}{stack.slot}", what, reduced)
        for stack in family.stacks
        for what, keys in _taken(stack).items()
        if what not in _OF_SHAPES
        and (reduced := _without(whole, stack.config_roots or family.config_roots, keys))
    )


#: A composite around the language model of another family has that family's cases.
LOADED = [name for name in NAMES if name not in _LISTED and not FAMILIES[name].language]


def _completed(case: Case) -> transformers.PreTrainedConfig | None:
    """The config as the library fills it in; None where it refuses to."""
    config_class = type(tiny_config(case.name))
    try:
        return config_class.from_dict(copy.deepcopy(dict(case.reduced)))
    except (ValueError, StrictDataclassError):
        return None


def _said(spec: StackSpec, config: Mapping[str, Any], roots: tuple[str, ...]) -> Any:
    """Rule, eps of the norm and layers of a stack by a config; the error where there is one."""
    settings = Settings(config, roots)
    try:
        layers = expected_layers(spec.layers, settings)
        settings = settings.at(2)
        rule = build_rule(spec, settings, EXPERTS, "router")
        norm = build_norm(spec.norm, settings, 64, "", "") if spec.norm else None
    except RouterError as error:
        return error.message
    return rule, norm, layers


def _spec(case: Case) -> tuple[StackSpec, tuple[str, ...]]:
    """The stack of a case, and where it reads its config."""
    family = family_of(case.reduced["model_type"])
    assert family is not None
    spec = next(s for s in family.stacks if f"{s.name}{s.slot}" == case.stack)
    return spec, spec.config_roots or family.config_roots


@pytest.mark.parametrize("name", LOADED)
def test_an_absent_key_means_what_the_library_takes_or_is_an_error(name: str) -> None:
    assert _cases(name)
    for case in _cases(name):
        completed = _completed(case)
        if completed is None:
            continue  # the library refuses the config: there is nothing to be equal to
        spec, roots = _spec(case)
        mine = _said(spec, case.reduced, roots)
        theirs = _said(spec, completed.to_dict(), roots)
        if isinstance(mine, str):
            assert "is missing or null" in mine, case.what
            continue
        assert mine[:2] == theirs[:2], case.what
        assert mine[2] in (None, theirs[2]), case.what


def _changes_the_rule(case: Case) -> bool:
    """Whether the library's default is another than that of the tiny model, and no error here."""
    if _completed(case) is None:
        return False
    spec, roots = _spec(case)
    mine = _said(spec, case.reduced, roots)
    tiny = _said(spec, _widened(tiny_config(case.name).to_dict()), roots)
    return not isinstance(mine, str) and mine[0] != tiny[0]


@pytest.mark.parametrize("name", some_by_day(LOADED))
def test_the_library_chooses_the_same_sets_without_the_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = [case for case in _cases(name) if _changes_the_rule(case)]
    for number, case in enumerate(changed):
        _check_choices(case, tmp_path / str(number), monkeypatch)


def _check_choices(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "tiny_config", lambda _: _completed(case))
    model = tiny_models.build(case.name)
    monkeypatch.undo()
    try:
        observed = observe(model, case.name)
    except (RuntimeError, TypeError) as error:
        # one group of which two are kept: the library does not run what its class makes
        assert case.what.startswith("groups"), error
        return
    model.save_pretrained(folder)
    spec, roots = _spec(case)
    file = folder / "config.json"
    saved = _without(json.loads(file.read_text()), roots, _taken(spec)[case.what])
    file.write_text(json.dumps(saved))
    found = load_routers(open_checkpoint(folder))
    routers = {(router.slot or router.stack, router.layer): router for router in found.routers}
    for seen in observed:
        router = routers.get((seen.stack, seen.layer))
        if router is None:
            continue  # looked up by token id, or shared with another stack
        mine, weights = routed(router, seen.inputs, case.name in OWN_NORM)
        is_tied = np.minimum(mine.margin, mine.group_margin) < 1e-5
        same = (np.sort(mine.chosen) == np.sort(seen.chosen)).all(axis=1)
        kept = (seen.chosen >= 0).all(axis=1)  # an expert that was full dropped none of them
        np.testing.assert_array_equal(same | is_tied | ~kept, True)
        order = np.argsort(mine.chosen), np.argsort(seen.chosen)
        np.testing.assert_allclose(
            np.take_along_axis(weights, order[0], 1)[same & kept],
            np.take_along_axis(seen.weights, order[1], 1)[same & kept],
            rtol=1e-5,
            atol=1e-6,
        )


def _changed(folder: Path, **changes: Any) -> RouterSet:
    """The routers of a checkpoint with another config; ``absent`` takes a key away."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: v for key, v in config.items() if v != "absent"}))
    return load_routers(open_checkpoint(folder))


def test_an_assumed_factor_stands_in_the_notes(tmp_path: Path) -> None:
    tiny_models.build("glm4_moe_lite").save_pretrained(tmp_path)
    assert _changed(tmp_path).notes == ()
    (note,) = _changed(tmp_path, routed_scaling_factor="absent").notes
    assert "the defaults of transformers 5.23.0: 'routed_scaling_factor' 1.8." in note


def test_groups_that_the_config_does_not_give_are_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = type(tiny_config("deepseek_v3")).from_dict(
        _widened(tiny_config("deepseek_v3").to_dict())
    )
    monkeypatch.setattr(tiny_models, "tiny_config", lambda _: wide)
    tiny_models.build("deepseek_v3").save_pretrained(tmp_path)
    found = _changed(tmp_path, n_group="absent", topk_group="absent")
    groups = found.routers[0].rule.groups
    assert groups is not None
    assert (groups.num_groups, groups.num_kept) == (8, 4)
    (note,) = [note for note in found.notes if "assumed" in note]
    assert "the defaults of transformers 5.23.0: 'n_group' 8, 'topk_group' 4." in note


def test_groups_that_the_config_calls_null_are_none_and_that_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.build("deepseek_v3").save_pretrained(tmp_path)
    found = _changed(tmp_path, n_group=None, topk_group=None)
    assert found.routers[0].rule.groups is None
    (note,) = [note for note in found.notes if "assumed" in note]
    assert "'n_group' is null, no group mask is assumed" in note


@pytest.mark.parametrize("policy", ["sampling", "random"])
def test_routers_of_nllb_that_draw_lots_are_listed(policy: str, tmp_path: Path) -> None:
    tiny_models.build("nllb_moe").save_pretrained(tmp_path)
    assert len(_changed(tmp_path, second_expert_policy="all").routers) == 4
    with pytest.raises(RouterError, match="its second expert is dr(awn|opped) at random"):
        _changed(tmp_path, second_expert_policy=policy)


def test_phimoe_chooses_two_whatever_its_config_says(tmp_path: Path) -> None:
    """The library goes twice through its experts; another number is refused."""
    config = tiny_config("phimoe")
    config.num_experts_per_tok = 3
    with tiny_models.repeatable("phimoe"):
        model = transformers.PhimoeForCausalLM(config).eval()
    assert {seen.chosen.shape[1] for seen in observe(model, "phimoe")} == {2}
    model.save_pretrained(tmp_path)
    with pytest.raises(RouterError, match="'num_experts_per_tok' is '3'; the rule of family"):
        load_routers(open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
def test_scores_in_half_precision_stand_in_the_notes(name: str, tmp_path: Path) -> None:
    tiny_models.build(name).save_pretrained(tmp_path)
    assert _changed(tmp_path).notes == ()
    (note,) = _changed(tmp_path, router_dtype="bfloat16").notes
    assert "computed in bfloat16 (router_dtype)" in note
