"""Oracles: hooks of the tests' own in the same pass, bit for bit, on the routers that the tests of
the families name and on tiny gated attention; and the recordings that came with the samples,
which another processor made, up to float32 rounding.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.router import Projection, Router
from moegeom.core.tokens import TokenSource
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import route
from moegeom.recorder import AttentionRecorder, RouterRecorder, merge_parts
from moegeom.recorder.keep import Keep, RowReader
from moegeom.recorder.request import CaptureRequest
from moegeom.recorder.run import capture, plan_capture
from moegeom.recorder.taps import ModelStore, Place, Tap, find_places
from moegeom.router.expert_functions import open_expert_functions, open_shared_experts
from moegeom.router.load import load_routers
from moegeom.tokens.attention_record import FACTS_FILE, SUMS_FILE, LayerSums, read_attention_record
from moegeom.tokens.open import open_tokens
from moegeom.tokens.sources.recorded import open_recording
from tests.by_day import by_day
from tests.families.observed import FORWARD, observe
from tests.families.test_families_against_transformers import routed
from tests.families.tiny_models import LOADED, OWN_NORM, attention_model, build, model_of
from tests.records import new_folder
from tests.unit.capture.conftest import NAMES, Sample, sample_of

#: How far a router input of a sample may be from that of another processor, in units of its own
#: length. Processors add up the terms of a float32 product in other orders. A sum of the 64 terms
#: of these models so moves by about sqrt(64) = 8 roundings (2^-24) of its size, and up to 16 sums
#: follow one another before the last router: 4 in each of 4 layers. All of them in one direction
#: make 128 roundings; in random directions, as instruction sets differ, 31 are the most seen.
ROUNDING = 128 * 2.0**-24


def record(sample: Sample, out: Path, documents: Iterable[int], **options: Any) -> RouterRecorder:
    wanted = set(documents)
    with RouterRecorder(sample.model, out, checkpoint=sample.path, **options) as recorder:
        for number, domain, ids in sample.documents():
            if number in wanted:
                recorder.tokens(ids, documents=[number], domain=domain)
                sample.model(input_ids=ids, use_cache=False)
    return recorder


@dataclass(frozen=True)
class Watched:
    inputs: list[np.ndarray] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)


@contextmanager
def watched(sample: Sample) -> Iterator[dict[str, Watched]]:
    """Hooks of our own on the gates: transformers' gates return (logits, weights, chosen)."""
    seen = {name: Watched() for name in sample.recording.facts.routers}
    handles = []
    for name, of in seen.items():

        def see(module: Any, arguments: Any, result: Any, of: Watched = of) -> None:
            of.inputs.append(arguments[0].flatten(0, -2).numpy().copy())
            of.chosen.append(result[2].numpy().copy())

        gate = sample.model.get_submodule(f"model.layers.{name.rpartition('/')[2]}.mlp.gate")
        handles.append(gate.register_forward_hook(see))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def assert_same_columns(mine: TokenSource, theirs: TokenSource) -> None:
    """What is known about each token, and of which routers: no arithmetic has a part in it."""
    total = theirs.facts.num_tokens
    for fact in ("num_tokens", "routers", "stage", "fingerprint", "domains"):
        assert getattr(mine.facts, fact) == getattr(theirs.facts, fact), fact
    a, b = mine.read_columns(0, total), theirs.read_columns(0, total)
    for column in ("document", "position", "token_id", "domain"):
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column), strict=True)


def assert_same_tokens(mine: TokenSource, theirs: TokenSource) -> None:
    assert_same_columns(mine, theirs)
    total = theirs.facts.num_tokens
    for router in theirs.facts.routers:
        np.testing.assert_array_equal(
            mine.read_values(router, 0, total), theirs.read_values(router, 0, total), strict=True
        )
        chosen = mine.read_chosen(router, 0, total)
        assert chosen is not None
        np.testing.assert_array_equal(chosen, theirs.read_chosen(router, 0, total), strict=True)


