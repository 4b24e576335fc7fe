"""What every kind of token file defines: how to see that a path is one, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moegeom.core.registry import Registry
from moegeom.core.tokens import Stage, TokenSource


@dataclass(frozen=True)
class Request:
    """What the caller says about a file that cannot say it itself.

    ``routers`` are the names known from the checkpoint, in its order; empty when not known.
    """

    stage: Stage | None = None
    router_map: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """One kind of token file. With ``needs_stage`` it must be told what its numbers are."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, Request], TokenSource]
    needs_stage: bool


SOURCES: Registry[Source] = Registry("token source", "moegeom.tokens.sources", "SOURCE", Source)
