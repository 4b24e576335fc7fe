"""What every kind of token file defines: how to see that a path is one, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moegeom.core.registry import Registry
from moegeom.core.tokens import Stage, TokenSource


@dataclass(frozen=True)
class KnownRouter:
    """What a trace is held against: where a router of the checkpoint is, and how it chooses."""

    name: str
    stack: str
    layer: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class Request:
    """What the caller says about a file that cannot say it itself.

    ``routers`` are the names known from the checkpoint, in its order; empty when not known.
    ``known`` are all routers of the checkpoint, wanted or not; empty when not known. ``dialect`` is
    the name of a dialect of traces, ``expert_map`` the file that says which expert lies at which
    of the places that a trace names.
    """

    stage: Stage | None = None
    router_map: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    known: tuple[KnownRouter, ...] = ()
    dialect: str | None = None
    expert_map: str | None = None


@dataclass(frozen=True)
class Source:
    """One kind of token file. With ``needs_stage`` it must be told what its numbers are."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, Request], TokenSource]
    needs_stage: bool


SOURCES: Registry[Source] = Registry("token source", "moegeom.tokens.sources", "SOURCE", Source)
