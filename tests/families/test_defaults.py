"""A key that config.json does not have means what the configuration class of transformers says.

For every family, every key that its file reads is taken away. What moegeom then says is what it
says with the library's own default written out, or an error that names the key; where it changes
the rule, the model of the library is built without the key and chooses the same sets.
"""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks import measured_results, run_checks
from moegeom.core.errors import OUT_OF_RANGE, RouterError
from moegeom.core.router import RouterSet
from moegeom.pipeline import lint
from moegeom.router.facts import settings_of
from moegeom.router.family import (
    Choice,
    Setting,
    StackSpec,
    TensorName,
    families,
    family_of,
    load_family,
)
from moegeom.router.load import load_routers
from moegeom.router.rule import build_norm, build_rule, expected_layers
from moegeom.router.settings import Settings
from tests.by_day import by_day
from tests.families import tiny_models
from tests.families.observed import observe
from tests.families.test_families_against_transformers import assert_same_choices, by_place
from tests.families.tiny_models import BY_DAY, FAMILIES, saved, tiny_config

#: Enough experts for the group masks that the classes have by default.
EXPERTS = 32
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")

#: The tensors say these.
_OF_SHAPES = {"num_experts", "hidden_size", "num_shared", "layers.count", "mtp_from"}


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


#: Nobody changes these.
_config = cache(tiny_config)


@cache
def _cases(name: str) -> tuple[Case, ...]:
    family = family_of(_config(name).model_type)
    assert family is not None
    whole = _widened(_config(name).to_dict())
    return tuple(
        Case(name, f"{stack.name}{stack.slot}", what, reduced)
        for stack in family.stacks
        for what, keys in _taken(stack).items()
        if what not in _OF_SHAPES
        and (reduced := _without(whole, stack.config_roots or family.config_roots, keys))
    )


#: A composite around the language model of another family has that family's cases.
LOADED = [name for name in tiny_models.LOADED if not FAMILIES[name].language]


def _completed(case: Case) -> transformers.PreTrainedConfig | None:
    """The config as the library fills it in; None where it refuses to."""
    config_class = type(_config(case.name))
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
    family = family_of(case.reduced["model_type"])
    assert family is not None
    spec = next(s for s in family.stacks if f"{s.name}{s.slot}" == case.stack)
    return spec, spec.config_roots or family.config_roots


@pytest.mark.parametrize("name", [name for name in BY_DAY if name in LOADED])
def test_an_absent_key_means_what_the_library_takes_or_is_an_error(name):
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


def test_the_defaults_of_the_library_are_legal_and_usual():
    """And no range is wider than what they show: usual is at most ten thousand times beyond."""
    extremes: dict[Any, list[float]] = {}
    for name in families():
        for model_type in load_family(name).model_types:
            config = CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}
            for stack in load_family(name).stacks:
                own = Settings(config, stack.config_roots or load_family(name).config_roots)
                for one in filter(own.has, settings_of(stack, of_config=False)):
                    if isinstance(own.get(one)[1], list) or (limits := one.range) is None:
                        continue
                    number = (own.integer if limits.is_whole else own.number)(one)
                    assert number == one.zero or limits.is_usual(number), (model_type, one)
                    if not limits.is_whole and number != limits.off:
                        extremes.setdefault(limits, []).append(number)
    for limits, found in extremes.items():
        assert min(found) <= 1e4 * limits.usual[0] or limits.usual[0] == 0.0, limits
        assert max(found) >= 1e-4 * limits.usual[1] or limits.usual[1] == np.inf, limits


@pytest.mark.parametrize("name", BY_DAY)
def test_a_model_of_the_library_is_judged_in_full_and_has_no_number_out_of_its_range(name):
    verdict = run_checks(measured_results(lint(str(saved(name)))))
    assert verdict.open == ()
    assert OUT_OF_RANGE not in [finding.code for finding in verdict.findings]


def _changes_the_rule(case: Case) -> bool:
    """Whether the library's default is another than that of the tiny model, and no error here."""
    if _completed(case) is None:
        return False
    spec, roots = _spec(case)
    mine = _said(spec, case.reduced, roots)
    tiny = _said(spec, _widened(_config(case.name).to_dict()), roots)
    return not isinstance(mine, str) and mine[0] != tiny[0]


