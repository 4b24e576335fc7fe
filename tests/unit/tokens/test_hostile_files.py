"""Files that inflate, or hold what nobody writes: refused from what they say, before it is made."""

from __future__ import annotations

import base64
import bz2
import json
import resource
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import MoeGeomError, RecordingError
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.foreign.npy import iter_npz, npz_shapes
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces import source, trace
from moegeom.tokens.traces.dialects._text import nested_ids
from moegeom.tokens.traces.trace import DIALECTS
from tests.ends import work_ends
from tests.fuzz.worker import odd_files
from tests.unit.tokens.conftest import Content, record, refusal
from tests.unit.tokens.dialects.written import known, npy

ROUTERS = ("text/0",)
KNOWN = (KnownRouter("text/0", "text", 0, 8, 2),)
ARRAY = np.arange(54, dtype=np.int32).reshape(9, 2, 3)
NPY = base64.b64decode(npy(ARRAY))


NAMES = [f"a.{end}" for end in "npy npz pt safetensors parquet jsonl json log gguf".split()]
NAMES += ["rec/recording.json", "trace/router_trace_rank0.jsonl", "run/moe_rank0.jsonl"]

#: Stages and dialects.
READ_AS = [
    *((stage, None) for stage in (None, "logits", "ids")),
    *((None, n) for n in DIALECTS.names()),
]


@pytest.mark.parametrize("odd", ["folder", "pipe", "loop", "dangling", "device"])
def test_what_is_no_file_is_refused_by_every_reader(odd, tmp_path):
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        odd_files()[odd](path)
        for one in {path, tmp_path / name.split("/")[0]}:
            for stage, dialect in READ_AS:
                with pytest.raises(MoeGeomError) as caught:
                    open_tokens(one, stage, routers=ROUTERS, known=KNOWN, dialect=dialect)
                assert len(str(caught.value)) < 1000, (name, dialect)


def many_names_for_one_stream(path, method: int, content: bytes, size: int, count: int):
    """An archive whose directory names the same compressed bytes ``count`` times."""
    name, check = b"a.npy", zlib.crc32(b"")
    local = struct.pack(
        "<4sHHHHHIIIHH", b"PK\3\4", 46, 0, method, 0, 33, check, len(content), size, len(name), 0
    )
    entry = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        b"PK\1\2", 46, 46, 0, method, 0, 33, check, len(content), size, len(name), 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    head = local + name + content
    directory = (entry + name) * count
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), len(head), 0)
    path.write_bytes(head + directory + end)


def test_members_are_read_as_numpy_writes_them_and_in_no_other_way(tmp_path):
    path = tmp_path / "a.npz"
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("a.npy", NPY)
        if method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            assert npz_shapes(path) == {"a": (9, 2, 3)}
            np.testing.assert_array_equal(dict(iter_npz(path))["a"], ARRAY)
        else:
            assert npz_shapes(path) == {}
            assert "compressed otherwise" in refusal(lambda: dict(iter_npz(path)))
            assert "compressed otherwise" in refusal(
                lambda: open_tokens(path, "ids", routers=("a",))
            )


def test_archives_that_promise_much_cost_nothing(tmp_path):
    raw = bytes(900_000 * 95)
    many_names_for_one_stream(tmp_path / "a.npz", 12, bz2.compress(raw, 9), len(raw), 1000)
    with work_ends():
        assert npz_shapes(tmp_path / "a.npz") == {}
    content = zlib.compress(b"")[2:-4]
    many_names_for_one_stream(tmp_path / "a.npz", 8, content, 1 << 31, 1)
    with pytest.raises(RecordingError, match="cannot hold"):
        dict(iter_npz(tmp_path / "a.npz"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["x" * 10_000_000, *[""] * 1000], "holds str"),
        ([[1, 2], ["3", 4]], "holds int, str"),
        ([[1, 2.0]], "holds float, int"),
        ([[True]], "holds bool"),
        ([[1], [1, 2]], "unequal length"),
        ([[1], 2], "holds int, list"),
        ([10**400], "beyond 64 bits"),
        ([[[[[[[[[[1]]]]]]]]]], "holds list"),
        ([], "holds nothing"),
        ([None], "holds NoneType"),
        ("x", "holds str"),
    ],
)
def test_nothing_but_lists_of_integers_becomes_an_array(value, expected):
    with pytest.raises(RecordingError, match=expected):
        nested_ids(value, "here")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_lists_of_integers_are_what_numpy_makes_of_them(shape, random):
    values = np.array([random.randrange(-9, 300) for _ in range(int(np.prod(shape)))], np.int64)
    value = values.reshape(shape).tolist()
    np.testing.assert_array_equal(nested_ids(json.loads(json.dumps(value)), ""), np.asarray(value))


