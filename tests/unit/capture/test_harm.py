"""Flips made in a running model give the model of the other set, and cost what its logits say."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import moegeom as mg
from moegeom.core.errors import RecordingError, UsageError
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.recorder.harm import LENGTH, FlipMaker, make_flips
from moegeom.recorder.run import capture, plan_capture
from moegeom.recorder.taps import identify
from moegeom.router.requested_family import NOTHING_ASKED
from moegeom.studies.boundary.document import document
from moegeom.tokens.recording.harm import DTYPES, FILE, LATER, read_harm
from moegeom.tokens.sources.recorded import open_recording
from tests.unit.capture.conftest import sample_of
from tests.unit.capture.test_command import request_of
from tests.unit.capture.trained import SIZES, tiny_model

FLIPS = 12


def piece(length: int = 60, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 64, length).tolist()


def made(model: torch.nn.Module, *pieces: list[int]) -> dict[str, np.ndarray]:
    """Columns of flips in the pieces, which follow each other."""
    model.eval()
    starts = np.cumsum([0, *(len(one) for one in pieces)])
    placed = list(zip(starts.tolist(), pieces, strict=False))
    columns, reasons = make_flips(
        model, identify(model, None, NOTHING_ASKED), placed, FLIPS * len(pieces)
    )
    assert not reasons
    return {name: np.array(values) for name, values in columns.items()}


@torch.no_grad()
def by_hand(model: torch.nn.Module, ids: torch.Tensor, token: int, expert_in: int, out: int):
    """Logits at a token of the last layer that swaps two experts, at the mirror image of the input.

    All of it from the weights: gate, experts, norm and head.
    """
    seen = {}
    block = model.model.layers[-1].mlp
    handles = [
        block.register_forward_hook(lambda m, a, r: seen.update(y=a[0], moe=r)),
        model.model.layers[-1].register_forward_hook(lambda m, a, r: seen.update(whole=r)),
    ]
    plain = model(input_ids=ids, use_cache=False).logits[0, token].double()
    for handle in handles:
        handle.remove()
    whole, moe = (s[0] if isinstance(s, tuple) else s for s in (seen["whole"], seen["moe"]))
    y = seen["y"].reshape(-1, 32)[token].double()
    weight = block.gate.weight.double()
    normal = weight[expert_in] - weight[out]
    mirrored = y - 2.0 * (normal @ y) / (normal @ normal) * normal
    p, chosen = torch.softmax(weight @ mirrored, 0).topk(2)
    assert expert_in in chosen and out not in chosen
    result = sum(
        share * _expert(block.experts, expert, y) for share, expert in zip(p, chosen, strict=True)
    )
    behind = whole[0, token].double() - moe.reshape(-1, 32)[token].double() + result
    norm = model.model.norm
    behind = behind / (behind.pow(2).mean() + norm.variance_epsilon).sqrt() * norm.weight
    return plain, model.lm_head.weight.double() @ behind


def _expert(experts, expert: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    gate, up = (experts.gate_up_proj[expert].double() @ y).chunk(2)
    return experts.down_proj[expert].double() @ (torch.nn.functional.silu(gate) * up)


def test_a_flip_of_the_last_layer_costs_what_its_other_expert_says_and_nothing_behind_it():
    model, text = tiny_model(initializer_range=0.5), piece()
    columns = made(model, text)
    last = columns["router"] == "text/1"
    assert last.sum() > 3 and (~last).sum() > 3
    assert not columns["kl_later"][last].any() and columns["kl_later"][~last].any()
    for row in np.flatnonzero(last):
        plain, flipped = by_hand(
            model,
            torch.tensor([text]),
            int(columns["token"][row]),
            int(columns["expert_in"][row]),
            int(columns["expert_out"][row]),
        )
        p, q = torch.log_softmax(plain, 0), torch.log_softmax(flipped, 0)
        assert columns["kl"][row] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
        assert columns["is_other_token"][row] == (plain.argmax() != flipped.argmax())


def test_flips_between_equal_experts_cost_nothing_and_between_others_more_than_a_step_beside():
    model = tiny_model(initializer_range=0.5, norm_topk_prob=True)
    columns = made(model, piece())
    assert np.median(columns["kl"]) > 10 * np.nanmedian(columns["kl_beside"])
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("gate_up_proj", "down_proj"):
                experts = getattr(layer.mlp.experts, name)
                experts.copy_(experts[:1].expand_as(experts))
    assert made(model, piece())["kl"].max() < 1e-9


def test_flipped_tokens_are_among_the_nearest_tenth_and_pieces_have_their_own():
    model, texts = tiny_model(initializer_range=0.5), [piece(70, n) for n in range(3)]
    columns = made(model, *texts)
    assert (np.bincount(columns["token"] // 70) > 0).all()
    whole = {"input_ids": torch.tensor(texts)}
    inputs = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_pre_hook(
            lambda m, a, name=f"text/{number}": inputs.update({name: a[0].reshape(-1, 32)})
        )
    with torch.no_grad():
        model(**whole)
    for place in identify(model, None, NOTHING_ASKED).places:
        mine = columns["router"] == place.router.name
        distance = mg.route(place.router, inputs[place.router.name]).boundary_distance
        token = columns["token"][mine]
        np.testing.assert_allclose(columns["boundary_distance"][mine], distance[token], rtol=1e-3)
        for text in range(3):
            of_text = distance[70 * text : 70 * (text + 1)]
            assert (distance[token[token // 70 == text]] <= np.sort(of_text)[6] * 1.001).all()


def test_a_model_in_bfloat16_is_flipped_as_far_as_its_numbers_show_the_step():
    model = tiny_model(initializer_range=0.5).to(torch.bfloat16)
    columns = made(model, piece())
    assert len(columns["kl"]) > 6 and (columns["kl"] > 0).mean() > 0.5


def test_a_model_without_a_head_and_one_without_choices_to_make_are_refused():
    model = tiny_model()
    with pytest.raises(RecordingError, match="no logits of next tokens"):
        FlipMaker(model.model, identify(model.model, None, NOTHING_ASKED)).make(piece(), 0, 3)
    everything = OlmoeForCausalLM(OlmoeConfig(**{**SIZES, "num_experts_per_tok": 8})).eval()
    with pytest.raises(RecordingError, match="no flip could be made"):
        make_flips(everything, identify(everything, None, NOTHING_ASKED), [(0, piece())], 3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    balanced = sample_of("olmoe-balanced")
    folder = tmp_path_factory.mktemp("harm")
    lines = [json.dumps({"token_ids": ids[0].tolist()}) for _, _, ids in balanced.documents()]
    (folder / "text.jsonl").write_text("\n".join(lines[:12]) + "\n", "utf-8")
    request = request_of(
        balanced, folder / "text.jsonl", folder / "rec", keep="hidden", num_tokens=2048, flips=24
    )
    summary = capture(request, plan_capture(request))
    assert 60 < summary.num_flips <= 72 and summary.harm > 0
    return summary.out


def test_a_report_says_what_the_flips_of_its_recording_cost(recorded, balanced):
    report = mg.boundary_report(str(balanced.path), str(recorded), arithmetics="bf16").value
    flips = read_harm(recorded, 2048)
    rows = [
        r
        for r in report.results.rows("layers")
        if r["variant"] == "as_stored" and r["population"] == "all"
    ]
    for row in rows:
        mine = flips[row["router"]]
        assert row["num_made_flips"] == len(mine["kl"])
        assert row["harm_kl"] == pytest.approx(mine["kl"].mean())
        assert row["harm_kl_later"] == pytest.approx(mine["kl_later"].mean())
        assert row["harm_kl_se"] > 0
    screen = " ".join(render(document(report, View(80)), "table", View(80)).split())
    assert f"the {LATER} behind it" in screen and "in nats a token: bf16" in screen


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("token", pa.array([5000] * 3, pa.int64()), "beyond the 2,048"),
        ("kl", pa.array([-1.0] * 3), "below 0"),
        ("kl", pa.array([float("nan")] * 3), "below 0"),
        ("kl_later", pa.array(["x"] * 3), "expected float64"),
        ("expert_in", None, "expert_in"),
    ],
)
def test_a_file_of_flips_that_makes_no_sense_is_refused(recorded, tmp_path, column, value, message):
    table = pq.read_table(recorded / FILE).slice(0, 3)
    assert set(DTYPES) < set(table.column_names)
    at = table.column_names.index(column)
    table = table.remove_column(at) if value is None else table.set_column(at, column, value)
    pq.write_table(table, tmp_path / FILE)
    with pytest.raises(RecordingError, match=message):
        read_harm(tmp_path, 2048)
    (tmp_path / FILE).write_bytes(b"PAR1" * 9)
    with pytest.raises(RecordingError, match=FILE):
        read_harm(tmp_path, 2048)


def test_flips_belong_to_recordings(recorded, balanced, tmp_path):
    assert open_recording(recorded).made_flips("text/0") is not None
    request = request_of(
        balanced, recorded.parent / "text.jsonl", tmp_path / "x", fold=True, flips=3
    )
    with pytest.raises(UsageError, match="--flips"):
        plan_capture(request)
    assert LENGTH == 256
