"""Log-probabilities of both runs, joined to the tokens by document and position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.documents import DocumentError
from moegeom.core.errors import RecordingError
from moegeom.core.parquet import parquet_facts, read_columns
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenColumns
from moegeom.report.explanations import LogProbs

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes of a file that is held in memory.
_LARGEST = 1 << 30

#: What a file must say of each token.
_COLUMNS = ("document", "position", "logprob", "other_logprob")

#: Tokens without and with a switch that are enough to compare the two.
_ENOUGH = 30


def log_probs(
    path: Path, columns: TokenColumns, num_switched: Int64[np.ndarray, "tokens"]
) -> LogProbs:
    """What the log-probabilities in ``path`` have to do with the routers that switched.

    A row is of the token at ``position``, which was predicted at the position before: its routing
    is that of the position before.

    Raises
    ------
    RecordingError
        When the file cannot be read, lacks a column, holds no number, or shares no token.
    """
    table = _read(path)
    document, position = (table[name].astype(np.int64) for name in _COLUMNS[:2])
    change = np.abs(table["logprob"] - table["other_logprob"])
    if not np.isfinite(change).all():
        raise RecordingError(
            f"{path.name}: row {int(np.argmin(np.isfinite(change)))} holds no finite "
            "log-probabilities.",
            "Leave out tokens that only one side scored.",
        )
    row = _rows(columns, document, position - 1)
    is_known = row >= 0
    if not is_known.any():
        raise RecordingError(
            f"{path.name}: none of its {number_of(len(row), 'row')} is of a token that both "
            "sides routed.",
            "Its documents and positions must be those of the recording.",
        )
    change, switched = change[is_known], num_switched[row[is_known]]
    never, some = change[switched == 0], change[switched > 0]
    return LogProbs(
        num_tokens=len(change),
        mean=float(change.mean()),
        num_unswitched=len(never),
        unswitched=float(never.mean()) if len(never) >= _ENOUGH else None,
        switched=float(some.mean()) if len(some) >= _ENOUGH else None,
        correlation=_correlation(change, switched),
    )


def _rows(
    columns: TokenColumns, document: Int64[np.ndarray, "rows"], position: Int64[np.ndarray, "rows"]
) -> Int64[np.ndarray, "rows"]:
    """The matched token of each row; -1 for none."""
    keys = columns.document << 32 | columns.position.astype(np.int64)
    order = np.argsort(keys, kind="stable")
    wanted = document << 32 | position
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    found = order[at]
    return np.where((keys[found] == wanted) & (position >= 0), found, -1)


def _correlation(
    change: Float64[np.ndarray, "tokens"], switched: Int64[np.ndarray, "tokens"]
) -> float | None:
    from scipy.stats import pearsonr, rankdata

    if len(change) < _ENOUGH or np.ptp(change) == 0.0 or np.ptp(switched) == 0:
        return None
    return float(pearsonr(rankdata(change), rankdata(switched)).correlation)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.stat().st_size > _LARGEST:
            raise RecordingError(f"{path.name}: larger than {_LARGEST >> 30} GiB.")
        table = _table(path)
    except OSError as error:
        raise RecordingError(f"{path.name}: cannot be read ({error}).") from None
    lacking = [name for name in _COLUMNS if name not in table.column_names]
    if lacking:
        raise RecordingError(
            f"{path.name}: has columns {', '.join(table.column_names[:8])}; "
            f"expected {', '.join(_COLUMNS)}.",
            "logprob is that of A (the recording), other_logprob that of B.",
        )
    if not table.num_rows:
        raise RecordingError(f"{path.name}: no rows.")
    return {name: _numbers(path, table, name) for name in _COLUMNS}


def _table(path: Path) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv, json

    readers: dict[str, Any] = {
        ".parquet": _parquet,
        ".csv": csv.read_csv,
        ".jsonl": json.read_json,
    }
    if path.suffix not in readers:
        raise RecordingError(
            f"{path.name}: expected a file whose name ends in {', '.join(readers)}."
        )
    try:
        return readers[path.suffix](path)
    except pa.ArrowException as error:
        raise RecordingError(f"{path.name}: cannot be read ({error}).") from None


def _parquet(path: Path) -> pa.Table:
    try:
        facts = parquet_facts(path)
        if not {*_COLUMNS} <= {*facts.names}:
            return facts.schema.empty_table()
        return read_columns(facts, _COLUMNS)
    except DocumentError as error:
        raise RecordingError(f"{path.name}: {error}.") from None


def _numbers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    import pyarrow as pa

    column, is_count = table.column(name), name in _COLUMNS[:2]
    kind = column.type
    fits = pa.types.is_integer(kind) or (pa.types.is_floating(kind) and not is_count)
    if not fits or column.null_count:
        what = "integers" if is_count else "numbers"
        raise RecordingError(
            f"{path.name}: column {name} holds {kind} with "
            f"{number_of(column.null_count, 'missing value')}; "
            f"expected {what} without gaps."
        )
    return column.to_numpy().astype(np.int64 if is_count else np.float64)
