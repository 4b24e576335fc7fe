"""The footer of a Parquet file, held against Arrow's reading of the same bytes."""

import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.core import parquet
from moegeom.core.documents import DocumentError
from moegeom.core.parquet import parquet_facts, read_columns, read_row_groups
from tests.ends import work_ends

DRAW = np.random.default_rng(0)


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