def assert_same_to_rounding(mine: TokenSource, theirs: TokenSource, checkpoint: Path) -> None:
    """The same tokens of two processors: inputs within ``ROUNDING`` of their length, the same set
    of experts wherever that cannot change it, and all that no arithmetic has a part in.

    Where a choice that is within rounding did go the other way, other experts ran, and what later
    routers saw of that document is not compared.
    """
    assert_same_columns(mine, theirs)
    total = theirs.facts.num_tokens
    document = theirs.read_columns(0, total).document
    routers = {router.name: router for router in load_routers(open_checkpoint(checkpoint)).routers}
    is_same = np.ones(total, dtype=bool)
    for name in theirs.facts.routers:
        a, b = mine.read_values(name, 0, total), theirs.read_values(name, 0, total)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        exact = b.astype(np.float64)
        size, change = np.linalg.norm(exact, axis=1), np.linalg.norm(a - exact, axis=1)
        np.testing.assert_array_less(change[is_same], ROUNDING * size[is_same], err_msg=name)
        sets = [np.sort(one.read_chosen(name, 0, total), axis=1) for one in (mine, theirs)]
        other = (sets[0] != sets[1]).any(axis=1)
        clear = is_clear(routers[name], exact)
        assert clear.mean() > 0.99
        assert not (other & clear & is_same).any(), f"{name}: other experts"
        is_same &= ~np.isin(document, document[other])


def is_clear(router: Router, inputs: np.ndarray) -> np.ndarray:
    """Tokens whose chosen set no change of the inputs by ``ROUNDING`` of their length can change.

    Each score then moves by no more than its logit (a sigmoid by a quarter of that, which leaves
    room for its own rounding), and the score of a group, a sum of two, by twice as much.
    """
    weight = router.weight.astype(np.float64)
    routed = route(inputs @ weight.T, router.rule, router.selection_bias)
    longest_row = np.linalg.norm(weight, axis=1).max()
    moves = ROUNDING * np.linalg.norm(inputs, axis=1) * longest_row
    return np.minimum(routed.margin, routed.group_margin / 2.0) > 2.0 * moves


@cache
def captured(name: str) -> tuple[Path, dict[str, Watched]]:
    sample, out = sample_of(name), new_folder() / "rec"
    with torch.no_grad(), watched(sample) as seen:
        record(sample, out, range(64), keep="hidden")
    return out, seen


@pytest.mark.parametrize(
    "name", by_day(NAMES, {"softmax": "olmoe-balanced", "sigmoid, groups": "deepseek-tiny"})
)
def test_a_capture_holds_bit_for_bit_what_the_routers_were_given_and_chose(name):
    """In the same pass, so on every processor; and up to rounding the stored recording."""
    sample, (out, seen) = sample_of(name), captured(name)
    mine = open_tokens(out)
    assert mine.facts.num_tokens == 4096
    for router, of in seen.items():
        np.testing.assert_array_equal(
            mine.read_values(router, 0, 4096), np.concatenate(of.inputs), strict=True
        )
        np.testing.assert_array_equal(mine.read_chosen(router, 0, 4096), np.concatenate(of.chosen))
    assert_same_to_rounding(mine, sample.recording, sample.path)


@pytest.mark.parametrize("num_ranks", by_day((1, 2, 3), {"one": 1, "more": 3}))
def test_parts_of_ranks_merge_to_the_recording_of_one_process(balanced, tmp_path, num_ranks):
    record(balanced, tmp_path / "alone", range(7), keep="hidden")
    for rank in reversed(range(num_ranks)):
        documents = range(rank, 7, num_ranks)
        record(balanced, tmp_path / "rec", documents, keep="hidden", rank=rank, num_ranks=num_ranks)
    assert_same_tokens(open_tokens(tmp_path / "rec"), open_tokens(tmp_path / "alone"))
    assert not (tmp_path / "rec.parts").exists()


