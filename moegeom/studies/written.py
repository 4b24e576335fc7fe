"""Output files of studies: ``--out`` is checked before the work and written after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.files import refuse_unwritable, write_whole
from moegeom.core.router import Router


def refuse_out(out: Path, overwrite: bool, endings: Sequence[str]) -> None:
    """Raises UsageError for a name that cannot be written, before anything is measured."""
    if out.suffix not in endings:
        raise UsageError(f"--out {out}: expected a name that ends in {' or '.join(endings)}.")
    if out.exists() and not (overwrite and out.is_file()):
        raise UsageError(f"--out {out}: exists already.", "Name another file, or --overwrite.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist.")
    refuse_unwritable(out)


def write_rows(
    out: Path, rows: Iterable[Mapping[str, Any]], routers: Iterable[Router] = ()
) -> None:
    """Writes the rows as Parquet, with stack and layer of a router behind it; null where absent.

    Of ``routers`` with the number of experts and top_k too.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moegeom.results.schema import keyed, sizes_of

    rows = [*rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    each = [{name: row.get(name) for name in names} for row in rows]
    table = keyed(pa.Table.from_pylist(each), sizes_of(routers))
    write_whole(out, lambda file: pq.write_table(table, file))
