"""Recordings of several ranks, merged: nothing of how the run was cut is left in the result."""

import itertools
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.merge import merge_recordings
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.stages import STAGE_TENSORS
from tests.by_day import IS_NIGHT
from tests.unit.tokens.conftest import refusal

ROUTERS = ("text/0", "text/1")
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
    columns = TokenColumns(
        np.zeros(num_tokens, np.int64),
        np.arange(num_tokens, dtype=np.int32),
        *(np.full(num_tokens, -1, dtype) for dtype in (np.int32, np.int16)),
    )
    with RecordingWriter(tmp_path / "part", "router_input", ("a",)) as writer:
        writer.append(columns, {"a": values})
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
        columns = TokenColumns(
            np.array([0]), np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int16)
        )
        with RecordingWriter(tmp_path / name, "logits", routers) as writer:
            writer.append(columns, {r: np.ones((1, width), np.float32) for r in routers})
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
