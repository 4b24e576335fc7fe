"""What ``output_router_logits=True`` gives, in every way people save it, and how keys are named;
which values are believed to be router inputs.
"""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

import moegeom as mg
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Norm
from moegeom.tokens.foreign.arrays import expanded
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.validity import fingerprint_test, rms_test

ROUTERS = tuple(f"text/{layer}" for layer in range(1, 5))
LOGITS = np.random.default_rng(3).standard_normal((4, 90, 16)).astype(np.float32)
BY_LAYER = {f"layer{layer}": LOGITS[layer - 1] for layer in range(1, 5)}


def tensors():
    return tuple(torch.from_numpy(layer.copy()) for layer in LOGITS)


def strided():
    """Layers of one tensor [tokens, layers, experts]: none lies in one piece."""
    return tuple(torch.from_numpy(LOGITS.transpose(1, 0, 2).copy()).unbind(1))


#: A file name, and what writes LOGITS there so that nothing else has to be said.
WAYS = {
    "np.save of a stack": ("a.npy", lambda path: np.save(path, LOGITS)),
    "np.savez of a stack": ("a.npz", lambda path: np.savez(path, router_logits=LOGITS)),
    "compressed": ("a.npz", lambda path: np.savez_compressed(path, router_logits=LOGITS)),
    "the tuple": ("a.pt", lambda path: torch.save(tensors(), path)),
    "a list": ("a.pt", lambda path: torch.save(list(tensors()), path)),
    "views of one tensor": ("a.pt", lambda path: torch.save(strided(), path)),
    "the stacked tensor": ("a.pth", lambda path: torch.save(torch.stack(tensors()), path)),
    "a dict by router": (
        "a.bin",
        lambda path: torch.save(dict(zip(ROUTERS, tensors(), strict=True)), path),
    ),
}


def opened(path, stage="logits", **more):
    return open_tokens(path, stage, routers=ROUTERS, **more)


def refuse(words, path, **more):
    with pytest.raises(RecordingError, match=words) as caught:
        opened(path, **more)
    return caught.value


def assert_logits(source, expected=LOGITS):
    for router, values in zip(ROUTERS, expected, strict=True):
        np.testing.assert_array_equal(source.read_values(router, 17, 60), values[17:60])


@pytest.mark.parametrize(("name", "write"), WAYS.values(), ids=WAYS)
def test_every_way_to_save_them_is_read_without_a_map(tmp_path, name, write):
    write(tmp_path / name)
    source = opened(tmp_path / name)
    assert (source.facts.routers, source.facts.num_tokens) == (ROUTERS, 90)
    assert_logits(source)


def test_tensors_of_every_float_and_facts_beside_them_are_read(tmp_path):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        values = tuple(t.to(dtype) for t in tensors())
        torch.save(values, tmp_path / "a.pt")
        assert_logits(opened(tmp_path / "a.pt"), [v.float().numpy() for v in values])
    document = torch.arange(90) // 30
    torch.save(
        dict(zip(ROUTERS, tensors(), strict=True)) | {"document": document}, tmp_path / "a.pt"
    )
    columns = opened(tmp_path / "a.pt").read_columns(20, 80)
    np.testing.assert_array_equal(columns.document, document[20:80])


@pytest.mark.parametrize("saved", [tuple, list, torch.stack])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_batch_is_left_out_by_its_mask(tmp_path, saved, side):
    """Three sequences of 30, 12 and 21 tokens in rows of 30, flattened as transformers does."""
    lengths = torch.tensor([30, 12, 21])[:, None]
    place = torch.arange(30)[None]
    mask = (place < lengths if side == "right" else place >= 30 - lengths).long()
    tokens = torch.arange(90).reshape(3, 30)
    held = {"router_logits": saved(tensors()), "attention_mask": mask, "input_ids": tokens}
    torch.save(held | {"loss": torch.tensor(0.5)}, tmp_path / "a.pt")
    source = opened(tmp_path / "a.pt")
    is_token = mask.reshape(-1).bool().numpy()
    assert (source.facts.num_tokens, source.facts.num_documents) == (63, 3)
    assert_logits(source, LOGITS[:, is_token])
    columns = source.read_columns(0, 63)
    np.testing.assert_array_equal(columns.document, np.repeat([0, 1, 2], [30, 12, 21]))
    np.testing.assert_array_equal(
        columns.position, np.concatenate([np.arange(n) for n in (30, 12, 21)])
    )
    np.testing.assert_array_equal(columns.token_id, np.arange(90)[is_token])


