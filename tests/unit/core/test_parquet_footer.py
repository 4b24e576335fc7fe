"""The footer of a Parquet file, held against Arrow's reading of the same bytes."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.core.documents import DocumentError
from moegeom.core.parquet import parquet_facts, read_columns
from moegeom.core.parquet_footer import read_row_groups

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
def test_a_footer_says_to_us_what_it_says_to_arrow(case: str, tmp_path: Path) -> None:
    options = dict(WRITTEN[case])
    path = tmp_path / "a.parquet"
    pq.write_table(table(options.pop("rows", 50)), path, **options)
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


def test_a_footer_that_contradicts_itself_does_not_end_the_process(tmp_path: Path) -> None:
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


def test_damaged_footers_end_soon_in_a_value_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(50), path, row_group_size=20)
    sound = path.read_bytes()
    (size,) = struct.unpack_from("<I", sound, len(sound) - 8)
    draw = random.Random(0)
    refused = 0
    started = time.process_time()
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
    assert time.process_time() - started < 20.0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PAR1",
        b"\xff\xff\xff\xffPAR1",
        b"\x00\x00\x00\x00PARE",
        b"\x19" * 5000 + (5000).to_bytes(4, "little") + b"PAR1",
        b"\x49" * 60 + b"\x3c\0\0\0PAR1",
    ],
)
def test_what_has_no_footer_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(raw)
    with pytest.raises(DocumentError, match="footer"):
        read_row_groups(tmp_path / "a.parquet")
