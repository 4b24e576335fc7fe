"""Foreign arrays as a token source: which array is which router, and the columns beside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.tokens import SourceFacts, Stage, TokenColumns
from moegeom.tokens.columns import DTYPES, ColumnSource, UnknownColumns, unknown_columns
from moegeom.tokens.recording import router_slug
from moegeom.tokens.rows import Rows
from moegeom.tokens.source import Request
from moegeom.tokens.stages import EXPERT_DTYPES, STAGE_TENSORS, StoredTensor
from moegeom.tokens.stored import StoredSource

#: Keys with these names are facts about tokens, one integer each, and no routers.
COLUMN_KEYS = ("document", "position", "token_id")

COLUMN_DTYPES = tuple(EXPERT_DTYPES.values())


def foreign_stage(path: Path, request: Request) -> Stage:
    """The stage that the caller named; only stages with one array per router are read."""
    if request.stage is None or len(STAGE_TENSORS[request.stage]) != 1:
        raise UsageError(
            f"{path.name}: stage {request.stage} is read from recordings only.",
            "Write one with moegeom.tokens.writer.RecordingWriter.",
        )
    return request.stage


def foreign_tensor(path: Path, request: Request) -> StoredTensor:
    """What each array of a foreign file is."""
    return STAGE_TENSORS[foreign_stage(path, request)][0]


def assign_routers(path: Path, keys: Collection[str], request: Request) -> dict[str, str]:
    """The key of each router, in the checkpoint's order.

    Without a router map every key must be understood; with one, keys that nothing names are left
    alone, so that a file may hold more than is asked for.
    """
    names = {alias: router for router in request.routers for alias in (router, router_slug(router))}
    names |= request.router_map
    if len(keys) == len(request.routers) == 1 and not request.router_map:
        names = dict(zip(keys, request.routers, strict=True))
    keys_of: dict[str, list[str]] = {}
    for key in keys:
        keys_of.setdefault(names.get(key, ""), []).append(key)
    unknown = keys_of.pop("", [])
    absent = sorted(set(request.router_map) - set(keys))
    not_routers = [r for r in keys_of if request.routers and r not in request.routers]
    twice = [router for router, found in keys_of.items() if len(found) > 1]
    if (unknown and not request.router_map) or absent or not_routers or twice or not keys_of:
        raise RecordingError(
            f"{path.name}: cannot tell which array is which router: found {_listed(keys)}; "
            f"expected {_listed(request.routers) or 'a router map'}"
            + (f"; the map names {_listed(absent)}, which the file lacks" if absent else "")
            + (f"; {_listed(not_routers)}: no such router" if not_routers else "")
            + (f"; several arrays for {_listed(twice)}" if twice else "")
            + ".",
            "Give a router map, KEY=ROUTER for each array.",
        )
    order = request.routers or tuple(keys_of)
    return {router: keys_of[router][0] for router in order if router in keys_of}


def foreign_source(
    path: Path,
    request: Request,
    tensor: StoredTensor,
    rows: Mapping[str, Rows],
    columns: Mapping[str, Rows],
) -> StoredSource:
    """The token source made of ``rows`` (by router) and ``columns`` (by name, one wide)."""
    first = next(iter(rows))
    num_tokens = rows[first].num_rows
    for name, found in {**rows, **columns}.items():
        if found.num_rows != num_tokens:
            raise RecordingError(
                f"{path.name}: {name} has {found.num_rows} tokens; {first} has {num_tokens}."
            )
    facts = SourceFacts(
        name=path.resolve().name,
        stage=foreign_stage(path, request),
        num_tokens=num_tokens,
        routers=tuple(rows),
        domains=(),
        has_documents="document" in columns,
        has_chosen=not tensor.is_float,
        size_bytes=path.stat().st_size,
    )
    tensors = {router: {tensor.name: found} for router, found in rows.items()}
    return StoredSource(facts, tensors, RowColumns(columns) if columns else UnknownColumns())


class RowColumns(ColumnSource):
    """Token columns read from arrays one wide; -1 for those that are not there."""

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        self._rows = rows

    def read(self, start: int, stop: int) -> TokenColumns:
        """Columns of tokens ``[start, stop)``."""
        found = dict(vars(unknown_columns(stop - start)))
        for name, rows in self._rows.items():
            column = np.empty((stop - start, 1), DTYPES[name])
            rows.read_into(start, column)
            found[name] = column[:, 0]
        return TokenColumns(**found)


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")
