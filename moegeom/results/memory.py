"""Results that are judged at once and never written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MemoryResults:
    """Facts of a run, and rows of each table by its name."""

    run: Mapping[str, Any]
    tables: Mapping[str, Rows]

    def rows(self, name: str) -> Rows:
        """The table as a list of rows of plain values; empty when nothing fills it."""
        return self.tables.get(name, ())
