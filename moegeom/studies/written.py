"""Output files of studies: ``--out`` is checked before the work and written after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.files import refuse_unwritable, write_whole
from moegeom.core.router import Router


def refuse_out(out: Path, overwrite: bool, endings: Sequence[str], option: str = "--out") -> None:
    """Raises UsageError for a name that cannot be written, before anything is measured."""
    if out.suffix not in endings:
        raise UsageError(f"{option} {out}: expected a name that ends in {' or '.join(endings)}.")
    if out.exists() and not (overwrite and out.is_file()):
        raise UsageError(f"{option} {out}: exists already.", "Name another file, or --overwrite.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{option} {out}: the folder {out.parent} does not exist.")
    refuse_unwritable(out)


def write_rows(
    out: Path,
    rows: Iterable[Mapping[str, Any]],
    routers: Iterable[Router] = (),
    columns: Sequence[tuple[str, str, str, str]] = (),
) -> None:
    """Writes the rows as Parquet, with stack and layer of a router behind it; null where absent.

    Of ``routers`` with the number of experts and top_k too. ``columns`` are name, type, unit and
    text of each; else they are in order of first appearance.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moegeom.results.schema import keyed, schema_of, sizes_of

    rows = [*rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    each = [{name: row.get(name) for name in names} for row in rows]
    table = pa.Table.from_pylist(each, schema_of(columns) if columns else None)
    table = keyed(table, sizes_of(routers))
    write_whole(out, lambda file: pq.write_table(table, file))
