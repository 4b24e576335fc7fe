"""Token files of others; files that inflate, or hold what nobody writes, are refused from what they
say, before it is made.
"""

import base64
import bz2
import io
import itertools
import json
import resource
import struct
import subprocess
import sys
import threading
import tracemalloc
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.tokens.foreign import parquet_rows
from moegeom.tokens.foreign.arrays import layers_in_file
from moegeom.tokens.foreign.npy import iter_npz, npz_shapes, read_npy_header
from moegeom.tokens.foreign.parquet_rows import ParquetTable
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.sources.recorded import open_recording
from moegeom.tokens.stages import VALUE_STAGES
from moegeom.tokens.traces import source, trace
from moegeom.tokens.traces.dialects._text import nested_ids
from moegeom.tokens.traces.trace import DIALECTS
from tests.array_source import ArraySource
from tests.by_day import by_day
from tests.ends import work_ends
from tests.fuzz.worker import odd_files
from tests.unit.tokens.conftest import ROUTERS, Content, record, refusal
from tests.unit.tokens.dialects.written import known, npy


def write_parquet(path, arrays):
    columns = {k: pa.array(list(a)) if a.ndim == 2 else pa.array(a) for k, a in arrays.items()}
    pq.write_table(pa.table(columns), path, row_group_size=17)


def write_fixed_lists(path, arrays):
    columns = {
        k: pa.FixedSizeListArray.from_arrays(pa.array(a.reshape(-1)), a.shape[1])
        if a.ndim == 2
        else pa.array(a)
        for k, a in arrays.items()
    }
    pq.write_table(pa.table(columns), path, row_group_size=17)


WRITERS = {
    "npz": ("a.npz", lambda path, arrays: np.savez(path, **arrays)),
    "compressed npz": ("a.npz", lambda path, arrays: np.savez_compressed(path, **arrays)),
    "safetensors": ("a.safetensors", lambda path, arrays: save_file(arrays, path)),
    "parquet": ("a.parquet", write_parquet),
    "parquet, fixed lists": ("a.parquet", write_fixed_lists),
}


def written(folder, kind, arrays):
    name, write = WRITERS[kind]
    write(folder / name, {key.replace("/", "."): array for key, array in arrays.items()})
    return folder / name


@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    by_day(
        itertools.product(WRITERS, VALUE_STAGES, ["float16", "float32", "float64"]),
        {
            "stored": ("npz", "router_input", "float64"),
            "deflated": ("compressed npz", "pre_norm", "float32"),
            "safetensors": ("safetensors", "logits", "float16"),
            "lists": ("parquet", "logits", "float32"),
            "fixed lists": ("parquet, fixed lists", "router_input", "float16"),
        },
    ),
)
def test_a_foreign_file_equals_the_recording(tmp_path, kind, stage, dtype):
    content = Content(90)
    recorded = open_tokens(
        record(tmp_path / "rec", content, (90,), stage, has_chosen=False, dtype=dtype), stage
    )
    values = {router: values.astype(dtype) for router, values in content.values.items()}
    foreign = open_tokens(written(tmp_path, kind, values), stage, routers=ROUTERS)
    assert foreign.facts.routers == recorded.facts.routers
    assert foreign.facts.num_tokens == recorded.facts.num_tokens
    for router in ROUTERS:
        for start, stop in ((0, 90), (15, 55), (17, 34), (89, 90), (40, 40)):
            np.testing.assert_array_equal(
                foreign.read_values(router, start, stop), recorded.read_values(router, start, stop)
            )
        assert foreign.read_chosen(router, 0, 90) is None


