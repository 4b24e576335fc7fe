import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.tokens import OUTPUT_KINDS
from moegeom.tokens.recording.facts import (
    RecordedCheckpoint,
    RecordingFacts,
    RecordingShard,
    parse_facts,
    read_facts,
    render_facts,
)
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from tests.unit.tokens.conftest import ROUTERS, SIZES, Content, record, refusal, refusal_to_open


def file_of(name: str) -> str:
    return f"{name}-text.1-00002.safetensors"


VALUES = file_of("router_input")


def edit_facts(path, **changes):
    file = path / "recording.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_writer_that_is_killed_fails_or_writes_nothing_leaves_nothing_that_opens(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        RecordingWriter(tmp_path / "rec", "ids", ("a",)) as writer,
    ):
        assert writer.num_tokens == 0
        _ = 1 / 0
    with (
        pytest.raises(RecordingError, match="nothing"),
        RecordingWriter(tmp_path / "rec", "ids", ("a",)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    writer = RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, domains=("a", "b"))
    writer.__enter__()
    writer.append(**Content(10).part(0, 10))
    assert "no complete recording" in refusal_to_open(tmp_path / "rec")
    assert "never finished" in refusal_to_open(tmp_path / "rec")
    assert "never finished" in refusal_to_open(tmp_path / "rec.partial")


def test_what_is_there_is_a_usage_error_and_left_alone(tmp_path, recording):
    (tmp_path / "other.partial").mkdir()
    for path, words in (
        (recording[0], f"{re.escape(str(recording[0]))} exists already"),
        (tmp_path / "other", r"other\.partial"),
    ):
        with pytest.raises(UsageError, match=words), RecordingWriter(path, "ids", ("a",)):
            pass
    assert open_recording(recording[0]).facts.num_tokens == 100
    assert (tmp_path / "other.partial").is_dir()


def test_a_truncated_or_missing_file_is_one_error_that_names_it(recording):
    others = ("tokens-00001.parquet", "chosen-text.0-00001.safetensors", "recording.json")
    for name in (VALUES, *map(file_of, OUTPUT_KINDS), *others):
        file = recording[0] / name
        data = file.read_bytes()
        # the newline at the end of recording.json carries nothing
        for size in (0, 7, 60, len(data) - 3):
            file.write_bytes(data[:size])
            assert name in refusal_to_open(recording[0]), size
        file.unlink()
        assert name in refusal_to_open(recording[0])
        file.write_bytes(data)


def test_a_file_cut_after_opening_is_one_error(recording):
    source = open_recording(recording[0])
    read = {
        "router_input": lambda: source.read_values("text/1", 90, 100),
        "expert_output": lambda: source.read_output("text/1", "expert_output", 90, 100),
    }
    for name, action in read.items():
        file = recording[0] / file_of(name)
        file.write_bytes(file.read_bytes()[:-3])
        assert "too early" in refusal(action)
        file.unlink()
        assert file_of(name) in refusal(action)


def test_a_shard_of_another_shape_or_dtype_is_refused(recording):
    for name, shape, dtype, words in [
        ("router_input", (59, 11), "float32", "11 columns"),
        ("router_input", (58, 12), "float32", "58 rows"),
        ("router_input", (59, 12), "float16", "F16"),
        ("router_input", (59, 12), "int32", "I32"),
        ("router_input", (59,), "float32", "shape"),
        ("router_input", (59, 0), "float32", "shape"),
        ("shared_output", (59, 11), "float32", "11 columns"),
        ("shared_output", (59, 5, 2), "float32", "(tokens, width)"),
        ("expert_output", (59, 4, 6), "float32", "4 x 6 columns"),
        ("expert_output", (59, 24), "float32", "(tokens, experts, width)"),
        ("expert_output", (59, 6, 0), "float32", "shape"),
        ("expert_output", (60, 6, 4), "float32", "60 rows"),
    ]:
        file = recording[0] / file_of(name)
        whole = file.read_bytes()
        save_file({name: np.zeros(shape, dtype)}, file)
        message = refusal_to_open(recording[0])
        assert file.name in message
        assert words in message
        file.write_bytes(whole)


def test_a_tensor_of_another_name_is_refused_and_extra_ones_do_no_harm(recording):
    file = recording[0] / VALUES
    save_file({**load_file(file), "other": np.zeros(3)}, file)
    assert open_recording(recording[0]).read_values("text/1", 99, 100).shape == (1, 12)
    shutil.copy(recording[0] / file_of("shared_output"), recording[0] / file_of("routed_output"))
    message = refusal_to_open(recording[0])
    assert "no tensor 'routed_output'; found shared_output" in message


def test_a_shard_in_the_place_of_another_is_refused(tmp_path):
    path = record(tmp_path / "rec", Content(100), (50, 50))
    shutil.copy(path / "tokens-00000.parquet", path / "tokens-00001.parquet")
    source = open_recording(path)
    assert "does not count from 50" in refusal(lambda: source.read_columns(60, 61))


def test_columns_that_do_not_fit_or_outputs_that_cannot_be_added_are_refused(recording):
    file = recording[0] / "tokens-00002.parquet"
    table = pq.read_table(file)
    pq.write_table(table.slice(0, 58), file)
    assert "58 tokens" in refusal_to_open(recording[0])
    pq.write_table(table.drop_columns(["position"]), file)
    assert "no column position" in refusal_to_open(recording[0])
    pq.write_table(table, file)
    edit_facts(recording[0], domains=["code"])
    source = open_recording(recording[0])
    assert "'prose' is not listed" in refusal(lambda: source.read_columns(0, 9))
    for shard, size in enumerate(SIZES):
        name = f"routed_output-text.1-0000{shard}.safetensors"
        save_file({"routed_output": np.zeros((size, 8), np.float32)}, recording[0] / name)
    message = refusal_to_open(recording[0])
    assert "text/1" in message
    assert "10 columns, routed_output 8" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"stage": "residuals"}, "router_input"),
        ({"stage": "ids", "outputs": []}, "null for ids"),
        ({"dtype": "float8"}, "bfloat16"),
        ({"dtype": None}, "dtype is None"),
        ({"num_tokens": 101}, "101"),
        ({"num_tokens": -1}, "-1"),
        ({"shards": []}, "0 tokens"),
        ({"shards": [{"first_token": 1, "num_tokens": 100}]}, "from 0"),
        ({"routers": []}, "no routers"),
        ({"routers": ["../text"]}, "router_input-...text"),
        ({"routers": ["a\\b"]}, "router name"),
        ({"routers": ["text/0", "text.0"]}, "share"),
        ({"domains": ["code", "code"]}, "distinct"),
        ({"outputs": ["shared_outputs"]}, "Did you mean shared_output?"),
        ({"outputs": ["shared_output", "shared_output"]}, "twice"),
    ],
)
def test_facts_that_do_not_fit_are_refused(recording, changes, words):
    edit_facts(recording[0], **changes)
    assert words in refusal_to_open(recording[0])


