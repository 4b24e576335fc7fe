"""What every kind of token file defines: how to see that a path is one, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moegeom.core.errors import RecordingError
from moegeom.core.registry import Rooms
from moegeom.core.tokens import Stage, TokenSource

if TYPE_CHECKING:
    from moegeom.tokens.traces.survey import FileJournal


@dataclass(frozen=True)
class KnownRouter:
    """Place and rule of a router of the checkpoint, which traces are checked against."""

    name: str
    stack: str
    layer: int
    num_experts: int
    top_k: int


#: Hears the name of a request that cannot be read, and why.
Refused = Callable[[str, RecordingError], None]


@dataclass(frozen=True)
class Company:
    """What goes with a first pass over files: its ``journal``, who hears how many bytes it begins
    to read, how many files of how many were read, and which requests are ``refused``:
    those are left out then, where otherwise the first one ends the pass. Slots ``may_be_empty``
    where the caller looks at the others.
    """

    journal: FileJournal | None = None
    begun: Callable[[int], None] | None = None
    advanced: Callable[[int, int], None] | None = None
    refused: Refused | None = None
    may_be_empty: bool = False


@dataclass(frozen=True)
class Request:
    """What the caller says about a file that cannot say it itself.

    ``routers`` are the names of the routers to read, in the checkpoint's order, and
    ``checkpoint_routers`` all of the checkpoint; both are empty without a checkpoint. ``dialect``
    is the name of a dialect of traces, ``expert_map`` the file that says which expert lies at which
    physical place, ``company`` what goes with a first pass over traces.
    """

    stage: Stage | None = None
    router_map: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    checkpoint_routers: tuple[KnownRouter, ...] = ()
    dialect: str | None = None
    expert_map: str | None = None
    company: Company | None = None


@dataclass(frozen=True)
class Source:
    """One kind of token file. With ``needs_stage`` the caller must name what its numbers are."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, Request], TokenSource]
    needs_stage: bool


SOURCES = Rooms("token source", "moegeom.tokens.sources", Source)