def limited(code: str, *arguments: str) -> str:
    """What a process of 3 GB of address space says about a file; nothing else may happen to it."""
    size = 3 << 30
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


#: Opens files of logits, one to an argument, and a recording.
OPEN = """
import sys
from moegeom.core.errors import MoeGeomError
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import KnownRouter
for path in sys.argv[1:]:
    try:
        source = open_tokens(path, "logits", routers=("text/0",))
        source.read_columns(0, 1), source.read_values("text/0", 0, 1)
    except MoeGeomError as error:
        print(error.message)
"""


@pytest.fixture
def recorded(tmp_path):
    """A small recording of logits."""
    return record(tmp_path / "rec", Content(40, width=5), (40,), "logits", has_chosen=False)


def with_column(folder, name, array):
    """The recording with one of its columns replaced, or added when it is there already."""
    file = folder / "tokens-00000.parquet"
    table = pq.read_table(file)
    place = table.schema.get_field_index(name)
    table = table.set_column(place, name, array(len(table)))
    pq.write_table(table.replace_schema_metadata({}), file, store_schema=False)


def long_text(size):
    return lambda rows: pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(rows, np.int32)), pa.array(["x" * size])
    )


def test_what_inflates_is_refused_before_it_is_spelled_out(tmp_path, recorded):
    """A kilobyte of Parquet, 80 MB of zeros in one list; and one long text in every row."""
    number, path = 20_000_000, tmp_path / "a.parquet"
    indices = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(number, np.int8)), pa.array(np.zeros(1, np.float32))
    )
    column = pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), indices)
    table = pa.table({"text/0": column})
    pq.write_table(table.replace_schema_metadata({}), path, store_schema=False)
    assert pq.read_schema(path).field(0).type.value_type == pa.float32()
    assert path.stat().st_size < 10_000
    with_column(recorded, "domain", long_text(100_000_000))
    first, second = limited(OPEN, str(path), str(recorded)).splitlines()
    assert "lists of 20,000,000 numbers" in first
    assert "repeats a text of 100,000,000 characters" in second


def test_columns_of_a_recording_are_of_their_kind_once_and_others_are_not_read(recorded):
    file = recorded / "tokens-00000.parquet"
    table = pq.read_table(file)
    extra = pa.nulls(len(table), pa.int64())
    for name in ("token", "document", "domain", "extra"):
        twice = table.append_column("extra", extra) if name == "extra" else table
        pq.write_table(twice.append_column(name, extra), file)
        assert f"two columns of the name '{name}'" in refusal(lambda: open_recording(recorded))
    pq.write_table(table.append_column("note", long_text(100)(len(table))), file)
    assert open_recording(recorded).read_columns(0, 2).document.tolist() == [0, 0]
    with_column(recorded, "document", long_text(1_000_000))
    assert "'document' is string; expected integers" in refusal(lambda: open_recording(recorded))
    pq.write_table(table, file)
    for kind in (pa.binary(), pa.struct([("a", pa.int64())]), pa.date32()):
        with_column(recorded, "domain", lambda rows, kind=kind: pa.nulls(rows, kind))
        assert "column 'domain' is" in refusal(lambda: open_recording(recorded))


WIDTH = 256
STEP = 256


def scan(source, num_tokens, router="a"):
    for start in range(0, num_tokens, STEP):
        source.read_values(router, start, start + STEP)
        source.read_columns(start, start + STEP)


