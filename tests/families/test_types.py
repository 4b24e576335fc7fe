"""Every ``model_type`` of transformers with experts is known, alone and as a part of a whole; of
others the right tensors are proposed, and none is loaded. The tiny models of the tests are whole,
repeatable, and hard to get right.
"""

import copy
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import MoeGeomError, RouterError
from moegeom.core.router import RouterSet
from moegeom.router.family import families, family_of, load_family
from moegeom.router.load import load_routers
from moegeom.router.recognise import Suggestion, describe_candidates, propose_routers, suggest
from moegeom.router.requested_family import RequestedFamily
from tests.by_day import IS_NIGHT, by_day
from tests.families.observed import observe
from tests.families.tiny_models import (
    BY_DAY,
    FAMILIES,
    LOADED,
    NAMES,
    SELECTION_BIAS,
    model_of,
    read,
    routers_of,
    saved,
)

#: Types with experts that no router of tokens chooses.
NO_ROUTER = {"vitpose_backbone": "the expert is that of the data set of an image"}

#: Types that transformers reads under another name, and names of files without a type.
NOT_OF_TRANSFORMERS = {"kimi_k2", "gpt-oss-original", "params-moe", "params-moe-args",
                       "minimax_text_01", "minimax_m1"}  # fmt: skip

OF_TRANSFORMERS = [n for n in families() if load_family(n).source.startswith("transformers")]

LIBRARY = Path(transformers.__file__).parent


def _name_experts() -> set[str]:
    """Classes of configurations whose file names experts: the others are looked at by night."""
    files = [file.read_text("utf-8") for file in LIBRARY.glob("models/*/configuration_*.py")]
    return {
        kind for text in files if "expert" in text for kind in re.findall(r"class (\w+)\(", text)
    }


def test_every_type_with_experts_has_a_family():
    by_day = _name_experts()
    unknown = {
        kind
        for kind, name in list(CONFIG_MAPPING_NAMES.items())
        if (IS_NIGHT or name in by_day)
        and any("expert" in key for key in getattr(transformers, name).__dataclass_fields__)
        and family_of(kind) is None
    }
    assert unknown == NO_ROUTER.keys()


def test_types_sources_and_routers_of_families_are_there_in_transformers():
    types = {kind for name in OF_TRANSFORMERS for kind in load_family(name).model_types}
    assert types - CONFIG_MAPPING_NAMES.keys() == NOT_OF_TRANSFORMERS
    for name in OF_TRANSFORMERS:
        version, *classes = re.split(r", | (?=modeling_)", load_family(name).source)
        assert version == f"transformers {transformers.__version__}"
        for file, kind in (part.split(" ") for part in classes):
            (path,) = LIBRARY.glob(f"models/*/{file}")
            assert f"class {kind}(" in path.read_text("utf-8"), name
    for name in (name for name in BY_DAY if not FAMILIES[name].language):
        model = model_of(name)
        family = family_of(model.config.model_type)
        assert family is not None
        classes = {type(router.module).__name__ for router in routers_of(model, name)}
        assert classes <= set(re.findall(r"\.py (\w+)", family.source)), name


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


PARTS = {"of another family": "llava__mixtral", "of its own": "gemma4", "vision too": "dots3_note"}


@pytest.mark.parametrize("name", by_day(LOADED, PARTS))
def test_a_part_alone_has_the_routers_that_it_has_in_the_whole(name, tmp_path):
    for number, path in enumerate(_parts(name)):
        folder = tmp_path / str(number)
        model_of(name).get_submodule(path).save_pretrained(folder)
        part = load_routers(open_checkpoint(folder))
        assert part.num_expected in (None, len(part.routers))
        for router in part.routers:
            same = [r for r in read(name).routers if np.array_equal(r.weight, router.weight)]
            assert [r.rule for r in same] == [router.rule]
            np.testing.assert_array_equal(router.gain, same[0].gain)


#: Where composites keep the config of their language model.
TABLES = ["text_config", "llm_config", "language_config", "thinker_config.text_config"]


def _wrapped(config: dict[str, Any], path: str) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        config = {key: config, "hidden_size": 7, "num_experts_per_tok": 99}
    return config | {"model_type": "never_seen"}