@pytest.mark.parametrize("kind", WRITERS)
def test_ids_columns_and_parts_of_a_foreign_file_are_read(tmp_path, kind):
    content = Content(90)
    for dtype in ("uint8", "int16", "int32", "int64"):
        arrays = {router: ids.astype(dtype) for router, ids in content.chosen.items()}
        foreign = open_tokens(written(tmp_path, kind, arrays), "ids", routers=ROUTERS)
        assert foreign.facts.has_chosen
        for router, ids in content.chosen.items():
            np.testing.assert_array_equal(foreign.read_chosen(router, 3, 77), ids[3:77])
    columns = content.columns
    beside = {"document": columns.document, "token_id": columns.token_id}
    source = open_tokens(
        written(tmp_path, kind, content.values | beside), "logits", routers=ROUTERS
    )
    assert source.facts.has_documents
    for name in ("document", "token_id", "position"):
        column = getattr(source.read_columns(20, 80), name)
        np.testing.assert_array_equal(column, getattr(columns, name)[20:80])
    # a map names the arrays and may leave some out; the only array is that of the only router
    one, other = content.values.values()
    path = written(tmp_path, kind, {"h7": other, "beside": one})
    source = open_tokens(path, "router_input", {"h7": "text/1"}, ROUTERS)
    assert source.facts.routers == ("text/1",)
    np.testing.assert_array_equal(source.read_values("text/1", 0, 90), other)
    source = open_tokens(written(tmp_path, kind, {"any": one}), "logits", routers=("text/0",))
    np.testing.assert_array_equal(source.read_values("text/0", 0, 90), one)


@pytest.mark.parametrize("kind", WRITERS)
def test_arrays_that_cannot_be_assigned_are_listed_and_a_truncated_file_is_refused(tmp_path, kind):
    values = Content(30).values.values()
    for keys, router_map, words in [
        (("h0", "h1"), {}, ("h0, h1", "text/0, text/1", "map")),
        (("h0", "text.0"), {}, ("h0", "text/0")),
        (("h0", "h1"), {"h9": "text/0"}, ("h9",)),
        (("text.0", "h1"), {"h9": "text/1"}, ("the map names h9",)),
        (("h0", "h1"), {"h0": "text/5"}, ("text/5", "no such router")),
        (("h0", "text.0"), {"h0": "text/0"}, ("several arrays for text/0",)),
    ]:
        path = written(tmp_path, kind, dict(zip(keys, values, strict=True)))
        with pytest.raises(RecordingError) as caught:
            open_tokens(path, "logits", router_map, ROUTERS)
        assert [word for word in words if word not in str(caught.value)] == [], keys
    # nor a truncated file
    path = written(tmp_path, kind, {"text/0": Content(30).values["text/0"]})
    whole = path.read_bytes()
    for size in (0, 1, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refusal(lambda: open_tokens(path, "logits", routers=("text/0",))), size


def test_numbers_of_other_dtypes_and_files_of_one_array_are_read(tmp_path):
    values = Content(50).values["text/0"]
    for dtype in ("<f2", "<f4", "<f8", ">f4"):
        np.save(tmp_path / "text.0.npy", values.astype(dtype))
        source = open_tokens(tmp_path / "text.0.npy", stage="pre_norm", routers=ROUTERS)
        assert source.facts.routers == ("text/0",)
        expected = values.astype(dtype).astype(np.float32)[11:37]
        np.testing.assert_array_equal(source.read_values("text/0", 11, 37), expected)
    halves = values.astype(ml_dtypes.bfloat16)
    save_file({"text/0": halves}, tmp_path / "a.safetensors")
    source = open_tokens(tmp_path / "a.safetensors", stage="logits", routers=ROUTERS)
    np.testing.assert_array_equal(source.read_values("text/0", 0, 50), halves.astype(np.float32))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_a_pickle_is_never_opened(tmp_path):
    bomb = np.array([[Bomb()]], dtype=object)
    np.save(tmp_path / "a.npy", bomb, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=bomb)
    (tmp_path / "a.pt").write_bytes(b"\x80\x04.")
    for name in ("a.npy", "a.npz", "a.pt"):
        message = refusal(lambda name=name: open_tokens(tmp_path / name, "logits", routers=("r",)))
        assert "pickle" in message


def test_an_array_that_is_no_rows_of_numbers_is_refused(tmp_path):
    for array, words in [
        (np.zeros((4, 5), np.int32), "int32"),
        (np.zeros(4, np.float32), "(4,)"),
        (np.zeros((4, 5, 6), np.float32), "(4, 5, 6)"),
        (np.zeros((0, 5), np.float32), "(0, 5)"),
        (np.zeros((5, 4), np.float32).T, "column by column"),
        (np.zeros((4, 5), ml_dtypes.bfloat16), "bfloat16"),
        (np.zeros((4, 5), np.complex64), "complex64"),
    ]:
        np.save(tmp_path / "a.npy", array)
        np.savez(tmp_path / "a.npz", x=array)
        for name in ("a.npy", "a.npz"):
            path = tmp_path / name
            assert words in refusal(lambda path=path: open_tokens(path, "logits", routers=("r",)))


@pytest.mark.parametrize(
    "kind", ["npy", "npz", "pt", "several in npz", "several in pt", "several in safetensors"]
)
def test_the_hint_for_batches_keeps_layers_apart(tmp_path, kind):
    """What the hint says is run: afterwards the file opens, and holds the rows of each layer."""
    batches = np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    path, is_several = tmp_path / f"a.{kind.rpartition(' ')[2]}", "several" in kind

    def write(array):
        several = {f"text.{layer}": part.copy() for layer, part in enumerate(array)}
        arrays = several if is_several else {"x": array}
        if path.suffix == ".pt":
            tensors = {name: torch.from_numpy(one) for name, one in arrays.items()}
            torch.save(tensors if is_several else tensors["x"], path)
        elif path.suffix == ".safetensors":
            save_file(arrays, path)
        elif path.suffix == ".npy":
            np.save(path, array)
        else:
            np.savez(path, **arrays)

    write(batches)
    with pytest.raises(RecordingError, match="expected") as caught:
        open_tokens(path, "logits", routers=ROUTERS)
    hint = caught.value.hint.removeprefix("Bring it to one row per token: ")
    code = hint.removesuffix(".").partition(" where layers come first")[0]
    name = "tensor" if path.suffix == ".pt" else "array"
    parts = [eval(code, {name: part}) for part in (batches if is_several else [batches])]
    write(np.stack(parts) if is_several else parts[0])
    opened = open_tokens(path, "logits", routers=ROUTERS)
    for router, part in zip(ROUTERS, batches, strict=True):
        np.testing.assert_array_equal(opened.read_values(router, 0, 15), part.reshape(15, 4))


def test_arrays_of_other_lengths_too_large_ids_and_huge_arrays_are_refused(tmp_path):
    one, other = Content(30).values.values()
    path = written(tmp_path, "npz", {"text/0": one, "text/1": other[:29]})
    assert "29" in refusal(lambda: open_tokens(path, "logits", routers=ROUTERS))
    np.save(tmp_path / "a.npy", np.array([[1, 2**40]]))
    source = open_tokens(tmp_path / "a.npy", "ids", routers=("r",))
    assert str(2**40) in refusal(lambda: source.read_chosen("r", 0, 1))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(1 << 16))
    assert "needs" in refusal(lambda: open_tokens(tmp_path / "a.npz", "logits", routers=("r",)))