def test_a_pattern_maps_every_layer_by_whole_keys_and_drops_leading_zeros(tmp_path):
    np.savez(tmp_path / "a.npz", **BY_LAYER)
    torch.save({k: torch.from_numpy(v.copy()) for k, v in BY_LAYER.items()}, tmp_path / "a.pt")
    for path in tmp_path.iterdir():
        assert_logits(opened(path, router_map={"layer{i}": "text/{i}"}))
    keys = ("h.07.x", "h.12.x", "h.x", "xh.07.x", "h.1.x.2")
    assert expanded({"h.{i}.x": "text/{i}", "h.x": "text/0"}, keys) == {
        "h.07.x": "text/7",
        "h.12.x": "text/12",
        "h.x": "text/0",
    }
    assert expanded({"g{i}": "text/{i}"}, keys) == {"g{i}": "text/{i}"}


def test_the_error_proposes_the_map_that_would_do_and_that_is_accepted(tmp_path):
    for keys, hint in (
        ((1, 2, 3, 4), "Add --map 'layer{i}=text/{i}'."),
        ((0, 1, 2, 3), "If they are in this order, add --map layer0=text/1 --map layer1=text/2 "),
        ((1, 2), "one --map 'layer{i}=text/{i}'"),
    ):
        np.savez(tmp_path / "a.npz", **{f"layer{key}": LOGITS[0] for key in keys})
        assert hint in refuse("cannot tell which array is which router", tmp_path / "a.npz").hint
    # ten layers and more sort otherwise as text
    routers = tuple(f"text/{layer}" for layer in range(12))
    arrays = {f"L{layer}": np.full((5, 3), layer, np.float32) for layer in reversed(range(12))}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(RecordingError) as caught:
        open_tokens(tmp_path / "a.npz", "logits", routers=routers)
    key, _, router = caught.value.hint.removeprefix("Add --map '").removesuffix("'.").partition("=")
    source = open_tokens(tmp_path / "a.npz", "logits", {key: router}, routers)
    assert [source.read_values(r, 0, 1)[0, 0] for r in routers] == list(range(12))


def test_a_mask_of_another_batch_or_a_stack_of_other_layers_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", LOGITS[:3])
    np.savez(tmp_path / "a.npz", LOGITS[:3])
    torch.save(torch.tensor(LOGITS[:3]), tmp_path / "a.pt")
    for path in tmp_path.iterdir():
        assert "--layers" in refuse(r"\(3, 90, 16\), 3 layers", path).hint
    for name, beside in {"attention_mask": torch.ones(3, 29), "input_ids": torch.ones(90)}.items():
        torch.save({"router_logits": tensors(), name: beside.long()}, tmp_path / "a.pt")
        refuse(f"90 rows.*{name}|{name} has shape .*90 rows", tmp_path / "a.pt")
    torch.save({"router_logits": ()}, tmp_path / "a.pt")
    refuse("holds an empty tuple", tmp_path / "a.pt")


