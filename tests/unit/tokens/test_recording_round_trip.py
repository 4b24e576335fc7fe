"""Recordings: what is written is read, damage is refused or healed, and of several ranks merged
nothing is left of how the run was cut.
"""

import filecmp
import itertools
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moegeom.core.errors import InternalError, RecordingError, UsageError
from moegeom.core.tokens import OUTPUT_KINDS, TokenColumns
from moegeom.tokens.recording.facts import (
    RecordedCheckpoint,
    RecordingFacts,
    RecordingShard,
    parse_facts,
    read_facts,
    render_facts,
)
from moegeom.tokens.recording.merge import merge_recordings
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.rows import SCRATCH_BYTES
from moegeom.tokens.sources.recorded import open_recording
from moegeom.tokens.stages import FLOAT_DTYPES, OUTPUT_TENSORS, STAGE_TENSORS, VALUE_STAGES
from tests.array_source import ArraySource
from tests.by_day import IS_NIGHT
from tests.columns import columns_of
from tests.unit.tokens.conftest import ROUTERS, SIZES, Content, record, refusal, refusal_to_open


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
    for one in (source, ArraySource(values)):
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


DOMAINS = ("prose", "code", "maths")


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@dataclass
class Run:
    """All tokens of a run, each with its own rows; any selection of them can be a part."""

    stage: str = "router_input"
    dtype: str = "float32"
    experts: str = "uint8"
    has_chosen: bool = True
    outputs: tuple[str, ...] = ()
    document: np.ndarray = field(default_factory=lambda: np.arange(60) // 13)
    num_domains: int = 3

    def __post_init__(self):
        random = np.random.default_rng(0)
        num_tokens = len(self.document)
        float_dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        places = [list(self.document[:n]).count(one) for n, one in enumerate(self.document)]
        self.columns = TokenColumns(
            document=self.document.astype(np.int64) * 10**12,
            position=np.array(places, np.int32),
            token_id=random.integers(0, 9, num_tokens).astype(np.int32),
            domain=(self.document % (self.num_domains + 1) - 1).astype(np.int16),
        )
        rows = lambda *row: random.standard_normal((num_tokens, *row)).astype(float_dtype)
        numbers = lambda k: random.integers(0, 99, (num_tokens, k)).astype(self.experts)
        width = {"shared_output": (3,), "routed_output": (3,), "expert_output": (4, 3)}
        names = [tensor.name for tensor in STAGE_TENSORS[self.stage]]
        self.rows = {
            router: {
                name: numbers(5) if name in ("expert", "chosen") else rows(5) for name in names
            }
            | ({"chosen": numbers(2)} if self.has_chosen else {})
            | {kind: rows(*width[kind]) for kind in self.outputs}
            for router in ROUTERS
        }

    def shard(self, index):
        return (
            TokenColumns(**{name: column[index] for name, column in vars(self.columns).items()}),
            {r: {name: a[index] for name, a in arrays.items()} for r, arrays in self.rows.items()},
            self.outputs,
        )

    def write(self, path, index, sizes=(), **options):
        """A part that holds the tokens ``index``, in shards of ``sizes`` and what is left."""
        options = {"dtype": self.dtype, "domains": DOMAINS, "fingerprint": "f", **options}
        if self.stage == "ids" and not self.outputs:
            options["dtype"] = None
        with RecordingWriter(path, self.stage, ROUTERS, **options) as writer:
            for piece in np.split(np.asarray(index), np.cumsum(sizes, dtype=int)):
                if len(piece):
                    writer.append_tensors(*self.shard(piece))
        return path

    def whole(self, path, shard_tokens):
        """What one process writes in order."""
        sizes = [shard_tokens] * (len(self.document) // shard_tokens)
        return self.write(path, np.arange(len(self.document)), sizes)


RUNS = {
    "router_input": Run(),
    "bfloat16": Run(dtype="bfloat16", has_chosen=False),
    "float64": Run("pre_norm", "float64", "int16"),
    "logits": Run("logits", "float16", "int32"),
    "top_logits": Run("top_logits", "bfloat16"),
    "ids": Run("ids"),
    "outputs": Run("ids", "bfloat16", outputs=("shared_output", "routed_output", "expert_output")),
}


@st.composite
def cuts(draw, num_tokens):
    """1 to 4 parts that hold every token between them, some of them twice, in any order."""
    num_parts = draw(st.integers(1, 4))
    tokens = st.lists(st.integers(0, num_tokens - 1), max_size=20)
    owner = draw(st.lists(st.integers(0, num_parts - 1), min_size=num_tokens, max_size=num_tokens))
    parts = []
    for part in range(num_parts):
        own = {t for t in range(num_tokens) if owner[t] == part} | set(draw(tokens))
        if own:
            parts.append(draw(st.permutations(sorted(own))))
    return parts, draw(st.lists(st.integers(1, 20), max_size=3))


@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=100 if IS_NIGHT else 6)
@given(data=st.data())
def test_no_cut_of_a_run_changes_a_byte_of_it(tmp_path_factory, name, data):
    run, tmp_path = RUNS[name], tmp_path_factory.mktemp("cut")
    parts, sizes = data.draw(cuts(len(run.document)))
    shard_tokens = data.draw(st.sampled_from([7, 59, 60, 61, 65_536]))
    paths = [run.write(tmp_path / str(n), part, sizes) for n, part in enumerate(parts)]
    merged = merge_recordings(paths, tmp_path / "merged", shard_tokens)
    assert merged.path == tmp_path / "merged"
    assert merged.num_tokens == len(run.document)
    assert merged.num_duplicates == sum(map(len, parts)) - len(run.document)
    assert files(tmp_path / "merged") == files(run.whole(tmp_path / "whole", shard_tokens))


def merged(folder, parts, *options):
    """Parts, merged, and where."""
    path = folder / f"merged{len(list(folder.iterdir()))}"
    merge_recordings(parts, path, *options)
    return path


def test_domains_are_numbered_by_their_first_token_and_only_where_used(tmp_path):
    run = replace(RUNS["router_input"], document=np.array([2, 2, 1, 1, 0]), num_domains=3)
    # domain numbers 1, 1, 0, 0, -1: in merged order unknown, then the first, then the second name
    tokens = np.arange(5)
    one = run.write(tmp_path / "one", tokens[:2], domains=("unused", "late", "more"))
    other = run.write(tmp_path / "other", tokens[2:], domains=("early", "unused"))
    for parts in itertools.permutations([one, other]):
        source = open_recording(merged(tmp_path, parts))
        assert source.facts.domains == ("early", "late")
        np.testing.assert_array_equal(source.read_columns(0, 5).domain, [-1, 0, 0, 1, 1])


@pytest.mark.parametrize(("narrow", "stored"), [("int32", b"I32"), ("int8", b"I16")])
def test_experts_of_several_widths_are_stored_in_one_that_fits_all(tmp_path, narrow, stored):
    first, second = RUNS["ids"], replace(RUNS["ids"], experts=narrow)
    parts = [
        first.write(tmp_path / "1", np.arange(30)),
        second.write(tmp_path / "2", np.arange(30, 60)),
    ]
    paths = [merged(tmp_path, order) for order in (parts, parts[::-1])]
    assert files(paths[0]) == files(paths[1])
    assert stored in files(paths[0])["chosen-text.0-00000.safetensors"]
    chosen = open_recording(paths[0]).read_chosen("text/0", 0, 60)
    np.testing.assert_array_equal(chosen, first.rows["text/0"]["chosen"])


def test_nan_and_signed_zero_keep_their_bits(tmp_path):
    run = replace(RUNS["bfloat16"])
    bits = run.rows["text/1"]["router_input"].view(np.uint16)
    bits[:4, 0] = [0x7FC1, 0xFFC0, 0x8000, 0x7FA5]  # NaNs with payload, quiet and signalling; -0
    parts = [run.write(tmp_path / f"{n}", np.arange(60)[n::2]) for n in range(2)]
    merge_recordings(parts, tmp_path / "merged")
    assert bits.tobytes() in files(tmp_path / "merged")["router_input-text.1-00000.safetensors"]
    again = merge_recordings([*parts, parts[0]], tmp_path / "again")
    assert again.num_duplicates == 30


def test_a_shard_of_wide_rows_holds_fewer_tokens(tmp_path):
    num_tokens, width = 3000, 1 << 15  # 64 KiB a row: 128 MiB hold 2048
    values = np.zeros((num_tokens, width), np.float16)
    with RecordingWriter(tmp_path / "part", "router_input", ("a",)) as writer:
        writer.append(columns_of(np.zeros(num_tokens)), {"a": values})
    merge_recordings([tmp_path / "part"], tmp_path / "merged")
    sizes = [file.stat().st_size for file in sorted((tmp_path / "merged").glob("router_input*"))]
    assert [size // (2 * width) for size in sizes] == [2048, 952]


#: What differs between a run and another one: the run itself, or what is said of it.
OTHERS = {
    "stage": Run("pre_norm"),
    "dtype": Run(dtype="bfloat16"),
    "has_chosen": Run(has_chosen=False),
    "outputs": Run(outputs=("shared_output",)),
    **dict.fromkeys(("fingerprint", "engine", "checkpoint_name", "created_by")),
}


def test_parts_of_different_runs_are_refused_with_the_part_and_the_difference(tmp_path):
    one = RUNS["router_input"].write(tmp_path / "one", np.arange(30))
    for what, run in OTHERS.items():
        facts = {} if run else {what: "other"}
        run = run or RUNS["router_input"]
        other = run.write(tmp_path / f"of {what}", np.arange(30, 60), **facts)
        message = refusal(lambda other=other: merged(tmp_path, [one, other]))
        assert f"of {what}: " in message and f"{what.removeprefix('checkpoint_')} is " in message
        assert "that of one is " in message
    assert len(list(tmp_path.iterdir())) == 1 + len(OTHERS)


def test_parts_with_other_routers_or_widths_are_refused(tmp_path):
    def part(name, routers, width):
        with RecordingWriter(tmp_path / name, "logits", routers) as writer:
            writer.append(columns_of([0], 0), {r: np.ones((1, width)) for r in routers})
        return tmp_path / name

    one, routers, width = part("one", ("a",), 4), part("routers", ("b",), 4), part("w", ("a",), 5)
    message = refusal(lambda: merged(tmp_path, [one, routers]))
    assert "routers: routers is ('b',)" in message
    message = refusal(lambda: merged(tmp_path, [one, width]))
    assert "w/logits-a-00000.safetensors: rows of shape (5,); those of one have (4,)" in message


def test_tokens_without_a_place_are_refused(tmp_path):
    for column in ("document", "position"):
        run = replace(RUNS["ids"])
        getattr(run.columns, column)[17] = -1
        part = run.write(tmp_path / column, np.arange(60))
        message = refusal(lambda part=part: merged(tmp_path, [part]))
        assert f"{column}: tokens without document or position" in message


@pytest.mark.parametrize(
    "name", ["logits", "expert", "chosen", "shared_output", "token_id", "domain"]
)
def test_two_rows_or_values_for_one_token_are_refused_with_the_token_and_the_parts(tmp_path, name):
    run = replace(RUNS["top_logits"], outputs=("shared_output",))
    one = run.write(tmp_path / "one", np.arange(40))
    rows, column = run.rows["text/1"].get(name), getattr(run.columns, name, None)
    if rows is None:
        column[33] = 2 if column[33] != 2 else 1
    else:
        rows[33, 1] += 1
    other = run.write(tmp_path / "other", np.arange(30, 60))
    message = refusal(lambda: merged(tmp_path, [one, other], 7))
    what = f"values of {name}" if rows is None else "rows of router text/1"
    assert f"one and other hold different {what}" in message
    document, position = run.columns.document[33], run.columns.position[33]
    assert f"document {document}, position {position};" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_no_parts_and_damaged_ones_are_refused(tmp_path):
    part = RUNS["ids"].write(tmp_path / "part", np.arange(60))
    for parts, shard_tokens in (([], 9), ([part], 0)):
        with pytest.raises(UsageError, match="expected 1 or more"):
            merge_recordings(parts, tmp_path / "merged", shard_tokens)
    with pytest.raises(UsageError, match="exists already"):
        merge_recordings([part], part)
    assert "absent" in refusal(lambda: merge_recordings([tmp_path / "absent"], tmp_path / "m"))
    (part / "chosen-text.1-00000.safetensors").write_bytes(b"")
    with pytest.raises(RecordingError, match="chosen-text.1-00000"):
        merge_recordings([part], tmp_path / "m")
