"""Blocks behind routers, over every family that transformers builds: whole, and without a part."""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.router.expert_names import LEAVES
from moegeom.router.family import family_of
from moegeom.router.inventory import is_of_experts
from moegeom.router.load import load_routers
from tests.by_day import by_day
from tests.families.tiny_models import BY_DAY, LOADED, saved

Blocks = dict[str, Any]


class Without:
    """A store whose files lack some tensors, and the second half of others."""

    def __init__(
        self, store: TensorStore, absent: Callable[[str], Any], halved: Callable[[str], Any]
    ) -> None:
        self.store, self.halved = store, halved
        self.there = [name for name in store.names() if not absent(name)]

    def names(self) -> Collection[str]:
        return dict.fromkeys(self.there).keys()

    def info(self, name: str) -> TensorInfo:
        info = self.store.info(name)
        shape = (info.shape[0] // 2, *info.shape[1:])
        return replace(info, shape=shape) if self.halved(name) else info

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@cache
def whole(family: str) -> Blocks:
    return blocks(family, lambda name: False)


def blocks(
    family: str, absent: Callable[[str], Any], halved: Callable[[str], Any] = lambda name: False
) -> Blocks:
    store: Any = Without(open_checkpoint(saved(family)), absent, halved)
    return load_routers(store).claims["blocks"]


def kinds(of: Blocks) -> set[tuple[str, str]]:
    return {(flaw["kind"], flaw["experts"]) for flaw in of["flaws"]}


def numbered(family: str) -> tuple[str, int]:
    """A module of experts, and how many are numbered: none where all are one tensor."""
    modules = [item for part in whole(family)["parts"] for item in part["modules"].items()]
    module, experts = next(item for item in modules if is_of_experts(item[0]))
    return module, 1 + int(experts.rpartition("-")[2]) if experts else 0


def of_expert(module: str, numbers: Collection[int]) -> Callable[[str], Any]:
    """Tensors of any matrix of these experts."""
    stem = re.escape(module.rpartition(".")[0]).replace(r"\{\}", "([0-9]+)")
    return lambda name: (hit := re.search(rf"\b{stem}\b", name)) and int(hit[1]) in numbers


def has_gate(family: str) -> bool:
    """Whether the family file says that shared experts are gated."""
    record = family_of(family.rpartition("__")[0] or family)
    return record is not None and any(stack.experts.has_shared_gate for stack in record.stacks)


FAMILIES = by_day(LOADED, BY_DAY)

#: All experts one below the other: how many rows one has is said by no name and no first axis.
FLAT = {"dbrx"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_has_no_flaw(family):
    of = whole(family)
    assert of["flaws"] == []
    assert of["has_experts"]
    modules = {module for part in of["parts"] for module in part["modules"]}
    assert has_gate(family) == any(module.endswith("shared_expert_gate") for module in modules)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FLAT])
def test_experts_that_are_not_in_the_file_are_counted(family):
    module, number = numbered(family)
    if not number:
        flaws = blocks(family, lambda name: False, re.compile(rf"\b{module}\b").search)["flaws"]
        assert flaws and all(2 * flaw["count"] == flaw["num_experts"] for flaw in flaws)
        assert {(flaw["kind"], flaw["module"]) for flaw in flaws} == {("missing", module)}
        return
    half = range(number // 2, number)
    flaws = blocks(family, of_expert(module, half))["flaws"]
    missing = [flaw for flaw in flaws if flaw["kind"] == "missing"]
    # experts that copy their input may have tensors, and need none
    assert missing and all(flaw["experts"].startswith(f"{half.start}-") for flaw in missing)
    assert kinds(blocks(family, of_expert(module, {1}))) == {("missing", "1")}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FLAT])
def test_a_matrix_of_experts_that_is_lost_is_named(family):
    module, number = numbered(family)
    own = re.escape(module).replace(r"\{\}", "2")
    flaws = blocks(family, lambda name: re.search(rf"\b{own}\b", name))["flaws"]
    lost = ("lost", module, "2" if number else "")
    assert {(f["kind"], f["module"], f["experts"]) for f in flaws} == {lost}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_without", ["one", "half", "all but one"])