def test_ranks_are_those_of_torch_distributed(balanced, tmp_path, monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 3)):
        monkeypatch.setattr(torch.distributed, name, lambda *group, value=value: value)
    record(balanced, tmp_path / "rec", range(2), keep="ids")
    assert [path.name for path in (tmp_path / "rec.parts").iterdir()] == ["00001-of-00003"]
    with pytest.raises(RecordingError, match=r"ranks 0, 2 of 3 are missing"):
        merge_parts(tmp_path / "rec")


@pytest.mark.parametrize("keep", ["logits", "top-logits:6", "ids", None])
def test_every_kind_of_keep_holds_what_it_says(balanced, tmp_path, keep):
    with watched(balanced) as seen:
        record(balanced, tmp_path / "rec", range(8), keep=keep)
    mine = open_tokens(tmp_path / "rec")
    stages = {"logits": "logits", "top-logits:6": "top_logits", "ids": "ids", None: "logits"}
    assert mine.facts.stage == stages[keep]
    for name in mine.facts.routers:
        chosen = mine.read_chosen(name, 0, 512)
        np.testing.assert_array_equal(chosen, np.concatenate(seen[name].chosen))
        weight = balanced.model.get_submodule(f"model.layers.{name[-1]}.mlp.gate").weight
        exact = np.concatenate(seen[name].inputs) @ weight.double().numpy().T
        if mine.facts.stage == "logits":
            np.testing.assert_allclose(mine.read_values(name, 0, 512), exact, atol=1e-4)
        if mine.facts.stage == "top_logits":
            top = mine.read_top_logits(name, 0, 512)
            np.testing.assert_allclose(top.logits, -np.sort(-exact, axis=1)[:, :6], atol=1e-4)
            np.testing.assert_allclose(
                np.take_along_axis(exact, top.expert.astype(int), axis=1), top.logits, atol=1e-4
            )


def test_padding_is_left_out_and_positions_count_tokens(balanced, tmp_path):
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # padded on the left
    mask[1, 9:] = 0  # padded on the right
    with RouterRecorder(balanced.model, tmp_path / "rec", keep="ids") as recorder:
        recorder.tokens(ids, mask, domain=["code", "docs"])
        balanced.model(input_ids=ids, attention_mask=mask, use_cache=False)
    found = open_tokens(tmp_path / "rec")
    columns = found.read_columns(0, 16)
    assert found.facts.num_tokens == 16
    assert columns.token_id.tolist() == [*range(5, 12), *range(12, 21)]
    assert columns.position.tolist() == [*range(7), *range(9)]
    assert columns.document.tolist() == [0] * 7 + [1] * 9
    assert [found.facts.domains[d] for d in columns.domain] == ["code"] * 7 + ["docs"] * 9


def test_a_pass_that_is_run_again_is_recorded_once(tmp_path):
    """Activation checkpoints call every module a second time on the way back."""
    sample = sample_of("olmoe-balanced")
    with RouterRecorder(sample.model, tmp_path / "rec", keep="ids") as recorder:
        for start in (0, 7):
            ids = torch.arange(start, start + 32)[None]
            recorder.tokens(ids)
            embedded = sample.model.get_input_embeddings()(ids).detach().requires_grad_()

            def run(x: torch.Tensor) -> torch.Tensor:
                return sample.model(inputs_embeds=x, use_cache=False).logits

            checkpoint(run, embedded, use_reentrant=False).sum().backward()
            sample.model.zero_grad()
    assert open_tokens(tmp_path / "rec").facts.num_tokens == 64
    assert recorder.num_ignored == 6


class _Waits(TorchDispatchMode):
    """Operations for which a host must wait for its device."""

    KINDS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self.KINDS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", ["hidden", "logits", "top-logits:6", "ids"])
