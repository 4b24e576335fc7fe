"""JSON and TOML of others end in values or in a sentence, and in little memory; values have one digest,
and numbers one text: layers, shares, and ranges by the one 95 % that there is. Footers of Parquet files
are held against Arrow's reading of the same bytes.
"""

import hashlib
import json
import math
import random
import re
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta
from scipy import stats

import moegeom
from moegeom.core import parquet
from moegeom.core import text as texts
from moegeom.core.digest import digest_of, digest_of_file
from moegeom.core.documents import DocumentError, parse_json, parse_toml, record_of
from moegeom.core.errors import UsageError
from moegeom.core.limits import MOST_DOTS
from moegeom.core.parquet import parquet_facts, read_columns, read_row_groups
from moegeom.core.router import format_layers, parse_layers
from tests.ends import work_ends

NINES = "9" * 5000


HOSTILE_TOML = [
    (".".join("a" * 40_000) + " = 1", "dots"),
    ("a = 1\n" * 100_000, "characters"),
    (f"a = {NINES}", "is not TOML"),
    (f"a = 0x{'f' * 5000}", "beyond 64 bits"),
    (f"a = [{{b = 0b1{'0' * 64}}}]", "beyond 64 bits"),
    ("a = " + "[" * 100_000, "nested too deeply"),
    ("a = 1\na = 2", "is not TOML"),
]
HOSTILE_JSON = [
    (NINES.encode(), "beyond 64 bits"),
    (b"[" + b"18446744073709551616]", "beyond 64 bits"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": \xff}', "not UTF-8 at byte 6"),
    (b"{", "is not JSON"),
    (b"[" + b"1," * 3_000_000 + b"1]", "values"),
    (b" " * (1 << 27), "bytes"),
]


def test_a_hostile_document_is_a_sentence():
    for parse, hostile in ((parse_toml, HOSTILE_TOML), (parse_json, HOSTILE_JSON)):
        for text, words in hostile:
            with work_ends(), pytest.raises(DocumentError, match=words):
                parse(text)


def test_as_many_dots_as_are_allowed_are_read():
    line = ".".join("a" * (MOST_DOTS + 1))
    text = "\n".join(f"x{n}.{line[2:]} = 1" for n in range(1000))
    with work_ends():
        parse_toml(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_json_writes_comes_back(value):
    assert parse_json(json.dumps(value).encode()) == value


def test_json_is_read_as_deep_as_it_can_be_written():
    def nested(depth):
        objects, lists = depth // 2, depth - depth // 2
        return b'{"a":' * objects + b"[" * lists + b"]" * lists + b"}" * objects

    assert parse_json(nested(100))
    with pytest.raises(DocumentError, match="nested too deeply"):
        parse_json(nested(101))


@dataclass
class Leaf:
    name: str
    size: Annotated[float, Meta(ge=0.0)] = 1.0

    def __post_init__(self):
        if self.name == "root":
            raise ValueError("a root is no leaf")


@dataclass
class Tree:
    leaves: Annotated[tuple[Leaf, ...], Meta(min_length=1, max_length=2)]
    kind: Literal["oak", "elm"] | None = None
    heights: dict[str, dict[str, int]] = field(default_factory=dict)


LEAF = {"name": "a"}
MISFITS: list[tuple[Any, str, str]] = [
    ([], "it is a list of 0, expected a table", ""),
    ({}, "key 'leaves' is missing", ""),
    ({"leafs": []}, "unknown key 'leafs'", "Did you mean leaves? Known: leaves, kind, heights."),
    ({"leaves": [], "kinds": 1}, "leaves is a list of 0, expected a list of at least 1 entry", ""),
    ({"leaves": {}}, "leaves is a table, expected a list", "begins with [[leaves]]"),
    ({"leaves": [LEAF | {"sice": 1}]}, "leaves[0]: unknown key 'sice'", "Did you mean size?"),
    ({"leaves": [LEAF | {"size": True}]}, "leaves[0].size is true, expected a number", ""),
    ({"leaves": [LEAF | {"size": math.nan}]}, "size is nan, expected a finite number", ""),
    ({"leaves": [LEAF, {"name": "root"}]}, "leaves[1]: a root is no leaf", ""),
    ({"leaves": [{"name": "\x1b" * 999}], "kind": 1}, "kind is 1, expected one of elm, oak, null", ""),
    ({"leaves": [LEAF], "kind": "oaks"}, "kind is 'oaks', expected one of", "Did you mean oak?"),
    ({"leaves": [LEAF], "kind": "\x1b" * 999}, "kind is '\\x1b", ""),
    ({"leaves": [LEAF], "kind": "\ud800"}, "holds '\\ud800', which is no character", ""),
    ({"leaves": [LEAF], "heights": {"a": {}, "\x1b": {"m": 1, "n": "2"}, "c": {"n": 3.5}}},
     "heights.\\x1b.n is '2', expected a whole number", ""),
]  # fmt: skip


def test_what_is_no_record_is_told_with_its_place_and_left_as_it_was():
    for document, words, hint in MISFITS:
        text = repr(document)
        with pytest.raises(DocumentError) as refused:
            record_of(Tree, document)
        assert words in str(refused.value), (words, str(refused.value))
        assert hint in refused.value.hint
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 200
        assert repr(document) == text
    assert record_of(TypedDict("kind", {"a": int}), {"a": 1, "b": 2}) == {"a": 1}


def test_of_many_entries_the_refused_one_is_named_soon():
    heights: dict[str, Any] = {str(n): {"a": n} for n in range(100_000)}
    heights["77777"]["a"] = None
    with work_ends(), pytest.raises(DocumentError, match="heights.77777.a is null"):
        record_of(Tree, {"leaves": [LEAF], "heights": heights})


# ------------------------------------------------------------------------------------------ digests
DIGESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def told(value: object) -> str:
    """Values that differ differ in this; lists and tuples are one."""
    if isinstance(value, dict):
        return f"{{{sorted((key, told(one)) for key, one in value.items())}}}"
    return f"[{[told(one) for one in value]}]" if isinstance(value, list | tuple) else repr(value)


@given(st.lists(DIGESTED, max_size=4), st.lists(DIGESTED, max_size=4))
def test_values_have_one_digest_exactly_when_they_are_equal(first, second):
    assert (digest_of(*first) == digest_of(*second)) == (told(first) == told(second))


def test_no_border_between_values_can_be_moved():
    values = [
        ("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), (["ab", "c"],), (["ab"], "c"), ({"ab": "c"},),
        ("text 1\na",), ("",), (), (None,), ("None",), (1,), ("1",), (True,), (1.0,), ([],), ({},),
    ]  # fmt: skip
    assert len({digest_of(*value) for value in values}) == len(values)


def test_arrays_differ_by_dtype_shape_and_bits():
    numbers = np.arange(8, dtype=np.uint8)
    arrays = [numbers, numbers.reshape(2, 4), numbers.view(np.int8), numbers.view(">u2")]
    arrays += [numbers.view(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
    arrays += [numbers.view("<u2"), numbers[:0], np.array(0.0), np.array(-0.0), numbers.tobytes()]
    assert len({digest_of(array) for array in arrays}) == len(arrays)
    assert digest_of(np.arange(8).reshape(2, 4).T) == digest_of(
        np.arange(8).reshape(2, 4).T.copy(order="C")
    )


def test_a_digest_of_bytes_and_files_is_that_of_hashlib(tmp_path):
    raw = bytes(range(256)) * 9000
    (tmp_path / "file").write_bytes(raw)
    assert digest_of_file(tmp_path / "file") == hashlib.sha256(raw).hexdigest()
    assert digest_of(raw) == hashlib.sha256(b"bytes %d\n%b" % (len(raw), raw)).hexdigest()


def test_records_paths_and_numbers_of_numpy_are_taken_and_nothing_else():
    @dataclass
    class Record:
        weight: np.ndarray
        name: str

    one = Record(np.ones(3), "a")
    assert (
        digest_of(one) == digest_of(Record(np.ones(3), "a")) != digest_of(Record(np.ones(3), "b"))
    )
    assert digest_of(Path("a")) == digest_of("a")
    assert digest_of(np.int64(3), np.float64(0.5)) == digest_of(3, 0.5)
    assert digest_of({"a", "b"}) == digest_of({"b", "a"})
    with pytest.raises(TypeError, match="object: no value"):
        digest_of(object())


# --------------------------------------------------------------------------------- numbers as texts
SOURCES = Path(moegeom.__file__).parent

#: ``2 * error``, ``1.96 * load_se`` and the like: a range with a factor of its own.
OF_ITS_OWN = re.compile(
    r"\b(2(\.0)?|1\.96)\s*\*\s*\w*(error|_se)\b|\b\w*(error|_se)\s*\*\s*(2(\.0)?|1\.96)\b"
)


def test_the_half_width_is_that_of_student_or_of_the_normal_distribution():
    for blocks in (2, 3, 16, 100):
        low, high = stats.t.interval(0.95, blocks - 1, loc=1.0, scale=0.3)
        np.testing.assert_allclose(texts.half_width(0.3, blocks), (high - low) / 2.0)
    for blocks in (None, 0, 1):
        np.testing.assert_allclose(texts.half_width(1.0, blocks), stats.norm.ppf(0.975), rtol=1e-6)
    assert texts.range_text(3.5, 0.1, 16, 1) == "3.3-3.7"
    assert texts.range_text(0.1, 0.1, 16, 2) == "0.00-0.31"


def test_no_range_has_a_factor_of_its_own():
    for copy in ("load - 2 * error", "1.96 * row_se", "2.0*standard_error"):
        assert OF_ITS_OWN.search(copy)
    folders = ["checks", "document", "measure", "metrics", "results", "studies", "core"]
    files = [path for folder in folders for path in sorted((SOURCES / folder).rglob("*.py"))]
    assert {path.relative_to(SOURCES).parts[0] for path in files} == set(folders)
    offenders = [
        f"{path.name}: {line.strip()}"
        for path in files
        if "cells" not in path.parts  # error bounds there, not standard errors
        for line in path.read_text("utf-8").splitlines()
        if OF_ITS_OWN.search(line)
    ]
    assert offenders == []


def test_a_share_has_two_figures_and_all_before_the_point():
    for share, text in {0.0: "0 %", 0.00123: "0.12 %", 0.0996: "10 %", 2.0: "200 %"}.items():
        assert texts.percent(share) == text
    assert texts.percent(0.12345, ".1f") == "12.3 %"


@given(share=st.floats(0.0, 1.0))
def test_what_is_not_all_is_never_all(share):
    """It is never more than it is, and less by a hundredth of a per cent at most."""
    said = float(texts.percent_of_all(share).removesuffix(" %"))
    assert said - 1e-9 <= 100.0 * share < said + 0.01 + 1e-9
    assert (said == 100.0) == (share == 1.0)


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_formatting_layers_is_the_inverse_of_parsing(layers):
    assert parse_layers(format_layers(layers)) == layers


def test_ranges_of_layers_include_their_ends():
    assert parse_layers("0,3-5, 7 - 7") == {0, 3, 4, 5, 7}
    assert format_layers(frozenset({0, 3, 4, 5, 9})) == "0,3-5,9"
    assert format_layers(frozenset()) == ""


def test_layers_that_are_nonsense_are_answered_with_an_example():
    for text in ("", "a", "1,,2", "-1", "1-", "1-2-3", "1.5", "999999", "١"):
        with pytest.raises(UsageError) as caught:
            parse_layers(text)
        assert caught.value.exit_code == 2
        assert caught.value.hint == "Write numbers and ranges, such as 0,3-7."
    with pytest.raises(UsageError) as caught:
        parse_layers("7-3")
    assert caught.value.message == "Layers '7-3': the range '7-3' runs backwards."
    assert caught.value.hint == "Write 3-7."


def test_one_is_one_and_thousands_are_separated():
    rows = [texts.number_of(n, "row") for n in (0, 1, 2, 2048)]
    assert rows == ["0 rows", "1 row", "2 rows", "2,048 rows"]
    assert [texts.all_of(n, "row") for n in (1, 2048)] == ["the row", "all 2,048 rows"]
    assert [texts.these(n, "row is", "rows are") for n in (1, 2)] == [
        "this row is",
        "these 2 rows are",
    ]
    batches = [texts.number_of(n, "batch is", "batches are") for n in (1, 2)]
    assert batches == ["1 batch is", "2 batches are"]


# ------------------------------------------------------------------------- footers of Parquet files
def table(rows: int) -> pa.Table:
    """Every kind of column that is read, nulls and names with dots among them."""
    return pa.table(
        {
            "text/0": pa.array([[0.5] * 3] * rows, pa.list_(pa.float32())),
            "text.1": pa.array([[0.5] * 4] * rows, pa.list_(pa.float32(), 4)),
            "document": pa.array(np.arange(rows), pa.int64()),
            "null": pa.array([None] * rows, pa.int32()),
            "word": pa.array(["x" * (i % 40) for i in range(rows)]),
            "flag": pa.array([bool(i % 2) for i in range(rows)]),
            "all": pa.array([{"a": 1, "b": [True]}] * rows),
        }
    )


WRITTEN = {
    "plain": {},
    "of no rows": {"rows": 0},
    "many groups": {"row_group_size": 3},
    "no dictionary": {"use_dictionary": False},
    "statistics, indexes and checksums": {"write_page_index": True, "write_page_checksum": True},
    "sorted": {"sorting_columns": [pq.SortingColumn(2)]},
    "bloom": {"version": "1.0", "data_page_version": "2.0", "compression": "zstd"},
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_footer_says_to_us_what_it_says_to_arrow_and_what_its_pages_take(case, tmp_path):
    options = dict(WRITTEN[case])
    path = tmp_path / "a.parquet"
    rows = options.pop("rows", 50)
    pq.write_table(table(rows), path, **options)
    metadata = pq.read_metadata(path)
    groups = read_row_groups(path)
    assert len(groups) == metadata.num_row_groups
    for number, group in enumerate(groups):
        theirs = metadata.row_group(number)
        assert group.num_rows == theirs.num_rows
        assert [(c.path, c.num_values, c.inflated_bytes) for c in group.chunks] == [
            (c.path_in_schema, c.num_values, c.total_uncompressed_size)
            for c in map(theirs.column, range(theirs.num_columns))
        ]
    facts = parquet_facts(path)
    num_pages = 4 * len(facts.groups)
    for name in facts.names:
        # up to headers of pages, and to the numbers of dictionaries, which no footer counts
        least = facts.inflated([name]) - 200 * num_pages
        most = facts.inflated([name]) + 8 * 5 * rows
        assert least <= facts.inflated_by_pages([name]) <= most


def test_a_footer_that_contradicts_itself_does_not_end_the_process(tmp_path):
    """A column with nulls whose schema says that there are none: Arrow's own object aborts."""
    path = tmp_path / "a.parquet"
    schema = pa.schema([pa.field("a", pa.list_(pa.int64()))])
    pq.write_table(pa.table({"a": [[1, 2], None, [3]]}, schema), path)
    raw = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<I", raw, len(raw) - 8)
    name = raw.index(b"\x01a", len(raw) - 8 - size)
    # the repetition of the field before its name: a zigzag 1 (optional) becomes 0 (required)
    at = raw.rindex(b"\x02", len(raw) - 8 - size, name)
    raw[at] = 0
    path.write_bytes(raw)
    asks = f"import pyarrow.parquet as pq; pq.read_metadata({str(path)!r}).row_group(0).column(0)"
    theirs = subprocess.run([sys.executable, "-c", asks], capture_output=True, timeout=60)
    assert theirs.returncode < 0, "Arrow has learnt to refuse it"
    with pytest.raises(DocumentError):
        read_columns(parquet_facts(path), ["a"])


def test_damaged_footers_end_in_a_value_or_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(50), path, row_group_size=20)
    sound = path.read_bytes()
    (size,) = struct.unpack_from("<I", sound, len(sound) - 8)
    draw = random.Random(0)
    refused = 0
    with work_ends():
        for _ in range(400):
            raw = bytearray(sound)
            for _ in range(draw.choice((1, 1, 3))):
                raw[draw.randrange(len(raw) - 8 - size, len(raw))] = draw.randrange(256)
            path.write_bytes(raw)
            try:
                read_row_groups(path)
            except DocumentError:
                refused += 1
    assert 60 < refused < 400


def test_what_has_no_footer_is_refused(tmp_path):
    for raw in (
        b"",
        b"PAR1",
        b"\xff\xff\xff\xffPAR1",
        b"\x00\x00\x00\x00PARE",
        b"\x19" * 5000 + (5000).to_bytes(4, "little") + b"PAR1",
        b"\x49" * 60 + b"\x3c\0\0\0PAR1",
    ):
        (tmp_path / "a.parquet").write_bytes(raw)
        with pytest.raises(DocumentError, match="footer"):
            read_row_groups(tmp_path / "a.parquet")


def thrift(fields: dict[int, tuple[str, Any]]) -> bytes:
    """A struct in the compact protocol."""
    kinds = {"i32": 5, "i64": 6, "text": 8, "list": 9, "struct": 12}
    out, before = b"", 0
    for number, (kind, value) in fields.items():
        out += bytes([(number - before) << 4 | kinds[kind]]) + _value(kind, value)
        before = number
    return out + b"\0"


def _value(kind: str, value: Any) -> bytes:
    if kind == "struct":
        return thrift(value)
    if kind == "text":
        return _varint(len(value)) + value
    if kind == "list":
        inner, items = value
        head = len(items) << 4 | {"i32": 5, "text": 8, "struct": 12}[inner]
        return bytes([head]) + b"".join(_value(inner, item) for item in items)
    return _varint(2 * value if value >= 0 else -2 * value - 1)


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def write_contradiction(path: Path, page_bytes: int, page_values: int) -> None:
    """A column of four numbers of 8 bytes, as its footer says; its only page says otherwise."""
    stored = pa.Codec("zstd").compress(bytes(page_bytes), asbytes=True)
    header = thrift(
        {
            1: ("i32", 0),
            2: ("i32", page_bytes),
            3: ("i32", len(stored)),
            5: ("struct", {n: ("i32", v) for n, v in ((1, page_values), (2, 0), (3, 3), (4, 3))}),
        }
    )
    column = {
        1: ("i32", 2), 2: ("list", ("i32", [0])), 3: ("list", ("text", [b"a"])), 4: ("i32", 6),
        5: ("i64", 4), 6: ("i64", 32), 7: ("i64", len(header + stored)), 9: ("i64", 4),
    }  # fmt: skip
    group = {
        1: ("list", ("struct", [{2: ("i64", 4), 3: ("struct", column)}])),
        2: ("i64", 32),
        3: ("i64", 4),
    }
    root = {4: ("text", b"schema"), 5: ("i32", 1)}
    leaf = {1: ("i32", 2), 3: ("i32", 0), 4: ("text", b"a")}
    footer = thrift(
        {
            1: ("i32", 1),
            2: ("list", ("struct", [root, leaf])),
            3: ("i64", 4),
            4: ("list", ("struct", [group])),
        }
    )
    path.write_bytes(
        b"PAR1" + header + stored + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    )


def test_what_a_page_asks_for_is_bounded_whatever_its_footer_says(tmp_path):
    path = tmp_path / "a.parquet"
    write_contradiction(path, 32, 4)  # none: a file that Arrow reads
    assert read_columns(parquet_facts(path), ["a"]).column("a").to_pylist() == [0] * 4
    assert pq.read_table(path).column("a").to_pylist() == [0] * 4
    for page_bytes, page_values in ((1 << 30, 4), (32, 2**31 - 1)):
        write_contradiction(path, page_bytes, page_values)
        facts = parquet_facts(path)
        assert facts.inflated(["a"]) == 64
        with pytest.raises(DocumentError, match=r"would take [0-9,]{13,} bytes of memory, more"):
            read_columns(facts, ["a"])


def test_pages_of_less_than_no_numbers_are_refused(tmp_path):
    write_contradiction(tmp_path / "a.parquet", 32, -1)
    with pytest.raises(DocumentError, match="pages of less than no bytes"):
        read_columns(parquet_facts(tmp_path / "a.parquet"), ["a"])


def test_texts_that_are_stored_as_differences_are_refused(tmp_path):
    """Half a megabyte in common with the text before, a thousand times: no header says so."""
    path = tmp_path / "a.parquet"
    long = "x" * 500_000
    words = pa.table({"a": [f"{long}{i}" for i in range(20)]})
    pq.write_table(words, path, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"})
    with pytest.raises(DocumentError, match="stored as differences"):
        read_columns(parquet_facts(path), ["a"])


def test_a_footer_of_more_columns_or_groups_than_are_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(table(8), path, row_group_size=2)
    facts = parquet_facts(path)
    monkeypatch.setattr(parquet, "PARQUET_PAGES", 7)
    with pytest.raises(DocumentError, match="has more than 7 pages"):
        read_columns(facts, ["document"])
    with monkeypatch.context() as few, pytest.raises(DocumentError, match="of too many values"):
        few.setattr(parquet, "PARQUET_VALUES", 100)
        parquet_facts(path)
    monkeypatch.setattr(parquet, "PARQUET_GROUPS", 3)
    with pytest.raises(DocumentError, match="has 4 row groups, more than 3"):
        parquet_facts(path)
    monkeypatch.setattr(parquet, "PARQUET_CHUNKS", 3)
    with pytest.raises(DocumentError, match="more than 3 columns in all row groups"):
        parquet_facts(path)
