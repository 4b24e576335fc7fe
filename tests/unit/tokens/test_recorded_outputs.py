"""Outputs of experts in a recording: written, read by any range, and absent where not recorded."""

import filecmp
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moegeom.core.errors import InternalError, MoeGeomError, RecordingError, UsageError
from moegeom.core.tokens import OUTPUT_KINDS
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.open import open_tokens
from moegeom.tokens.prior import IsotropicRmsPrior
from moegeom.tokens.recording.facts import parse_facts, read_facts, render_facts
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.stages import FLOAT_DTYPES, OUTPUT_TENSORS, STAGE_TENSORS

ROUTERS = ("text/0", "text/1")
SIZES = (40, 1, 59)
ROW_SHAPES = {
    "shared_output": (10,),
    "routed_output": (10,),
    "expert_output": (6, 4),
    "routing_weights": (2,),
}
SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"


def outputs_of(num_tokens, kinds=OUTPUT_KINDS, seed=3):
    """By kind and router, as ``append`` takes them."""
    random = np.random.default_rng(seed)
    shapes = {kind: (num_tokens, *ROW_SHAPES[kind]) for kind in kinds}
    return {
        kind: {router: random.standard_normal(shape, dtype=np.float32) for router in ROUTERS}
        for kind, shape in shapes.items()
    }


def part_of(outputs, start, stop):
    return {kind: {r: a[start:stop] for r, a in by.items()} for kind, by in outputs.items()}


def write(path, held, outputs, stage="router_input", dtype="float32", sizes=SIZES):
    with RecordingWriter(path, stage, ROUTERS, domains=("a", "b"), dtype=dtype) as writer:
        first = 0
        for size in sizes:
            columns, values, chosen = held.part(first, first + size, stage, True, dtype)
            part = part_of(outputs, first, first + size)
            writer.append(columns, values, chosen, outputs=part)
            first += size
    return path


@pytest.fixture
def recorded(tmp_path, content):
    """A recording with outputs of all kinds, and the outputs that are in it."""
    outputs = outputs_of(100)
    return write(tmp_path / "rec", content(100), outputs), outputs


def edit_facts(path, **changes):
    file = path / "recording.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# ------------------------------------------------------------------------------ written and read


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("stage", STAGE_TENSORS)
def test_what_is_written_is_read_at_every_stage_and_dtype(tmp_path, content, stage, dtype):
    outputs = outputs_of(100)
    path = write(tmp_path / "rec", content(100), outputs, stage, dtype)
    source = open_recording(path)
    assert source.facts.outputs == OUTPUT_KINDS
    assert read_facts(path).dtype == dtype
    for kind, by_router in outputs.items():
        for router, output in by_router.items():
            found = source.read_output(router, kind, 0, 100)
            np.testing.assert_array_equal(
                found, output.astype(FLOAT_DTYPES[dtype]).astype(np.float32)
            )
            assert found.dtype == np.float32
            assert found.shape == (100, *ROW_SHAPES[kind])


# The fixture is a factory without state.
@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    cuts=st.sets(st.integers(1, 99), max_size=5),
    ends=st.tuples(*[st.integers(0, 100)] * 2),
    kinds=st.sets(st.sampled_from(OUTPUT_KINDS), min_size=1),
)
def test_any_sharding_and_any_range_equal_slicing_the_whole(
    tmp_path_factory, content, cuts, ends, kinds
):
    edges = [0, *sorted(cuts), 100]
    start, stop = sorted(ends)
    outputs = outputs_of(100, sorted(kinds))
    path = tmp_path_factory.mktemp("any") / "rec"
    source = open_recording(write(path, content(100), outputs, sizes=np.diff(edges).tolist()))
    assert set(source.facts.outputs) == kinds
    for kind in OUTPUT_KINDS:
        found = source.read_output("text/1", kind, start, stop)
        if kind in kinds:
            np.testing.assert_array_equal(found, outputs[kind]["text/1"][start:stop], strict=True)
        else:
            assert found is None


def test_each_kind_has_files_of_its_own(recorded):
    path, outputs = recorded
    for kind in OUTPUT_KINDS:
        file = load_file(path / f"{kind}-text.1-00000.safetensors")
        np.testing.assert_array_equal(file[kind], outputs[kind]["text/1"][:40], strict=True)
        assert len(file) == 1
    assert json.loads((path / "recording.json").read_text())["outputs"] == list(OUTPUT_KINDS)
    assert set(OUTPUT_TENSORS) == set(OUTPUT_KINDS)