def test_no_step_waits_for_the_device(balanced, tmp_path, keep):
    ids = torch.arange(64)[None]
    mask = (ids < 60).long()

    def seen(announce: Any) -> list[str]:
        with _Waits() as waits:
            announce(ids, mask)
            balanced.model(input_ids=ids, attention_mask=mask, use_cache=False)
        return waits.seen

    bare = seen(lambda *_: None)
    with RouterRecorder(balanced.model, tmp_path / "rec", keep=keep) as recorder:
        assert seen(recorder.tokens) == bare
        with _Waits() as waits:
            recorder.tokens(ids, mask)  # takes the pass before in
            assert waits.seen == []
            balanced.model(input_ids=ids, attention_mask=mask, use_cache=False)


def test_other_tokens_than_announced_and_a_router_that_learns_are_refused(balanced, tmp_path):
    for announced, message in ((16, "saw 32 tokens; 16 were announced"), (0, "no router saw a")):
        with (
            pytest.raises(RecordingError, match=message),
            RouterRecorder(balanced.model, tmp_path / "rec") as recorder,
        ):
            if announced:
                recorder.tokens(torch.arange(announced)[None])
            balanced.model(input_ids=torch.arange(32)[None], use_cache=False)
        assert not list(tmp_path.iterdir())
    weight = balanced.model.model.layers[1].mlp.gate.weight
    before = weight.clone()
    try:
        with (
            pytest.raises(RecordingError, match=r"layers\.1\.mlp\.gate\.weight' changed"),
            RouterRecorder(balanced.model, tmp_path / "rec") as recorder,
        ):
            recorder.tokens(torch.arange(16)[None])
            balanced.model(input_ids=torch.arange(16)[None], use_cache=False)
            weight.add_(1e-3)
    finally:
        weight.copy_(before)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (RecordingError, {"checkpoint": "step_100"}, "text/0 of the running model is not that of"),
        (UsageError, {"keep": "top-logits:3"}, "5 logits at least"),
        (UsageError, {"keep": "everything"}, "expected hidden, logits"),
        (UsageError, {"keep": "attention:0-3"}, "AttentionRecorder"),
        (UsageError, {"rank": 3, "num_ranks": 2}, "rank 3 of 2"),
        (UsageError, {"rank": 0}, "are given together"),
        (UsageError, {"fold": True, "keep": "logits"}, "measures router inputs"),
        (UsageError, {"fold": True, "keep": "outputs"}, "keeps no outputs of experts"),
        (UsageError, {"fold": True, "rank": 0, "num_ranks": 2}, "2 ranks that nothing connects"),
    ],
)
def test_what_cannot_be_recorded_is_refused(balanced, tmp_path, error, options, message):
    folder = balanced.path.parent / options.get("checkpoint", "step_1500")
    with pytest.raises(error, match=message):
        RouterRecorder(balanced.model, tmp_path / "rec", **options | {"checkpoint": folder})


SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
KINDS = ("shared_output", "routed_output", "expert_output")


def recorded(model: Any, out: Path, keep: str, checkpoint: Path | None = None) -> Any:
    ids = torch.randint(3, 160, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), RouterRecorder(model, out, keep=keep, checkpoint=checkpoint) as recorder:
        model(input_ids=ids)  # not announced: neither recorded nor mixed into what is
        recorder.tokens(ids.flip(1))
        model(input_ids=ids.flip(1))
    return open_recording(out)