class Outputs:
    """What a model returns is a class, which no reader of tensors knows."""


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (Outputs, "Outputs"),
        (lambda: {"text/1": [1.0, 2.0]}, "expected a tensor"),
        (lambda: (torch.zeros(2, 5, 16),) * 4, "(2, 5, 16); expected (tokens, width)"),
        (lambda: (torch.zeros(5, 16, dtype=torch.int64),) * 4, "int64; expected float16"),
        (lambda: (torch.zeros(5, 16).to_sparse(),) * 4, "is a sparse tensor"),
        (lambda: 7, "is a int; expected a tensor"),
        (tuple, "an empty tuple"),
    ],
)
def test_what_holds_no_rows_of_numbers_is_refused(tmp_path, saved, words):
    torch.save(saved(), tmp_path / "a.pt")
    error = refuse(re.escape(words), tmp_path / "a.pt")
    assert error.hint or "expected float16" in words
    (tmp_path / "a.pt").write_bytes(b"\x80\x04.")  # no archive of torch: never opened
    assert "np.savez" in refuse("pickle", tmp_path / "a.pt").hint


KNOWN = tuple(KnownRouter(router, "text", n + 1, 16, 3) for n, router in enumerate(ROUTERS))
IDS = np.argsort(LOGITS, axis=2)[:, :, :3].astype(np.int32)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_ids_by_layer_are_read_as_such_and_not_as_a_trace(tmp_path, name):
    """A trace is [tokens, layers, k]; ids of all routers are [layers, tokens, k], as logits are."""
    (np.save if name == "a.npy" else np.savez)(tmp_path / name, IDS)
    source = opened(tmp_path / name, "ids", checkpoint_routers=KNOWN)
    assert (source.facts.routers, source.facts.num_tokens) == (ROUTERS, 90)
    for layer, router in enumerate(ROUTERS):
        np.testing.assert_array_equal(source.read_chosen(router, 3, 80), IDS[layer, 3:80])
    with pytest.raises(UsageError, match=r"\(4, 90, 3\); its first axis") as caught:
        opened(tmp_path / name, None, checkpoint_routers=KNOWN)
    assert "--stage ids as [layers, tokens, k]" in caught.value.hint
    # a trace stays one whatever stage is named
    np.save(tmp_path / "b.npy", IDS.transpose(1, 0, 2))
    for stage in (None, "ids"):
        source = opened(tmp_path / "b.npy", stage, checkpoint_routers=KNOWN)
        np.testing.assert_array_equal(source.read_chosen("text/2", 0, 90), IDS[1])


@pytest.mark.parametrize("layers", [4, 5])
def test_as_many_tokens_as_routers_are_tokens_unless_ids_by_layer_are_asked_for(tmp_path, layers):
    trace = np.zeros((4, layers, 3), np.int32)
    trace[:, -4:] = IDS[:, :4].transpose(1, 0, 2)
    np.save(tmp_path / "a.npy", trace)
    for option in ({}, {"dialect": "vllm"}):
        source = opened(tmp_path / "a.npy", None, checkpoint_routers=KNOWN, **option)
        np.testing.assert_array_equal(source.read_chosen("text/2", 0, 4), IDS[1, :4])
    with pytest.raises(UsageError, match="may be layers or tokens") as caught:
        opened(tmp_path / "a.npy", "ids", checkpoint_routers=KNOWN)
    assert "one array for each router" in caught.value.hint


RMS = Norm("rms", 1e-6, "norm.weight")
LAYER = Norm("layer", 1e-5, "norm.weight")


def residual_stream(tokens=2000, hidden=512):
    """As in trained models: heavy tails over dimensions, norms that vary, a few huge tokens."""
    random = np.random.default_rng(0)
    scale = np.exp(0.5 * random.standard_normal(hidden))
    size = np.exp(0.25 * random.standard_normal((tokens, 1)))
    rows = random.standard_normal((tokens, hidden)) * scale * size
    rows[::400, 3] = 1000.0
    return rows


def gain_of(seed=1):
    return np.exp(0.4 * np.random.default_rng(seed).standard_normal(512)).astype(np.float32)


def rms_norm(rows, gain, eps=1e-6):
    return gain * rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)


