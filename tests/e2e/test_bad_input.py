"""Input that must be refused: exit code 3, one sentence with where, found and expected, no trace."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.core.tokens import TokenColumns
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint
from moegeom.tokens.recording.writer import RecordingWriter

GATE = "model.layers.{}.mlp.gate.weight"
NORM = "model.layers.{}.post_attention_layernorm.weight"
SCAN = ("scan", "model", "--tokens", "rec", "--out", "out")


@pytest.fixture
def damaged(world, tmp_path) -> Path:
    """A folder with a checkpoint and a recording that a test may damage."""
    return world.copy_to(tmp_path, "model", "rec")


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def refused(moegeom):
    """Runs a command that must be refused with a sentence that holds each of ``said``."""

    def refuse(folder: Path, arguments: tuple[str, ...], *said: str, code: int = 3) -> str:
        before = everything_below(folder)
        ran = moegeom(folder, *arguments)
        assert ran.code == code, ran.out + ran.err
        assert ran.out == ""
        error, *rest = ran.err.splitlines()
        assert error.startswith("error: ")
        assert all(line.startswith(("  hint: ", "  note: ")) for line in rest), ran.err
        assert "Traceback" not in ran.err
        assert error.endswith((".", "?", ")"))
        for words in said:
            assert words in ran.err
        assert everything_below(folder) == before
        return ran.err

    return refuse


def change_tensors(model: Path, **changes: np.ndarray | None) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def values_of(recording: Path, router: str = "text/0") -> Path:
    return recording / f"router_input-{router.replace('/', '.')}-00000.safetensors"


def write_recording(path: Path, values: dict[str, np.ndarray], stage="router_input") -> None:
    tokens = len(next(iter(values.values())))
    count = np.arange(tokens)
    columns = TokenColumns(
        document=count // 128,
        position=(count % 128).astype(np.int32),
        token_id=np.full(tokens, -1, np.int32),
        domain=np.full(tokens, -1, np.int16),
    )
    with RecordingWriter(path, stage, tuple(values)) as writer:
        writer.append(columns, values)


# --------------------------------------------------------------------------------- the checkpoint


def test_no_such_checkpoint(refused, damaged):
    refused(damaged, ("scan", "nowhere", "--out", "out"), "nowhere", "no such file", "hint:")


def test_truncated_shard(refused, damaged):
    file = damaged / "model/model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 100)
    refused(damaged, SCAN, "model.safetensors: truncated", str(size - 100), str(size), "hint:")


def test_index_that_names_a_missing_file(refused, damaged):
    names = load_file(damaged / "model/model.safetensors")
    shutil.move(damaged / "model/model.safetensors", damaged / "model/model-00001.safetensors")
    shards = dict.fromkeys(names, "model-00001.safetensors")
    shards[GATE.format(2)] = "model-00002.safetensors"
    index = damaged / "model/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}), "utf-8")
    refused(damaged, SCAN, index.name, "model-00002.safetensors", "1 of 2 files", "hint:")


def test_config_and_tensor_disagree_on_the_number_of_experts(refused, damaged):
    config = damaged / "model/config.json"
    settings = json.loads(config.read_text("utf-8")) | {"num_experts": 32}
    config.write_text(json.dumps(settings), "utf-8")
    refused(damaged, SCAN, "model.safetensors", GATE.format(0), "16", "32", "hint:")


def test_no_routers(refused, damaged):
    norms = {
        name: tensor
        for name, tensor in load_file(damaged / "model/model.safetensors").items()
        if "norm" in name
    }
    save_file(norms, damaged / "model/model.safetensors")
    refused(damaged, SCAN, "model:", "none of 3 tensors", "qwen3_moe", "mlp.gate.weight", "hint:")


def test_unknown_family(refused, damaged):
    (damaged / "model/config.json").write_text('{"model_type": "llama"}', "utf-8")
    refused(damaged, SCAN, "'llama'", "mlp.gate.weight", "moegeom families")


def test_nan_in_a_router_row(refused, damaged):
    weight = load_file(damaged / "model/model.safetensors")[GATE.format(1)].copy()
    weight[7, 3] = np.nan
    change_tensors(damaged / "model", **{GATE.format(1): weight})
    tokens = (*SCAN, "--stale-inputs")
    refused(damaged, tokens, "text/1", "expert 7", "1 of 16", GATE.format(1), "--layers")


def test_nan_in_a_router_row_is_not_green_without_tokens(moegeom, damaged):
    weight = load_file(damaged / "model/model.safetensors")[GATE.format(2)].copy()
    weight[7, 3] = np.nan
    change_tensors(damaged / "model", **{GATE.format(2): weight})
    ran = moegeom(damaged, "scan", "model", "--out", "out")
    assert ran.code in (0, 3)
    if ran.code == 0:
        (verdict,) = (line for line in ran.out.splitlines() if line.startswith("VERDICT"))
        assert " 2 errors" in verdict  # the duplicate rows of layer 1, and this
    assert "text/2" in ran.out + ran.err or "layer 2" in ran.out
    assert "Traceback" not in ran.err


def test_a_directory_in_place_of_the_file(refused, damaged):
    (damaged / "model/model.safetensors").unlink()
    (damaged / "model/model.safetensors").mkdir()
    refused(damaged, SCAN, "model.safetensors", "not a regular file")


def test_a_broken_link_in_place_of_the_file(refused, damaged):
    (damaged / "model/model.safetensors").unlink()
    (damaged / "model/model.safetensors").symlink_to("gone.safetensors")
    refused(damaged, SCAN, "model.safetensors", "cannot be read")


# ---------------------------------------------------------------------------------- the recording


def test_no_such_recording(refused, damaged):
    refused(damaged, ("scan", "model", "--tokens", "nowhere", "--out", "out"), "nowhere: no such")


def test_residual_stream_in_place_of_router_inputs(refused, damaged):
    gain = load_file(damaged / "model/model.safetensors")[NORM.format(0)].astype(np.float32)
    inputs = load_file(values_of(damaged / "rec"))["router_input"]
    length = np.exp(np.random.default_rng(0).normal(0.0, 0.4, (len(inputs), 1)))
    residual = (inputs / gain * 3.0 * length).astype(np.float32)
    write_recording(damaged / "residual", dict.fromkeys(("text/0", "text/1", "text/2"), residual))
    arguments = ("scan", "model", "--tokens", "residual", "--out", "out")
    refused(damaged, arguments, "residual, router text/0", "RMS", "expected 1", "pre_norm")


def test_tokens_of_the_wrong_width(refused, damaged):
    narrow = np.ones((64, 48), np.float32)
    write_recording(damaged / "narrow", dict.fromkeys(("text/0", "text/1", "text/2"), narrow))
    arguments = ("scan", "model", "--tokens", "narrow", "--out", "out")
    refused(damaged, arguments, "narrow", "text/0", "48", "64", "hint:")


def test_recording_of_another_checkpoint(refused, moegeom, damaged):
    shutil.rmtree(damaged / "model")
    other = SyntheticModel(hidden=64, experts=16, top_k=4, layers=3, seed=9)
    write_checkpoint(damaged / "model", other)
    # the gains differ as well: only the fingerprint test comes first
    refused(damaged, SCAN, "rec: recorded from another checkpoint", "fingerprint", "--stale-inputs")


def test_recording_of_another_model(refused, damaged):
    write_recording(damaged / "other", {"audio/0": np.ones((8, 64), np.float32)})
    arguments = ("scan", "model", "--tokens", "other", "--out", "out")
    refused(damaged, arguments, "other", "audio/0", "text/0", "hint:")


def test_truncated_recording(refused, damaged):
    file = values_of(damaged / "rec", "text/2")
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    refused(damaged, SCAN, file.name)


def test_a_directory_in_place_of_recorded_values(refused, damaged):
    file = values_of(damaged / "rec")
    file.unlink()
    file.mkdir()
    refused(damaged, SCAN, file.name)


def test_a_broken_link_in_place_of_recorded_values(refused, damaged):
    file = values_of(damaged / "rec")
    file.unlink()
    file.symlink_to("gone.safetensors")
    refused(damaged, SCAN, file.name)


def test_foreign_file_without_a_stage(refused, damaged):
    np.save(damaged / "text.0.npy", np.ones((8, 64), np.float32))
    arguments = ("scan", "model", "--tokens", "text.0.npy", "--out", "out")
    refused(damaged, arguments, "text.0.npy", "--stage", "router_input", code=2)


def plant_nan(recording: Path, router: str, token: int) -> None:
    values = load_file(values_of(recording, router))["router_input"].copy()
    values[token, 5] = np.nan
    save_file({"router_input": values}, values_of(recording, router))


def test_nan_token(refused, moegeom, damaged):
    plant_nan(damaged / "rec", "text/0", 137)
    said = ("rec", "router text/0", "first: token 137", "--non-finite skip")
    refused(damaged, SCAN, *said)
    ran = moegeom(damaged, *SCAN, "--non-finite", "skip", "--quiet")
    assert ran.code == 0, ran.err

    from moegeom.results.reader import open_results

    results = open_results(damaged / "out")
    assert results.run["parts"]["text/0"]["first_non_finite"] == [137]
    # the same without the option is another request, whatever lies there
    refused(damaged, SCAN, "skipped 1 token of router text/0", "--overwrite", code=2)
    counted = {
        row["router"]: row["num_tokens"]
        for row in results.rows("layers")
        if row["variant"] == "as_stored" and row["population"] == "all"
    }
    assert counted == {"text/0": 1023, "text/1": 1024, "text/2": 1024}


def test_the_flag_of_the_hint_works_after_a_nan_in_a_later_layer(moegeom, damaged):
    plant_nan(damaged / "rec", "text/2", 0)
    ran = moegeom(damaged, *SCAN)
    assert ran.code == 3
    assert "text/2" in ran.err
    assert not (damaged / "out").exists()
    ran = moegeom(damaged, *SCAN, "--non-finite", "skip", "--quiet")
    assert ran.code == 0, ran.err


# ------------------------------------------------------------------------------------- the output


def test_existing_output(refused, damaged):
    (damaged / "out").mkdir()
    refused(damaged, SCAN, "out exists already and holds no results", "hint:", code=2)


def test_output_below_a_file(refused, damaged):
    (damaged / "file").write_text("")
    arguments = ("scan", "model", "--tokens", "rec", "--out", "file/out")
    refused(damaged, arguments, "file", code=2)


def test_a_results_directory_that_is_damaged(refused, world, tmp_path):
    world.copy_to(tmp_path, "results")
    (tmp_path / "results/layers.parquet").write_bytes(b"PAR1 and then nothing")
    refused(tmp_path, ("report", "results"), "layers.parquet", "hint:")


def test_results_of_a_later_schema(refused, world, tmp_path):
    world.copy_to(tmp_path, "results")
    run = tmp_path / "results/run.json"
    run.write_text(json.dumps(json.loads(run.read_text("utf-8")) | {"schema": 99}), "utf-8")
    refused(tmp_path, ("report", "results"), "schema 99", "reads schema 1", "hint:")


def test_an_error_names_the_folder_that_was_typed(moegeom, place):
    """Two folders of one name cannot be told apart by a message that has the name alone."""
    absent = moegeom(place, "scan", "model", "--tokens", "nowhere/rec")
    assert absent.code == 3
    assert "nowhere/rec" in absent.err
    (place / "other").mkdir()
    (place / "other" / "model").mkdir()
    empty = moegeom(place, "diff", "model", "other/model")
    assert "other/model" in empty.err
    (place / "stale").mkdir()
    shutil.copytree(place / "rec", place / "stale" / "rec")
    facts = place / "stale/rec/recording.json"
    facts.write_text(re.sub(r'("fingerprint": ")[^"]+', r"\1sha256:0", facts.read_text("utf-8")))
    stale = moegeom(place, "scan", "model", "--tokens", "stale/rec")
    assert stale.code == 3
    assert "recorded from another checkpoint" in stale.err
    assert "note: tokens: stale/rec" in stale.err
