"""A checkpoint of a family that is not known: the right tensors are proposed, and none is loaded."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.router.asked_family import AskedFamily
from moegeom.router.load import load_routers
from moegeom.router.proposal import describe_candidates, propose_routers, suggested_options
from tests.families.test_families_against_transformers import LOADED, model_of

#: Share of the families whose routers must come first among the candidates.
LEAST_RIGHT = 0.9


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """By family: are the first candidates its routers, all of them, and nothing else?"""
    found = {}
    for name in LOADED:
        folder = tmp_path_factory.mktemp(name)
        model_of(name).save_pretrained(folder)
        store = open_checkpoint(folder)
        routers = load_routers(store)
        weights = {router.provenance.tensors[0] for router in routers.routers}
        weights |= {skipped.tensor for skipped in routers.skipped}
        proposed: set[str] = set()
        for candidate in propose_routers(store):
            if weights <= proposed:
                break
            proposed |= set(candidate.names)
        found[name] = proposed == weights
    return found


def test_the_first_candidates_are_the_routers_of_most_families(right: dict[str, bool]) -> None:
    wrong = [name for name, is_right in right.items() if not is_right]
    assert 1 - len(wrong) / len(right) >= LEAST_RIGHT, wrong


@pytest.mark.parametrize("name", LOADED[::6])
def test_an_unknown_model_type_is_never_loaded(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "never_seen"}))
    with pytest.raises(RouterError) as caught:
        load_routers(open_checkpoint(tmp_path))
    assert "Tensors that look like routers: " in caught.value.message
    assert "--router-pattern '" in caught.value.hint
    assert "--score NAME" in caught.value.hint


def test_matrices_that_are_no_routers_are_not_shown(tmp_path: Path) -> None:
    model_of("deepseek_v3").save_pretrained(tmp_path)
    shown = describe_candidates(open_checkpoint(tmp_path))
    assert shown.count("{i}") == 1
    assert "mlp.gate.weight" in shown


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "deepseek_v3", "gpt_oss", "minimax_m2"])
def test_the_proposed_options_load_every_router_with_its_biases(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path)
    store = open_checkpoint(tmp_path)
    known = load_routers(store)
    said = shlex.split(suggested_options(store))
    given = dict(zip(said[::2], said[1::2], strict=True))
    asked = AskedFamily(
        pattern=given["--router-pattern"],
        top_k=int(given["--top-k"]),
        score="sigmoid",
        selection_bias=given.get("--selection-bias"),
        logit_bias=given.get("--logit-bias"),
    )
    found = load_routers(store, asked=asked)
    assert [r.layer for r in found.routers] == [r.layer for r in known.routers]
    for mine, theirs in zip(found.routers, known.routers, strict=True):
        assert mine.rule.top_k == theirs.rule.top_k
        for part in ("weight", "selection_bias", "logit_bias"):
            np.testing.assert_equal(getattr(mine, part), getattr(theirs, part))
