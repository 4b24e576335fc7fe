"""What somebody says about an unknown architecture is taken at its word, or refused with the gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import UsageError
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily

_PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"


def _refusal(
    asked: RequestedFamily, names: Any = ("model.layers.0.mlp.gate.weight",)
) -> UsageError:
    with pytest.raises(UsageError) as caught:
        asked.family(names)
    return caught.value


def test_nothing_said_is_no_family():
    assert RequestedFamily().family(["a"]) is None


def test_a_pattern_loads_what_the_known_family_loads(make_olmoe):
    known = load_routers(open_checkpoint(make_olmoe()))
    folder = make_olmoe(config={"model_type": "mystery"})
    asked = RequestedFamily(pattern=_PATTERN, top_k=known.routers[0].rule.top_k, score="softmax")
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
        (RequestedFamily(pattern=_PATTERN), "--top-k and --score"),
        (RequestedFamily(pattern=_PATTERN, top_k=2), "--score"),
        (RequestedFamily(top_k=2, score="softmax"), "--router-pattern"),
    ],
)
def test_what_is_not_said_is_not_guessed(asked, missing):
    assert _refusal(asked).message.startswith(f"{missing} missing: ")


def test_a_pattern_that_fits_nothing_is_refused():
    asked = RequestedFamily(pattern="gate", top_k=1, score="softmax")
    assert _refusal(asked).message == "--router-pattern 'gate': fits none of 1 tensor names."


def test_a_pattern_that_is_none_is_refused():
    asked = RequestedFamily(pattern="(", top_k=1, score="softmax")
    assert "is no regular expression" in _refusal(asked).message


def test_an_unknown_score_is_refused():
    asked = RequestedFamily(pattern=_PATTERN, top_k=1, score="sparsemax")
    assert _refusal(asked).message == (
        "--score sparsemax: expected one of identity, relu, sigmoid, softmax, sqrt_softplus."
    )


def test_a_layer_that_is_not_clear_is_asked_for():
    asked = RequestedFamily(pattern=r"block\..*", top_k=1, score="softmax")
    message = _refusal(asked, ["block.3.layer.1.router.weight"]).message
    assert message.endswith(
        "which number of 'block.3.layer.1.router.weight' is the layer is not clear."
    )
    grouped = RequestedFamily(pattern=r"block\.(\d+)\.layer.*", top_k=1, score="softmax")
    family = grouped.family(["block.3.layer.1.router.weight"])
    assert family is not None
    assert family.stacks[0].weight[0].name == "block.{layer}.layer.1.router.weight"


def test_long_names_are_not_tried():
    asked = RequestedFamily(pattern=r"(a+)+b", top_k=1, score="softmax")
    assert "fits none" in _refusal(asked, ["a" * 100_000]).message


def test_a_file_of_ones_own_says_everything(make_olmoe, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "text = 'softmax, top {top_k} of {num_experts}'\n"
        "[[stacks]]\nname = 'text'\nweight = ['layers.{layer}.mlp.gate.weight']\n"
        "top_k = 1\nscore = 'softmax'\nweights.source = 'scores'\n"
    )
    folder = make_olmoe(config={"model_type": "mystery"})
    found = load_routers(open_checkpoint(folder), asked=RequestedFamily(file=file))
    assert (found.family, found.routers[0].rule.top_k) == ("mine", 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("text = 3", "mine.toml: key 'stacks' is missing."),
        ("colour = 'red'", "mine.toml: unknown key 'colour'."),
        ("[[stacks]", "mine.toml: is not TOML"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(text, sentence, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert _refusal(RequestedFamily(file=file)).message.startswith(sentence)


def test_a_file_and_a_pattern_contradict_each_other(tmp_path):
    asked = RequestedFamily(file=tmp_path / "mine.toml", top_k=2)
    assert _refusal(asked).message == "--family FILE says everything: leave out the other options."


def test_a_flag_is_never_dropped(tmp_path):
    both = RequestedFamily(file=tmp_path / "mine.toml", renormalise=True)
    assert _refusal(both).message == "--family FILE says everything: leave out the other options."
    alone = _refusal(RequestedFamily(renormalise=True)).message
    assert alone.startswith("--router-pattern and --top-k and --score missing: ")


def test_a_family_that_is_known_can_be_asked_for_by_name(make_olmoe):
    folder = make_olmoe(config={"model_type": "mystery"})
    found = load_routers(open_checkpoint(folder), asked=RequestedFamily(file=Path("olmoe")))
    assert found.family == "olmoe"
    assert found.fingerprint == load_routers(open_checkpoint(make_olmoe())).fingerprint


def test_an_error_names_the_file_as_it_is_called(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert _refusal(RequestedFamily(file=file)).message.startswith("config.json: is not TOML")


def test_more_experts_than_there_are_is_an_error_of_the_option(make_olmoe):
    asked = RequestedFamily(pattern=_PATTERN, top_k=99, score="softmax")
    with pytest.raises(UsageError) as caught:
        load_routers(open_checkpoint(make_olmoe()), asked=asked)
    assert caught.value.message == (
        "router text/0: 99 experts are to be chosen, as --top-k or the family file says; "
        "the router has 6."
    )


def test_only_layers_that_the_pattern_fits_are_loaded(make_olmoe):
    pattern = r"model\.layers\.([12])\..*gate\.weight"
    asked = RequestedFamily(pattern=pattern, top_k=2, score="softmax")
    found = load_routers(open_checkpoint(make_olmoe()), asked=asked)
    assert [router.layer for router in found.routers] == [1, 2]
    assert found.notes == (
        "not loaded: 1 tensor like 'model.layers.0.mlp.gate.weight', which may be routers too",
    )


def test_what_a_pattern_leaves_out_need_not_be_whole(make_olmoe):
    spoilt = {
        "model.layers.0.mlp.gate.weight": None,
        "model.layers.0.mlp.gate.weight_packed": torch.ones(3),
    }
    pattern = r"model\.layers\.([12])\..*gate\.weight"
    for change in (spoilt, {"model.layers.0.mlp.gate.scale": torch.ones(3)}):
        asked = RequestedFamily(pattern=pattern, top_k=2, score="softmax")
        found = load_routers(open_checkpoint(make_olmoe(change)), asked=asked)
        assert [router.layer for router in found.routers] == [1, 2]


def test_a_bias_is_used_in_every_layer_or_in_none(make_olmoe):
    biases = {f"model.layers.{i}.mlp.gate.bias": torch.ones(6) for i in range(3)}
    folder = make_olmoe(biases)
    pattern = r"model\.layers\.([01])\.mlp\.gate\.bias"
    asked = RequestedFamily(pattern=_PATTERN, top_k=2, score="softmax", logit_bias=pattern)
    with pytest.raises(UsageError) as caught:
        load_routers(open_checkpoint(folder), asked=asked)
    assert caught.value.message == (
        f"--logit-bias '{pattern}': does not fit 'model.layers.2.mlp.gate.bias', the bias of a "
        "router that is loaded."
    )


def test_two_routers_of_one_layer_are_an_error_of_the_pattern():
    names = [f"{end}.block.{i}.router.weight" for end in ("encoder", "decoder") for i in (1, 3)]
    asked = RequestedFamily(pattern=r".*block\.([0-9]+)\.router\.weight", top_k=1, score="softmax")
    error = _refusal(asked, names)
    assert error.message == (
        "--router-pattern: fits 'encoder.block.1.router.weight' and "
        "'decoder.block.1.router.weight', two routers of layer 1."
    )
    assert error.exit_code == 2


def test_routers_of_another_stack_are_named(make_olmoe):
    others = {f"model.vision.blocks.{i}.mlp.gate.weight": torch.rand(6, 16) for i in range(2)}
    asked = RequestedFamily(pattern=_PATTERN, top_k=2, score="softmax")
    assert load_routers(open_checkpoint(make_olmoe()), asked=asked).notes == ()
    found = load_routers(open_checkpoint(make_olmoe(others)), asked=asked)
    (note,) = found.notes
    assert note.startswith("not loaded: 2 tensors like 'model.vision.blocks.0.mlp.gate.weight'")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((16, 16), "16 rows count as experts, where config.json says 6"),
        ((16, 6), "16 rows count as experts, where config.json says 6 (stored transposed?)"),
    ],
)
def test_a_number_of_experts_that_the_config_does_not_know_is_noted(shape, said, make_olmoe):
    odd = {f"model.layers.{i}.self_attn.o_proj.weight": torch.rand(shape) for i in range(3)}
    pattern = r"model\.layers\.([0-9]+)\.self_attn\.o_proj\.weight"
    asked = RequestedFamily(pattern=pattern, top_k=2, score="softmax")
    found = load_routers(open_checkpoint(make_olmoe(odd)), asked=asked)
    assert found.notes[0] == f"text/0: {said}"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "cannot be read" in _refusal(RequestedFamily(file=tmp_path / "none.toml")).message
    assert "cannot be read" in _refusal(RequestedFamily(file=tmp_path)).message
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    assert "is not UTF-8 at byte 0" in _refusal(RequestedFamily(file=tmp_path / "bad.toml")).message
