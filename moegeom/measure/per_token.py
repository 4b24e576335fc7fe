"""Rows per token: what is asked for by --per-token, and not loaded by who does not ask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moegeom.core.files import writing
from moegeom.core.parquet import opened
from moegeom.core.router import Router
from moegeom.kernels.batch import TokenBatch
from moegeom.results.schema import ROUTER_FACTS, router_facts, sizes_of


class PerTokenFile:
    """``tokens.parquet`` of one router, written batch by batch in the order of the tokens.

    ``chosen`` is in descending selection score, ``weights`` in the order of ``chosen``;
    ``expert_out`` and ``expert_in`` name the nearest boundary, -1 where it is not decided or there
    is none. ``boundary_distance`` is exact where ``boundary_distance_upper`` equals it, else a
    lower bound. What is not known is null.
    """

    def __init__(self, path: Path, router: Router) -> None:
        # zstd, level 1: ids and weights shrink by a third at the speed of the disk
        self._schema = pa.schema(
            [
                pa.field("router", pa.dictionary(pa.int32(), pa.string())),
                *ROUTER_FACTS,
                pa.field("token", pa.int64()),
                pa.field("chosen", pa.list_(pa.int32())),
                pa.field("weights", pa.list_(pa.float32())),
                pa.field("margin", pa.float64()),
                pa.field("boundary_distance", pa.float64()),
                pa.field("boundary_distance_upper", pa.float64()),
                pa.field("expert_out", pa.int32()),
                pa.field("expert_in", pa.int32()),
            ]
        )
        self._router = router
        self._facts = router_facts([router.name], {router.name: sizes_of([router])[0]})
        self._path = path
        with writing(path):
            self._file = opened(path, "wb")
            self._writer = pq.ParquetWriter(
                self._file, self._schema, compression="zstd", compression_level=1
            )

    def rows(self, batch: TokenBatch) -> pa.Table:
        """The tokens of one batch."""
        q, rows, pair = batch, len(batch.token), batch.pair
        first = pa.array(np.zeros(rows, np.int32))
        columns = [
            pa.DictionaryArray.from_arrays(first, [self._router.name]),
            *self._facts.take(first).columns,
            pa.array(q.token),
            self._lists(q.chosen, pa.int32()),
            pa.nulls(rows, pa.list_(pa.float32()))
            if q.weights is None
            else self._lists(q.weights.astype(np.float32), pa.float32()),
            _or_null(q.margin, pa.float64(), rows),
            _or_null(q.distance, pa.float64(), rows),
            _or_null(q.distance_upper, pa.float64(), rows),
            _or_null(None if pair is None else pair[:, 0], pa.int32(), rows),
            _or_null(None if pair is None else pair[:, 1], pa.int32(), rows),
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def write(self, rows: pa.Table) -> None:
        """Appends the rows of one batch."""
        with writing(self._path):
            self._writer.write_table(rows)

    def close(self) -> None:
        with writing(self._path):
            self._writer.close()
            self._file.close()

    def _lists(self, values: np.ndarray, kind: pa.DataType) -> pa.Array:
        offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), type=kind))


def _or_null(values: np.ndarray | None, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if values is None else pa.array(values, type=kind)
