"""Log-probabilities of both runs, joined by document and position, and their change at flips."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import RecordingError, first_line
from moegeom.core.files import open_regular
from moegeom.core.limits import LOG_PROB_BYTES, LOG_PROB_ROWS
from moegeom.core.parquet import parquet_facts, read_columns
from moegeom.core.shapes import Bool, Float64, Int64, Integer
from moegeom.core.text import half_width, number_of, quoted
from moegeom.core.tokens import TokenColumns
from moegeom.geometry.statistics import clustered_error, rank_correlation

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes of text that are parsed at once.
_PIECE = 1 << 20

#: What a file must say of each token.
_COLUMNS = ("document", "position", "logprob", "other_logprob")

#: Line of help of the option that names such a file.
LOG_PROBS = "Log-probs of both: document, position, logprob, other_logprob; parquet, csv, jsonl."

#: Tokens without and with a flip that are enough to compare the two.
_ENOUGH = 30


@dataclass(frozen=True)
class FlipCost:
    """How many ``nats`` more the log-probabilities of flipped tokens differ than those of others.

    ``nats`` is the difference of two means of |change of the log-probability|, ``error`` its
    standard error over ``num_documents``, whose tokens are not independent.
    """

    nats: float
    error: float
    num_documents: int

    @property
    def range(self) -> tuple[float, float]:
        """Both ends of the 95 % interval."""
        half = half_width(self.error, self.num_documents)
        return self.nats - half, self.nats + half


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of both runs, joined by token.

    ``mean`` is the mean absolute difference in nats; ``unflipped`` and ``flipped`` are those of
    tokens that agreed at every router and of the others, None where there are none. ``cost`` is
    what a flip adds, None with too few of either or a single document. ``correlation`` is
    Spearman's, between the difference and the number of routers that flipped.
    """

    num_tokens: int
    mean: float
    num_unflipped: int
    unflipped: float | None
    flipped: float | None
    cost: FlipCost | None
    correlation: float | None

    @property
    def sentence(self) -> str:
        """The whole comparison as one sentence."""
        tokens = number_of(self.num_tokens, "token differs", "tokens differ")
        text = f"log-probs: {tokens} by {self.mean:.2g} nats in the mean"
        if self.unflipped is not None:
            where = f"where no expert flipped ({number_of(self.num_unflipped, 'token')})"
            text += f"; {self.unflipped:.2g} {where}"
        if self.flipped is not None:
            text += f", {self.flipped:.2g} where one did"
        if self.cost is not None:
            low, high = self.cost.range
            text += f": a flip goes with {self.cost.nats:.2g} nats more ({low:.2g} to {high:.2g})"
        if self.correlation is not None:
            text += f"; rank correlation with the number of layers that flip {self.correlation:.2f}"
        return f"{text}."


