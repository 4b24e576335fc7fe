import filecmp
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.tokens import OUTPUT_KINDS, TokenColumns
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.memory import IsotropicRmsPrior
from moegeom.tokens.recording.facts import parse_facts, read_facts, render_facts
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.rows import SCRATCH_BYTES
from moegeom.tokens.stages import FLOAT_DTYPES, OUTPUT_TENSORS, STAGE_TENSORS, VALUE_STAGES
from tests.by_day import IS_NIGHT
from tests.unit.tokens.conftest import ROUTERS, Content, record, refusal


def assert_columns_equal(columns: TokenColumns, expected: TokenColumns, where=slice(None)) -> None:
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(
            getattr(columns, name), array[where], err_msg=name, strict=True
        )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("stage", STAGE_TENSORS)
def test_what_is_written_is_read(tmp_path, stage, dtype):
    content = Content(100)
    path = record(tmp_path / "rec", content, stage=stage, dtype=dtype, kinds=OUTPUT_KINDS)
    source = open_recording(path)
    facts = source.facts
    assert (facts.num_tokens, facts.stage, facts.outputs) == (100, stage, OUTPUT_KINDS)
    assert read_facts(path).dtype == dtype
    assert_columns_equal(source.read_columns(0, 100), content.columns)
    stored = lambda array: array.astype(FLOAT_DTYPES[dtype]).astype(np.float32)
    for router in ROUTERS:
        np.testing.assert_array_equal(source.read_chosen(router, 0, 100), content.chosen[router])
        pairs = [
            (source.read_output(router, kind, 0, 100), content.outputs[kind][router])
            for kind in OUTPUT_KINDS
        ]
        if stage in VALUE_STAGES:
            pairs.append((source.read_values(router, 0, 100), content.values[router]))
        elif stage == "top_logits":
            top = source.read_top_logits(router, 0, 100)
            pairs.append((top.logits, content.values[router][:, :3]))
            np.testing.assert_array_equal(top.expert, content.chosen[router])
        for values, written in pairs:
            np.testing.assert_array_equal(values, stored(written), strict=True)


@settings(deadline=None, max_examples=200 if IS_NIGHT else 40)
@given(
    cuts=st.sets(st.integers(1, 99), max_size=6),
    ends=st.tuples(*[st.integers(0, 100)] * 2),
    kinds=st.sets(st.sampled_from(OUTPUT_KINDS)),
)
def test_any_sharding_and_any_range_equal_slicing_the_whole(tmp_path_factory, cuts, ends, kinds):
    content = Content(100)
    sizes = [b - a for a, b in pairwise([0, *sorted(cuts), 100])]
    start, stop = sorted(ends)
    path = tmp_path_factory.mktemp("any") / "rec"
    source = open_recording(record(path, content, sizes, dtype="bfloat16", kinds=sorted(kinds)))
    part = content.part(start, stop, kinds=OUTPUT_KINDS)
    stored = lambda array: array.astype(FLOAT_DTYPES["bfloat16"]).astype(np.float32)
    np.testing.assert_array_equal(
        source.read_values("text/1", start, stop), stored(part["values"]["text/1"])
    )
    np.testing.assert_array_equal(
        source.read_chosen("text/1", start, stop), part["chosen"]["text/1"]
    )
    assert_columns_equal(source.read_columns(start, stop), part["columns"])
    assert {*source.facts.outputs} == kinds
    for kind in OUTPUT_KINDS:
        output = source.read_output("text/1", kind, start, stop)
        if kind in kinds:
            expected = stored(part["outputs"][kind]["text/1"])
            np.testing.assert_array_equal(output, expected, strict=True)
        else:
            assert output is None


def test_facts_are_read_back_and_stand_in_the_file_as_the_format_says(recording):
    path, content = recording
    facts = open_recording(path).facts
    assert (facts.name, facts.engine, facts.fingerprint) == ("rec", "test 1.0", "sha256:1")
    assert facts.routers == ROUTERS
    assert facts.domains == ("code", "prose")
    assert (facts.has_documents, facts.num_documents, facts.has_chosen) == (True, 3, True)
    assert facts.size_bytes == sum(f.stat().st_size for f in path.iterdir())
    assert not facts.is_synthetic
    text = (path / "recording.json").read_text()
    assert str(path.parent) not in text
    document = json.loads(text)
    assert document["schema"] == 1
    assert document["shards"][1] == {"first_token": 40, "num_tokens": 1}
    assert document["checkpoint"] == {"name": "tiny", "fingerprint": "sha256:1"}
    assert document["outputs"] == [*OUTPUT_KINDS] == [*OUTPUT_TENSORS]
    assert parse_facts(render_facts(read_facts(path)).encode(), "rec") == read_facts(path)
    for kind in OUTPUT_KINDS:  # has files of its own
        file = load_file(path / f"{kind}-text.1-00000.safetensors")
        assert {*file} == {kind}
        np.testing.assert_array_equal(file[kind], content.outputs[kind]["text/1"][:40], strict=True)