def near(mine: np.ndarray | None, theirs: np.ndarray, tolerance: float = 1e-5) -> None:
    scale = max(float(np.abs(theirs).max()), 1e-30)
    assert mine is not None
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", ["olmoe-balanced", "deepseek-tiny"])
def test_outputs_of_a_running_sample_are_those_computed_from_its_file(name, tmp_path):
    ckpt = SAMPLES / name / "step_1500"
    model = transformers.AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32).eval()
    source = recorded(model, tmp_path / "rec", "outputs:every-expert", ckpt)
    assert source.facts.outputs == KINDS
    assert source.facts.num_tokens == 48
    mg.outputs(ckpt, tmp_path / "rec", every_expert=True, out=tmp_path / "computed")
    computed = open_recording(tmp_path / "computed")
    for router in source.facts.routers:
        for kind in KINDS:
            theirs = computed.read_output(router, kind, 0, 48)
            assert theirs is not None
            near(source.read_output(router, kind, 0, 48), theirs)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_moe",  # a number gates the shared expert
        "granitemoeshared",  # shared experts outside the block
        "llama4_text",  # adds to what the shared expert gave, in place
        "minimax_m3_vl_text",  # multiplies the sum of the routed experts
        "nemotron_h__latent",
        "longcat_flash",
    ],
)
def test_outputs_of_a_block_are_told_apart(name, tmp_path):
    model = build(name)
    source, store = recorded(model, tmp_path / "rec", "outputs"), ModelStore(model)
    for router in load_routers(store).routers:
        inputs = source.read_values(router.name, 0, 48)
        choice, weights = routed(router, inputs, False)
        experts = open_expert_functions(store, router)
        expected = experts.mixed(inputs.astype(np.float64), choice.chosen, weights)
        near(source.read_output(router.name, "routed_output", 0, 48), expected)
        shared = open_shared_experts(store, router)
        theirs = np.zeros_like(inputs) if shared is None else shared.apply(inputs)
        near(source.read_output(router.name, "shared_output", 0, 48), theirs)


@pytest.mark.parametrize(
    ("name", "keep", "why"),
    [
        ("axk1", "outputs", "a norm stands behind it"),
        ("jetmoe", "outputs", "mixes tokens between them"),
        ("cohere2_moe__sigmoid", "outputs", "mean of shared and routed"),
        ("muse_spark", "outputs:every-expert", "cannot be asked one by one"),
        ("switch_transformers", "outputs:every-expert", "cannot be asked one by one"),
    ],
)
def test_blocks_that_give_another_sum_are_refused(name, keep, why, tmp_path):
    with pytest.raises(RecordingError, match=why):
        RouterRecorder(build(name), tmp_path / "rec", keep=keep)


GATED = "qwen3_next"

#: Token ids of three texts of unlike lengths.
TEXTS = [np.random.default_rng(n).integers(10, 60, 12 + 5 * n).tolist() for n in range(3)]


def _saved(name: str) -> tuple[Any, Path]:
    model, folder = attention_model(name), new_folder()
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def gated() -> tuple[Any, Path]:
    return _saved(GATED)


@pytest.fixture(scope="module")
def sunk() -> tuple[Any, Path]:
    return _saved("gpt_oss")


def _record(model: Any, out: Path, *batches: list[list[int]], **given: Any) -> list[LayerSums]:
    with AttentionRecorder(model, out, **given) as recorder:
        for batch in batches:
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(text)) + text for text in batch])
            mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in batch])
            recorder.tokens(ids, mask)
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    return [*read_attention_record(out).layers]


@pytest.mark.parametrize("which", ["gated", "sunk"])
def test_padding_and_batches_do_not_change_the_sums(which, request, tmp_path):
    model, _ = request.getfixturevalue(which)
    together = _record(model, tmp_path / "a", TEXTS)
    apart = _record(model, tmp_path / "b", *([text] for text in TEXTS))
    for one, two in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.queries, two.queries)
        np.testing.assert_allclose(one.sums, two.sums, rtol=1e-4, atol=1e-4)


def test_only_announced_passes_count_and_nothing_that_gradients_run_again(gated, tmp_path):
    model, _ = gated
    ids = torch.tensor([TEXTS[2]])
    plain = _record(model, tmp_path / "a", [TEXTS[2]])
    model.activation_checkpointing_enable()
    model.train().requires_grad_(True)
    try:
        with AttentionRecorder(model, tmp_path / "b") as recorder:
            model(input_ids=ids, use_cache=False)
            recorder.tokens(ids)
            model(input_ids=ids, use_cache=False).logits.sum().backward()
    finally:
        model.activation_checkpointing_disable()
        model.eval().requires_grad_(False).zero_grad()
    for one, two in zip(plain, read_attention_record(tmp_path / "b").layers, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.sums, two.sums, rtol=1e-4, atol=1e-4)


