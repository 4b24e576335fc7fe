"""PyTorch: a file of ``torch.save``, a folder with an index, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.folder import Location
from moegeom.checkpoint.formats._indexed import Naming, choose, open_index
from moegeom.checkpoint.formats._pytorch_archive import TorchArchive, View, read_torch_archive
from moegeom.checkpoint.formats._pytorch_names import flatten
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote.lazy import lazy
from moegeom.checkpoint.shards import ShardedStore, join_shards
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_SUFFIX = ".bin.index.json"
_NAMING = Naming(_INDEX_SUFFIX, "pytorch_model.bin.index.json", "pytorch_model.bin")

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
    chosen = choose(location, _weights(location.files), _NAMING)
    if chosen.index:
        return open_index(folder, chosen, lambda name: PytorchFile(folder.file(name)))
    shards = {name: PytorchFile(folder.file(name)) for name in chosen.files}
    return ShardedStore(folder, shards, join_shards(shards, folder.num_parallel))


FORMAT = Format("pytorch", recognises, open_pytorch)
