"""Tables of experts by token id: layers whose choice is looked up, and not made by a router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import TOKEN_TABLE_BYTES
from moegeom.core.router import EXACT_IN_BFLOAT16, TableName, TokenTable
from moegeom.core.shapes import Shaped
from moegeom.router.plain_names import with_plain_names


def token_table_facts(store: TensorStore, tables: Sequence[TableName]) -> list[dict[str, Any]]:
    """What every table holds, for ``run.json``; a table that cannot be read says so."""
    plain = with_plain_names(store)
    return [asdict(_read(plain, table)) for table in tables]


def _read(store: TensorStore, table: TableName) -> TokenTable:
    token_table = TokenTable(table.router, table.tensor, "")
    try:
        info, experts = store.info(table.tensor), store.info(table.weight).shape[0]
        token_table = TokenTable(table.router, table.tensor, info.dtype, num_experts=experts)
        if len(info.shape) != 2 or info.size_bytes > TOKEN_TABLE_BYTES:
            shape = " x ".join(map(str, info.shape))
            return TokenTable(
                table.router, table.tensor, info.dtype, reason=f"its shape is {shape}"
            )
        return looked_up(token_table, store.read(table.tensor))
    except CheckpointError as error:
        return replace(token_table, reason=error.message.removesuffix("."))


def looked_up(table: TokenTable, stored: Shaped[np.ndarray, "tokens k"]) -> TokenTable:
    """The table with what ``stored`` holds; entries that are no whole number are no expert."""
    values = stored if stored.dtype.kind in "iu" else upcast(stored)
    is_expert = (values >= 0) & (values < table.num_experts)
    if values.dtype.kind == "f":
        is_expert &= values == np.floor(values)
    ids = np.where(is_expert, values, -1).astype(np.int64)
    ordered = np.sort(ids, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    # of ids that went too far up the parity is known as well
    is_large = (values > EXACT_IN_BFLOAT16) & (values < 2**31)
    large = values[is_large]
    return replace(
        table,
        num_tokens=len(values),
        top_k=values.shape[1],
        largest=float(values.max()) if values.size else 0.0,
        num_outside=int((~is_expert).sum()),
        num_repeated=int(repeats.any(axis=1).sum()),
        num_used=len(np.unique(ids[is_expert])),
        num_large=len(large),
        num_large_odd=int((large % 2 != 0).sum()),
    )