def log_probs(
    path: Path, columns: TokenColumns, num_flipped: Int64[np.ndarray, "tokens"]
) -> LogProbs:
    """What the log-probabilities in ``path`` have to do with the routers that flipped.

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
    change, flipped = change[is_known], num_flipped[row[is_known]]
    never, some = change[flipped == 0], change[flipped > 0]
    return LogProbs(
        num_tokens=len(change),
        mean=float(change.mean()),
        num_unflipped=len(never),
        unflipped=float(never.mean()) if len(never) >= _ENOUGH else None,
        flipped=float(some.mean()) if len(some) >= _ENOUGH else None,
        cost=_cost(change, flipped > 0, columns.document[row[is_known]]),
        correlation=rank_correlation(change, flipped) if len(change) >= _ENOUGH else None,
    )


def _rows(
    columns: TokenColumns, document: Int64[np.ndarray, "rows"], position: Int64[np.ndarray, "rows"]
) -> Int64[np.ndarray, "rows"]:
    """The matched token of each row; -1 for none."""
    documents = np.unique(columns.document)  # a document may have any number: its rank fits 31 bits
    rank = np.minimum(np.searchsorted(documents, document), len(documents) - 1)
    keys = np.searchsorted(documents, columns.document) << 32 | columns.position.astype(np.int64)
    order = np.argsort(keys, kind="stable")
    row_keys = rank << 32 | position
    at = np.minimum(np.searchsorted(keys[order], row_keys), len(keys) - 1)
    token = order[at]
    is_there = (documents[rank] == document) & (keys[token] == row_keys) & (position >= 0)
    return np.where(is_there, token, -1)


def _cost(
    change: Float64[np.ndarray, "tokens"],
    is_flipped: Bool[np.ndarray, "tokens"],
    document: Integer[np.ndarray, "tokens"],
) -> FlipCost | None:
    """Mean change of flipped less that of other tokens; None with too few of either."""
    kinds = (is_flipped, ~is_flipped)
    if min(kind.sum() for kind in kinds) < _ENOUGH:
        return None
    means = [float(change[kind].mean()) for kind in kinds]
    influence = np.where(is_flipped, change - means[0], means[1] - change)
    influence /= np.where(is_flipped, is_flipped.sum(), (~is_flipped).sum())
    error = clustered_error(influence, document)
    if error is None:
        return None
    return FlipCost(means[0] - means[1], error, len(np.unique(document)))


def _read(path: Path) -> dict[str, np.ndarray]:
    import pyarrow as pa

    readers = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise RecordingError(
            f"{path.name}: expected a file whose name ends in {', '.join(readers)}."
        )
    parts, num_rows = [], 0
    try:
        with open_regular(path, follows=True) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LOG_PROB_BYTES:
                raise _too_large(path, f"{size:,} bytes", LOG_PROB_BYTES)
            for part in readers[path.suffix](path, file):
                num_rows += part.num_rows
                if num_rows > LOG_PROB_ROWS:
                    raise _too_large(path, f"{number_of(num_rows, 'row')} or more", LOG_PROB_ROWS)
                parts.append([_numbers(path, part, name) for name in _COLUMNS])
    except (OSError, DocumentError, pa.ArrowException) as error:
        raise RecordingError(
            f"{path.name}: cannot be read ({first_line(error)[:200]}).",
            "document and position are integers, logprob and other_logprob numbers.",
        ) from None
    if not num_rows:
        raise RecordingError(f"{path.name}: no rows.")
    return {name: np.concatenate(pieces) for name, *pieces in zip(_COLUMNS, *parts, strict=True)}


def _too_large(path: Path, amount: str, most: int) -> RecordingError:
    return RecordingError(
        f"{path.name}: has {amount}, more than the {most:,} that are read.",
        "Keep the rows of the tokens that both sides routed.",
    )


def _check_names(path: Path, names: Sequence[str]) -> None:
    if not {*_COLUMNS} <= {*names}:
        raise RecordingError(
            f"{path.name}: has columns {', '.join(names[:8]):.200}; "
            f"expected {', '.join(_COLUMNS)}.",
            "logprob is that of A (the recording), other_logprob that of B.",
        )


def _parquet(path: Path, file: BufferedReader) -> Iterator[pa.Table]:
    facts = parquet_facts(path)
    _check_names(path, facts.names)
    if sum(facts.sizes) > LOG_PROB_ROWS:
        raise _too_large(path, number_of(sum(facts.sizes), "row"), LOG_PROB_ROWS)
    yield read_columns(facts, _COLUMNS)


def _csv(path: Path, file: BufferedReader) -> Iterator[pa.RecordBatch]:
    """Record batches of the CSV file; other columns are ignored."""
    from pyarrow import csv

    heads = file.readline(_PIECE).decode("utf-8-sig", "replace").split(",")
    _check_names(path, [head.strip().strip('"') for head in heads])
    file.seek(0)
    options = csv.ConvertOptions(column_types=_kinds(), include_columns=_COLUMNS)
    yield from csv.open_csv(file, convert_options=options)


def _jsonl(path: Path, file: BufferedReader) -> Iterator[pa.Table]:
    """Record batches of the JSON lines; other keys are ignored.

    Not by Arrow's own reader: a line that is no object, such as ``null``, ends the process there.
    """
    rest = b""
    while piece := file.read(_PIECE):
        lines, _, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > _PIECE:
            raise DocumentError(f"has a line of more than {_PIECE:,} bytes")
        if lines.strip():
            yield _table(lines.split(b"\n"))
    if rest.strip():
        yield _table([rest])


def _table(lines: Sequence[bytes]) -> pa.Table:
    import pyarrow as pa

    rows = []
    for line in filter(bytes.strip, lines):
        row = parse_json(line, _PIECE)
        if not isinstance(row, dict):
            raise DocumentError(f"has the line {quoted(line)}; expected an object")
        rows.append({name: _number(row.get(name), name) for name in _COLUMNS})
    return pa.Table.from_pylist(rows, schema=_kinds())


def _number(value: object, name: str) -> int | float | None:
    """The value, checked; Arrow would cut 1.5 to a whole number, and count true as 1."""
    is_count = name in _COLUMNS[:2]
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return value if is_count else float(value)
    if isinstance(value, float) and not is_count:
        return value
    raise DocumentError(f"has {name} {quoted(value)}")


def _kinds() -> pa.Schema:
    """What the columns of texts are read as."""
    import pyarrow as pa

    return pa.schema(
        [(name, pa.int64() if name in _COLUMNS[:2] else pa.float64()) for name in _COLUMNS]
    )


def _numbers(path: Path, table: pa.Table | pa.RecordBatch, name: str) -> np.ndarray:
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
