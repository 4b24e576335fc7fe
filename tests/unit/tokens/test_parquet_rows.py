"""Row groups of a Parquet file are decoded as often as they must be."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moegeom.tokens.foreign.parquet_rows import ParquetTable

THREADS, GROUP, WIDTH = 8, 64, 4


def test_threads_that_want_one_row_group_decode_it_once(tmp_path, monkeypatch):
    values = np.arange(2 * GROUP * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array(list(values))}), path, row_group_size=GROUP)
    table, decoded, together = ParquetTable(path), [], threading.Barrier(THREADS)
    decode = table._decode

    def counted(name: str, width: int, number: int) -> np.ndarray:
        decoded.append(number)
        return decode(name, width, number)

    def read(thread: int) -> np.ndarray:
        together.wait()
        return table.group("a", WIDTH, thread % 2)

    monkeypatch.setattr(table, "_decode", counted)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(read, range(THREADS)))
    assert sorted(decoded) == [0, 1]
    for thread, rows in enumerate(found):
        np.testing.assert_array_equal(rows, values[thread % 2 * GROUP :][:GROUP])