def test_facts_with_outputs_survive_writing_and_parsing(recorded):
    facts = read_facts(recorded[0])
    assert facts.outputs == OUTPUT_KINDS
    assert parse_facts(render_facts(facts).encode(), "rec") == facts


def test_the_order_of_the_mapping_does_not_change_a_byte(tmp_path, content):
    outputs = outputs_of(100)
    first = write(tmp_path / "a", content(100), outputs)
    second = write(tmp_path / "b", content(100), dict(reversed(outputs.items())))
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    same, different, unreadable = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (sorted(same), different, unreadable) == (names, [], [])


def test_outputs_beside_values_change_none_of_the_other_files(tmp_path, content, recorded):
    bare = write(tmp_path / "bare", content(100), {})
    for file in bare.iterdir():
        if file.name != "recording.json":
            assert file.read_bytes() == (recorded[0] / file.name).read_bytes()


# ---------------------------------------------------------------------------------- not recorded


def test_a_recording_without_outputs_is_the_one_it_always_was(tmp_path, content):
    path = write(tmp_path / "rec", content(100), {})
    assert "outputs" not in json.loads((path / "recording.json").read_text())
    source = open_recording(path)
    assert source.facts.outputs == ()
    for kind in OUTPUT_KINDS:
        assert source.read_output("text/0", kind, 0, 100) is None


def test_recordings_made_before_outputs_were_known_still_open():
    source = open_recording(SAMPLES / "deepseek-tiny" / "rec" / "step_1500")
    assert source.facts.outputs == ()
    assert source.read_output("text/1", "shared_output", 0, 9) is None


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "parquet"])
def test_foreign_files_hold_no_outputs(tmp_path, suffix):
    values, path = np.ones((5, 4), np.float32), tmp_path / f"a.{suffix}"
    writers = {
        "npy": lambda: np.save(path, values),
        "npz": lambda: np.savez(path, a=values),
        "safetensors": lambda: save_file({"a": values}, path),
        "parquet": lambda: pq.write_table(pa.table({"a": list(values)}), path),
    }
    writers[suffix]()
    source = open_tokens(path, "router_input", routers=("text/0",))
    assert source.facts.outputs == ()
    for kind in OUTPUT_KINDS:
        assert source.read_output("text/0", kind, 0, 5) is None


def test_a_prior_has_no_outputs():
    source = IsotropicRmsPrior((("text/0", None, 8),), 50, 0)
    assert source.facts.outputs == ()
    for kind in OUTPUT_KINDS:
        assert source.read_output("text/0", kind, 0, 50) is None


# ---------------------------------------------------------------------------------- every source


def test_arrays_in_memory_answer_as_their_recording_does(recorded, content):
    path, outputs = recorded
    memory = ArraySource(content(100).values, num_tokens=350, outputs=outputs)
    recording = open_recording(path)
    assert memory.facts.outputs == recording.facts.outputs
    for kind in OUTPUT_KINDS:
        whole = recording.read_output("text/1", kind, 0, 100)
        for ends in ((0, 100), (30, 30), (60, 140), (340, 350)):
            np.testing.assert_array_equal(
                memory.read_output("text/1", kind, *ends),
                whole[np.arange(*ends) % 100],
                strict=True,
            )
    assert ArraySource(content(9).values).read_output("text/1", "expert_output", 0, 9) is None


def test_a_kind_that_does_not_exist_is_a_bug_of_the_caller(recorded, content):
    recording = open_recording(recorded[0])
    sources = (
        recording,
        ArraySource(content(9).values),
        IsotropicRmsPrior((("text/0", None, 8),), 50, 0),
    )
    for source in sources:
        with pytest.raises(InternalError, match="shared_output, routed_output, expert_output"):
            source.read_output("text/0", "shared_outputs", 0, 1)
    with pytest.raises(InternalError, match="block_output"):
        ArraySource(content(9).values, outputs={"block_output": content(9).values})


def test_ranges_and_routers_are_held_as_for_values(recorded, refused):
    source = open_recording(recorded[0])
    with pytest.raises(InternalError, match="100"):
        source.read_output("text/0", "shared_output", 90, 101)
    assert "text/0, text/1" in refused(lambda: source.read_output("text/7", "shared_output", 0, 1))


# --------------------------------------------------------------------------------------- damaged


