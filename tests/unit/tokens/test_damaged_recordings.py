import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.tokens.recording.facts import RecordingFacts, RecordingShard, parse_facts, render_facts
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter

VALUES = "router_input-text.1-00002.safetensors"


def edit_facts(path, **changes):
    file = path / "recording.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_killed_writer_leaves_nothing_that_opens(tmp_path, content, refused_open):
    held = content(10)
    writer = RecordingWriter(
        tmp_path / "rec", "router_input", ("text/0", "text/1"), domains=("a", "b")
    )
    writer.__enter__()
    writer.append(*held.part(0, 10, "router_input", True, "float32"))
    assert "no complete recording" in refused_open(tmp_path / "rec")
    assert "never finished" in refused_open(tmp_path / "rec")
    assert "never finished" in refused_open(tmp_path / "rec.partial")


def test_an_exception_removes_what_was_written(tmp_path, content):
    with (
        pytest.raises(ZeroDivisionError),
        RecordingWriter(tmp_path / "rec", "ids", ("a",)) as writer,
    ):
        assert writer.num_tokens == 0
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_an_existing_path_is_a_usage_error_that_names_the_whole_path(recording):
    with (
        pytest.raises(UsageError, match=f"{re.escape(str(recording[0]))} exists already"),
        RecordingWriter(recording[0], "ids", ("a",)),
    ):
        pass
    assert open_recording(recording[0]).facts.num_tokens == 100


def test_another_writer_at_work_is_a_usage_error_and_left_alone(tmp_path):
    (tmp_path / "rec.partial").mkdir()
    with (
        pytest.raises(UsageError, match=r"rec\.partial"),
        RecordingWriter(tmp_path / "rec", "ids", ("a",)),
    ):
        pass
    assert (tmp_path / "rec.partial").is_dir()


def test_an_empty_recording_is_refused(tmp_path):
    with (
        pytest.raises(RecordingError, match="nothing"),
        RecordingWriter(tmp_path / "rec", "ids", ("a",)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 7, 60, -1])
@pytest.mark.parametrize("name", [VALUES, "tokens-00001.parquet", "recording.json"])
def test_a_truncated_file_is_one_error_that_names_it(recording, refused_open, name, kept):
    file = recording[0] / name
    data = file.read_bytes()
    # The newline at the end of recording.json carries nothing.
    file.write_bytes(data[: len(data) - 3 if kept == -1 else kept])
    assert name in refused_open(recording[0])


@pytest.mark.parametrize(
    "name", [VALUES, "chosen-text.0-00001.safetensors", "tokens-00001.parquet", "recording.json"]
)
def test_a_missing_file_is_one_error_that_names_it(recording, refused_open, name):
    (recording[0] / name).unlink()
    assert name in refused_open(recording[0])


def test_a_file_cut_after_opening_is_one_error(recording, refused):
    source = open_recording(recording[0])
    file = recording[0] / VALUES
    file.write_bytes(file.read_bytes()[:-3])
    assert "too early" in refused(lambda: source.read_values("text/1", 90, 100))
    file.unlink()
    assert VALUES in refused(lambda: source.read_values("text/1", 90, 100))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((59, 11), np.float32), "11 columns"),
        (np.zeros((58, 12), np.float32), "58 rows"),
        (np.zeros((59, 12), np.float16), "F16"),
        (np.zeros((59, 12), np.int32), "I32"),
        (np.zeros(59, np.float32), "shape"),
        (np.zeros((59, 0), np.float32), "shape"),
    ],
)
def test_a_shard_of_another_shape_or_dtype_is_refused(recording, refused_open, array, words):
    save_file({"router_input": array}, recording[0] / VALUES)
    message = refused_open(recording[0])
    assert VALUES in message
    assert words in message


def test_a_tensor_of_another_name_is_refused(recording, refused_open):
    save_file({"hidden": np.zeros((59, 12), np.float32)}, recording[0] / VALUES)
    assert "found hidden" in refused_open(recording[0])


def test_a_shard_in_the_place_of_another_is_refused(tmp_path, content, record, refused):
    path = record(tmp_path / "rec", content(100), (50, 50))
    shutil.copy(path / "tokens-00000.parquet", path / "tokens-00001.parquet")
    source = open_recording(path)
    assert "does not count from 50" in refused(lambda: source.read_columns(60, 61))


def test_columns_of_another_length_are_refused(recording, refused_open):
    file = recording[0] / "tokens-00002.parquet"
    pq.write_table(pq.read_table(file).slice(0, 58), file)
    assert "58 tokens" in refused_open(recording[0])


def test_a_missing_column_is_refused(recording, refused_open):
    file = recording[0] / "tokens-00002.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["position"]), file)
    assert "no column position" in refused_open(recording[0])