def layer_norm(rows, gain, bias, eps=1e-5):
    centred = rows - rows.mean(axis=1, keepdims=True)
    return gain * centred / np.sqrt(centred.var(axis=1, keepdims=True) + eps) + bias


GAIN = gain_of()


@pytest.fixture
def stored():
    """Router inputs behind the norm."""
    return rms_norm(residual_stream(), GAIN).astype(np.float32)


def test_router_inputs_pass_whatever_they_are_stored_or_computed_in():
    rows, gain = residual_stream(), GAIN.astype(ml_dtypes.bfloat16)
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        inputs = rms_norm(rows, GAIN).astype(dtype).astype(np.float32)
        result = rms_test(inputs, GAIN, RMS)
        assert result.passed
        assert result.median == pytest.approx(1, abs=2e-3)
        assert (result.share_within_2_percent, result.num_tokens) == (1, 2000)
    scale = (1 / np.sqrt((rows**2).mean(axis=1, keepdims=True))).astype(ml_dtypes.bfloat16)
    inputs = (rows.astype(ml_dtypes.bfloat16) * scale) * gain
    assert rms_test(inputs.astype(np.float32), gain.astype(np.float32), RMS).passed


def test_a_residual_stream_fails():
    rows = residual_stream()
    rms = np.sqrt((rows**2).mean(axis=1, keepdims=True))
    for size in (0.02, 0.9, 1.0, 1.1, 7.0):
        scaled = (rows * size / np.median(rms)).astype(np.float32)
        result = rms_test(scaled, np.ones(512, np.float32), RMS)
        assert not result.passed
        assert "residual stream" in result.sentence
        assert f"{result.median:.4g}" in result.sentence
    # its norm may be nearly constant, too
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal((2000, 1))
    assert not rms_test((rows / rms * noise).astype(np.float32), None, RMS).passed


def test_the_gain_of_another_layer_or_convention_and_padding_fail(stored):
    assert not rms_test(stored, gain_of(seed=2), RMS).passed
    assert not rms_test(stored, None, RMS).passed
    random = np.random.default_rng(0).standard_normal((500, 512))
    without_offset = rms_norm(random, np.full(512, 1.5)).astype(np.float32)
    result = rms_test(without_offset, np.full(512, 0.5, np.float32), RMS)
    assert not result.passed
    assert result.median == pytest.approx(3, abs=1e-3)
    assert "another layer or convention" in result.sentence
    stored[:600] = 0
    result = rms_test(stored, GAIN, RMS)
    assert not result.passed
    assert result.num_zero_tokens == 600
    assert "600 tokens are all zero" in result.sentence


def test_small_tokens_pass_and_dimensions_of_gain_zero_prove_nothing():
    rows = residual_stream()
    rows[:40] *= 1e-3 / np.sqrt((rows[:40] ** 2).mean(axis=1, keepdims=True))
    result = rms_test(rms_norm(rows, GAIN).astype(np.float32), GAIN, RMS)
    assert result.passed
    assert result.p01 == pytest.approx(2**-0.5, abs=1e-3)
    assert result.share_within_2_percent == pytest.approx(0.98)
    gain = GAIN.copy()
    gain[::8] = 0
    inputs = rms_norm(residual_stream(), gain).astype(np.float32)
    result = rms_test(inputs, gain, RMS)
    assert result.passed
    assert result.num_dimensions_skipped == 64
    assert "64 dimensions" in result.sentence
    assert not rms_test(3 * inputs, gain, RMS).passed
    assert not rms_test(inputs / 3, gain, RMS).passed
    assert not rms_test(np.ones((4, 8), np.float32), np.zeros(8, np.float32), RMS).passed


def test_rows_that_are_not_finite_are_counted_and_not_tested(stored):
    stored[5, 3], stored[6, 2] = np.nan, np.inf
    result = rms_test(stored, GAIN, RMS)
    assert (result.passed, result.num_not_finite) == (True, 2)
    nothing = rms_test(np.full((3, 512), np.nan, np.float32), GAIN, RMS)
    assert not nothing.passed
    assert "No token could be tested" in nothing.sentence


