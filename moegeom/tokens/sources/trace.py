"""Choices that an engine or a trainer wrote down, in any dialect."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.errors import CheckpointError, RecordingError, UsageError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.source import Request, Source
from moegeom.tokens.traces.axes import main_stack
from moegeom.tokens.traces.counted import counted_source
from moegeom.tokens.traces.dialect import find_dialect
from moegeom.tokens.traces.expert_map import mapped, read_expert_map
from moegeom.tokens.traces.source import clean, of_routers, trace_source


def recognises(path: Path) -> bool:
    """True for a file or folder that some dialect takes for its own."""
    return find_dialect(path, None) is not None


def open_source(path: Path, request: Request) -> TokenSource:
    """The trace, read whole, cleaned and held against the routers of the checkpoint."""
    dialect = find_dialect(path, request.dialect)
    if dialect is None:
        raise UsageError(f"{path.name}: no dialect of traces takes it for its own.")
    if not request.known:
        raise UsageError(
            f"{path.name}: a trace is read against all routers of its checkpoint.",
            "Use moegeom scan, or leave out --layers.",
        )
    if request.expert_map is not None:
        routers = main_stack(request.known, path.name)
        dialect = mapped(dialect, read_expert_map(Path(request.expert_map)), routers)
    try:
        trace = dialect.read(path)
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint) from None
    if trace.counts is not None:
        return counted_source(path, trace, request.known, request.routers)
    cleaned = clean(trace, request.known)
    return trace_source(path, trace, of_routers(cleaned, request.routers))


SOURCE = Source("trace", recognises, open_source, needs_stage=False)
