"""What a Megatron-Core checkpoint says beside its tensors: arguments, and layers in one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.folder import Folder
from moegeom.checkpoint.formats._pytorch_globals import ALLOWED, Dropped
from moegeom.checkpoint.pickle.machine import Record
from moegeom.checkpoint.pickle.pickled import unpickle
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore
from moegeom.checkpoint.store import TensorInfo
from moegeom.checkpoint.zipped import read_archive
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import MEGATRON_ARGUMENT_BYTES, MEGATRON_NAME_CHARACTERS
from moegeom.core.shapes import Shaped

#: The file of everything that is the same on all ranks.
COMMON = "common.pt"

#: ``decoder.layers.mlp.router.weight``: homogeneous layers in the older layout are one tensor.
_STACKED = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?P<tail>(?![0-9]+\.).+)")

_Plain = bool | int | float | str | None


class MegatronStore(ShardedStore):
    """A ``TensorStore`` whose config are the arguments of the run.

    Where all layers of a part are one tensor, each appears under the name that it has in the newer
    layout, ``layers.{i}.``. ``shape_of`` tells the shape of a stored tensor, at little cost.
    """

    def __init__(
        self,
        folder: Folder,
        shards: Mapping[str, CheckpointShard],
        shard_of: Mapping[str, str],
        index_bytes: int,
        shape_of: Callable[[str], tuple[int, ...]],
    ) -> None:
        super().__init__(folder, shards, shard_of, index_bytes)
        self._shape_of = shape_of

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return megatron_config(self.folder)

    @cached_property
    def _names(self) -> Mapping[str, tuple[str, int] | None]:
        """Stored tensor and layer by name; None for a tensor that is what it is called."""
        names: dict[str, tuple[str, int] | None] = {}
        left = MEGATRON_NAME_CHARACTERS
        for stored in super().names():
            hit = _STACKED.fullmatch(stored)
            count = self._num_layers if hit else 0
            if hit is None or not count or self._shape_of(stored)[:1] != (count,):
                names[stored] = None
                continue
            left -= count * (len(stored) + len(str(count)))
            if left < 0 or len(names) + count > limits.TENSORS:
                raise CheckpointError(
                    f"{self.label}: its tensors of {count} layers each have more than "
                    f"{limits.TENSORS} names, or more than {MEGATRON_NAME_CHARACTERS} characters "
                    "in all."
                )
            for layer in range(count):
                names[f"{hit['head']}.{layer}.{hit['tail']}"] = (stored, layer)
        return names

    @cached_property
    def _num_layers(self) -> int:
        count = self.config.get("num_layers")
        return count if type(count) is int and 0 < count <= 10_000 else 0

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        place = self._names.get(name)
        if place is None:
            return super().info(name)
        stored, layer = place
        whole = super().info(stored)
        size = whole.size_bytes // whole.shape[0]
        offset = whole.offset + layer * size
        return TensorInfo(name, whole.dtype, whole.shape[1:], whole.file, offset, size)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        if self._names.get(name) is None:
            return super().read(name)
        info = self.info(name)
        where = f"{info.file}: tensor {name!r}"
        dtype = numpy_dtype(info.dtype, where)
        return as_array(self.read_bytes(name, 0, info.size_bytes), dtype, info.shape, where)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        place = self._names.get(name)
        if place is None:
            return super().read_bytes(name, start, size)
        info = self.info(name)
        length = max(min(size, info.size_bytes - start), 0)
        return super().read_bytes(place[0], place[1] * info.size_bytes + start, length)


def megatron_config(folder: Folder) -> Mapping[str, Any]:
    """The plain arguments of the run, as a config.

    ``model_type`` is ``megatron-sigmoid``, ``megatron-softmax``, or ``megatron-softmax-first``
    where the softmax comes before the choice; ``gain_offset`` is 1 for norms whose gain is stored
    less 1.
    """
    archive = read_archive(folder.file(COMMON))
    pickles = [name for name in archive.entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{COMMON}: holds {len(pickles)} pickles of data, expected one.")
    raw = archive.read(pickles[0], MEGATRON_ARGUMENT_BYTES)
    root = unpickle(raw, COMMON, _Anything(), lambda _: None)
    namespace = root.get("args") if isinstance(root, dict) else None
    arguments = namespace.state if isinstance(namespace, _Arguments) else None
    pairs = arguments.items() if isinstance(arguments, dict) else ()
    plain = {key: value for key, value in pairs if isinstance(key, str) and _is_plain(value)}
    if not plain:
        raise CheckpointError(
            f"{COMMON}: holds no arguments of the run.",
            "Describe the routers with --family FILE or --router-pattern.",
        )
    score = plain.get("moe_router_score_function") or "softmax"
    is_first = score == "softmax" and plain.get("moe_router_pre_softmax") is True
    return {
        **plain,
        "model_type": f"megatron-{score}{'-first' if is_first else ''}",
        "gain_offset": 1.0 if plain.get("apply_layernorm_1p") is True else 0.0,
    }


class _Arguments(Record):
    """What stands in for ``argparse.Namespace``."""

    __slots__ = ()


class _Anything(Mapping[str, Any]):
    """Stand-ins for every global: arguments hold enums and functions, which nobody needs."""

    def __getitem__(self, name: str) -> Any:
        if name in ("argparse.Namespace", "types.SimpleNamespace"):
            return _Arguments
        return ALLOWED.get(name, Dropped)

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(ALLOWED)

    def __len__(self) -> int:
        return len(ALLOWED)


def _is_plain(value: Any) -> bool:
    entries = value if isinstance(value, list) and len(value) <= 10_000 else [value]
    return all(isinstance(entry, _Plain) for entry in entries)
