"""Routers of a checkpoint are loaded as a known family, or options, say, or refused with the gap."""

import os
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, UsageError
from moegeom.router import load as load_module
from moegeom.router.family import families, parse_family
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily
from tests.unit.router.conftest import family_file, loaded, refusal, write_arrays

_GATE = "model.layers.1.mlp.gate.weight"
_NORM = "model.layers.1.post_attention_layernorm.weight"


def test_config_and_tensor_that_disagree_on_experts_are_both_named(make_olmoe):
    error = refusal(make_olmoe(config={"num_experts": 128}))
    assert error.message == (
        "model.safetensors: tensor 'model.layers.0.mlp.gate.weight' has shape (6, 16); "
        "config.json says 128 experts."
    )
    assert error.hint == (
        "Is the config from another revision, or the tensor a slice of a sharded save?"
    )
    assert error.exit_code == 3
    sides = {f"model.layers.{i}.mlp.gate.weight": torch.ones(16, 6) for i in range(3)}
    error = refusal(make_olmoe(sides))
    assert error.message.endswith("has shape (16, 6); config.json says 6 experts.")
    assert 'layout = "transposed"' in error.hint


def test_shapes_that_no_router_or_gain_has_are_refused(make_olmoe, monkeypatch):
    for shape in ((6,), (6, 16, 1), (0, 16), (6, 0)):
        assert refusal(make_olmoe({_GATE: torch.ones(shape)})).message == (
            f"model.safetensors: tensor '{_GATE}' has shape {shape}, expected (experts, hidden)."
        )
    assert refusal(make_olmoe({_NORM: torch.ones(15)})).message == (
        f"model.safetensors: tensor '{_NORM}' (gain of the norm in front) has shape (15,); "
        "its router needs (16,)."
    )
    monkeypatch.setattr("moegeom.router.storage.ROUTER_BYTES", 100)
    assert "too many for a router" in refusal(make_olmoe()).message


def test_a_truncated_file_or_no_config_is_an_error(make_olmoe):
    path = make_olmoe() / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    error = refusal(path.parent, kind=CheckpointError)
    assert error.message.startswith("model.safetensors: truncated, has ")
    for model_type in (..., 3, None):
        message = refusal(make_olmoe(config={"model_type": model_type})).message
        assert "expected a config.json with a model_type" in message
    folder = make_olmoe()
    (folder / "config.json").unlink()
    assert refusal(folder).message.startswith(f"{folder.name}: found no config.json, expected")


def test_no_router_names_family_patterns_and_what_looks_like_one_if_anything_does(make_olmoe):
    none = {f"model.layers.{i}.mlp.gate.weight": None for i in range(3)}
    odd = {f"model.layers.{i}.moe.router.weight": torch.ones(6, 16) for i in range(3)}
    folder = make_olmoe(none | odd)
    assert refusal(folder).message == (
        f"{folder.name}: none of 9 tensors is a router of family olmoe "
        "('layers.{layer}.mlp.gate.weight', 'blocks.{layer}.feed_forward_moe.router.weight'). "
        "Tensors that look like routers: model.layers.{i}.moe.router.weight (6, 16) "
        "(its name, 6 experts in the config, the same in 3 layers)."
    )
    folder = make_olmoe({f"model.layers.{i}.mlp.gate.weight": None for i in range(3)})
    assert "No tensor of 6 looks like a router." in refusal(folder).message


def test_an_unknown_model_type_shows_evidence_and_the_known_families(make_olmoe):
    folder = make_olmoe(config={"model_type": "novel_moe"})
    error = refusal(folder)
    assert error.message == (
        f"{folder.name}: the selection rule of model_type 'novel_moe' is not known. "
        "Tensors that look like routers: model.layers.{i}.mlp.gate.weight (6, 16) "
        "(its name, 6 experts in the config, the same in 3 layers, experts beside it)."
    )
    assert error.hint == (
        "If that is what they are, say how they choose: --router-pattern "
        r"'model\.layers\.([0-9]+)\.mlp\.gate\.weight' --top-k 2 --score NAME; --family FILE says "
        "more. Not said by these options: NAME: the config names no score; how weights are made: "
        "softmax or sigmoid of the chosen, divided by their sum (--renormalise) or not, a scale "
        "without a key, small constants; the norm in front. "
        f"`moegeom families` lists the {len(families())} families that are known."
    )


def test_rows_that_are_not_finite_are_noted_and_loaded(make_olmoe):
    weight = torch.ones(6, 16)
    weight[5, 3], weight[2, 0] = float("nan"), float("inf")
    gain = torch.ones(16)
    gain[7] = float("nan")
    found = loaded(make_olmoe({_GATE: weight, _NORM: gain}))
    assert found.notes == (
        "text/1: 2 rows hold non-finite values, first row 2",
        "text/1: the gain of the norm in front holds 1 non-finite value, first at index 7",
    )
    np.testing.assert_array_equal(found.routers[1].weight, weight.numpy())