def test_without_attention_weights_gates_are_known_and_sinks_are_not(gated, tmp_path):
    model, folder = gated
    model.set_attn_implementation("sdpa")
    try:
        (sums,) = _record(model, tmp_path / "rec", TEXTS, checkpoint=folder)
    finally:
        model.set_attn_implementation("eager")
    assert (sums.has_heads, sums.has_weights, sums.has_places) == (True, False, False)
    found = mg.attention(folder, tokens=tmp_path / "rec")
    (layer,) = found.value.layers
    assert layer.on_tokens is not None
    assert "gate_mean" in layer.on_tokens.figures
    assert not {"first_token_mass", "gate_first_correlation"} & layer.on_tokens.figures.keys()
    assert "how much goes to first tokens was not looked at" in " ".join(found.text().split())


def test_a_gate_that_a_bias_closes_takes_the_energy_away(tmp_path):
    """At a bias of -6 a gate is 1/400: one minus its square, whatever the token."""
    model = attention_model("qwen3_next__bias")
    model.save_pretrained(tmp_path / "open")
    for path, parameter in model.named_parameters():
        if path.endswith("3.self_attn.q_proj.bias"):
            parameter.copy_(torch.full_like(parameter, -6.0))
        if path.endswith("3.self_attn.q_proj.weight"):
            parameter.mul_(0.0)
    _record(model, tmp_path / "rec", TEXTS)
    model.save_pretrained(tmp_path / "shut")
    (layer,) = mg.attention(tmp_path / "shut", tokens=tmp_path / "rec").value.layers
    assert layer.on_tokens is not None
    found = {name: figure.mean for name, figure in layer.on_tokens.figures.items()}
    gate = 1.0 / (1.0 + np.exp(6.0))
    assert found["gate_mean"] == pytest.approx(gate, rel=1e-6)
    assert found["gate_closed_share"] == 1.0
    assert found["energy_removed_share"] == pytest.approx(1.0 - gate**2, rel=1e-6)
    assert found["gate_first_correlation"] is None
    assert found["gate_median"] == pytest.approx(gate, rel=0.07)
    with pytest.raises(RecordingError, match="other gates"):
        mg.attention(tmp_path / "open", tokens=tmp_path / "rec")


def test_random_rows_are_as_long_as_those_of_the_gate(gated, tmp_path):
    """Their gates vary about as much as inputs and lengths say: the pull is finite and another."""
    model, _ = gated
    (sums,) = _record(model, tmp_path / "rec", TEXTS)
    own, random = sums.rows[:, 1].sum(axis=(1, 2))
    assert own != random
    assert random == pytest.approx(own, rel=0.25)
    assert sums.histogram.sum(axis=2).tolist() == [[sums.rows.shape[3] * sums.tokens.sum()] * 4] * 2


def test_another_checkpoint_is_refused_and_a_rounded_one_is_the_same(gated, tmp_path):
    model, _ = gated
    other = attention_model(GATED)
    for path, parameter in other.named_parameters():
        if "q_proj" in path:
            parameter.add_(0.1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(RecordingError, match="are not those of the checkpoint"):
        AttentionRecorder(model, tmp_path / "rec", checkpoint=tmp_path / "other")
    _, folder = gated
    half = attention_model(GATED).to(torch.bfloat16)
    (sums,) = _record(half, tmp_path / "rec", TEXTS, checkpoint=folder)
    (layer,) = mg.attention(folder, tokens=tmp_path / "rec").value.layers
    assert layer.on_tokens is not None and sums.tokens.sum() == sum(map(len, TEXTS))


def test_a_model_without_known_gates_and_a_block_without_tokens_are_errors(gated, tmp_path):
    model, _ = gated
    with pytest.raises(RecordingError, match="no gate and no learned sink of model_type 'olmoe'"):
        AttentionRecorder(sample_of("olmoe-balanced").model, tmp_path / "a")
    with (
        pytest.raises(RecordingError, match="no attention layer saw a token"),
        AttentionRecorder(model, tmp_path / "b"),
    ):
        model(input_ids=torch.tensor([TEXTS[0]]), use_cache=False)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UsageError, match="AttentionRecorder"):
        RouterRecorder(model, tmp_path / "c", keep="attention")


