"""A model in memory as a checkpoint: the same names, rules and checks as for one on disk.

Tensors of torch become NumPy arrays without a copy where both can share the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Shaped
from moegeom.router.plain_names import plain_name

#: Dtypes of torch in the spelling of safetensors.
STORED_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

#: Dtypes that NumPy has only by ml_dtypes: they cross over as integers of the same size.
_AS_INTEGERS: dict[torch.dtype, tuple[torch.dtype, type]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def as_array(tensor: torch.Tensor) -> Shaped[np.ndarray, "*shape"]:
    """The tensor's numbers in its dtype, by DLPack; a tensor of a device is copied to the host."""
    host = tensor.detach().cpu()
    if host.dtype in _AS_INTEGERS:
        integers, scalar = _AS_INTEGERS[host.dtype]
        return np.from_dlpack(host.contiguous().view(integers)).view(scalar)
    return np.from_dlpack(host)


class ModelStore:
    """Parameters and buffers of a model, by the names they would have without wrappers."""

    def __init__(self, model: torch.nn.Module, label: str = "the running model") -> None:
        self._label = label
        self._config = _config(model)
        named = (*model.named_parameters(), *model.named_buffers())
        self._own_names = {plain_name(name): name for name, _ in named}
        self._tensors = {plain_name(name): tensor for name, tensor in named}
        self._bytes_read = 0

    @property
    def label(self) -> str:
        return self._label

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def bytes_total(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @property
    def revision(self) -> str:
        return ""

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def own_name(self, name: str) -> str:
        """The parameter's name in this very model, wrappers included."""
        return self._own_names[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer itself."""
        return self._tensors[name]

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        dtype = STORED_NAMES.get(tensor.dtype, str(tensor.dtype))
        shape, size = tuple(tensor.shape), tensor.numel() * tensor.element_size()
        return TensorInfo(name, dtype, shape, self._label, 0, size)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        info, tensor = self.info(name), self._tensors[name]
        if tensor.is_meta or not tensor.numel():
            raise CheckpointError(
                f"{self._label}: parameter '{name}' holds no values here (shape "
                f"{list(info.shape)}, device {tensor.device}).",
                "It is sharded or offloaded: pass checkpoint=PATH, whose routers are the same.",
            )
        # A sharded tensor (DTensor) is gathered: every rank that has a part makes the same call.
        gather = getattr(tensor, "full_tensor", None)
        whole = tensor if gather is None else gather()
        self._bytes_read += info.size_bytes
        return np.ascontiguousarray(as_array(whole))

    def prepare(self, names: Iterable[str]) -> None:
        """Nothing: everything is open."""

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        for name in sorted(set(names)):
            yield name, self.read(name)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self.read(name).tobytes()[start : start + size]


def _config(model: torch.nn.Module) -> Mapping[str, Any]:
    """The configuration of a model of transformers; empty for any other."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            return config.to_dict()
    return {}