#: By the step whose default differs from that of the tiny model.
STEPS = {
    "groups": "deepseek_v3",
    "groups of another kind": "deepseek_v2__groups",
    "renormalising": "qwen2_moe",
    "a factor of the weights": "deepseek_v4",
    "a bias of the choice": "lfm2_moe__nobias",
    "a bias of the logits": "switch_transformers__bias_nocap",
    "capacity": "switch_transformers",
}


@pytest.mark.parametrize("name", by_day(LOADED, STEPS))
def test_the_library_chooses_the_same_sets_without_the_key(name, tmp_path, monkeypatch):
    for case in filter(_changes_the_rule, _cases(name)):
        _check_choices(case, tmp_path / case.what, monkeypatch)


def _check_choices(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "tiny_config", lambda _: _completed(case))
    model = tiny_models.build(case.name)
    monkeypatch.undo()
    try:
        observe(model, case.name)
    except (RuntimeError, TypeError) as error:
        # one group of which two are kept: the library does not run what its class makes
        assert case.what.startswith("groups"), error
        return
    model.save_pretrained(folder)
    spec, roots = _spec(case)
    file = folder / "config.json"
    file.write_text(
        json.dumps(_without(json.loads(file.read_text()), roots, _taken(spec)[case.what]))
    )
    assert_same_choices(by_place(load_routers(open_checkpoint(folder))), model, case.name)


def _changed(name: str, folder: Path, **changes: Any) -> RouterSet:
    """The routers of a family's checkpoint with another config; ``absent`` takes a key away."""
    shutil.copytree(saved(name), folder, dirs_exist_ok=True)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: v for key, v in config.items() if v != "absent"}))
    return load_routers(open_checkpoint(folder))


HALF = ({"router_dtype": "bfloat16"}, "computed in bfloat16 (router_dtype)")

#: Family -> the config, and words of the note of it.
NOTED = {
    "glm4_moe_lite": (
        {"routed_scaling_factor": "absent"},
        "the defaults of transformers 5.23.0: 'routed_scaling_factor' 1.8.",
    ),
    "deepseek_v3": (
        {"n_group": None, "topk_group": None},
        "'n_group' is null, no group mask is assumed",
    ),
    **dict.fromkeys(("switch_transformers", "nllb_moe"), HALF),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_assumed_of_a_config_stands_in_the_notes(name, tmp_path):
    config, words = NOTED[name]
    assert tiny_models.read(name).notes == ()
    routers = _changed(name, tmp_path, **config)
    (note,) = routers.notes
    assert words in note
    assert name != "deepseek_v3" or routers.routers[0].rule.groups is None


def test_groups_that_the_config_does_not_give_are_stated(tmp_path, monkeypatch):
    plain = tiny_config("deepseek_v3")
    wide = type(plain).from_dict(_widened(plain.to_dict()))
    monkeypatch.setattr(tiny_models, "tiny_config", lambda _: wide)
    tiny_models.build("deepseek_v3").save_pretrained(tmp_path / "wide")
    monkeypatch.setattr("tests.families.test_defaults.saved", lambda _: tmp_path / "wide")
    read = _changed("deepseek_v3", tmp_path, n_group="absent", topk_group="absent")
    groups = read.routers[0].rule.groups
    assert groups is not None
    assert (groups.num_groups, groups.num_kept) == (8, 4)
    (note,) = [note for note in read.notes if "assumed" in note]
    assert "the defaults of transformers 5.23.0: 'n_group' 8, 'topk_group' 4." in note


def test_routers_of_nllb_that_draw_lots_are_listed(tmp_path):
    assert len(_changed("nllb_moe", tmp_path, second_expert_policy="all").routers) == 4
    for policy in ("sampling", "random"):
        with pytest.raises(RouterError, match="its second expert is dr(awn|opped) at random"):
            _changed("nllb_moe", tmp_path, second_expert_policy=policy)


def test_phimoe_chooses_two_whatever_its_config_says(tmp_path):
    """The library goes twice through its experts; another number is refused."""
    config = tiny_config("phimoe")
    config.num_experts_per_tok = 3
    with tiny_models.repeatable("phimoe"):
        model = transformers.PhimoeForCausalLM(config).eval()
    assert {seen.chosen.shape[1] for seen in observe(model, "phimoe")} == {2}
    model.save_pretrained(tmp_path)
    with pytest.raises(RouterError, match="'num_experts_per_tok' is '3'; the rule of family"):
        load_routers(open_checkpoint(tmp_path))
