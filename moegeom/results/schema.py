"""Tables of the results: which columns, of which type, with which facts attached.

A new metric column does not change the version of the schema; a changed meaning changes the version
of its metric, which stands in the field metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from moegeom.core.metric import Column, Metric
from moegeom.core.router import Router
from moegeom.core.row_keys import layer_of, row_order
from moegeom.core.text import spelled
from moegeom.results.reader import EMPTY_COLUMNS, SCHEMA_VERSION, plain_value

#: Columns that every metric table begins with.
KEYS = (
    Column("router", "identity <stack>/<layer>[/slot]", "", "str"),
    Column("variant", "as_stored, or random: the random router of the same shape", "", "str"),
    Column("population", "all, domain=<name>, or outliers", "", "str"),
)

#: Tables that no metric fills.
OTHER_TABLES: dict[str, tuple[Column, ...]] = {
    "domains": (
        Column("population", "domain=<name>", "", "str"),
        Column("num_tokens", "tokens of the domain in the source", "tokens", "int"),
    ),
    "variants": (
        Column("variant", "name used in the variant column", "", "str"),
        Column("text", "what was changed", "", "str"),
        Column("seed", "seed of its random numbers", "", "int"),
        Column("num_tokens", "tokens that it was measured on", "tokens", "int"),
        Column("engine", "what an arithmetic copies", "", "str"),
        Column("version", "its version or commit", "", "str"),
        Column("source", "where that is written", "", "str"),
        Column("ties", "lowest, or undetermined where the engine breaks them anyhow", "", "str"),
        Column("num_tokens_all_layers", "tokens that every router saw", "tokens", "int"),
        Column(
            "num_flipped_any_layer",
            "of these, tokens that flip at one router at least",
            "tokens",
            "int",
        ),
    ),
    "whatif": (
        *KEYS[:2],
        Column("quantity", "a parameter that was fitted, or what the sample says", "", "str"),
        Column("value", "its value", "", "float"),
    ),
    "findings": (
        Column("severity", "error, warning or note", "", "str"),
        Column("code", "code of the check; empty for a note", "", "str"),
        Column("routers", "routers concerned", "", "list"),
        Column("title", "the finding in a sentence", "", "str"),
        Column("detail", "the evidence", "", "str"),
        Column("next_command", "what to type to learn more", "", "str"),
        Column("fix", "a change that is proved to be neutral, with the proof", "", "str"),
    ),
}

_TYPES: dict[str, pa.DataType] = {
    "float": pa.float64(),
    "int": pa.int64(),
    "bool": pa.bool_(),
    "str": pa.string(),
}

#: Texts that recur, as files hold them.
_CODES = pa.dictionary(pa.int32(), pa.string())

#: What stands behind the keys in every table with a column ``router``.
ROUTER_FACTS = pa.schema(
    pa.field(name, kind, metadata={"text": text})
    for name, kind, text in (
        ("stack", _CODES, "first part of the router's name"),
        ("layer", pa.int32(), "number of the layer, in its stack"),
        ("num_experts", pa.int64(), "experts of the router as stored"),
        ("top_k", pa.int64(), "experts that the router as stored chooses for a token"),
    )
)

#: Element type of each list column.
_LIST_TYPES = {
    "beaten_by": pa.int32(),
    "expert_set": pa.int32(),
    "mean_row_projections": pa.float32(),
    "routers": pa.string(),
    "row_projections": pa.float32(),
    "values": pa.float32(),
    "widest": pa.float32(),
}

#: Tables that are read to draw figures, and are too long to be printed.
OF_FIGURES = frozenset(["matrices", "positions", "sample"])


#: Ending of columns that say in words which quantiles lie beyond the ends of a histogram.
BOUND = "_bound"

#: Other columns of texts in the tables of metrics; every other one holds numbers or truth values.
TEXTS = frozenset(
    [
        "entropy_of",
        "domain",
        "estimator",
        "gain_digest",
        "logit_bias_digest",
        "margin_unit",
        "matrix",
        "parts_digest",
        "quantity",
        "reach",
        "selection_bias_digest",
        "stack",
        "weight_digest",
        *(column.name for column in KEYS),
    ]
)


def is_text(column: str) -> bool:
    """Whether a column of the tables of metrics holds texts."""
    return column in TEXTS or column.endswith(BOUND)


def fits(table: str, field: pa.Field) -> bool:
    """True when a column of a file holds what is written under its name, or nothing at all."""
    if pa.types.is_null(field.type):
        return True
    if table in OTHER_TABLES and field.name not in ROUTER_FACTS.names:
        kinds = {column.name: column.kind for column in OTHER_TABLES[table]}
        kind = kinds.get(field.name, "none")
    else:
        is_truth = field.name.startswith(("is_", "has_"))
        kind = "str" if is_text(field.name) else "bool" if is_truth else "number"
    if field.name in _LIST_TYPES:
        item = getattr(field.type, "value_type", pa.null())
        return _is_of(item, "str" if _LIST_TYPES[field.name] == pa.string() else "number")
    return _is_of(field.type, kind)


def _is_of(dtype: pa.DataType, kind: str) -> bool:
    if kind in ("str", "list"):
        return pa.types.is_string(dtype)
    if kind == "none":
        return False
    if kind == "bool":
        return pa.types.is_boolean(dtype)
    return pa.types.is_integer(dtype) or pa.types.is_floating(dtype)


def metric_tables(metrics: Iterable[Metric]) -> list[str]:
    """Names of the tables that these metrics fill, sorted."""
    return sorted({table for metric in metrics for table in metric.columns})


def arrow_schema(table: str, metrics: Sequence[Metric]) -> pa.Schema:
    """Schema of a metric table: keys, then columns in the order of the metrics."""
    fields = {column.name: _field(column) for column in KEYS}
    for metric in metrics:
        for column in metric.columns.get(table, ()):
            names = (i for i in metric.invariances if i not in column.changes_with)
            facts = {
                "metric": metric.name,
                "metric_version": str(metric.version),
                "invariances": ",".join(names),
            }
            fields.setdefault(column.name, _field(column, facts))
            if column.has_se:
                error = Column(f"{column.name}_se", f"standard error of {column.name}", column.unit)
                fields.setdefault(error.name, _field(error, facts))
    return pa.schema(list(fields.values()), metadata={"moegeom_schema": str(SCHEMA_VERSION)})


def other_schema(table: str) -> pa.Schema:
    """Schema of a table that no metric fills."""
    fields = [_field(column) for column in OTHER_TABLES[table]]
    return pa.schema(fields, metadata={"moegeom_schema": str(SCHEMA_VERSION)})


def sizes_of(routers: Iterable[Router]) -> list[dict[str, Any]]:
    """Name, experts and top_k of routers, as run.json says them."""
    return [
        {"name": one.name, "num_experts": one.num_experts, "top_k": one.rule.top_k}
        for one in routers
    ]


def router_facts(names: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """``ROUTER_FACTS`` of routers by name: what their names say, and what ``facts`` say of them."""
    each = (
        {"stack": name.partition("/")[0], "layer": layer_of(name), **facts.get(name, {})}
        for name in names
    )
    return table_of([*each], ROUTER_FACTS)


def schema_of(columns: Iterable[tuple[str, Any, str, str]]) -> pa.Schema:
    """Schema of a table of a study: name, type, unit and text of each column."""
    return pa.schema(
        [
            pa.field(name, kind, metadata={"text": text} | ({"unit": unit} if unit else {}))
            for name, kind, unit, text in columns
        ],
        metadata={"moegeom_schema": str(SCHEMA_VERSION)},
    )


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as an Arrow table; what a row does not hold, and nan, is null."""
    names = {name for row in rows for name in row}
    columns = [
        _column([row.get(field.name) for row in rows], field.type)
        if field.name in names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def without_empty(table: pa.Table) -> pa.Table:
    """The table without columns that hold nothing in any row: its metadata has their names."""
    empty = [name for name in table.column_names if 0 < len(table) == table[name].null_count]
    metadata = {**(table.schema.metadata or {}), EMPTY_COLUMNS: ",".join(empty)}
    return table.drop_columns(empty).replace_schema_metadata(metadata)


def keyed(table: pa.Table, routers: Iterable[Mapping[str, Any]] = ()) -> pa.Table:
    """The table with its rows in order, and with what is known of their routers behind the keys.

    ``routers`` are what run.json says of them: rows are in their order, then in that of
    :func:`row_order` of variant and population. Of other routers stack and layer are known, which
    their names say. Texts that recur become dictionaries.
    """
    facts = {router["name"]: router for router in routers}
    places = {name: place for place, name in enumerate(facts)}
    codes: dict[str, pa.DictionaryArray] = {}
    for place, field in enumerate(table.schema):
        if is_text(field.name) and pa.types.is_string(field.type):
            texts = table[field.name].combine_chunks()
            values = texts.drop_null().unique().to_pylist()
            values.sort(key=lambda text: (places.get(text, len(places)), row_order(text)))
            array = pa.array(values, pa.string())
            of_rows = pc.call_function("index_in", [texts], pc.SetLookupOptions(array))
            codes[field.name] = pa.DictionaryArray.from_arrays(of_rows, array)
            table = table.set_column(place, field.with_type(_CODES), codes[field.name])
    keys = [column.name for column in KEYS if column.name in codes]
    names = codes["router"].dictionary.to_pylist() if "router" in keys else []
    if (facts and "router" in keys) or any(layer_of(name) is not None for name in names):
        of_rows = router_facts(names, facts).take(codes["router"].indices)
        for place, field in enumerate([*ROUTER_FACTS][: 4 if facts else 2], len(keys)):
            table = table.add_column(place, field, of_rows[field.name])
    if keys:
        ranks = pa.table({name: codes[name].indices for name in keys})
        by = pc.SortOptions([(name, "ascending") for name in keys])
        table = table.take(pc.call_function("sort_indices", [ranks], by))
    return table


#: Types of cells that Arrow takes as they are.
_PLAIN = frozenset({float, int, bool, str, type(None)})


def _column(cells: Sequence[Any], kind: pa.DataType) -> pa.Array:
    plain = [cell if type(cell) in _PLAIN else plain_value(cell) for cell in cells]
    # nan within a list stays: it is a number of an array, not a missing cell
    missing = not pa.types.is_list(kind)
    try:
        return pa.array(plain, type=kind, from_pandas=missing)
    except UnicodeEncodeError:  # a name that is no UTF-8
        texts = [spelled(cell) if isinstance(cell, str) else cell for cell in plain]
        return pa.array(texts, type=kind, from_pandas=missing)


def _field(column: Column, facts: Mapping[str, str] = {}) -> pa.Field:
    kind = pa.list_(_LIST_TYPES[column.name]) if column.kind == "list" else _TYPES[column.kind]
    metadata = {"text": column.text, "unit": column.unit, "formula": column.formula, **facts}
    return pa.field(column.name, kind, metadata={k: v for k, v in metadata.items() if v})
