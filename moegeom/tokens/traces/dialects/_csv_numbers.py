"""Text of comma-separated whole numbers, decoded by Arrow: a column for each name, no nulls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, first_line
from moegeom.core.files import open_regular
from moegeom.core.limits import TRACE_BYTES
from moegeom.core.shapes import Int64
from moegeom.core.text import number_of

_LINE_BYTES = 200


def first_lines(path: Path, most: int = 3) -> list[bytes]:
    """The first lines of a ``.csv`` file, without their ends; none of any other file."""
    if path.suffix != ".csv" or not path.is_file():
        return []
    with open_regular(path, follows=True) as stream:
        lines = [stream.readline(_LINE_BYTES) for _ in range(most)]
    return [line.rstrip(b"\r\n") for line in lines if line]


def csv_numbers(
    path: Path, names: Sequence[str], num_headers: int = 0
) -> Int64[np.ndarray, "lines columns"]:
    """Every line behind the headers, as many numbers to a line as there are ``names``.

    Raises
    ------
    RecordingError
        When the file is too large, or a line holds anything else.
    """
    import pyarrow as pa
    from pyarrow import csv

    size = path.stat().st_size
    if size > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: has {size:,} bytes, more than the {TRACE_BYTES:,} allowed.",
            "Cut it into several files.",
        )
    try:
        table = csv.read_csv(
            path,
            csv.ReadOptions(column_names=list(names), skip_rows=num_headers, use_threads=False),
            csv.ParseOptions(quote_char=False, double_quote=False),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.int64()),
                null_values=[],
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordingError(
            f"{path.name}: {first_line(error)[:120]}; expected "
            f"{number_of(len(names), 'whole number')} a line ({', '.join(names)}).",
            "Is it whole? Copy it again.",
        ) from None
    columns = [table.column(name).to_numpy() for name in names]
    return np.stack(columns, axis=1) if len(table) else np.zeros((0, len(names)), np.int64)