def test_an_unlisted_domain_is_refused(recording, refused):
    edit_facts(recording[0], domains=["code"])
    source = open_recording(recording[0])
    assert "'prose' is not listed" in refused(lambda: source.read_columns(0, 9))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": True}, "whole number"),
        ({"stage": "residuals"}, "router_input"),
        ({"stage": "ids"}, "null for ids"),
        ({"dtype": "float8"}, "bfloat16"),
        ({"dtype": ["float32"]}, "bfloat16"),
        ({"num_tokens": 101}, "101"),
        ({"num_tokens": -1}, "-1"),
        ({"shards": []}, "0 tokens"),
        ({"shards": [[0, 100]]}, "object"),
        ({"shards": [{"first_token": 1, "num_tokens": 100}]}, "from 0"),
        ({"routers": []}, "no routers"),
        ({"routers": ["text/0", 1]}, "texts"),
        ({"routers": ["../text"]}, "router_input-...text"),
        ({"routers": ["a\\b"]}, "router name"),
        ({"routers": ["text/0", "text.0"]}, "share"),
        ({"domains": ["code", "code"]}, "distinct"),
        ({"checkpoint": "tiny"}, "object"),
        ({"checkpoint": {"name": "tiny"}}, "fingerprint"),
        ({"has_chosen": 1}, "true or false"),
        ({"num_documents": "3"}, "whole number"),
    ],
)
def test_facts_that_do_not_fit_are_refused(recording, refused_open, changes, words):
    edit_facts(recording[0], **changes)
    assert words in refused_open(recording[0])


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"schema": NaN}'])
def test_text_that_is_no_facts_is_refused(text, refused):
    assert "rec" in refused(lambda: parse_facts(text.encode(), "rec"))


def test_facts_survive_writing_and_parsing():
    facts = RecordingFacts(
        "ids",
        None,
        5,
        (RecordingShard(0, 5),),
        ("a/0",),
        True,
        False,
        ("ü",),
        None,
        "n",
        "f",
        "e",
        "m",
    )
    assert parse_facts(render_facts(facts).encode(), "rec") == facts


def test_any_damaged_byte_ends_in_a_value_or_our_error(recording):
    random = np.random.default_rng(0)
    for name in (VALUES, "tokens-00000.parquet", "recording.json"):
        file = recording[0] / name
        whole = file.read_bytes()
        for where in random.integers(0, len(whole), 60):
            damaged = bytearray(whole)
            damaged[where] ^= 1 << int(random.integers(8))
            file.write_bytes(damaged)
            assert outcome(recording[0]) in ("value", "refused")
        file.write_bytes(whole)


def outcome(path) -> str:
    try:
        source = open_recording(path)
        source.read_columns(0, source.facts.num_tokens)
        for router in source.facts.routers:
            source.read_values(router, 0, source.facts.num_tokens)
    except MoeGeomError:
        return "refused"
    return "value"


def test_the_writer_refuses_what_does_not_fit(tmp_path, content):
    held = content(20)
    columns, values, chosen = held.part(0, 20, "router_input", True, "float32")
    short = {r: v[:19] for r, v in values.items()}
    narrow = {r: v[:, :5] for r, v in values.items()}
    cases = [
        (columns, {"text/0": values["text/0"]}, None, "text/0"),
        (columns, short, chosen, "19"),
        (columns, narrow, chosen, "12"),
        (columns, values, None, "chosen"),
        (columns, {r: v.astype(np.int32) for r, v in values.items()}, chosen, "int32"),
        (columns, values, {r: c - 5 for r, c in chosen.items()}, "-5"),
        (columns, values, {r: c.astype(np.float32) for r, c in chosen.items()}, "integers"),
    ]
    with RecordingWriter(
        tmp_path / "rec", "router_input", ("text/0", "text/1"), domains=("a", "b")
    ) as writer:
        writer.append(columns, values, chosen)
        for *arguments, words in cases:
            with pytest.raises(RecordingError, match=words):
                writer.append(*arguments)
        writer.append(columns, values, chosen)
    # A refused shard leaves no trace.
    found = open_recording(tmp_path / "rec")
    assert found.facts.num_tokens == 40
    np.testing.assert_array_equal(found.read_values("text/1", 20, 40), values["text/1"])


def test_values_too_large_for_float16_are_refused_not_recorded_as_infinite(tmp_path, content):
    held = content(3)
    columns, _, _ = held.part(0, 3, "logits", False, "float32")
    with (
        pytest.raises(UsageError, match="bfloat16"),
        RecordingWriter(
            tmp_path / "rec", "logits", ("a",), domains=("x", "y"), dtype="float16"
        ) as writer,
    ):
        writer.append(columns, {"a": np.full((3, 2), 1e6, np.float32)})


def test_extra_tensors_beside_ours_do_no_harm(recording):
    file = recording[0] / VALUES
    save_file({**load_file(file), "other": np.zeros(3)}, file)
    assert open_recording(recording[0]).read_values("text/1", 99, 100).shape == (1, 12)