def peak_of(action) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_a_recording_does_not_grow_with_its_tokens(tmp_path, dtype):
    values = {"a": np.ones((8192, WIDTH), np.float32)}

    def write(path, num_shards):
        with RecordingWriter(path, "router_input", ("a",), dtype=dtype) as writer:
            for shard in range(num_shards):
                columns = ArraySource(values).read_columns(shard * 8192, (shard + 1) * 8192)
                writer.append(columns, values)

    write(tmp_path / "short", 1)
    write(tmp_path / "long", 8)
    short, long = open_recording(tmp_path / "short"), open_recording(tmp_path / "long")
    scan(short, 8192)
    whole = 8 * 8192 * WIDTH * 4
    peak = peak_of(lambda: scan(long, 8 * 8192))
    # Four cached row groups, a batch and the scratch.
    assert peak < 4 * 8192 * 18 + 3 * STEP * WIDTH * 4 + (3 << 20) < whole / 8
    assert peak < peak_of(lambda: scan(short, 8192)) + 4 * 8192 * 18 + (1 << 20)


def test_a_large_npy_or_npz_is_not_loaded(tmp_path):
    values = np.ones((40_000, WIDTH), np.float32)
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", values)
    for path in tmp_path.iterdir():
        source = open_tokens(path, "logits", routers=("a",))
        peak = peak_of(lambda source=source: scan(source, 39_000))
        assert peak < 2 << 20 < values.nbytes / 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_outputs_of_experts_does_not_load_the_shard(tmp_path, dtype):
    shape = (2048, 16, WIDTH)
    with RecordingWriter(tmp_path / "rec", "router_input", ("a",), dtype=dtype) as writer:
        writer.append(
            ArraySource({"a": np.ones((2048, 1), np.float32)}).read_columns(0, 2048),
            {"a": np.ones((2048, WIDTH), np.float32)},
            outputs={"expert_output": {"a": np.ones(shape, np.float32)}},
        )
    source = open_recording(tmp_path / "rec")

    def read():
        for start in range(0, 2048, 64):
            source.read_output("a", "expert_output", start, start + 64)

    batch = 64 * 16 * WIDTH * 4
    # Two batches, the one before still being held, and the scratch.
    assert peak_of(read) < 2 * batch + (2 << 20) < np.prod(shape) * 4 / 6


@pytest.mark.parametrize(("step", "most"), [(1, 2**20), (-1, 2**18)])
def test_counting_documents_takes_no_memory_that_their_number_multiplies(tmp_path, step, most):
    """As many documents as tokens: in order next to nothing is held, else a number of each."""

    def peak(num_tokens):
        document = np.arange(num_tokens)[::step]
        path = tmp_path / f"{num_tokens}.npz"
        np.savez(path, a=np.zeros((num_tokens, 1), np.int32), document=document)
        opened = []
        peak = peak_of(lambda: opened.append(open_tokens(path, "ids", routers=("a",))))
        assert opened[0].facts.num_documents == num_tokens
        np.testing.assert_array_equal(opened[0].read_columns(70, 90).document, document[70:90])
        return peak

    peak(most)  # what a first opening imports stays
    growth = peak(most) - peak(most // 4)
    assert growth < 0.75 * most * (0.01 if step == 1 else 40)


def test_traces_do_not_grow_with_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "CACHE_BYTES", 1 << 17)
    monkeypatch.setattr(trace, "PIECE_BYTES", 1 << 17)
    order = np.argsort(np.random.default_rng(0).random((2**15, 4, 16)), axis=2)
    ids = order[:, :, :4].astype(np.uint8)
    ids[:, 0] = 0
    for number in range(9):
        np.save(tmp_path / f"{number}.npy", np.roll(ids, number + 1, axis=0))

    def read(pattern):
        opened = open_tokens(str(tmp_path / pattern), routers=("text/1",), known=known(64))
        for start in range(0, opened.facts.num_tokens, 2**15):
            opened.read_chosen("text/1", start, start + 1024)

    read("0.npy")  # what is imported when it is first used
    few = peak_of(lambda: read("[01].npy"))
    assert peak_of(lambda: read("*.npy")) < few + (1 << 16)
    assert few < 6 * ids.nbytes
