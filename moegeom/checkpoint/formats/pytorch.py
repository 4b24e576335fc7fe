"""PyTorch: a file of ``torch.save``, a folder with an index, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.folder import Folder, Location
from moegeom.checkpoint.formats._pytorch_archive import TorchArchive, View, read_torch_archive
from moegeom.checkpoint.formats._pytorch_names import flatten
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote_lazy import lazy
from moegeom.checkpoint.shards import ShardedStore, check_present, join_shards, parse_index
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_SUFFIX = ".bin.index.json"
_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"

#: What trainers write beside the weights with the same suffixes.
_NO_WEIGHTS = (
    "training_args.bin", "optimizer*", "*optim_states.pt", "scheduler*", "scaler*", "rng_state*",
    "random_states*", "trainer_state*",
)  # fmt: skip

#: A folder that holds one of these is a checkpoint of another format.
_OTHER_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", ".metadata", "*.distcp", "*.gguf")


@dataclass(frozen=True)
class PytorchFile:
    """One file; its directory and its pickle are read on first use."""

    file: RangeFile

    @property
    def label(self) -> str:
        return self.file.label

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes()

    @lazy
    def content(self) -> TorchArchive:
        return read_torch_archive(self.file)

    @lazy
    def tensors(self) -> Mapping[str, Any]:
        return flatten(self.content.root, self.label)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        view = self._view(name)
        return TensorInfo(name, view.dtype, view.shape, self.label, view.offset, view.size_bytes)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        return self.content.read(self._view(name), self._where(name))

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self.content.read_bytes(self._view(name), start, size)

    def _view(self, name: str) -> View:
        if name not in self.tensors:
            raise CheckpointError(
                f"{self._where(name)} is not in this file, which holds {len(self.tensors)}."
            )
        return self.content.view(self.tensors[name], self._where(name))

    def _where(self, name: str) -> str:
        return f"{self.label}: tensor {name!r}"


def recognises(location: Location) -> bool:
    """True for a file of ``torch.save``, an index of such files, or a folder of either."""
    if location.file is not None:
        return location.file.endswith((*_SUFFIXES, _INDEX_SUFFIX))
    files = location.files
    if any(fnmatchcase(name, pattern) for name in files for pattern in _OTHER_WEIGHTS):
        return False
    return any(name.endswith(_INDEX_SUFFIX) for name in files) or bool(_weights(files))


def _weights(files: Sequence[str]) -> list[str]:
    """The files that hold weights, by their names."""
    return [
        name
        for name in files
        if name.endswith(_SUFFIXES) and not any(fnmatchcase(name, p) for p in _NO_WEIGHTS)
    ]


def open_pytorch(location: Location) -> ShardedStore:
    """The checkpoint at a location that ``recognises`` accepts."""
    folder = location.folder
    if location.file is not None:
        if location.file.endswith(_INDEX_SUFFIX):
            return _open_index(folder, location.file)
        return _open_files(folder, [location.file])
    files = _weights(location.files)
    indexes = [name for name in location.files if name.endswith(_INDEX_SUFFIX)]
    named = [name for name in indexes if name == _INDEX] or indexes
    single = [name for name in files if name == _SINGLE]
    if len(named) == 1:
        return _open_index(folder, named[0], rival=_SINGLE if single else None)
    if len(named) > 1:
        raise CheckpointError(
            f"{folder.label}: holds {len(named)} indexes ({', '.join(named)}).",
            "Pass the index to read.",
        )
    return _open_files(folder, single or files)


def _open_index(folder: Folder, index: str, rival: str | None = None) -> ShardedStore:
    shard_of = parse_index(folder.file(index))
    used = sorted(set(shard_of.values()))
    if rival and rival not in used:
        # transformers would load the single file, others the shards: do not guess.
        raise CheckpointError(
            f"{folder.label}: holds both {rival} and {index}, which does not name it.",
            "Pass the file or the index to read.",
        )
    check_present(folder, index, used)
    shards = {name: PytorchFile(folder.file(name)) for name in used}
    return ShardedStore(folder, shards, shard_of)


def _open_files(folder: Folder, names: Sequence[str]) -> ShardedStore:
    shards = {name: PytorchFile(folder.file(name)) for name in names}
    return ShardedStore(folder, shards, join_shards(shards, folder.num_parallel))


FORMAT = Format("pytorch", recognises, open_pytorch)
