"""Safetensors: one file, a folder with an index, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.dtypes import numpy_dtype
from moegeom.checkpoint.formats._safetensors_header import Header, read_header
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.checkpoint.shards import ShardedStore, check_present, join_shards, parse_index
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SafetensorsFile:
    """One file; the header is read on first use."""

    file: CountingFile

    @property
    def label(self) -> str:
        return self.file.label

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes()

    @cached_property
    def header(self) -> Header:
        return read_header(self.file)

    def names(self) -> Collection[str]:
        return self.header.names

    def info(self, name: str) -> TensorInfo:
        return self.header.info(name)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        info = self.info(name)
        dtype = numpy_dtype(info.dtype, f"{info.file}: tensor {name!r}")
        raw = self.file.read(info.offset, info.size_bytes)
        return np.frombuffer(raw, dtype).reshape(info.shape)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        info = self.info(name)
        kept = max(min(size, info.size_bytes - start), 0)
        return self.file.read(info.offset + start, kept)


def recognises(path: Path) -> bool:
    """True for a safetensors file, an index of such files, or a folder that holds either."""
    if path.is_dir():
        return any(entry.name.endswith((_SUFFIX, _INDEX_SUFFIX)) for entry in path.iterdir())
    return path.name.endswith((_SUFFIX, _INDEX_SUFFIX))


def open_safetensors(path: Path) -> ShardedStore:
    """The checkpoint at a path that ``recognises`` accepts."""
    if not path.is_dir():
        return _open_index(path) if path.name.endswith(_INDEX_SUFFIX) else _open_files([path])
    files = sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIX))
    indexes = sorted(p for p in path.iterdir() if p.name.endswith(_INDEX_SUFFIX))
    named = [p for p in indexes if p.name == _INDEX] or indexes
    single = [p for p in files if p.name == _SINGLE]
    if len(named) == 1:
        return _open_index(named[0], rival=_SINGLE if single else None)
    if len(named) > 1:
        raise CheckpointError(
            f"{_label(path)}: holds {len(named)} indexes ({', '.join(p.name for p in named)}).",
            "Pass the index to read.",
        )
    return _open_files(single or files)


def _open_index(path: Path, rival: str | None = None) -> ShardedStore:
    log = ReadLog()
    shard_of = parse_index(CountingFile(path, path.name, log))
    used = sorted(set(shard_of.values()))
    if rival and rival not in used:
        # transformers would load the single file, others the shards: do not guess.
        raise CheckpointError(
            f"{_label(path.parent)}: holds both {rival} and {path.name}, which does not name it.",
            "Pass the file or the index to read.",
        )
    check_present(path.parent, path.name, used)
    shards = {n: SafetensorsFile(CountingFile(path.parent / n, n, log)) for n in used}
    return ShardedStore(path.parent, _label(path.parent), shards, shard_of, log)


def _open_files(paths: list[Path]) -> ShardedStore:
    log = ReadLog()
    folder = paths[0].parent
    shards = {p.name: SafetensorsFile(CountingFile(p, p.name, log)) for p in paths}
    return ShardedStore(folder, _label(folder), shards, join_shards(shards), log)


def _label(folder: Path) -> str:
    return folder.resolve().name or "checkpoint"


FORMAT = Format("safetensors", recognises, open_safetensors)