def test_ragged_or_missing_lists_are_refused(tmp_path):
    def read():
        source = open_tokens(tmp_path / "a.parquet", "logits", routers=ROUTERS)
        source.read_values("text/0", 0, 2)

    two = [1.0, 2.0]
    for lists in ([two, [1.0]], [[1.0], two], [two, None], [two, [1.0, None]]):
        pq.write_table(pa.table({"text.0": lists}), tmp_path / "a.parquet")
        assert "every token" in refusal(read)


def test_what_is_not_there_not_known_or_of_no_stage_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", Content(5).values["text/0"])
    refusals = {
        None: "--stage",
        "top_logits": "top_logits",
        "router_inputs": "you mean router_input",
    }
    for stage, words in refusals.items():
        with pytest.raises(UsageError, match=words):
            open_tokens(tmp_path / "a.npy", stage, routers=("r",))
    assert "no such file" in refusal(lambda: open_tokens(tmp_path / "none"))
    (tmp_path / "a.csv").write_text("1,2")
    assert "parquet" in refusal(lambda: open_tokens(tmp_path / "a.csv", "logits"))
    (tmp_path / "empty").mkdir()
    assert "recording.json" in refusal(lambda: open_tokens(tmp_path / "empty"))


def test_a_recording_says_its_stage_and_routers_itself(recording):
    assert open_tokens(recording[0]).facts.stage == "router_input"
    assert open_tokens(recording[0], "router_input", routers=ROUTERS).facts.num_tokens == 100
    with pytest.raises(UsageError, match="router_input, not logits"):
        open_tokens(recording[0], "logits")
    with pytest.raises(UsageError, match="map"):
        open_tokens(recording[0], router_map={"a": "text/0"})
    with pytest.raises(RecordingError, match="none in common"):
        open_tokens(recording[0], routers=("vision/0",))


