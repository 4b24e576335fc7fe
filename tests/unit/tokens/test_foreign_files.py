import io
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import SOURCES

ROUTERS = ("text/0", "text/1")


def write_npz(path, arrays):
    np.savez(path, **arrays)


def write_compressed(path, arrays):
    np.savez_compressed(path, **arrays)


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
    "npz": ("a.npz", write_npz),
    "compressed npz": ("a.npz", write_compressed),
    "safetensors": ("a.safetensors", lambda path, arrays: save_file(arrays, path)),
    "parquet": ("a.parquet", write_parquet),
    "parquet, fixed lists": ("a.parquet", write_fixed_lists),
}


@pytest.fixture(params=WRITERS)
def write(request, tmp_path):
    name, function = WRITERS[request.param]

    def run(arrays):
        function(tmp_path / name, arrays)
        return tmp_path / name

    return run


def by_slug(arrays):
    return {router.replace("/", "."): array for router, array in arrays.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("stage", ["router_input", "pre_norm", "logits"])
def test_a_foreign_file_equals_the_recording(tmp_path, content, record, write, stage, dtype):
    held = content(90)
    recorded = open_tokens(
        record(tmp_path / "rec", held, (90,), stage, has_chosen=False, dtype=dtype), stage=stage
    )
    foreign = open_tokens(
        write({k: v.astype(dtype) for k, v in by_slug(held.values).items()}),
        stage=stage,
        routers=ROUTERS,
    )
    assert foreign.facts.routers == recorded.facts.routers
    assert foreign.facts.num_tokens == recorded.facts.num_tokens
    for router in ROUTERS:
        for start, stop in ((0, 90), (15, 55), (17, 34), (89, 90), (40, 40)):
            np.testing.assert_array_equal(
                foreign.read_values(router, start, stop), recorded.read_values(router, start, stop)
            )
        assert foreign.read_chosen(router, 0, 90) is None


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_foreign_ids_equal_the_recording(tmp_path, content, record, write, dtype):
    held = content(90)
    recorded = open_tokens(record(tmp_path / "rec", held, (90,), "ids"))
    arrays = {k: v.astype(dtype) for k, v in by_slug(held.chosen).items()}
    foreign = open_tokens(write(arrays), stage="ids", routers=ROUTERS)
    assert foreign.facts.has_chosen
    for router in ROUTERS:
        np.testing.assert_array_equal(
            foreign.read_chosen(router, 3, 77), recorded.read_chosen(router, 3, 77)
        )


def test_columns_beside_the_arrays_are_read(content, write):
    held = content(90)
    arrays = {"document": held.columns.document, "token_id": held.columns.token_id}
    source = open_tokens(write({**by_slug(held.values), **arrays}), stage="logits", routers=ROUTERS)
    found = source.read_columns(20, 80)
    np.testing.assert_array_equal(found.document, held.columns.document[20:80])
    np.testing.assert_array_equal(found.token_id, held.columns.token_id[20:80])
    np.testing.assert_array_equal(found.position, held.columns.position[20:80])
    assert source.facts.has_documents


def test_a_router_map_names_the_arrays_and_may_leave_some_out(content, write):
    held = content(30)
    arrays = {"h7": held.values["text/1"], "other": held.values["text/0"]}
    source = open_tokens(
        write(arrays), stage="router_input", router_map={"h7": "text/1"}, routers=ROUTERS
    )
    assert source.facts.routers == ("text/1",)
    np.testing.assert_array_equal(source.read_values("text/1", 0, 30), held.values["text/1"])


@pytest.mark.parametrize(
    ("keys", "router_map", "words"),
    [
        (("h0", "h1"), {}, ("h0, h1", "text/0, text/1", "map")),
        (("h0", "text.0"), {}, ("h0", "text/0")),
        (("h0", "h1"), {"h9": "text/0"}, ("h9",)),
        (("text.0", "h1"), {"h9": "text/1"}, ("the map names h9",)),
        (("h0", "h1"), {"h0": "text/5"}, ("text/5", "no such router")),
        (("h0", "text.0"), {"h0": "text/0"}, ("several arrays for text/0",)),
    ],
)
def test_arrays_that_cannot_be_assigned_are_listed(
    content, write, refused, keys, router_map, words
):
    values = list(content(30).values.values())
    path = write(dict(zip(keys, values, strict=True)))
    message = refused(lambda: open_tokens(path, "logits", router_map, ROUTERS))
    for word in words:
        assert word in message


def test_the_only_array_belongs_to_the_only_router(content, write):
    values = content(30).values["text/0"]
    source = open_tokens(write({"whatever": values}), stage="logits", routers=("text/0",))
    np.testing.assert_array_equal(source.read_values("text/0", 0, 30), values)


def test_arrays_of_different_lengths_are_refused(tmp_path, content, refused):
    held = content(30).values
    np.savez(tmp_path / "a.npz", **{"text.0": held["text/0"], "text.1": held["text/1"][:29]})
    message = refused(lambda: open_tokens(tmp_path / "a.npz", "logits", routers=ROUTERS))
    assert "29" in message


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_an_npy_file_equals_its_array(tmp_path, content, dtype):
    values = content(50).values["text/0"].astype(dtype)
    np.save(tmp_path / "text.0.npy", values)
    source = open_tokens(tmp_path / "text.0.npy", stage="pre_norm", routers=ROUTERS)
    assert source.facts.routers == ("text/0",)
    np.testing.assert_array_equal(
        source.read_values("text/0", 11, 37), values[11:37].astype(np.float32)
    )


def test_bfloat16_safetensors_are_read(tmp_path, content):
    values = content(20).values["text/0"].astype(ml_dtypes.bfloat16)
    save_file({"text/0": values}, tmp_path / "a.safetensors")
    source = open_tokens(tmp_path / "a.safetensors", stage="logits", routers=ROUTERS)
    np.testing.assert_array_equal(source.read_values("text/0", 0, 20), values.astype(np.float32))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_a_pickle_is_never_opened(tmp_path, refused):
    bomb = np.array([[Bomb()]], dtype=object)
    np.save(tmp_path / "a.npy", bomb, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=bomb)
    (tmp_path / "a.pt").write_bytes(b"\x80\x04.")
    for name in ("a.npy", "a.npz", "a.pt"):
        message = refused(lambda name=name: open_tokens(tmp_path / name, "logits", routers=("r",)))
        assert "pickle" in message


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 5), np.int32), "int32"),
        (np.zeros(4, np.float32), "(4,)"),
        (np.zeros((4, 5, 6), np.float32), "(4, 5, 6)"),
        (np.zeros((0, 5), np.float32), "(0, 5)"),
        (np.zeros((5, 4), np.float32).T, "column by column"),
        (np.zeros((4, 5), ml_dtypes.bfloat16), "bfloat16"),
        (np.zeros((4, 5), np.complex64), "complex64"),
    ],
)
def test_an_array_that_is_no_rows_of_numbers_is_refused(tmp_path, refused, array, words):
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", x=array)
    for name in ("a.npy", "a.npz"):
        message = refused(lambda name=name: open_tokens(tmp_path / name, "logits", routers=("r",)))
        assert words in message


