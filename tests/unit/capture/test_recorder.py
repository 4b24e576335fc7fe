"""Oracles: hooks of the tests' own in the same pass, bit for bit, and the recordings that came with
the samples, which another processor made, up to float32 rounding.
"""

from __future__ import annotations

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import TokenSource
from moegeom.geometry.selection import route
from moegeom.recorder import RouterRecorder, merge_parts
from moegeom.recorder.taps import ModelStore
from moegeom.router.expert_functions import open_expert_functions, open_shared_experts
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.reader import open_recording
from tests.by_day import by_day
from tests.families.test_families_against_transformers import routed
from tests.families.tiny_models import build
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