@pytest.mark.parametrize("order", ["sorted", "shuffled", "interleaved"])
def test_positions_count_from_the_first_token_of_each_document(tmp_path, order):
    """Across pieces and blocks of any size; -1 where documents do not stand in one piece."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, 9000, 60)
    names = np.arange(60) if order == "sorted" else generator.permutation(60) - 7
    document = np.repeat(names, lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    if order == "interleaved":
        document[-1], position = document[0], np.full(len(document), -1)
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros((len(document), 1), np.int32), document=document)
    source = open_tokens(path, "ids", routers=("a",))
    assert source.facts.num_documents == len(np.unique(document))
    for start in [0, 1, 4095, 4096, 65_535, 65_536, *generator.integers(0, len(document), 40)]:
        stop = min(int(start + generator.integers(1, 9000)), len(document))
        columns = source.read_columns(int(start), stop)
        np.testing.assert_array_equal(columns.document, document[start:stop])
        np.testing.assert_array_equal(columns.position, position[start:stop])


def test_threads_that_want_the_same_row_groups_decode_them_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_rows, "_TOGETHER", 256)
    values = np.arange(2 * 64 * 4, dtype=np.float32).reshape(-1, 4)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array(list(values))}), path, row_group_size=16)
    table, decoded, together = ParquetTable(path), [], threading.Barrier(8)
    decode = table._decode

    def counted(name: str, width: int, number: int) -> np.ndarray:
        decoded.append(number)
        return decode(name, width, number)

    def read(thread: int) -> np.ndarray:
        together.wait()
        return table.block("a", 4, thread % 2)

    monkeypatch.setattr(table, "_decode", counted)
    with ThreadPoolExecutor(8) as pool:
        blocks = list(pool.map(read, range(8)))
    assert sorted(decoded) == [0, 1]
    for thread, rows in enumerate(blocks):
        np.testing.assert_array_equal(rows, values[thread % 2 * 64 :][:64])


def test_the_size_of_an_array_is_that_of_its_numbers_behind_the_header():
    for shape in ((5,), (5, 3), (2, 5, 3)):
        array, stream = np.zeros(shape, np.float32), io.BytesIO()
        np.save(stream, array)
        size = stream.tell()
        stream.seek(0)
        header = read_npy_header(stream, "x.npy")
        assert (header.size_bytes, header.start) == (array.nbytes, size - array.nbytes)
        layers = layers_in_file(Path("x.npy"), header.start, header.dtype, header.shape)
        starts = [layer.offset - header.start for layer in layers]
        assert starts == ([0, array.nbytes // 2] if len(shape) == 3 else [0])
        assert {(layer.num_rows, layer.width) for layer in layers} == {
            (5, 3 if array.ndim > 1 else 1)
        }


ONE_ROUTER = ("text/0",)
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
                    open_tokens(
                        one, stage, routers=ONE_ROUTER, checkpoint_routers=KNOWN, dialect=dialect
                    )
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
        opened = open_tokens(
            str(tmp_path / pattern), routers=("text/1",), checkpoint_routers=known(64)
        )
        for start in range(0, opened.facts.num_tokens, 2**15):
            opened.read_chosen("text/1", start, start + 1024)

    read("0.npy")  # what is imported when it is first used
    few = peak_of(lambda: read("[01].npy"))
    # what each request lacks is noted for all of them
    assert peak_of(lambda: read("*.npy")) < few + (1 << 17)
    assert few < 6 * ids.nbytes