def test_facts_survive_writing_and_parsing_and_other_text_is_refused(tmp_path):
    for text in ("", "[]", "null", "{", "[" * 100_000, '{"schema": NaN}'):
        assert "rec" in refusal(lambda text=text: parse_facts(text.encode(), "rec"))
    texts = {"checkpoint": RecordedCheckpoint("n", "f"), "engine": "e", "created_by": "m"}
    facts = RecordingFacts(
        "ids", None, 5, (RecordingShard(0, 5),), ("a/0",), True, False, ("ü",), None, **texts
    )
    assert parse_facts(render_facts(facts).encode(), "rec") == facts
    bare = record(tmp_path / "bare", Content(100), stage="ids")
    assert read_facts(bare).dtype is None
    edit_facts(bare, dtype="float32")
    assert "null for ids without outputs" in refusal_to_open(bare)


def changed(name, change):
    def spoil(part):
        place = part if name in part else part["outputs"]
        spoilt = place | {name: {router: change(a) for router, a in place[name].items()}}
        return spoilt if place is part else part | {"outputs": spoilt}

    return spoil


def without(*kinds):
    return lambda part: (
        part | {"outputs": {kind: by for kind, by in part["outputs"].items() if kind not in kinds}}
    )


def of_router(*routers):
    """A shard with the outputs of one router under these names."""
    return lambda part: (
        part
        | {
            "outputs": part["outputs"]
            | {"shared_output": dict.fromkeys(routers, part["outputs"]["shared_output"]["text/0"])}
        }
    )


