"""Recordings, and choices that an engine or a trainer wrote down, in any dialect and any number of
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.files import in_folder, name_of
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.source import Request, Source
from moegeom.tokens.traces.axes import main_stack
from moegeom.tokens.traces.expert_map import mapped, read_expert_map
from moegeom.tokens.traces.source import counted_source, trace_source
from moegeom.tokens.traces.survey import ALONE, CountsAlone, FileOf, first_pass
from moegeom.tokens.traces.trace import Dialect, find_dialect

#: Files of a folder that show whether it holds traces.
_FIRST_FILES = 3


def recognises(path: Path) -> bool:
    """True for a file or folder that some dialect takes for its own, and for a folder of such."""
    return find_dialect(path, None) is not None or holds_traces(path)


def holds_traces(path: Path) -> bool:
    """Whether the first files of a folder, which is no recording, are traces."""
    if not path.is_dir() or (path / "recording.json").exists():
        return False
    return any(find_dialect(file, None) is not None for file in in_folder(path)[:_FIRST_FILES])


def open_source(path: Path, request: Request) -> TokenSource:
    """The trace, cleaned and checked against the routers of the checkpoint."""
    return open_traces([path], request)


def open_traces(paths: Sequence[Path], request: Request) -> TokenSource:
    """The traces in files and folders as one source, in the order in which they are given.

    Raises
    ------
    UsageError
        When there is no checkpoint to hold them against.
    RecordingError
        When they are not of one dialect, or do not fit.
    """
    dialect, files = dialect_and_files(paths, request.dialect)
    where = name_of(paths)
    if not request.known:
        raise UsageError(
            f"{where}: a trace is read against all routers of its checkpoint.",
            "Use moegeom scan, or leave out --layers.",
        )
    routers = main_stack(request.known, where)
    if request.expert_map is not None:
        dialect = mapped(dialect, read_expert_map(Path(request.expert_map)), routers)
    parts = [FileOf(file, dialect) for file in files]
    company = ALONE if request.company is None else request.company
    try:
        index = first_pass(parts, routers, where, company, dialect.copies)
    except CountsAlone as counts:
        if len(files) > 1:
            raise
        return counted_source(files[0], counts.trace, request.known, request.routers)
    return trace_source(where, index, request.routers)


def dialect_and_files(paths: Sequence[Path], name: str | None) -> tuple[Dialect, list[Path]]:
    """Dialect of the first file, and all files; a folder stands for the files of its run.

    Raises
    ------
    UsageError
        When no dialect takes the first for its own.
    RecordingError
        When a folder is empty, or files of some ending are of another dialect.
    """
    first = next((path for path in paths if find_dialect(path, name) is not None), paths[0])
    dialect = find_dialect(first, name)
    inside = [file for path in paths if path.is_dir() for file in in_folder(path)]
    if dialect is None:
        dialect = next(filter(None, (find_dialect(file, None) for file in inside)), None)
    if dialect is None:
        raise UsageError(f"{paths[0].name}: no dialect of traces takes it for its own.")
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
        elif dialect.files is not None:
            files += dialect.files(path)
        else:
            files += in_folder(path)
    if not files:
        raise RecordingError(f"{paths[0].name}: a folder without files.")
    _refuse_strangers(files, dialect, name)
    return dialect, files


def _refuse_strangers(files: Sequence[Path], dialect: Dialect, name: str | None) -> None:
    """Raises RecordingError where a first file of some ending is no trace of the dialect.

    Others are told when they are read; that takes long.
    """
    endings = {file.suffix: file for file in reversed(files)}
    for file in endings.values():
        if len(files) == 1 or name is not None or dialect.recognises(file):
            continue
        other = find_dialect(file, None)
        what = "no trace that can be told" if other is None else f"a trace of dialect {other.name}"
        raise RecordingError(
            f"{file.name} is {what}; {files[0].name} is one of dialect {dialect.name}; expected "
            "one dialect in all files.",
            "Name the files of one: --tokens 'FOLDER/*.jsonl'; or --dialect, if they are of it.",
        )


#: A recording is any folder: the reader says what one lacks. It has its stage and its routers.
RECORDING = Source(
    "recording", Path.is_dir, lambda path, request: open_recording(path), needs_stage=False
)
TRACE = Source("trace", recognises, open_source, needs_stage=False)