def test_a_pass_with_a_cache_knows_no_first_token(sunk, tmp_path):
    model, _ = sunk
    ids = torch.tensor([TEXTS[2]])
    with torch.no_grad():
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    with AttentionRecorder(model, tmp_path / "rec") as recorder:
        recorder.tokens(ids[:, 4:])
        model(input_ids=ids[:, 4:], past_key_values=cache)
    assert not any(one.has_places for one in read_attention_record(tmp_path / "rec").layers)


def _request(folder: Path, tmp_path: Path, **given: Any) -> CaptureRequest:
    text = tmp_path / "texts.jsonl"
    text.write_text("\n".join(json.dumps({"token_ids": one}) for one in TEXTS))
    usual = {"keep": "attention", "tokenizer": "bytes"}
    usual |= {"text": (str(text),), "out": tmp_path / "rec"}
    return CaptureRequest(folder, **usual | given)


def test_the_command_records_what_the_recorder_does(sunk, tmp_path):
    model, folder = sunk
    request = _request(folder, tmp_path, keep="attention:1-2", dtype="float32")
    found = capture(request, plan_capture(request))
    assert found.num_tokens == sum(map(len, TEXTS))
    recorded = read_attention_record(tmp_path / "rec").layers
    own = _record(model, tmp_path / "own", *([text] for text in TEXTS))[1:3]
    assert [one.name for one in recorded] == ["text/1", "text/2"]
    for one, two in zip(recorded, own, strict=True):
        np.testing.assert_allclose(one.sums, two.sums, rtol=1e-5, atol=1e-6)
    said = " ".join(mg.attention(folder, tokens=tmp_path / "rec").text().split())
    assert "2 layers not in the recording, by weights alone." in said
    for option in ({"fold": True}, {"restart": True}):
        with pytest.raises(UsageError, match="does not apply to --keep attention"):
            plan_capture(_request(folder, tmp_path, out=tmp_path / "none", **option))


def test_a_recording_for_scans_is_none_of_attention_and_the_other_way_round(sunk, tmp_path):
    _record(sunk[0], tmp_path / "rec", TEXTS)
    (tmp_path / "other").mkdir()
    with pytest.raises(RecordingError, match="nothing of attention was recorded"):
        mg.attention(sunk[1], tokens=tmp_path / "other")
    with pytest.raises(MoeGeomError) as raised:
        open_tokens(tmp_path / "rec")
    assert "moegeom research attention CKPT --tokens" in raised.value.hint


def test_a_damaged_record_is_refused(gated, tmp_path):
    _record(gated[0], tmp_path / "rec", TEXTS)
    file, sums = tmp_path / "rec" / FACTS_FILE, tmp_path / "rec" / SUMS_FILE
    facts, arrays = json.loads(file.read_text()), load_file(sums)
    (layer,) = facts["layers"]
    for other_facts, other_arrays in (
        ({"schema": facts["schema"] + 1}, {}),
        ({"layers": [layer | {"heads": layer["heads"] + 1}]}, {}),
        ({}, {"text/3.rows": arrays["text/3.rows"][:, :1].copy()}),
        ({}, {"text/3.tokens": -arrays["text/3.tokens"]}),
    ):
        file.write_text(json.dumps(facts | other_facts))
        save_file(arrays | other_arrays, sums)
        with pytest.raises(RecordingError):
            read_attention_record(tmp_path / "rec")


#: Families whose module gives back what expert capacity left of the choice.
AFTER_CAPACITY = {"nllb_moe", "switch_transformers"}

RUN = [name for name in LOADED if FORWARD.get(name, True)]