def _in_table(name: str, path: str, folder: Path, **text: Any) -> TensorStore:
    """A checkpoint whose config is a table of one that nobody knows, with changes of text_config."""
    shutil.copytree(saved(name), folder, dirs_exist_ok=True)
    file = folder / "config.json"
    config = _wrapped(json.loads(file.read_text()), path)
    config.get("text_config", {}).update(text)
    file.write_text(json.dumps(config))
    return open_checkpoint(folder)


@pytest.mark.parametrize(
    ("path", "name"),
    by_day(
        [(path, name) for path in TABLES for name in LOADED],
        [*zip(TABLES, ("olmoe", "gpt_oss", "deepseek_v3", "jetmoe"), strict=True)],
    ),
)
def test_the_type_of_the_language_model_says_the_rule(path, name, tmp_path):
    bare, inside = read(name), load_routers(_in_table(name, path, tmp_path))
    assert [r.rule for r in inside.routers] == [r.rule for r in bare.routers]
    assert inside.fingerprint == bare.fingerprint
    assert inside.num_expected == bare.num_expected
    assert any("'never_seen' is not known: the rule is that of its " in n for n in inside.notes)


def test_a_named_family_reads_the_table_and_two_models_are_not_guessed_between(tmp_path):
    store = _in_table("qwen3_moe", "text_config", tmp_path, model_type=None)
    del store.config["num_experts_per_tok"]
    with pytest.raises(RouterError, match="'never_seen' is not known"):
        load_routers(store)
    asked = RequestedFamily(file=Path("qwen3_moe"))
    assert load_routers(store, requested_family=asked).routers[0].rule.top_k == 3
    store = _in_table("qwen3_moe", "text_config", tmp_path)
    store.config["llm_config"] = {"model_type": "mixtral"}
    with pytest.raises(RouterError, match="text_config of family qwen3_moe and llm_config of"):
        load_routers(store)


@pytest.mark.parametrize(
    ("kind", "family"),
    [("qwen3_vl_moe_next", "qwen3_vl_moe"), ("deepseek_v5", "deepseek_v"), ("mixtrall", "mixtral")],
)
def test_an_unknown_type_names_families_of_a_similar_name(kind, family, tmp_path):
    with pytest.raises(RouterError) as caught:
        load_routers(_in_table("qwen3_moe", "text_config", tmp_path, model_type=kind))
    assert f"(inside: {kind!r})" in caught.value.message
    assert f"--family {family}" in caught.value.hint


#: Share of the families whose routers must come first among the candidates.
LEAST_RIGHT = 0.9


def _is_right(name: str) -> bool:
    routers = read(name)
    weights = {router.provenance.tensors[0] for router in routers.routers}
    weights |= {skipped.tensor for skipped in routers.skipped}
    proposed: set[str] = set()
    for candidate in propose_routers(open_checkpoint(saved(name))):
        if weights <= proposed:
            break
        proposed |= set(candidate.names)
    return proposed == weights


def test_the_first_candidates_are_the_routers_of_most_families_and_alone():
    wrong = [name for name in BY_DAY if not _is_right(name)]
    assert 1 - len(wrong) / len(BY_DAY) >= LEAST_RIGHT, wrong
    text = describe_candidates(open_checkpoint(saved("deepseek_v3")))
    assert text.count("{i}") == 1
    assert "mlp.gate.weight" in text


def _unknown(name: str, folder: Path) -> tuple[TensorStore, RouterSet]:
    """The checkpoint of a family as if nobody knew the family, and its routers."""
    shutil.copytree(saved(name), folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(_nameless(json.loads(path.read_text()))))
    return open_checkpoint(folder), read(name)


def _nameless(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: "never_seen" if key == "model_type" else _nameless(value)
        for key, value in config.items()
    }


