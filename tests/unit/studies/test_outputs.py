"""Oracle: transformers runs the blocks of the sample checkpoints on the inputs that are recorded."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import moegeom as mg
from moegeom.core.errors import RecordingError, RouterError
from moegeom.research.outputs.document import outputs_figures
from moegeom.tokens.recording.reader import open_recording
from tests.unit.studies.samples import BALANCED, GROUPED, sides


def sample_of(ckpt: Path, tokens: Path, **options: Any) -> Any:
    return mg.outputs(ckpt, tokens, **({"sample": 200, "seed": 5} | options)).value


@pytest.fixture(scope="module", params=[BALANCED, GROUPED], ids=lambda path: path.name)
def written(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple:
    out = tmp_path_factory.mktemp("outputs") / "rec"
    record = sample_of(*sides(request.param), every_expert=True, out=out)
    return request.param, record, open_recording(out), out


def of_model(block: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        total = block(inputs[None])[0]
        has_shared = hasattr(block, "shared_experts")
        shared = block.shared_experts(inputs) if has_shared else torch.zeros_like(inputs)
        ones = torch.ones(len(inputs), 1)
        every = [
            block.experts(inputs, torch.full((len(inputs), 1), e), ones)
            for e in range(block.experts.num_experts)
        ]
    routed = total - shared
    return {
        "shared_output": shared,
        "routed_output": routed,
        "expert_output": torch.stack(every, 1),
    }


def test_the_recording_holds_what_the_blocks_give(written):
    path, record, source, _ = written
    model = transformers.AutoModelForCausalLM.from_pretrained(sides(path)[0], dtype=torch.float32)
    assert source.facts.outputs == ("shared_output", "routed_output", "expert_output")
    assert source.facts.num_tokens == record.num_tokens == 200
    for router in record.routers:
        layer = int(router.router.rpartition("/")[2])
        inputs = torch.tensor(source.read_values(router.router, 0, 200))
        for kind, expected in of_model(model.eval().model.layers[layer].mlp, inputs).items():
            mine = source.read_output(router.router, kind, 0, 200)
            scale = max(float(expected.abs().max()), 1e-30)
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * scale, err_msg=kind)


def test_tokens_are_those_of_the_recording_that_was_read(written):
    path, record, source, _ = written
    whole = open_recording(sides(path)[1])
    router, total = record.routers[0].router, whole.facts.num_tokens
    every, own = whole.read_columns(0, total), source.read_columns(0, 200)
    place = {
        key: row
        for row, key in enumerate(
            zip(every.document.tolist(), every.position.tolist(), strict=True)
        )
    }
    rows = [place[key] for key in zip(own.document.tolist(), own.position.tolist(), strict=True)]
    for part, values in vars(every.at(np.array(rows))).items():
        np.testing.assert_array_equal(getattr(own, part), values)
    inputs = whole.read_values(router, 0, total)
    np.testing.assert_array_equal(source.read_values(router, 0, 200), inputs[rows])
    chosen = whole.read_chosen(router, 0, total)
    assert chosen is not None
    np.testing.assert_array_equal(source.read_chosen(router, 0, 200), chosen[rows])


def test_a_scan_of_it_has_the_same_figures(written):
    path, record, _, out = written
    router = record.routers[-1]
    layer = int(router.router.rpartition("/")[2])
    (row,) = mg.scan(sides(path)[0], out, layers=layer).layers().to_pylist()
    assert row["routed_mean_energy_share"] == pytest.approx(router.routed_mean_share, 1e-5)
    assert row["overlap_output"] == pytest.approx(router.overlap_every, 1e-4, 1e-7)
    if router.shared == "computed":
        assert row["shared_mean_energy_share"] == pytest.approx(router.shared_mean_share, 1e-5)
        assert row["shared_energy_share"] == pytest.approx(router.shared_energy_share, 1e-5)
    else:
        assert row["shared_energy_share"] == 0.0


def test_experts_share_the_tokens_and_the_energy_and_the_chosen_alone_give_the_output(written):
    _, record, _, _ = written
    for router in record.routers:
        assert sum(one.num_tokens for one in router.experts) == record.num_tokens * router.top_k
        assert sum(one.energy_share for one in router.experts) == pytest.approx(1.0)
        assert 0.0 < router.adds_up <= 1.0
        assert router.num_read == router.num_experts == len(router.experts)
    path, record, _, _ = written
    few = sample_of(*sides(path))
    for one, both in zip(few.routers, record.routers, strict=True):
        assert one.routed_norm == pytest.approx(both.routed_norm, 1e-6)
        assert one.overlap == pytest.approx(both.overlap, 1e-5)
        assert one.overlap_every is None
        assert one.num_read <= both.num_read


def test_a_table_has_a_row_for_each_expert_and_the_figure_their_shares(tmp_path):
    file = tmp_path / "experts.parquet"
    record = mg.outputs(*sides(BALANCED), layers=[0, 1], sample=50, out=file).value
    experts = [one for router in record.routers for one in router.experts]
    rows, (figure,) = pq.read_table(file).to_pylist(), outputs_figures(record)
    assert [row["expert"] for row in rows] == 2 * [*range(16)]
    assert [r["contribution_norm"] for r in rows] == [one.contribution_norm for one in experts]
    columns = {name: list(values) for name, values in figure.columns}
    assert columns["energy_share"] == [one.energy_share for one in experts]
    assert sum(columns["num_tokens"]) == 2 * 50 * 4


def test_tokens_that_are_not_finite_somewhere_are_left_out_everywhere():
    ckpt, rec = sides(BALANCED)
    whole = open_recording(rec)
    arrays = {name: whole.read_values(name, 0, 60).copy() for name in whole.facts.routers}
    arrays["text/1"][7] = np.nan
    record = mg.outputs(ckpt, mg.recording(arrays, stage="router_input"), non_finite="skip").value
    assert (record.num_tokens, record.sample.num_non_finite) == (59, 1)
    assert [router.num_tokens for router in record.routers] == [59, 59, 59]


def test_logits_alone_and_a_file_of_routers_alone_are_refused(tmp_path):
    ckpt, _ = sides(BALANCED)
    logits = np.random.default_rng(0).standard_normal((64, 16))
    held = mg.recording({"text/0": logits}, stage="logits")
    with pytest.raises(RecordingError, match="computed on router inputs"):
        mg.outputs(ckpt, held)
    ckpt, rec = sides(BALANCED)
    stored = load_file(ckpt / "model.safetensors")
    save_file(
        {n: t for n, t in stored.items() if "expert" not in n}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((ckpt / "config.json").read_text())
    with pytest.raises(RouterError, match="no tensors of experts"):
        mg.outputs(tmp_path, rec)
