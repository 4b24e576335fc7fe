"""Every ``model_type`` of transformers with experts is known, alone and as a part of a whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.router.family_file import families, family_of, load_family
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily
from tests.families.by_day import some_by_day
from tests.families.test_families_against_transformers import LOADED, model_of
from tests.families.tiny_families import FAMILIES
from tests.families.tiny_models import NAMES, routers_of

#: Types with experts that no router of tokens chooses.
NO_ROUTER = {"vitpose_backbone": "the expert is that of the data set of an image"}

#: Types that transformers reads under another name, and names of files without a type.
NOT_OF_TRANSFORMERS = {"kimi_k2", "gpt-oss-original", "params-moe", "params-moe-args"}

OF_TRANSFORMERS = [n for n in families() if load_family(n).source.startswith("transformers")]

#: Words of a config that count experts.
_EXPERTS = re.compile(r"expert")


def test_every_type_with_experts_has_a_family() -> None:
    unknown = {
        kind
        for kind, name in list(CONFIG_MAPPING_NAMES.items())
        if any(map(_EXPERTS.search, getattr(transformers, name).__dataclass_fields__))
        and family_of(kind) is None
    }
    assert unknown == NO_ROUTER.keys()


def test_every_type_of_a_family_is_one_of_transformers() -> None:
    types = {kind for name in OF_TRANSFORMERS for kind in load_family(name).model_types}
    assert types - CONFIG_MAPPING_NAMES.keys() == NOT_OF_TRANSFORMERS


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_source_of_a_family_is_there(name: str) -> None:
    source = load_family(name).source
    version, *said = re.split(r", | (?=modeling_)", source)
    assert version == f"transformers {transformers.__version__}"
    for file, kind in (part.split(" ") for part in said):
        (found,) = Path(transformers.__file__).parent.glob(f"models/*/{file}")
        assert f"class {kind}(" in found.read_text("utf-8")


@pytest.mark.parametrize(
    "name", some_by_day([name for name in NAMES if not FAMILIES[name].language])
)
def test_the_source_names_the_routers_of_the_model(name: str) -> None:
    model = model_of(name)
    family = family_of(model.config.model_type)
    assert family is not None
    seen = {type(router.module).__name__ for router in routers_of(model, name)}
    assert seen <= set(re.findall(r"\.py (\w+)", family.source))


def _parts(name: str) -> list[str]:
    """Language models inside of a model that are models of a type of their own."""
    model = model_of(name)
    found: dict[str, str] = {}
    for path, part in model.named_modules():
        if isinstance(part, transformers.PreTrainedModel) and path:
            kind = part.config.model_type
            if kind != model.config.model_type and any(
                router.name.startswith(f"{path}.") for router in routers_of(model, name)
            ):
                found.setdefault(kind, path)
    return list(found.values())


@pytest.mark.parametrize("name", some_by_day(LOADED))
def test_a_part_alone_has_the_routers_that_it_has_in_the_whole(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "whole")
    whole = load_routers(open_checkpoint(tmp_path / "whole"))
    for number, path in enumerate(_parts(name)):
        folder = tmp_path / str(number)
        model.get_submodule(path).save_pretrained(folder)
        part = load_routers(open_checkpoint(folder))
        assert part.num_expected in (None, len(part.routers))
        for router in part.routers:
            same = [r for r in whole.routers if np.array_equal(r.weight, router.weight)]
            assert [r.rule for r in same] == [router.rule]
            np.testing.assert_array_equal(router.gain, same[0].gain)


#: Where composites keep the config of their language model.
TABLES = ["text_config", "llm_config", "language_config", "thinker_config.text_config"]


def _wrapped(config: dict[str, Any], path: str) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        config = {key: config, "hidden_size": 7, "num_experts_per_tok": 99}
    return config | {"model_type": "never_seen"}


def _in_table(name: str, path: str, folder: Path) -> Path:
    model_of(name).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(_wrapped(json.loads(file.read_text()), path)))
    return folder


@pytest.mark.parametrize("path", TABLES)
@pytest.mark.parametrize("name", some_by_day(LOADED))
def test_the_type_of_the_language_model_says_the_rule(name: str, path: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path)
    bare = load_routers(open_checkpoint(tmp_path))
    found = load_routers(open_checkpoint(_in_table(name, path, tmp_path)))
    assert [r.rule for r in found.routers] == [r.rule for r in bare.routers]
    assert found.fingerprint == bare.fingerprint
    assert found.num_expected == bare.num_expected
    assert any("'never_seen' is not known: the rule is that of its " in n for n in found.notes)


def test_a_named_family_reads_the_table_of_the_language_model(tmp_path: Path) -> None:
    file = _in_table("qwen3_moe", "text_config", tmp_path) / "config.json"
    config = json.loads(file.read_text())
    del config["text_config"]["model_type"], config["num_experts_per_tok"]
    file.write_text(json.dumps(config))
    with pytest.raises(RouterError, match="'never_seen' is not known"):
        load_routers(open_checkpoint(tmp_path))
    asked = RequestedFamily(file=Path("qwen3_moe"))
    assert load_routers(open_checkpoint(tmp_path), asked=asked).routers[0].rule.top_k == 3


@pytest.mark.parametrize(
    ("kind", "family"),
    [("qwen3_vl_moe_next", "qwen3_vl_moe"), ("deepseek_v5", "deepseek_v"), ("mixtrall", "mixtral")],
)
def test_an_unknown_type_names_families_of_a_similar_name(
    kind: str, family: str, tmp_path: Path
) -> None:
    file = _in_table("qwen3_moe", "text_config", tmp_path) / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["model_type"] = kind
    file.write_text(json.dumps(config))
    with pytest.raises(RouterError) as caught:
        load_routers(open_checkpoint(tmp_path))
    assert f"(inside: {kind!r})" in caught.value.message
    assert f"--family {family}" in caught.value.hint


def test_two_language_models_are_not_guessed_between(tmp_path: Path) -> None:
    file = _in_table("qwen3_moe", "text_config", tmp_path) / "config.json"
    config = json.loads(file.read_text())
    config["llm_config"] = {"model_type": "mixtral"}
    file.write_text(json.dumps(config))
    with pytest.raises(RouterError, match="text_config of family qwen3_moe and llm_config of"):
        load_routers(open_checkpoint(tmp_path))
    shutil.rmtree(tmp_path)
