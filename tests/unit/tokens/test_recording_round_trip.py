import filecmp
import json
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.rows import SCRATCH_BYTES
from moegeom.tokens.stages import FLOAT_DTYPES, STAGE_TENSORS, VALUE_STAGES

ROUTERS = ("text/0", "text/1")


def assert_columns_equal(found: TokenColumns, expected: TokenColumns, where=slice(None)) -> None:
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), array[where], err_msg=name)
        assert getattr(found, name).dtype == array.dtype


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("stage", STAGE_TENSORS)
def test_what_is_written_is_read(tmp_path, content, record, stage, dtype):
    held = content(100)
    source = open_recording(record(tmp_path / "rec", held, (40, 1, 59), stage, dtype=dtype))
    assert source.facts.num_tokens == 100
    assert source.facts.stage == stage
    assert_columns_equal(source.read_columns(0, 100), held.columns)
    for router in ROUTERS:
        np.testing.assert_array_equal(source.read_chosen(router, 0, 100), held.chosen[router])
        stored = held.values[router].astype(FLOAT_DTYPES[dtype]).astype(np.float32)
        if stage in VALUE_STAGES:
            found = source.read_values(router, 0, 100)
            np.testing.assert_array_equal(found, stored)
            assert found.dtype == np.float32
        elif stage == "top_logits":
            top = source.read_top_logits(router, 0, 100)
            np.testing.assert_array_equal(top.logits, stored[:, :3])
            np.testing.assert_array_equal(top.expert, held.chosen[router])


def test_every_fact_is_read_back(recording):
    facts = open_recording(recording[0]).facts
    assert (facts.name, facts.engine, facts.fingerprint) == ("rec", "test 1.0", "sha256:1")
    assert facts.routers == ROUTERS
    assert facts.domains == ("code", "prose")
    assert (facts.has_documents, facts.num_documents, facts.has_chosen) == (True, 3, True)
    assert facts.size_bytes == sum(f.stat().st_size for f in recording[0].iterdir())
    assert not facts.is_synthetic


def test_no_path_is_written(recording):
    text = (recording[0] / "recording.json").read_text()
    assert str(recording[0].parent) not in text


# The fixtures are factories without state.
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cuts=st.lists(st.integers(1, 199), max_size=8), ends=st.tuples(*[st.integers(0, 200)] * 2))
def test_any_sharding_and_any_range_equal_slicing_the_whole(
    tmp_path_factory, content, record, cuts, ends
):
    held = content(200)
    edges = [0, *sorted(set(cuts)), 200]
    sizes = [b - a for a, b in pairwise(edges)]
    start, stop = sorted(ends)
    path = tmp_path_factory.mktemp("any") / "rec"
    source = open_recording(record(path, held, sizes, dtype="bfloat16"))
    stored = held.values["text/1"].astype(FLOAT_DTYPES["bfloat16"]).astype(np.float32)
    np.testing.assert_array_equal(source.read_values("text/1", start, stop), stored[start:stop])
    np.testing.assert_array_equal(
        source.read_chosen("text/1", start, stop), held.chosen["text/1"][start:stop]
    )
    assert_columns_equal(source.read_columns(start, stop), held.columns, slice(start, stop))


def test_equal_input_gives_equal_bytes(tmp_path, content, record):
    first = record(tmp_path / "a", content(100), (40, 60))
    second = record(tmp_path / "b", content(100), (40, 60))
    names = sorted(f.name for f in first.iterdir())
    assert names == sorted(f.name for f in second.iterdir())
    same, different, unreadable = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (sorted(same), different, unreadable) == (names, [], [])


def test_float64_is_rounded_to_float32(tmp_path, content):
    held = content(8)
    third = np.full((8, 4), 1 / 3)
    with RecordingWriter(tmp_path / "rec", "logits", ("a",)) as writer:
        writer.append(TokenColumns(**{**vars(held.columns), "domain": no_domain(8)}), {"a": third})
    found = open_recording(tmp_path / "rec").read_values("a", 0, 8)
    np.testing.assert_array_equal(found, np.full((8, 4), np.float32(1 / 3)))


def no_domain(num_tokens):
    return np.full(num_tokens, -1, np.int16)


def test_unknown_columns_stay_unknown(tmp_path):
    unknown = {
        "document": np.full(5, -1, np.int64),
        "position": np.full(5, -1, np.int32),
        "token_id": np.full(5, -1, np.int32),
        "domain": no_domain(5),
    }
    with RecordingWriter(tmp_path / "rec", "ids", ("a",)) as writer:
        writer.append(TokenColumns(**unknown), chosen={"a": np.zeros((5, 2), np.uint8)})
    source = open_recording(tmp_path / "rec")
    assert_columns_equal(source.read_columns(0, 5), TokenColumns(**unknown))
    assert (source.facts.has_documents, source.facts.num_documents) == (False, None)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
def test_expert_numbers_of_any_integer_dtype_become_int32(tmp_path, content, dtype):
    held = content(6)
    ids = np.array([[3, 200]] * 6, dtype)
    with RecordingWriter(tmp_path / "rec", "ids", ("a",), domains=("x", "y")) as writer:
        writer.append(held.columns, chosen={"a": ids})
    found = open_recording(tmp_path / "rec").read_chosen("a", 0, 6)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [[3, 200]] * 6)


def test_two_threads_read_what_one_reads(recording):
    path, held = recording
    source = open_recording(path)
    wrong: list[str] = []

    def read(router: str) -> None:
        for start in range(0, 90, 3):
            found = source.read_values(router, start, start + 10)
            document = source.read_columns(start, start + 10).document
            if not np.array_equal(found, held.values[router][start : start + 10]):
                wrong.append(f"values {router} {start}")
            if not np.array_equal(document, held.columns.document[start : start + 10]):
                wrong.append(f"columns {start}")

    threads = [threading.Thread(target=read, args=(r,)) for r in ROUTERS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_was_not_recorded_is_not_given(tmp_path, content, record, refused):
    ids = open_recording(record(tmp_path / "ids", content(9), (9,), "ids"))
    assert "stage ids" in refused(lambda: ids.read_values("text/0", 0, 1))
    assert "stage ids" in refused(lambda: ids.read_top_logits("text/0", 0, 1))
    bare = open_recording(record(tmp_path / "bare", content(9), (9,), has_chosen=False))
    assert bare.read_chosen("text/0", 0, 9) is None
    assert not bare.facts.has_chosen


def test_an_unknown_router_is_one_clear_error(recording, refused):
    source = open_recording(recording[0])
    message = refused(lambda: source.read_values("text/7", 0, 1))
    assert "text/7" in message
    assert "text/0, text/1" in message


def test_tokens_beyond_the_end_are_a_bug_of_the_caller(recording):
    source = open_recording(recording[0])
    with pytest.raises(InternalError, match="100"):
        source.read_values("text/0", 90, 101)


def test_the_facts_file_is_what_the_format_says(recording):
    document = json.loads((recording[0] / "recording.json").read_text())
    assert document["schema"] == 1
    assert document["shards"][1] == {"first_token": 40, "num_tokens": 1}
    assert document["checkpoint"] == {"name": "tiny", "fingerprint": "sha256:1"}
    assert RecordingError.exit_code == 3


def test_a_range_larger_than_the_conversion_scratch_is_read_whole(tmp_path, content, record):
    held = content(2000, width=700)
    assert 2 * SCRATCH_BYTES < 2000 * 700 * 2
    source = open_recording(record(tmp_path / "rec", held, (1900, 100), dtype="float16"))
    stored = held.values["text/0"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(source.read_values("text/0", 3, 1990), stored[3:1990])