#: Wrong in any shard; the first of a recording included.
NEVER = [
    (lambda part: part | {"values": {"text/0": part["values"]["text/0"]}}, "router text/1 has"),
    (changed("values", lambda a: a[:19]), "19"),
    (changed("values", lambda a: a.astype(np.int32)), "int32"),
    (changed("chosen", lambda a: np.full_like(a, -5)), "-5"),
    (changed("chosen", lambda a: a.astype(np.float32)), "integers"),
    (of_router(), "shared_output"),
    (of_router("text/0"), "text/1"),
    (of_router("text/9"), "text/9"),
    (changed("shared_output", lambda a: a[:19]), "19"),
    (changed("shared_output", lambda a: a[:, :, None]), "(20, 10, 1)"),
    (changed("expert_output", lambda a: a.reshape(20, 24)), "(20, 24)"),
    (changed("expert_output", lambda a: a[:, :0]), "(20, 0, 4)"),
    (changed("expert_output", lambda a: a.astype(np.int32)), "int32"),
]

#: Wrong among the outputs of the first shard.
FIRST = [(changed("routed_output", lambda a: a[:, :8]), "10 columns, routed_output 8")]

#: Wrong because the first shard was another.
LATER = [
    (changed("values", lambda a: a[:, :5]), "12"),
    (lambda part: part | {"chosen": None}, "chosen"),
    (without(*OUTPUT_KINDS), "outputs none; expected shared_output"),
    (lambda part: part | {"outputs": None}, "outputs none; expected shared_output"),
    (without("routed_output"), "outputs shared_output, expert_output"),
    (changed("shared_output", lambda a: a[:, :5]), "(20, 10)"),
    (changed("expert_output", lambda a: a.swapaxes(1, 2)), "(20, 6, 4)"),
]


@pytest.mark.parametrize("is_first", [False, True])
def test_the_writer_refuses_what_does_not_fit_and_keeps_no_trace(tmp_path, is_first):
    good = Content(20).part(0, 20, kinds=OUTPUT_KINDS)
    with RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, domains=("a", "b")) as writer:
        if not is_first:
            writer.append(**good)
        for spoil, words in NEVER + (FIRST if is_first else LATER):
            assert words in refusal(lambda spoil=spoil: writer.append(**spoil(good)))
        with pytest.raises(UsageError, match="Did you mean shared_output"):
            writer.append(**good | {"outputs": {"shared_outputs": good["values"]}})
        writer.append(**good)
    source = open_recording(tmp_path / "rec")
    assert source.facts.num_tokens == (20 if is_first else 40)
    first = source.facts.num_tokens - 20
    values = source.read_values("text/1", first, first + 20)
    np.testing.assert_array_equal(values, good["values"]["text/1"])
    output = source.read_output("text/1", "expert_output", first, first + 20)
    np.testing.assert_array_equal(output, good["outputs"]["expert_output"]["text/1"])


def test_a_refused_first_shard_does_not_decide_what_is_recorded(tmp_path):
    good = Content(20).part(0, 20, kinds=OUTPUT_KINDS)
    with RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, domains=("a", "b")) as writer:
        spoil = changed("expert_output", lambda a: a[:19])
        assert refusal(lambda: writer.append(**spoil(good)))
        halves = {
            router: value[:, :6].astype(np.float16) for router, value in good["values"].items()
        }
        writer.append(good["columns"], halves)
    facts = open_recording(tmp_path / "rec").facts
    assert (facts.outputs, facts.has_chosen) == ((), False)
    assert read_facts(tmp_path / "rec").dtype == "float16"


def test_numbers_too_large_for_float16_are_refused_not_recorded_as_infinite(tmp_path):
    part = Content(20).part(0, 20, kinds=OUTPUT_KINDS)
    options = {"domains": ("a", "b"), "dtype": "float16"}
    for name in ("values", "shared_output"):
        spoil = changed(name, lambda a: 1e6 * a)
        with (
            pytest.raises(UsageError, match="bfloat16"),
            RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, **options) as writer,
        ):
            writer.append(**spoil(part))
        assert list(tmp_path.iterdir()) == []
