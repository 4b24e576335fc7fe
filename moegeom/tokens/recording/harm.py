"""Flips that were made in a running model and what they cost, beside a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.documents import DocumentError
from moegeom.core.errors import RecordingError
from moegeom.core.files import write_whole
from moegeom.core.parquet import parquet_facts, read_columns

FILE = "harm.parquet"

#: Positions behind a flip whose divergence is added up.
LATER = 32

#: Columns of a flip beside ``router``: the token's number in the recording, the experts that
#: change places, the distance to their boundary, and KL(before || after) of the next token in nats:
#: at the token, added up over the positions behind it, and after a step of the same length that
#: flips nothing; whether the likeliest next token is another one.
DTYPES: dict[str, np.dtype] = {
    "token": np.dtype(np.int64),
    "expert_out": np.dtype(np.int32),
    "expert_in": np.dtype(np.int32),
    "boundary_distance": np.dtype(np.float64),
    "kl": np.dtype(np.float64),
    "kl_later": np.dtype(np.float64),
    "kl_beside": np.dtype(np.float64),
    "is_other_token": np.dtype(np.bool_),
}

#: The flips of one router, by column.
Flips = Mapping[str, np.ndarray]


def write_harm(folder: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes the columns, ``router`` too, beside a finished recording."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = {name: pa.array(np.array(columns[name], dtype)) for name, dtype in DTYPES.items()}
    table = pa.table({"router": list(columns["router"]), **made})
    write_whole(folder / FILE, lambda file: pq.write_table(table, file))


def read_harm(folder: Path, num_tokens: int) -> dict[str, Flips]:
    """Flips by router; none where nobody made any.

    Raises
    ------
    RecordingError
        When the file cannot be read, lacks a column, or tells of tokens that are not there.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        table = read_columns(parquet_facts(path), ("router", *DTYPES))
        routers = np.array(table.column("router").to_pylist(), object)
        columns = {}
        for name, dtype in DTYPES.items():
            column = table.column(name).to_numpy()
            if column.dtype != dtype:
                raise DocumentError(f"has {column.dtype} in column {name!r}; expected {dtype}")
            columns[name] = column
        token = columns["token"]
        if len(token) and not 0 <= token.min() <= token.max() < num_tokens:
            raise DocumentError(f"tells of tokens beyond the {num_tokens:,} of the recording")
        for name in ("kl", "kl_later"):
            if not (columns[name] >= 0).all():
                raise DocumentError(f"holds a divergence below 0 in column {name!r}")
    except (DocumentError, OSError, KeyError) as error:
        raise RecordingError(
            f"{FILE}: {error}.", "Delete it, or record again with moegeom capture --flips."
        ) from None
    return {
        str(router): {name: column[routers == router] for name, column in columns.items()}
        for router in dict.fromkeys(routers.tolist())
    }
