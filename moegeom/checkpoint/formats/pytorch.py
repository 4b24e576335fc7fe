"""PyTorch: a file of ``torch.save``, a folder with an index, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from moegeom.checkpoint.folder import Location
from moegeom.checkpoint.formats._indexed import Naming, choose, open_index
from moegeom.checkpoint.formats._pytorch_archive import TensorView, TorchArchive, read_torch_archive
from moegeom.checkpoint.formats._pytorch_globals import PickledTensor, UnreadableTensor
from moegeom.checkpoint.ranks import open_files
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.remote.lazy import lazy
from moegeom.checkpoint.shards import ShardedStore
from moegeom.checkpoint.store import Format, TensorInfo
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import TORCH_STEPS
from moegeom.core.shapes import Shaped

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

    def _view(self, name: str) -> TensorView:
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

    def holds_weights(name: str) -> bool:
        plain = name.rpartition("/")[2]
        return not any(fnmatchcase(plain, pattern) for pattern in _NO_WEIGHTS)

    return [name for name in files if name.endswith(_SUFFIXES) and holds_weights(name)]


def open_pytorch(location: Location) -> ShardedStore:
    """The checkpoint at a location that ``recognises`` accepts."""
    folder = location.folder
    chosen = choose(location, _weights(location.files), _NAMING)
    if chosen.index:
        return open_index(folder, chosen, lambda name: PytorchFile(folder.file(name)))
    shards = {name: PytorchFile(folder.file(name)) for name in chosen.files}
    return open_files(folder, shards)


FORMAT = Format("pytorch", recognises, open_pytorch)


Tensor = PickledTensor | UnreadableTensor

_STEPS_PER_NAME = 100


def flatten(root: Any, where: str) -> Mapping[str, Tensor]:
    """The tensors of whatever was saved, in its order, by name; all else is left out.

    Raises
    ------
    CheckpointError
        If ``root`` is no dict or list, two tensors have one name, or there is no end of them.
    """
    if isinstance(root, Tensor):
        raise CheckpointError(
            f"{where}: holds a single tensor without a name, expected a state dict.",
            "Save a dict: torch.save({'name': tensor}, file).",
        )
    if not isinstance(root, dict | list | tuple):
        raise CheckpointError(f"{where}: holds a {type(root).__name__}, expected a state dict.")
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    left = TORCH_STEPS
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            name = path[1:]
            if name in tensors:
                raise CheckpointError(f"{where}: holds two tensors named {name!r}.")
            tensors[name] = value
            continue
        inner = _items(value)
        left -= len(value) + len(inner) * (_STEPS_PER_NAME + len(path))
        left -= sum(len(str(key)) for key, _ in inner)
        if left < 0:
            raise CheckpointError(f"{where}: holds too many tensors, or dicts inside themselves.")
        waiting.extend((f"{path}.{key}", item) for key, item in reversed(inner))
    return tensors


def _items(value: Any) -> list[tuple[str | int, Any]]:
    """Items that are tensors or may hold some, under keys that can be part of a name."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    kinds = (PickledTensor, UnreadableTensor, dict, list, tuple)
    return [
        (key, item) for key, item in pairs if isinstance(item, kinds) and isinstance(key, str | int)
    ]
