"""Recordings, and choices that an engine or a trainer wrote down, in any dialect and any number of
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.text import number_of
from moegeom.core.tokens import SourceFacts, TokenSource
from moegeom.tokens.files import in_folder, name_of
from moegeom.tokens.foreign.arrays import TensorFile, open_tensor_file
from moegeom.tokens.recording.columns import ParquetColumns
from moegeom.tokens.recording.facts import (
    RecordingFacts,
    columns_file_name,
    read_facts,
    tensor_file_name,
)
from moegeom.tokens.recording.harm import read_harm
from moegeom.tokens.rows import FileRows, ShardedRows, StoredSource
from moegeom.tokens.source import Request, Source
from moegeom.tokens.stages import StoredTensor, check_output_shapes, stored_tensors
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
    if not request.checkpoint_routers:
        raise UsageError(
            f"{where}: a trace is read against all routers of its checkpoint.",
            "Use moegeom scan, or leave out --layers.",
        )
    routers = main_stack(request.checkpoint_routers, where)
    if request.expert_map is not None:
        dialect = mapped(dialect, read_expert_map(Path(request.expert_map)), routers)
    parts = [FileOf(file, dialect) for file in files]
    company = ALONE if request.company is None else request.company
    try:
        index = first_pass(parts, routers, where, company, dialect.copies)
    except CountsAlone as counts:
        if len(files) > 1:
            raise
        return counted_source(files[0], counts.trace, request.checkpoint_routers, request.routers)
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


# ------------------------------------------------------------------------------------------ opening


def open_recording(path: str | Path) -> StoredSource:
    """The recording in directory ``path``, as a token source.

    Raises
    ------
    RecordingError
        When it is half-written, of another schema, or when any file is missing, truncated or of
        another shape or dtype than ``recording.json`` and its sibling files say.
    """
    directory = Path(path).resolve()
    facts = read_facts(directory)
    tensors = {router: _open_router(directory, facts, router) for router in facts.routers}
    columns = ParquetColumns(
        tuple(directory / columns_file_name(n) for n in range(len(facts.shards))),
        tuple(shard.num_tokens for shard in facts.shards),
        facts.domains,
    )
    flips = read_harm(directory, facts.num_tokens)
    return StoredSource(_source_facts(directory, facts), tensors, columns, flips)


def _source_facts(directory: Path, facts: RecordingFacts) -> SourceFacts:
    return SourceFacts(
        name=directory.name,
        stage=facts.stage,
        num_tokens=facts.num_tokens,
        routers=facts.routers,
        domains=facts.domains,
        has_documents=facts.has_documents,
        has_chosen=facts.has_chosen,
        engine=facts.engine,
        fingerprint=facts.checkpoint.fingerprint,
        num_documents=facts.num_documents,
        size_bytes=sum(file.stat().st_size for file in directory.iterdir()),
        outputs=facts.outputs,
    )


def _open_router(directory: Path, facts: RecordingFacts, router: str) -> dict[str, ShardedRows]:
    tensors = stored_tensors(facts.stage, facts.has_chosen, facts.outputs)
    parts: dict[str, list[FileRows]] = {tensor.name: [] for tensor in tensors}
    for number, shard in enumerate(facts.shards):
        for prefix in dict.fromkeys(tensor.file_prefix for tensor in tensors):
            path = directory / tensor_file_name(prefix, router, number)
            file = open_tensor_file(path)
            for tensor in tensors:
                if tensor.file_prefix == prefix:
                    rows = _tensor_rows(file, tensor, facts.dtype, shard.num_tokens)
                    parts[tensor.name].append(rows)
    rows = {name: ShardedRows.of(_same_width(shards)) for name, shards in parts.items()}
    row_shapes = {name: shards.row_shape for name, shards in rows.items()}
    check_output_shapes(row_shapes, f"{directory.name}: router {router}")
    return rows


def _tensor_rows(
    file: TensorFile, tensor: StoredTensor, dtype: str | None, num_tokens: int
) -> FileRows:
    if tensor.name not in file.names:
        names = ", ".join(sorted(file.names)) or "none"
        raise RecordingError(f"{file.path.name}: no tensor '{tensor.name}'; found {names}.")
    allowed = [tensor.dtypes[dtype]] if tensor.is_float and dtype else [*tensor.dtypes.values()]
    rows = file.rows(tensor.name, allowed, tensor.row)
    if rows.num_rows != num_tokens:
        raise RecordingError(
            f"{file.path.name}: tensor '{tensor.name}' has {number_of(rows.num_rows, 'row')}; "
            f"recording.json says {number_of(num_tokens, 'token')}."
        )
    return rows


def _same_width(parts: list[FileRows]) -> tuple[FileRows, ...]:
    for part in parts:
        if part.row_shape != parts[0].row_shape:
            raise RecordingError(
                f"{part.path.name}: {_size(part)} columns; {parts[0].path.name} has "
                f"{_size(parts[0])}. The shards come from different models."
            )
    return tuple(parts)


def _size(rows: FileRows) -> str:
    return " x ".join(map(str, rows.row_shape))