def test_equal_input_gives_equal_bytes_and_outputs_change_no_other_file(tmp_path, recording):
    path, content = recording
    reordered = record(tmp_path / "b", content, kinds=OUTPUT_KINDS[::-1])
    names = sorted(f.name for f in path.iterdir())
    assert names == sorted(f.name for f in reordered.iterdir())
    same, different, unreadable = filecmp.cmpfiles(path, reordered, names, shallow=False)
    assert (sorted(same), different, unreadable) == (names, [], [])
    bare = record(tmp_path / "bare", content)
    assert "outputs" not in json.loads((bare / "recording.json").read_text())
    for file in bare.iterdir():
        if file.name != "recording.json":
            assert file.read_bytes() == (path / file.name).read_bytes()


def test_arrays_in_memory_answer_as_their_recording_does(recording):
    path, content = recording
    memory = ArraySource(content.values, num_tokens=350, outputs=content.outputs)
    source = open_recording(path)
    assert memory.facts.outputs == source.facts.outputs
    for kind in OUTPUT_KINDS:
        whole = source.read_output("text/1", kind, 0, 100)
        for ends in ((0, 100), (30, 30), (60, 140), (340, 350)):
            output = memory.read_output("text/1", kind, *ends)
            np.testing.assert_array_equal(output, whole[np.arange(*ends) % 100], strict=True)
    assert ArraySource(content.values).read_output("text/1", "expert_output", 0, 9) is None


def test_what_is_not_there_is_a_clear_error_or_a_bug_of_the_caller(tmp_path, recording):
    source, values = open_recording(recording[0]), recording[1].values
    for read in (
        lambda: source.read_values("text/7", 0, 1),
        lambda: source.read_output("text/7", "shared_output", 0, 1),
    ):
        assert "text/7" in refusal(read)
        assert "text/0, text/1" in refusal(read)
    with pytest.raises(InternalError, match="100"):
        source.read_values("text/0", 90, 101)
    with pytest.raises(InternalError, match="100"):
        source.read_output("text/0", "shared_output", 90, 101)
    prior = IsotropicRmsPrior((("text/0", None, 8),), 50, 0)
    for one in (source, ArraySource(values), prior):
        with pytest.raises(InternalError, match="shared_output, routed_output, expert_output"):
            one.read_output("text/0", "shared_outputs", 0, 1)
    with pytest.raises(InternalError, match="block_output"):
        ArraySource(values, outputs={"block_output": values})
    ids = open_recording(record(tmp_path / "ids", Content(9), (9,), "ids"))
    assert "stage ids" in refusal(lambda: ids.read_values("text/0", 0, 1))
    assert "stage ids" in refusal(lambda: ids.read_top_logits("text/0", 0, 1))
    bare = open_recording(record(tmp_path / "bare", Content(9), (9,), has_chosen=False))
    assert bare.read_chosen("text/0", 0, 9) is None
    assert not bare.facts.has_chosen
    assert RecordingError.exit_code == 3


def test_numbers_of_other_dtypes_become_float32_and_int32_and_unknown_ones_stay_so(tmp_path):
    third, dtypes = np.full((5, 4), 1 / 3), (np.int64, np.int32, np.int32, np.int16)
    unknown = TokenColumns(*(np.full(5, -1, dtype) for dtype in dtypes))
    for dtype in ("uint8", "int16", "uint16", "int32", "int64"):
        ids = np.array([[3, 200]] * 5, dtype)
        with RecordingWriter(tmp_path / dtype, "logits", ("a",)) as writer:
            writer.append(unknown, {"a": third}, {"a": ids})
        source = open_recording(tmp_path / dtype)
        values, chosen = source.read_values("a", 0, 5), source.read_chosen("a", 0, 5)
        np.testing.assert_array_equal(values, third.astype(np.float32), strict=True)
        np.testing.assert_array_equal(chosen, ids.astype(np.int32), strict=True)
        assert_columns_equal(source.read_columns(0, 5), unknown)
        assert (source.facts.has_documents, source.facts.num_documents) == (False, None)


def test_threads_read_what_one_reads(recording):
    path, content = recording
    source, starts = open_recording(path), range(0, 90, 3)

    def read(router):
        values = [source.read_values(router, start, start + 10) for start in starts]
        return values, [source.read_columns(start, start + 10).document for start in starts]

    with ThreadPoolExecutor(4) as pool:
        for router, parts in zip(ROUTERS * 2, pool.map(read, ROUTERS * 2), strict=True):
            for start, values, document in zip(starts, *parts, strict=True):
                where = slice(start, start + 10)
                np.testing.assert_array_equal(values, content.values[router][where])
                np.testing.assert_array_equal(document, content.columns.document[where])


def test_a_range_larger_than_the_conversion_scratch_is_read_whole(tmp_path):
    content = Content(2000, width=700)
    assert 2 * SCRATCH_BYTES < 2000 * 700 * 2
    source = open_recording(record(tmp_path / "rec", content, (1900, 100), dtype="float16"))
    stored = content.values["text/0"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(source.read_values("text/0", 3, 1990), stored[3:1990])