@pytest.mark.parametrize(
    "kind", ["npy", "npz", "pt", "several in npz", "several in pt", "several in safetensors"]
)
def test_the_hint_for_batches_keeps_layers_apart(tmp_path, kind):
    """What the hint says is run: afterwards the file opens, and holds the rows of each layer."""
    torch = pytest.importorskip("torch")
    batches = np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    path = tmp_path / f"a.{kind.rpartition(' ')[2]}"

    def write(array):
        several = {
            router.replace("/", "."): part for router, part in zip(ROUTERS, array, strict=True)
        }
        if path.suffix == ".pt":
            tensors = {k: torch.from_numpy(v.copy()) for k, v in several.items()}
            torch.save(tensors if "several" in kind else torch.from_numpy(array), path)
        elif path.suffix == ".safetensors":
            save_file({k: v.copy() for k, v in several.items()}, path)
        elif path.suffix == ".npy":
            np.save(path, array)
        else:
            np.savez(path, **(several if "several" in kind else {"x": array}))

    write(batches)
    with pytest.raises(RecordingError, match="expected") as caught:
        open_tokens(path, "logits", routers=ROUTERS)
    said = caught.value.hint.removeprefix("Bring it to one row per token: ")
    first = said.removesuffix(".").partition(" where layers come first")[0]
    name = "tensor" if path.suffix == ".pt" else "array"
    if "several" in kind:
        flat = np.stack([eval(first, {name: part}) for part in batches])
    else:
        flat = eval(first, {name: batches})
    write(flat)
    opened = open_tokens(path, "logits", routers=ROUTERS)
    for router, part in zip(ROUTERS, batches, strict=True):
        np.testing.assert_array_equal(opened.read_values(router, 0, 15), part.reshape(15, 4))


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "parquet"])
def test_any_damage_ends_in_a_value_or_our_error(tmp_path, content, suffix):
    values = content(30).values["text/0"]
    path = tmp_path / f"a.{suffix}"
    table = {"npy": lambda p, a: np.save(p, a["text.0"]), "npz": write_npz}
    table |= {"safetensors": WRITERS["safetensors"][1], "parquet": write_parquet}
    table[suffix](path, {"text.0": values})
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    cuts = [whole[:n] for n in (0, 1, 8, 40, len(whole) // 2, len(whole) - 1)]
    flips = []
    for where in random.integers(0, min(len(whole), 400), 80):
        damaged = bytearray(whole)
        damaged[where] ^= 1 << int(random.integers(8))
        flips.append(bytes(damaged))
    for data in cuts + flips:
        path.write_bytes(data)
        assert outcome(path) in ("value", "refused")
    for data in cuts:
        path.write_bytes(data)
        assert outcome(path) == "refused"


def outcome(path) -> str:
    try:
        source = open_tokens(path, "logits", routers=("text/0",))
        source.read_values("text/0", 0, source.facts.num_tokens)
    except MoeGeomError:
        return "refused"
    return "value"


def test_ids_beyond_int32_are_refused(tmp_path, refused):
    np.save(tmp_path / "a.npy", np.array([[1, 2**40]]))
    source = open_tokens(tmp_path / "a.npy", "ids", routers=("r",))
    assert str(2**40) in refused(lambda: source.read_chosen("r", 0, 1))


@pytest.mark.parametrize(
    "lists",
    [
        [[1.0, 2.0], [1.0]],
        [[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]],
        [[1.0, 2.0], None],
        [[1.0, 2.0], [1.0, None]],
    ],
)
def test_ragged_or_missing_lists_are_refused(tmp_path, refused, lists):
    pq.write_table(pa.table({"text.0": lists}), tmp_path / "a.parquet")

    def read():
        source = open_tokens(tmp_path / "a.parquet", "logits", routers=ROUTERS)
        source.read_values("text/0", 0, 2)

    assert "every token" in refused(read)


def test_a_huge_compressed_array_is_refused_before_it_is_decompressed(tmp_path, refused):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(1 << 16))
    assert "needs" in refused(lambda: open_tokens(tmp_path / "a.npz", "logits", routers=("r",)))


def test_a_foreign_file_needs_a_stage(tmp_path, content):
    np.save(tmp_path / "a.npy", content(5).values["text/0"])
    with pytest.raises(UsageError, match="--stage"):
        open_tokens(tmp_path / "a.npy", routers=("r",))
    with pytest.raises(UsageError, match="top_logits"):
        open_tokens(tmp_path / "a.npy", "top_logits", routers=("r",))
    with pytest.raises(UsageError, match="Did you mean router_input"):
        open_tokens(tmp_path / "a.npy", "router_inputs", routers=("r",))


def test_a_recording_says_its_stage_itself(recording):
    assert open_tokens(recording[0]).facts.stage == "router_input"
    assert open_tokens(recording[0], "router_input", routers=ROUTERS).facts.num_tokens == 100
    with pytest.raises(UsageError, match="router_input, not logits"):
        open_tokens(recording[0], "logits")
    with pytest.raises(UsageError, match="map"):
        open_tokens(recording[0], router_map={"a": "text/0"})


def test_a_recording_of_another_model_is_refused(recording):
    with pytest.raises(RecordingError, match="none in common"):
        open_tokens(recording[0], routers=("vision/0",))


def test_what_is_not_there_or_not_known_is_refused(tmp_path, refused):
    assert "no such file" in refused(lambda: open_tokens(tmp_path / "none"))
    (tmp_path / "a.csv").write_text("1,2")
    assert "parquet" in refused(lambda: open_tokens(tmp_path / "a.csv", "logits"))
    (tmp_path / "empty").mkdir()
    assert "recording.json" in refused(lambda: open_tokens(tmp_path / "empty"))


def test_every_source_is_named_as_its_file():
    assert SOURCES.names() == ["npy", "npz", "parquet", "pt", "recording", "safetensors", "trace"]
    assert [source.name for source in SOURCES.all()] == SOURCES.names()


def test_knowing_every_source_loads_no_heavy_library():
    code = (
        "import sys; from moegeom.tokens.open import open_tokens; "
        "from moegeom.tokens.source import SOURCES; SOURCES.all(); "
        "print([m for m in ('pyarrow', 'pandas', 'torch', 'numba') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


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
        found = source.read_columns(int(start), stop)
        np.testing.assert_array_equal(found.document, document[start:stop])
        np.testing.assert_array_equal(found.position, position[start:stop])
