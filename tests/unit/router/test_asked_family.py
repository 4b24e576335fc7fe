"""What somebody says about an unknown architecture is taken at its word, or refused with the gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import UsageError
from moegeom.router.asked_family import AskedFamily
from moegeom.router.load import load_routers

_PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"


def _refusal(asked: AskedFamily, names: Any = ("model.layers.0.mlp.gate.weight",)) -> UsageError:
    with pytest.raises(UsageError) as caught:
        asked.family(names)
    return caught.value


def test_nothing_said_is_no_family() -> None:
    assert AskedFamily().family(["a"]) is None


def test_a_pattern_loads_what_the_known_family_loads(make_olmoe: Any) -> None:
    known = load_routers(open_checkpoint(make_olmoe()))
    folder = make_olmoe(config={"model_type": "mystery"})
    asked = AskedFamily(pattern=_PATTERN, top_k=known.routers[0].rule.top_k, score="softmax")
    found = load_routers(open_checkpoint(folder), asked=asked)
    assert [r.name for r in found.routers] == [r.name for r in known.routers]
    for mine, theirs in zip(found.routers, known.routers, strict=True):
        np.testing.assert_array_equal(mine.weight, theirs.weight)
        assert mine.rule.top_k == theirs.rule.top_k
        assert mine.gain is None
    assert found.family_text.endswith("as described by options")


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        (AskedFamily(pattern=_PATTERN), "--top-k and --score"),
        (AskedFamily(pattern=_PATTERN, top_k=2), "--score"),
        (AskedFamily(top_k=2, score="softmax"), "--router-pattern"),
    ],
)
def test_what_is_not_said_is_not_guessed(asked: AskedFamily, missing: str) -> None:
    assert _refusal(asked).message.startswith(f"{missing} missing: ")


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    asked = AskedFamily(pattern="gate", top_k=1, score="softmax")
    assert _refusal(asked).message == "--router-pattern 'gate': fits none of 1 tensor names."


def test_a_pattern_that_is_none_is_refused() -> None:
    asked = AskedFamily(pattern="(", top_k=1, score="softmax")
    assert "is no regular expression" in _refusal(asked).message


def test_an_unknown_score_is_refused() -> None:
    asked = AskedFamily(pattern=_PATTERN, top_k=1, score="sparsemax")
    assert _refusal(asked).message == (
        "--score sparsemax: expected one of identity, sigmoid, softmax, sqrt_softplus."
    )


def test_a_layer_that_is_not_clear_is_asked_for() -> None:
    asked = AskedFamily(pattern=r"block\..*", top_k=1, score="softmax")
    message = _refusal(asked, ["block.3.layer.1.router.weight"]).message
    assert message.endswith(
        "which number of 'block.3.layer.1.router.weight' is the layer is not clear."
    )
    grouped = AskedFamily(pattern=r"block\.(\d+)\.layer.*", top_k=1, score="softmax")
    family = grouped.family(["block.3.layer.1.router.weight"])
    assert family is not None
    assert family.stacks[0].weight[0].name == "block.{layer}.layer.1.router.weight"


def test_long_names_are_not_tried() -> None:
    asked = AskedFamily(pattern=r"(a+)+b", top_k=1, score="softmax")
    assert "fits none" in _refusal(asked, ["a" * 100_000]).message


def test_a_file_of_ones_own_says_everything(make_olmoe: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "text = 'softmax over {num_experts}, keep {top_k}'\n"
        "[[stacks]]\nname = 'text'\nweight = ['layers.{layer}.mlp.gate.weight']\n"
        "top_k = 1\nscore = 'softmax'\nweights.source = 'scores'\n"
    )
    folder = make_olmoe(config={"model_type": "mystery"})
    found = load_routers(open_checkpoint(folder), asked=AskedFamily(file=file))
    assert (found.family, found.routers[0].rule.top_k) == ("mine", 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("text = 3", "mine.toml: key 'stacks' is missing."),
        ("colour = 'red'", "mine.toml: unknown key 'colour'."),
        ("[[stacks]", "mine.toml: is not TOML"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert _refusal(AskedFamily(file=file)).message.startswith(sentence)


def test_a_file_and_a_pattern_contradict_each_other(tmp_path: Path) -> None:
    asked = AskedFamily(file=tmp_path / "mine.toml", top_k=2)
    assert _refusal(asked).message == "--family FILE says everything: leave out the other options."


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in _refusal(AskedFamily(file=tmp_path / "none.toml")).message
    assert "cannot be read" in _refusal(AskedFamily(file=tmp_path)).message
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    assert "is not UTF-8 at byte 0" in _refusal(AskedFamily(file=tmp_path / "bad.toml")).message