def test_missing_and_surplus_layers_are_noted_and_only_the_selected_read(make_olmoe):
    for count, expected, notes in (
        (5, 5, ("text: no router in layers 3-4, where config.json implies one",)),
        (2, 2, ("text: routers in layer 2, where config.json implies none",)),
        (..., None, ()),
    ):
        routers = loaded(make_olmoe(config={"num_hidden_layers": count}))
        assert len(routers.routers) == 3
        assert (routers.num_expected, routers.notes) == (expected, notes)
    store: Any = open_checkpoint(make_olmoe())
    routers = load_routers(store, "1-7")
    assert [r.layer for r in routers.routers] == [1, 2]
    assert (routers.num_expected, routers.notes) == (2, ())
    unread = store.info("model.layers.0.mlp.gate.weight").offset
    assert unread not in [r.offset for r in store.log.ranges]
    error = refusal(make_olmoe(), "7-9,12", UsageError)
    assert error.message == "Layers 7-9,12: no router is there."
    assert error.hint == "Layers with routers: 0-2."


def test_the_gain_is_the_stored_tensor_plus_the_offset_of_the_family(make_olmoe, monkeypatch):
    text = resources.files("moegeom.router.families").joinpath("olmoe.toml").read_text("utf-8")
    shifted = parse_family("olmoe", text.replace('kind = "rms"', 'kind = "rms"\ngain_offset = 1.0'))
    monkeypatch.setattr(load_module, "recognise_family", lambda store: shifted)
    gain = torch.rand(16)
    router = loaded(make_olmoe({_NORM: gain})).routers[1]
    np.testing.assert_array_equal(router.gain, (1 + gain).numpy(), strict=True)
    assert router.norm is not None
    assert (router.norm.kind, router.norm.eps, router.norm.gain_offset) == ("rms", 1e-5, 1.0)


def test_the_set_says_what_was_read_without_a_path(make_olmoe):
    folder = make_olmoe()
    found = loaded(folder)
    assert found.checkpoint == folder.name
    files = ("model.safetensors", "config.json")
    assert found.bytes_total == sum((folder / file).stat().st_size for file in files)
    assert 0 < found.bytes_read < found.bytes_total + 10_000
    assert found.seconds > 0


def test_a_bias_that_is_one_row_of_a_matrix_is_not_read_from_anything_else(tmp_path):
    """Row 0 of a vector would be one number for all experts."""
    layer = "model.layers.0."
    config = {"model_type": "ernie4_5_vl_moe", "moe_num_experts": 4, "moe_k": 2}
    config |= {"hidden_size": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    for shape in ((), (4,), (1, 3), (2, 4, 1)):
        tensors = {
            f"{layer}mlp.gate.weight": np.ones((8, 4), np.float32),
            f"{layer}mlp.moe_statics.e_score_correction_bias": np.ones(shape, np.float32),
            f"{layer}post_attention_layernorm.weight": np.ones(8, np.float32),
        }
        message = refusal(write_arrays(tmp_path, tensors, config)).message
        assert "its router needs (1 or more rows, 4)." in message


_OPTIONS: dict[str, Any] = {
    "pattern": r"model\.layers\.([0-9]+)\.mlp\.gate\.weight",
    "top_k": 2,
    "score": "sigmoid",
}


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_a_bias_of_the_choice_that_the_family_lacks_is_refused(shape, make_olmoe):
    for leaf in (
        "mlp.e_score_correction_bias",
        "mlp.expert_bias",
        "mlp.expert_bias_E",
        "mlp.experts.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
        "mlp.router.balancing_bias",
        "mlp.routing.bias",
        "exp_probs_b.bias",
    ):
        name = f"model.layers.1.{leaf}"
        error = refusal(make_olmoe({name: torch.ones(shape)}))
        assert error.message == (
            f"model.safetensors: tensor '{name}' has one number for each expert and may change "
            "which are chosen, but the rule does not name it."
        )
        assert "--selection-bias 'model\\.layers\\.([0-9]+)\\." in error.hint


def test_the_same_holds_for_routers_that_options_describe(make_olmoe):
    folder = make_olmoe({f"model.layers.{i}.mlp.expert_bias": torch.arange(6.0) for i in range(3)})
    hint = refusal(folder, **_OPTIONS).hint
    advised = hint.partition("--selection-bias '")[2].partition("'")[0]
    routers = loaded(folder, **_OPTIONS, selection_bias=advised).routers
    assert all(router.rule.has_selection_bias for router in routers)


def test_other_tensors_do_not_stand_in_the_way(make_olmoe):
    for name, values in (
        ("model.layers.1.mlp.expert_bias", torch.ones(7)),
        ("model.layers.1.mlp.expert_bias", torch.ones(6, dtype=torch.int64)),
        ("model.layers.1.mlp.experts.0.router_bias", torch.ones(6)),
        ("model.layers.1.mlp.shared_expert_gate.bias", torch.ones(6)),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(6)),
        ("model.layers.7.mlp.expert_bias", torch.ones(6)),
        ("model.expert_bias", torch.ones(6)),
    ):
        assert len(loaded(make_olmoe({name: values})).routers) == 3, name