def test_layer_norm_outputs_pass_the_test_for_layer_norm_and_others_fail():
    bias = gain_of(seed=3)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        inputs = layer_norm(residual_stream(), GAIN, bias).astype(dtype).astype(np.float32)
        result = rms_test(inputs, GAIN, LAYER, bias)
        assert result.passed
        assert "standard deviation" in result.sentence
        assert not rms_test(inputs, GAIN, LAYER).passed
    rows = np.random.default_rng(0).standard_normal((200, 512))
    result = rms_test((layer_norm(rows, 1, 0) + 0.3).astype(np.float32), None, LAYER)
    assert not result.passed
    assert result.median == pytest.approx(1, abs=1e-4)
    assert "mean reaches 0.3" in result.sentence


def test_fingerprints_match_differ_or_are_unknown():
    assert fingerprint_test("a", "a") == "matches"
    assert fingerprint_test("a", "b") == "differs"
    assert fingerprint_test("", "b") == fingerprint_test("a", "") == "unknown"


# ------------------------------------------------------------------------- as people hold them
CHECKPOINT = "sample_ckpts/olmoe-balanced/step_1500"
DRAWN = np.random.default_rng(0).standard_normal((4, 3, 128, 16)).astype(np.float32)
INPUTS = np.random.default_rng(1).standard_normal((4, 2, 128, 64)).astype(np.float32)


@pytest.mark.parametrize(
    ("value", "stage", "words"),
    [
        (INPUTS, "pre_norm", "output_hidden_states gives"),
        ([*INPUTS], "pre_norm", "output_hidden_states gives"),
        ([*INPUTS.reshape(4, 256, 64)], "pre_norm", "output_hidden_states gives"),
        (DRAWN, "logits", "array.swapaxes(0, 1) where batches come first"),
        (DRAWN[0].swapaxes(0, 1), "logits", "swapaxes(0, 1)"),
        ([[*layers] for layers in DRAWN], "logits", "np.concatenate(layer) for layer in zip"),
        ([DRAWN[0, 0], DRAWN[0, 1, :5]], "logits", "np.concatenate(layer) for layer in zip"),
        (DRAWN[0].view(np.uint16)[..., ::2], "logits", "array.view(ml_dtypes.bfloat16)"),
        (DRAWN[0], "ids", "array.astype(numpy.int32)"),
        (DRAWN[0], "hidden", "Known: ids, logits, pre_norm, router_input"),
        ({"router_logits": [*DRAWN[0]], "attention_mask": np.ones((2, 9))}, "logits", "as many"),
    ],
)
def test_arrays_as_people_hold_them_are_refused_with_what_mends_them(value, stage, words):
    with pytest.raises(mg.MoeGeomError) as caught:
        mg.scan(CHECKPOINT, mg.recording(value, stage=stage))
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_the_output_of_a_model_in_memory_is_that_of_its_file(tmp_path):
    """Padding is left out by the mask; without one a note says that it is counted."""
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[:, 50:] = 0
    output = {"router_logits": tuple(map(torch.tensor, DRAWN[0])), "attention_mask": mask}
    counts = []
    for held in (output, {"router_logits": output["router_logits"]}):
        torch.save(held, tmp_path / "out.pt")
        in_file = mg.scan(CHECKPOINT, mg.recording(tmp_path / "out.pt", stage="logits"))
        in_memory = mg.scan(CHECKPOINT, mg.recording(held, stage="logits"))
        one, two = (
            scan.layers().drop_columns(["router"]).to_pylist() for scan in (in_file, in_memory)
        )
        assert one == two
        counts.append(one[0]["num_tokens"])
        assert ("padding of the batch" in in_file.text()) == ("attention_mask" not in held)
    assert counts == [100, 128]
