import io
import itertools
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from moegeom.core.errors import RecordingError, UsageError
from moegeom.tokens.foreign import parquet_rows
from moegeom.tokens.foreign.arrays import layers_in_file
from moegeom.tokens.foreign.npy import read_npy_header
from moegeom.tokens.foreign.parquet_rows import ParquetTable
from moegeom.tokens.open import open_tokens
from moegeom.tokens.stages import VALUE_STAGES
from tests.by_day import by_day
from tests.unit.tokens.conftest import ROUTERS, Content, record, refusal


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