#: By what the router's module, or its block, gives back.
RESULTS = {
    "logits, weights, choices": "olmoe",
    "of its own norm": "gemma4_text",
    "logits alone": "dbrx",
    "a mask": "switch_transformers",
    "masks of two": "nllb_moe",
    "sorted by expert": "jetmoe",
    "weights of all experts": "llama4_text",
    "numbers of experts that copy": "longcat_flash",
    "a table of tokens": "deepseek_v4",
    "a choice that its block makes": "deepseek_v3",
    "weights before choices": "granitemoe",
    "with biases of logits": "gpt_oss",
    "experts in two lots": "ernie4_5_vl_moe",
    "sparsemixer": "phimoe",
    "with rows of shared experts": "inkling_text",
    "without a module of its own": "minimax_m2",
    "in a part of the model": "llava__mixtral",
}


def tapped(name: str) -> tuple[Any, ...]:
    """Places, what their taps deliver while the families' oracle runs the model, and what it saw."""
    model = model_of(name)
    store = ModelStore(model)
    places = find_places(load_routers(store).routers, store)
    delivered: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    handles = [
        handle
        for place in places
        for handle in Tap(place, model, lambda n, *of: delivered.setdefault(n, of)).hooks()
    ]
    try:
        return places, delivered, observe(model, name)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", by_day(RUN, RESULTS))
def test_a_tap_sees_what_the_router_was_given_and_chose(name):
    """And logits on the device are those of the rule, in float64 from the same inputs."""
    places, delivered, observed = tapped(name)
    assert delivered
    for place in (place for place in places if place.router.name in delivered):
        inputs, chosen = delivered[place.router.name]
        router = place.router
        read = [_normed(o.inputs, place, name) for o in observed]
        same = [o for o, y in zip(observed, read, strict=True) if _is_close(y, inputs, name)]
        assert same, f"{router.name} was given something else"
        assert (chosen is None) == (name.partition("__")[0] in AFTER_CAPACITY)
        if chosen is not None:
            assert any(np.array_equal(np.sort(o.chosen), np.sort(chosen)) for o in same)
        parts = RowReader(place, Keep("logits")).of(inputs, None)
        assert parts.values is not None
        exact = inputs.double().numpy() @ router.weight.T.astype(np.float64)
        if router.logit_bias is not None:
            exact = exact + router.logit_bias
        np.testing.assert_allclose(parts.values.numpy(), exact, rtol=1e-4, atol=1e-4)


def _normed(inputs: np.ndarray, place: Place, name: str) -> np.ndarray:
    """What reaches the rows: some routers norm their input themselves."""
    router = place.router
    if name not in OWN_NORM:
        return inputs
    assert router.norm is not None
    assert router.gain is not None
    return normed(inputs, router.norm.kind, router.norm.eps, router.gain)


def _is_close(mine: np.ndarray, theirs: torch.Tensor, name: str) -> bool:
    if mine.shape != tuple(theirs.shape):
        return False
    if name in OWN_NORM:  # normed by two implementations
        return np.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    return np.array_equal(mine, theirs)


def test_logits_of_a_cosine_router_are_scaled_cosines():
    places, delivered, _ = tapped("olmoe")
    inputs, _ = delivered[places[0].router.name]
    generator = np.random.default_rng(0)
    inner = generator.standard_normal((7, inputs.shape[1]))
    shift, similar = generator.standard_normal(7), generator.standard_normal((5, 7))
    similar /= np.linalg.norm(similar, axis=1, keepdims=True)
    router = dataclasses.replace(
        places[0].router,
        weight=(similar @ inner).astype(np.float32),
        logit_bias=(similar @ shift).astype(np.float32),
        projection=Projection(inner.astype(np.float32), shift.astype(np.float32), scale=3.0),
    )
    place = dataclasses.replace(places[0], router=router)
    parts = RowReader(place, Keep("logits")).of(inputs, None)
    projected = inputs.double().numpy() @ inner.T + shift
    cosine = projected @ similar.T / np.linalg.norm(projected, axis=1, keepdims=True)
    assert parts.values is not None
    np.testing.assert_allclose(parts.values.numpy(), 3.0 * cosine, atol=1e-5)