def _followed(found: Suggestion, store: TensorStore, known: RouterSet) -> RouterSet:
    words = shlex.split(found.options)
    renormalise = "--renormalise" in words
    words = [word for word in words if word != "--renormalise"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    rule = known.routers[0].rule
    bias = "--logit-bias" if rule.has_logit_bias else "--selection-bias"
    if "--BIAS" in given:
        given[bias] = given.pop("--BIAS")
    asked = RequestedFamily(
        pattern=given["--router-pattern"],
        top_k=rule.top_k if given["--top-k"] == "K" else int(given["--top-k"]),
        score=rule.score if given["--score"] == "NAME" else given["--score"],
        renormalise=renormalise,
        selection_bias=given.get("--selection-bias"),
        logit_bias=given.get("--logit-bias"),
    )
    return load_routers(store, requested_family=asked)


#: By what may differ: a word of the phrase that must name it.
NAMED = {
    "routers": "other tensors that look like routers",
    "weight": "rows of experts that always run|lies on its side|such as a scale",
    "top_k": "^K: ",
    "score": "^NAME: ",
    **dict.fromkeys(("has_selection_bias", "has_logit_bias"), "a bias|^--BIAS"),
    "groups": "^groups of experts",
    "logit_map": "^a map of the logits",
    "capacity": "the number of tokens that an expert takes",
    "source": "how weights are made|sparsemixer",
    "renormalise": r"\(--renormalise\)",
    "scale": "a scale that weights are multiplied by|a scale without a key",
    **dict.fromkeys(("epsilon", "floor"), "small constants"),
    "power": "how weights are made",
    "jitter": "sparsemixer",
    "norm": "the norm in front",
    **dict.fromkeys(("expert_scale", "projection"), "such as a scale"),
}


def _differences(mine: RouterSet, theirs: RouterSet) -> set[str]:
    by_tensor = {router.provenance.tensors[0]: router for router in mine.routers}
    found = set()
    for known in theirs.routers:
        router = by_tensor.get(known.provenance.tensors[0])
        if router is None:
            found.add("routers")
            continue
        pairs = ((router.rule, known.rule), (router.rule.weights, known.rule.weights))
        for own, other in pairs:
            found |= {
                field.name
                for field in dataclasses.fields(own)
                if field.name != "weights"
                and getattr(own, field.name) != getattr(other, field.name)
            }
        found |= {"norm"} if known.norm != router.norm else set()
        for part in ("weight", "expert_scale", "projection"):
            one, two = getattr(router, part), getattr(known, part)
            is_same = one is two or (one is not None and two is not None and one.shape == two.shape)
            found |= set() if is_same else {part}
    return found


#: By what a suggestion has to leave out.
LEFT_OUT = {
    "nothing but the weights": "olmoe",
    "groups and a scale": "deepseek_v3",
    "groups of another kind": "deepseek_v2__groups",
    "which of two biases": "deepseek_v4",
    "a bias of logits": "gpt_oss",
    "a scale of experts": "gemma4_text",
    "a capacity": "switch_transformers",
    "sparsemixer": "phimoe",
    "rows of shared experts": "inkling_text",
    "a map of logits": "laguna",
    "a matrix on its side": "granitemoe",
    "two routers in a layer": "jetmoe",
    "experts that copy": "longcat_flash",
    "a power": "dbrx",
    "a bias without groups": "minimax_m2",
}

#: Here the options load every router with its biases.
COMPLETE = {"olmoe", "mixtral", "deepseek_v3", "gpt_oss", "minimax_m2"}


@pytest.mark.parametrize("name", by_day(LOADED, LEFT_OUT))
def test_what_a_suggestion_leaves_out_is_named(name, tmp_path):
    """Never loaded by itself; followed to the letter, every difference stands in a phrase."""
    store, known = _unknown(name, tmp_path)
    with pytest.raises(RouterError) as caught:
        load_routers(store)
    assert "Tensors that look like routers: " in caught.value.message
    assert "--router-pattern '" in caught.value.hint
    assert "Not said by these options: " in caught.value.hint
    suggestion = suggest(store)
    assert suggestion is not None
    try:
        mine = _followed(suggestion, store, known)
    except MoeGeomError as refused:
        assert refused.hint and name not in COMPLETE  # nothing is loaded, and what to do is said
        return
    if name in COMPLETE:
        assert [r.layer for r in mine.routers] == [r.layer for r in known.routers]
        for one, other in zip(mine.routers, known.routers, strict=True):
            assert one.rule.top_k == other.rule.top_k
            for part in ("weight", "selection_bias", "logit_bias"):
                np.testing.assert_equal(getattr(one, part), getattr(other, part))
    for difference in _differences(mine, known):
        assert any(re.search(NAMED[difference], phrase) for phrase in suggestion.unsaid), difference


def test_what_is_not_there_is_not_named_and_a_bias_that_may_be_either_is_left_open(tmp_path):
    """Phrases about groups, scales, maps and capacity come from the config, not by heart."""
    found = suggest(_unknown("olmoe", tmp_path)[0])
    assert found is not None
    assert [phrase.partition(":")[0].partition(",")[0] for phrase in found.unsaid] == [
        "NAME",
        "how weights are made",
        "the norm in front",
    ]
    found = suggest(_unknown("deepseek_v4", tmp_path)[0])
    assert found is not None
    assert "--BIAS" in found.options
    assert "--logit-bias" not in found.options
    assert "--score sqrt_softplus" in found.options


# -------------------------------------------------------------------------------------- tiny models
#: Tokens whose set of experts changes when the selection biases are left out.
MOST = 0.5
#: One expert of 13 per token has fewer ways to change.
TOP_ONE = {"zaya": 0.1, "zaya__skip": 0.1}


#: With biases and groups, a table of tokens, two stacks and a capacity, a state, and nothing.
KINDS = ["deepseek_v3", "deepseek_v4", "switch_transformers", "zaya", "qwen2_moe"]


@pytest.fixture(scope="module", params=by_day(NAMES, KINDS))
def tiny(request):
    model = model_of(request.param)
    return SimpleNamespace(name=request.param, model=model, seen=observe(model, request.param))


def sets_of(router):
    return np.sort(router.chosen, axis=1)


def selection_biases(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for path, tensor in tensors if SELECTION_BIAS.search(path)]


def test_every_stack_has_routers_that_give_tokens_many_sets_of_distinct_experts(tiny):
    assert {router.stack for router in tiny.seen} == {s for s, _ in FAMILIES[tiny.name].routers}
    assert len({(router.stack, router.layer) for router in tiny.seen}) == len(tiny.seen)
    for router in tiny.seen:
        assert re.search(rf"\.{router.layer}\.", f".{router.module}")
        tokens, k = router.chosen.shape
        assert router.inputs.shape[0] == tokens
        assert router.weights.shape == (tokens, k)
        for values in (router.inputs, router.weights):
            assert values.dtype == np.float32 and np.isfinite(values).all()
        np.testing.assert_array_equal(router.weights[router.chosen == -1], 0)
        ordered = sets_of(router)
        assert ((ordered[:, 1:] > ordered[:, :-1]) | (ordered[:, 1:] == -1)).all()
        assert ordered.min() >= -1
        assert k < ordered.max() + 1 < 40
        assert len(np.unique(ordered, axis=0)) >= (5 if k == 1 else 10)


def test_selection_biases_left_out_change_most_choices(tiny):
    """In the first layer of a stack that has one: its input does not depend on other biases."""
    model = copy.deepcopy(tiny.model)
    if not (biases := selection_biases(model)):
        buffers = [b for r in routers_of(model, tiny.name) for b, _ in r.module.named_buffers()]
        assert [buffer for buffer in buffers if "bias" in buffer] == []  # none of another name
        return
    for bias in biases:
        bias.data.zero_()
    first = {}
    for with_them, without in zip(tiny.seen, observe(model, tiny.name), strict=True):
        if with_them.token_ids is None:  # a table decides by token, without a bias
            first.setdefault(with_them.stack, (with_them, without))
    for with_them, without in first.values():
        changed = (sets_of(with_them) != sets_of(without)).any(axis=1).mean()
        assert changed > TOP_ONE.get(tiny.name, MOST)


def test_variants_drop_tokens_or_skip_experts_where_they_should():
    for value, expected in (
        (-1, {"nllb_moe__bias_cap": True, "switch_transformers": True, "nllb_moe": False}),
        (-1, {"switch_transformers__bias_nocap": False}),
        (12, {"zaya": False, "zaya__skip": True}),
    ):
        for name, is_there in expected.items():
            routers = observe(model_of(name), name)
            assert any((router.chosen == value).any() for router in routers) is is_there, name
