"""A directory with ``recording.json``."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.tokens import TokenSource
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.source import Request, Source


def recognises(path: Path) -> bool:
    """True for any directory; the reader reports what a recording lacks."""
    return path.is_dir()


def open_source(path: Path, request: Request) -> TokenSource:
    """The recording; it knows its stage and its routers by itself."""
    del request
    return open_recording(path)


SOURCE = Source("recording", recognises, open_source, needs_stage=False)
