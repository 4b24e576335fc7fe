"""Tables that an enumeration writes: cells.parquet and walls.parquet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from moegeom.results.reader import SCHEMA_VERSION

#: Columns of each table: name, type, unit, text.
CELL_TABLES: dict[str, tuple[tuple[str, pa.DataType, str, str], ...]] = {
    "cells": (
        ("router", pa.string(), "", "identity <stack>/<layer>[/slot]"),
        ("cell", pa.int64(), "", "number of the cell, from 0 at each router"),
        ("token", pa.int64(), "", "token that the search began at; null for the whole slice"),
        ("coalition", pa.list_(pa.int32()), "", "experts that are chosen there, ascending"),
        ("witness", pa.list_(pa.float64()), "input", "a point inside, in coordinates of the slice"),
        ("witness_exact", pa.string(), "", "where no float64 point was found inside: a rational"),
        ("witness_input", pa.list_(pa.float32()), "input", "the same point as router input"),
        ("num_walls", pa.int64(), "", "walls of the cell"),
        ("is_bounded", pa.bool_(), "", "null where a ball, a box or steps bound the search"),
        ("is_checked", pa.bool_(), "", "the witness was verified in integers (--certify)"),
        ("inradius", pa.float64(), "input", "radius of the largest ball inside (--inradius)"),
        ("distance_lower", pa.float64(), "input", "to the cell, from the centre or the token"),
        ("distance_upper", pa.float64(), "input", "upper end of the same bracket"),
        ("hops", pa.int64(), "", "walls between the token's cell and this one"),
        ("num_tokens", pa.int64(), "tokens", "tokens drawn inside"),
        ("num_own_tokens", pa.int64(), "tokens", "of these, tokens whose own choice this is"),
    ),
    "walls": (
        ("router", pa.string(), "", "identity <stack>/<layer>[/slot]"),
        ("token", pa.int64(), "", "token that the search began at; null for the whole slice"),
        ("cell", pa.int64(), "", "the cell that comes first"),
        ("other_cell", pa.int64(), "", "the cell on the other side"),
        ("experts_out", pa.list_(pa.int32()), "", "experts that only the first cell has"),
        ("experts_in", pa.list_(pa.int32()), "", "experts that only the other cell has"),
        ("distance_lower", pa.float64(), "input", "to the wall, from the tokens' mean"),
        ("distance_upper", pa.float64(), "input", "upper end of the same bracket"),
    ),
}


def cell_table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """Columns as a table of :data:`CELL_TABLES`; those that are not given are null."""
    length = len(next(iter(columns.values())))
    fields, arrays = [], []
    for column, kind, unit, text in CELL_TABLES[name]:
        arrays.append(pa.array(columns.get(column, [None] * length), type=kind))
        facts = {"text": text, "unit": unit}
        fields.append(pa.field(column, kind, metadata={k: v for k, v in facts.items() if v}))
    schema = pa.schema(fields, metadata={"moegeom_schema": str(SCHEMA_VERSION)})
    return pa.Table.from_arrays(arrays, schema=schema)
