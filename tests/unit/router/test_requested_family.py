"""What somebody says about an unknown architecture is taken at its word, or refused with the gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.core.errors import UsageError
from moegeom.router.requested_family import RequestedFamily
from tests.unit.router.conftest import loaded, refusal

_PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"


_ASKED: dict[str, Any] = {"pattern": _PATTERN, "top_k": 2, "score": "softmax"}
_NAME = "model.layers.0.mlp.gate.weight"


def _refused(*names: str, **asked: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        RequestedFamily(**asked).family(names or (_NAME,))
    return caught.value


def test_nothing_asked_for_is_no_family():
    assert RequestedFamily().family(["a"]) is None


def test_a_pattern_or_a_name_loads_what_the_known_family_loads(make_olmoe):
    known = loaded(make_olmoe())
    folder = make_olmoe(config={"model_type": "mystery"})
    described = loaded(folder, **_ASKED)
    assert [r.name for r in described.routers] == [r.name for r in known.routers]
    for mine, theirs in zip(described.routers, known.routers, strict=True):
        np.testing.assert_array_equal(mine.weight, theirs.weight)
        assert mine.rule.top_k == theirs.rule.top_k
        assert mine.gain is None
    assert described.family_text.endswith("as described by options")
    named = loaded(folder, file=Path("olmoe"))
    assert (named.family, named.fingerprint) == ("olmoe", known.fingerprint)


_ALONE = "--family FILE says everything: leave out the other options."
_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"pattern": _PATTERN}, "--top-k and --score missing: "),
    ({"pattern": _PATTERN, "top_k": 2}, "--score missing: "),
    ({"top_k": 2, "score": "softmax"}, "--router-pattern missing: "),
    ({"renormalise": True}, "--router-pattern and --top-k and --score missing: "),
    (_ASKED | {"pattern": "gate"}, "--router-pattern 'gate': fits none of 1 tensor names."),
    (_ASKED | {"pattern": "("}, "--router-pattern '(': is no regular expression"),
    (
        _ASKED | {"score": "sparsemax"},
        "--score sparsemax: expected one of identity, relu, sigmoid, softmax, sqrt_softplus.",
    ),
    ({"file": Path("mine.toml"), "top_k": 2}, _ALONE),
    ({"file": Path("mine.toml"), "renormalise": True}, _ALONE),
]


@pytest.mark.parametrize(("asked", "beginning"), _REFUSALS)
def test_what_is_not_given_is_not_guessed_and_what_is_is_not_dropped(asked, beginning):
    assert _refused(**asked).message.startswith(beginning)


def test_a_layer_that_is_not_clear_is_asked_for():
    name = "block.3.layer.1.router.weight"
    message = _refused(name, **(_ASKED | {"pattern": r"block\..*"})).message
    assert message.endswith(f"which number of '{name}' is the layer is not clear.")
    family = RequestedFamily(**(_ASKED | {"pattern": r"block\.(\d+)\.layer.*"})).family([name])
    assert family is not None
    assert family.stacks[0].weight[0].name == "block.{layer}.layer.1.router.weight"


def test_long_names_are_not_tried():
    assert "fits none" in _refused("a" * 100_000, **(_ASKED | {"pattern": r"(a+)+b"})).message


def test_a_file_of_ones_own_says_everything(make_olmoe, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "text = 'softmax, top {top_k} of {num_experts}'\n"
        "[[stacks]]\nname = 'text'\nweight = ['layers.{layer}.mlp.gate.weight']\n"
        "top_k = 1\nscore = 'softmax'\nweights.source = 'scores'\n"
    )
    routers = loaded(make_olmoe(config={"model_type": "mystery"}), file=file)
    assert (routers.family, routers.routers[0].rule.top_k) == ("mine", 1)


_FILES = {
    "mine.toml: key 'stacks' is missing.": b"text = 3",
    "mine.toml: unknown key 'colour'.": b"colour = 'red'",
    "mine.toml: is not TOML": b"[[stacks]",
    "mine.toml: is not UTF-8 at byte 0": b"\xff",
    "config.json: is not TOML": b"{}",
}


def test_a_file_that_is_not_understood_is_refused_as_it_is_called(tmp_path):
    for beginning, raw in _FILES.items():
        file = tmp_path / beginning.partition(":")[0]
        file.write_bytes(raw)
        assert _refused(file=file).message.startswith(beginning)
    for file in (tmp_path / "none.toml", tmp_path):
        assert "cannot be read" in _refused(file=file).message


def test_more_experts_than_there_are_is_an_error_of_the_option(make_olmoe):
    error = refusal(make_olmoe(), kind=UsageError, **(_ASKED | {"top_k": 99}))
    assert error.message == (
        "router text/0: 99 experts are to be chosen, as --top-k or the family file says; "
        "the router has 6."
    )


def test_what_a_pattern_leaves_out_is_noted_and_need_not_be_whole(make_olmoe):
    asked = _ASKED | {"pattern": r"model\.layers\.([12])\..*gate\.weight"}
    gate = "model.layers.0.mlp.gate."
    for change in (
        {},
        {f"{gate}weight": None, f"{gate}weight_packed": torch.ones(3)},
        {f"{gate}scale": torch.ones(3)},
    ):
        routers = loaded(make_olmoe(change), **asked)
        assert [router.layer for router in routers.routers] == [1, 2]
        if not change:
            (note,) = routers.notes
            assert note == (f"not loaded: 1 tensor like '{gate}weight', which may be routers too")
    others = {f"model.vision.blocks.{i}.mlp.gate.weight": torch.rand(6, 16) for i in range(2)}
    assert loaded(make_olmoe(), **_ASKED).notes == ()
    (note,) = loaded(make_olmoe(others), **_ASKED).notes
    assert note.startswith("not loaded: 2 tensors like 'model.vision.blocks.0.mlp.gate.weight'")


def test_a_bias_is_used_in_every_layer_or_in_none(make_olmoe):
    folder = make_olmoe({f"model.layers.{i}.mlp.gate.bias": torch.ones(6) for i in range(3)})
    pattern = r"model\.layers\.([01])\.mlp\.gate\.bias"
    assert refusal(folder, kind=UsageError, **_ASKED, logit_bias=pattern).message == (
        f"--logit-bias '{pattern}': does not fit 'model.layers.2.mlp.gate.bias', the bias of a "
        "router that is loaded."
    )


def test_two_routers_of_one_layer_are_an_error_of_the_pattern():
    names = [f"{end}.block.{i}.router.weight" for end in ("encoder", "decoder") for i in (1, 3)]
    error = _refused(*names, **(_ASKED | {"pattern": r".*block\.([0-9]+)\.router\.weight"}))
    assert error.message == (
        "--router-pattern: fits 'encoder.block.1.router.weight' and "
        "'decoder.block.1.router.weight', two routers of layer 1."
    )
    assert error.exit_code == 2


def test_a_number_of_experts_that_the_config_does_not_know_is_noted(make_olmoe):
    asked = _ASKED | {"pattern": r"model\.layers\.([0-9]+)\.self_attn\.o_proj\.weight"}
    for width, hint in ((16, ""), (6, " (stored transposed?)")):
        odd = {f"model.layers.{i}.self_attn.o_proj.weight": torch.rand(16, width) for i in range(3)}
        assert loaded(make_olmoe(odd), **asked).notes[0] == (
            f"text/0: 16 rows count as experts, where config.json says 6{hint}"
        )