@pytest.mark.parametrize("kept", [0, 7, 60, -1, None])
@pytest.mark.parametrize("kind", OUTPUT_KINDS)
def test_a_truncated_or_missing_file_is_one_error_that_names_it(recorded, refused_open, kind, kept):
    file = recorded[0] / f"{kind}-text.1-00002.safetensors"
    data = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(data[: len(data) - 3 if kept == -1 else kept])
    assert file.name in refused_open(recorded[0])


def test_a_file_cut_after_opening_is_one_error(recorded, refused):
    source = open_recording(recorded[0])
    file = recorded[0] / "expert_output-text.1-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert "too early" in refused(lambda: source.read_output("text/1", "expert_output", 90, 100))


@pytest.mark.parametrize(
    ("kind", "array", "words"),
    [
        ("shared_output", np.zeros((59, 11), np.float32), "11 columns"),
        ("shared_output", np.zeros((58, 10), np.float32), "58 rows"),
        ("shared_output", np.zeros((59, 10), np.float16), "F16"),
        ("shared_output", np.zeros((59, 10), np.int32), "I32"),
        ("shared_output", np.zeros((59, 5, 2), np.float32), "(tokens, width)"),
        ("expert_output", np.zeros((59, 4, 6), np.float32), "4 x 6 columns"),
        ("expert_output", np.zeros((59, 24), np.float32), "(tokens, experts, width)"),
        ("expert_output", np.zeros((59, 6, 0), np.float32), "shape"),
        ("expert_output", np.zeros((60, 6, 4), np.float32), "60 rows"),
    ],
)
def test_a_shard_of_another_shape_or_dtype_is_refused(recorded, refused_open, kind, array, words):
    name = f"{kind}-text.1-00002.safetensors"
    save_file({kind: array}, recorded[0] / name)
    message = refused_open(recorded[0])
    assert name in message
    assert words in message


def test_a_tensor_of_another_name_is_refused(recorded, refused_open):
    name = "routed_output-text.0-00000.safetensors"
    shutil.copy(recorded[0] / "shared_output-text.0-00000.safetensors", recorded[0] / name)
    assert "no tensor 'routed_output'; found shared_output" in refused_open(recorded[0])


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (["shared_outputs"], ("'shared_outputs'", *OUTPUT_KINDS)),
        (["shared_output", "shared_output"], ("twice",)),
        ("shared_output", ("a list",)),
        (None, ("a list",)),
        ([["shared_output"]], ("texts",)),
    ],
)
def test_facts_about_outputs_that_do_not_fit_are_refused(recorded, refused_open, outputs, words):
    edit_facts(recorded[0], outputs=outputs)
    message = refused_open(recorded[0])
    for word in words:
        assert word in message


def test_ids_have_a_dtype_when_outputs_are_beside_them_and_only_then(
    tmp_path, content, refused_open
):
    bare = write(tmp_path / "bare", content(100), {}, "ids")
    assert read_facts(bare).dtype is None
    edit_facts(bare, dtype="float32")
    assert "null for ids without outputs" in refused_open(bare)
    beside = write(tmp_path / "beside", content(100), outputs_of(100), "ids", "bfloat16")
    assert read_facts(beside).dtype == "bfloat16"
    edit_facts(beside, dtype=None)
    assert "dtype is None" in refused_open(beside)


def test_any_damaged_byte_ends_in_a_value_or_our_error(recorded):
    random = np.random.default_rng(0)
    for kind in OUTPUT_KINDS:
        file = recorded[0] / f"{kind}-text.1-00002.safetensors"
        whole = file.read_bytes()
        for where in random.integers(0, min(200, len(whole)), 60):
            damaged = bytearray(whole)
            damaged[where] ^= 1 << int(random.integers(8))
            file.write_bytes(damaged)
            assert outcome(recorded[0], kind) in ("value", "refused")
        file.write_bytes(whole)


def outcome(path, kind) -> str:
    try:
        open_recording(path).read_output("text/1", kind, 0, 100)
    except MoeGeomError:
        return "refused"
    return "value"


# ----------------------------------------------------------------------------------- the writer


def without(outputs, kind):
    return {name: by_router for name, by_router in outputs.items() if name != kind}


def changed(outputs, kind, change):
    return {**outputs, kind: {router: change(a) for router, a in outputs[kind].items()}}