def test_a_bias_says_how_to_name_it_unless_a_family_calls_it_harmless(make_olmoe, tmp_path):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    error = refusal(make_olmoe({name: torch.ones(6)}))
    assert error.message.startswith(f"model.safetensors: tensor '{name}' stands beside")
    assert "--selection-bias or --logit-bias" in error.hint
    folder = make_olmoe({f"model.layers.{i}.mlp.expert_bias": torch.ones(6) for i in range(3)})
    file = family_file(tmp_path, "beside = ['layers.{layer}.mlp.expert_bias']\n")
    assert len(loaded(folder, file=file).routers) == 3


_PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"


_ASKED: dict[str, Any] = {"pattern": _PATTERN, "top_k": 2, "score": "softmax"}
_NAME = "model.layers.0.mlp.gate.weight"


def _refused(*names: str, **asked: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        RequestedFamily(**asked).family(names or (_NAME,))
    return caught.value


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


def test_a_layer_that_is_not_clear_or_has_two_routers_is_an_error_of_the_pattern():
    name = "block.3.layer.1.router.weight"
    message = _refused(name, **(_ASKED | {"pattern": r"block\..*"})).message
    assert message.endswith(f"which number of '{name}' is the layer is not clear.")
    family = RequestedFamily(**(_ASKED | {"pattern": r"block\.(\d+)\.layer.*"})).family([name])
    assert family is not None
    assert family.stacks[0].weight[0].name == "block.{layer}.layer.1.router.weight"
    names = [f"{end}.block.{i}.router.weight" for end in ("encoder", "decoder") for i in (1, 3)]
    error = _refused(*names, **(_ASKED | {"pattern": r".*block\.([0-9]+)\.router\.weight"}))
    assert error.message == (
        "--router-pattern: fits 'encoder.block.1.router.weight' and "
        "'decoder.block.1.router.weight', two routers of layer 1."
    )
    assert error.exit_code == 2
    assert "fits none" in _refused("a" * 100_000, **(_ASKED | {"pattern": r"(a+)+b"})).message
    assert RequestedFamily().family(["a"]) is None


def test_a_file_of_ones_own_says_everything_or_is_refused_as_it_is_called(make_olmoe, tmp_path):
    folder = make_olmoe(config={"model_type": "mystery"})
    routers = loaded(folder, file=family_file(tmp_path))
    assert (routers.family, routers.routers[0].rule.top_k) == ("mine", 1)
    for beginning, raw in _FILES.items():
        file = tmp_path / beginning.partition(":")[0]
        file.write_bytes(raw)
        assert _refused(file=file).message.startswith(beginning)
    for file in (tmp_path / "none.toml", tmp_path):
        assert "cannot be read" in _refused(file=file).message


_FILES = {
    "mine.toml: key 'stacks' is missing.": b"text = '3'",
    "mine.toml: unknown key 'colour'.": b"colour = 'red'",
    "mine.toml: is not TOML": b"[[stacks]",
    "mine.toml: is not UTF-8 at byte 0": b"\xff",
    "config.json: is not TOML": b"{}",
}


def test_what_a_pattern_leaves_out_and_a_number_of_experts_that_is_not_known_are_noted(make_olmoe):
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
    asked = _ASKED | {"pattern": r"model\.layers\.([0-9]+)\.self_attn\.o_proj\.weight"}
    for width, hint in ((16, ""), (6, " (stored transposed?)")):
        odd = {f"model.layers.{i}.self_attn.o_proj.weight": torch.rand(16, width) for i in range(3)}
        assert loaded(make_olmoe(odd), **asked).notes[0] == (
            f"text/0: 16 rows count as experts, where config.json says 6{hint}"
        )


def test_a_bias_is_used_in_every_layer_or_in_none_and_no_more_experts_than_there_are(make_olmoe):
    folder = make_olmoe({f"model.layers.{i}.mlp.gate.bias": torch.ones(6) for i in range(3)})
    pattern = r"model\.layers\.([01])\.mlp\.gate\.bias"
    assert refusal(folder, kind=UsageError, **_ASKED, logit_bias=pattern).message == (
        f"--logit-bias '{pattern}': does not fit 'model.layers.2.mlp.gate.bias', the bias of a "
        "router that is loaded."
    )
    error = refusal(make_olmoe(), kind=UsageError, **(_ASKED | {"top_k": 99}))
    assert error.message == (
        "router text/0: 99 experts are to be chosen, as --top-k or the family file says; "
        "the router has 6."
    )
