"""What ``moegeom track`` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moegeom.core.finding import Severity
from moegeom.engine.request import Terms


@dataclass(frozen=True)
class TrackRequest(Terms):
    """What was asked for. ``tokens`` is a path with {step} or {name}; None looks at weights alone.

    ``out`` None is runs/<name of the series>.track. ``expert`` asks for the load of one expert at
    every step; ``fail_on`` is the least severity of a finding that fails, None an error.
    """

    patterns: tuple[str, ...]
    out: Path | None = None
    tokens: str | None = None
    expert: int | None = None
    exclude_first: int = 0
    fail_on: Severity | None = None