def test_a_matrix_is_missed_however_many_experts_lack_it_in_one_layer_or_in_all(
    family, num_without
):
    module, number = numbered(family)
    if not number:
        pytest.skip("all experts in one tensor")
    without = range({"one": number - 1, "half": number // 2, "all but one": 1}[num_without], number)
    own = re.compile(rf"\b{re.escape(module)}\b".replace(r"\{\}", "([0-9]+)"))
    routers = {router for part in whole(family)["parts"] for router in part["routers"]}
    for layers in (routers, {min(routers)}):
        starts = "|".join({router.split("/")[1] for router in layers})
        layer = re.compile(rf"[^0-9]*\.(?:{starts})\.")

        def absent(name: str, layer: re.Pattern[str] = layer) -> bool:
            return bool((hit := own.search(name)) and int(hit[1]) in without and layer.match(name))

        flaws = [f for f in blocks(family, absent)["flaws"] if f["module"] == module]
        assert flaws and all(flaw["kind"] == "lost" for flaw in flaws)
        assert all(flaw["experts"].startswith(f"{without.start}") for flaw in flaws)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_that_every_layer_lost_is_known_from_the_others(family):
    modules = {module for part in whole(family)["parts"] for module in part["modules"]}
    # of experts that are spelled in a way of their own nothing is known
    own = {m.rpartition(".")[0] for m in modules if m.endswith("linear_gate")}
    for module in sorted(modules):
        if module.rpartition(".")[2] in LEAVES and module.rpartition(".")[0] not in own:
            name = re.escape(module).replace(r"\{\}", "[0-9]+")
            flaws = blocks(family, re.compile(rf"\.[0-9]+\.{name}(?:[._][^.]*)?$").search)["flaws"]
            folders = {(flaw["kind"], flaw["module"].rpartition(".")[0]) for flaw in flaws}
            # another spelling of the same matrix may fit what is there
            assert folders == {("lost", module.rpartition(".")[0])}, module


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("layers", ["0", "[0-9]+"])
def test_a_bias_of_experts_that_the_family_has_is_missed_in_one_layer_and_in_all(leaf, layers):
    pattern = re.compile(rf"layers\.{layers}\..*experts\.{leaf}_bias$")
    flaws = blocks("gpt_oss", pattern.search)["flaws"]
    assert {(f["kind"], f["module"]) for f in flaws} == {("lost", f"mlp.experts.{leaf}_bias")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_that_one_layer_lost_is_named_there(family):
    parts = [part for part in whole(family)["parts"] if len(part["routers"]) >= 3]
    if not parts:
        pytest.skip("fewer than three layers that hold the same")
    routers, modules = parts[0]["routers"], parts[0]["modules"]
    layer = routers[-1].split("/")[1]
    for module in modules:
        own = re.escape(module).replace(r"\{\}", "[0-9]+")
        pattern = re.compile(rf"\b{layer}\.{own}(?:[._][^.]*)?$")
        flaws = blocks(family, pattern.search)["flaws"]
        where = {name for flaw in flaws for name in flaw["routers"]}
        assert {name for name in routers if name.split("/")[1] == layer} <= where, module
        assert {name.split("/")[1] for name in where} == {layer}, module
        assert any(flaw["module"] == module or flaw["kind"] == "none" for flaw in flaws) or (
            "shared" in module and flaws[0]["module"] == "shared experts"
        )


@pytest.mark.parametrize("family", [name for name in FAMILIES if has_gate(name)])
def test_a_gate_that_every_layer_lost_is_known_from_the_family(family):
    flaws = blocks(family, lambda name: "shared_expert_gate" in name)["flaws"]
    assert {(flaw["kind"], flaw["module"]) for flaw in flaws} == {("lost", "shared_expert_gate")}
