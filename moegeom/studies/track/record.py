"""What ``moegeom track`` is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.finding import Severity
from moegeom.engine.request import Terms, Tokens


@dataclass(frozen=True)
class TrackRequest(Terms):
    """What was asked for. ``tokens`` is a path with {step} or {name}, or tokens by the name of the
    checkpoint; None looks at weights alone.

    ``out`` None is runs/<name of the series>.track. ``expert`` asks for the load of one expert at
    every step; ``fail_on`` is the least severity of a finding that fails, None an error. ``export``
    are entries ``NAME:PATH``, NAME an export of a series.
    """

    patterns: tuple[str, ...]
    out: Path | None = None
    tokens: str | Mapping[str, Tokens] | None = None
    expert: int | None = None
    engine: str | None = None
    fail_on: Severity | None = None
    export: tuple[str, ...] = ()
