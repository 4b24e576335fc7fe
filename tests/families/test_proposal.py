"""A checkpoint of a family that is not known: the right tensors are proposed, and none is loaded."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import MoeGeomError, RouterError
from moegeom.core.router import RouterSet
from moegeom.router.load import load_routers
from moegeom.router.recognise import Suggestion, describe_candidates, propose_routers, suggest
from moegeom.router.requested_family import RequestedFamily
from tests.by_day import by_day
from tests.families.tiny_models import BY_DAY, LOADED, read, saved

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
    return load_routers(store, asked=asked)


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
