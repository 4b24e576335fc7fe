"""Opening a recording: every file is checked from its header, no values are read."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of
from moegeom.core.tokens import SourceFacts
from moegeom.tokens.foreign.arrays import TensorFile, open_tensor_file
from moegeom.tokens.recording.columns import ParquetColumns
from moegeom.tokens.recording.facts import (
    RecordingFacts,
    columns_file_name,
    read_facts,
    tensor_file_name,
)
from moegeom.tokens.rows import FileRows, ShardedRows, StoredSource
from moegeom.tokens.stages import StoredTensor, check_output_shapes, stored_tensors


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
    return StoredSource(_source_facts(directory, facts), tensors, columns)


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
