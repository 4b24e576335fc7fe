"""Tokens on their way from the model to a sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import InternalError
from moegeom.core.tokens import TokenColumns, TopLogits
from moegeom.tokens.recording.writer import Values


@dataclass(frozen=True, eq=False)
class Shard:
    """What is kept of some tokens at every router; ``domains`` are the names known so far.

    ``values`` is None where ids alone are kept, ``chosen`` where the model does not give them.
    ``outputs`` of experts stand by kind, then by router; None where none are kept.
    """

    columns: TokenColumns
    values: Values | None
    chosen: Mapping[str, np.ndarray] | None
    domains: tuple[str, ...]
    outputs: Mapping[str, Mapping[str, np.ndarray]] | None = None


@dataclass(frozen=True, eq=False)
class InputRows:
    """Router inputs of some tokens, and the model's own choices (empty where it gives none)."""

    columns: TokenColumns
    values: Mapping[str, np.ndarray]
    chosen: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, shard: Shard) -> InputRows:
        """Those of a shard that holds router inputs."""
        values = {}
        for name, rows in (shard.values or {}).items():
            if isinstance(rows, TopLogits):
                raise InternalError(f"router {name} gives logits where inputs are folded")
            values[name] = rows
        return cls(shard.columns, values, shard.chosen or {})

    def __len__(self) -> int:
        return len(self.columns.document)

    def at(self, rows: slice) -> InputRows:
        """Some of them."""
        return InputRows(
            self.columns.at(rows),
            {name: array[rows] for name, array in self.values.items()},
            {name: array[rows] for name, array in self.chosen.items()},
        )

    def then(self, more: InputRows) -> InputRows:
        """These and those that follow."""
        return InputRows(
            self.columns.then(more.columns),
            {n: np.concatenate([self.values[n], rows]) for n, rows in more.values.items()},
            {n: np.concatenate([self.chosen[n], rows]) for n, rows in more.chosen.items()},
        )


NO_ROWS = InputRows(
    TokenColumns(
        document=np.empty(0, np.int64),
        position=np.empty(0, np.int32),
        token_id=np.empty(0, np.int32),
        domain=np.empty(0, np.int16),
    ),
    {},
    {},
)