#: Wrong in any shard; the first of a recording included.
NEVER = [
    (lambda o: {**o, "shared_output": {}}, "shared_output"),
    (lambda o: {**o, "shared_output": {"text/0": o["shared_output"]["text/0"]}}, "text/1"),
    (lambda o: {**o, "shared_output": {"text/9": o["shared_output"]["text/0"]}}, "text/9"),
    (lambda o: changed(o, "shared_output", lambda a: a[:19]), "19"),
    (lambda o: changed(o, "shared_output", lambda a: a[:, :, None]), "(20, 10, 1)"),
    (lambda o: changed(o, "expert_output", lambda a: a.reshape(20, 24)), "(20, 24)"),
    (lambda o: changed(o, "expert_output", lambda a: a[:, :0]), "(20, 0, 4)"),
    (lambda o: changed(o, "expert_output", lambda a: a.astype(np.int32)), "int32"),
]

#: Wrong because the first shard was another.
LATER = [
    (lambda o: {}, "outputs none; expected shared_output"),
    (lambda o: None, "outputs none; expected shared_output"),
    (lambda o: without(o, "routed_output"), "outputs shared_output, expert_output"),
    (lambda o: changed(o, "shared_output", lambda a: a[:, :5]), "(20, 10)"),
    (lambda o: changed(o, "expert_output", lambda a: a.swapaxes(1, 2)), "(20, 6, 4)"),
]


@pytest.mark.parametrize("is_first", [False, True])
def test_the_writer_refuses_what_does_not_fit_and_keeps_no_trace(tmp_path, content, is_first):
    columns, values, chosen = content(20).part(0, 20, "router_input", True, "float32")
    good = outputs_of(20)
    with RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, domains=("a", "b")) as writer:
        if not is_first:
            writer.append(columns, values, chosen, outputs=good)
        for spoil, words in NEVER if is_first else NEVER + LATER:
            with pytest.raises(RecordingError) as caught:
                writer.append(columns, values, chosen, outputs=spoil(good))
            assert words in str(caught.value)
        writer.append(columns, values, chosen, outputs=good)
    found = open_recording(tmp_path / "rec")
    assert found.facts.num_tokens == (20 if is_first else 40)
    np.testing.assert_array_equal(
        found.read_output("text/1", "expert_output", 0, 20), good["expert_output"]["text/1"]
    )


def test_a_refused_first_shard_does_not_decide_what_is_recorded(tmp_path, content):
    columns, values, chosen = content(20).part(0, 20, "router_input", True, "float32")
    spoiled = changed(outputs_of(20), "expert_output", lambda a: a[:19])
    with RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, domains=("a", "b")) as writer:
        with pytest.raises(RecordingError):
            writer.append(columns, values, chosen, outputs=spoiled)
        halves = {router: value[:, :6].astype(np.float16) for router, value in values.items()}
        writer.append(columns, halves)
    facts = open_recording(tmp_path / "rec").facts
    assert (facts.outputs, facts.has_chosen) == ((), False)
    assert read_facts(tmp_path / "rec").dtype == "float16"


def test_an_unknown_kind_is_a_usage_error_with_the_nearest_name(tmp_path, content):
    columns, values, _ = content(20).part(0, 20, "router_input", True, "float32")
    with (
        pytest.raises(UsageError, match="Did you mean shared_output"),
        RecordingWriter(tmp_path / "rec", "router_input", ROUTERS, domains=("a", "b")) as writer,
    ):
        writer.append(columns, values, outputs={"shared_outputs": values})


def test_outputs_that_cannot_be_added_are_refused(tmp_path, content, recorded, refused_open):
    columns, values, chosen = content(20).part(0, 20, "router_input", True, "float32")
    narrow = changed(outputs_of(20), "routed_output", lambda a: a[:, :8])
    with (
        pytest.raises(RecordingError, match="10 columns, routed_output 8"),
        RecordingWriter(tmp_path / "new", "router_input", ROUTERS, domains=("a", "b")) as writer,
    ):
        writer.append(columns, values, chosen, outputs=narrow)
    for shard, size in enumerate(SIZES):
        name = f"routed_output-text.1-0000{shard}.safetensors"
        save_file({"routed_output": np.zeros((size, 8), np.float32)}, recorded[0] / name)
    message = refused_open(recorded[0])
    assert "text/1" in message
    assert "10 columns, routed_output 8" in message


def test_outputs_too_large_for_float16_are_refused_not_recorded_as_infinite(tmp_path, content):
    large = changed(outputs_of(100), "shared_output", lambda a: 1e6 * a)
    with pytest.raises(UsageError, match="bfloat16"):
        write(tmp_path / "rec", content(100), large, dtype="float16")
    assert not (tmp_path / "rec").exists()
