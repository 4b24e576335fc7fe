"""How a router weight is stored, and the exact way back to floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import RouterError
from moegeom.core.limits import ROUTER_BYTES, ROUTER_PACKED_VALUES
from moegeom.core.registry import Rooms
from moegeom.core.shapes import Float, Float32, Shaped
from moegeom.router.integrity import STORAGE_UNKNOWN
from moegeom.router.settings import Settings
from moegeom.router.storages._config import look_up
from moegeom.router.storages._tensors import Read, RouterTensors, Values, refuse, stands_beside


@dataclass(frozen=True)
class Stored:
    """One router weight before its values: what to read, and how to make floats of it.

    ``dtype`` is for people; ``shape`` is that of the decoded weight. ``decode`` takes the values of
    ``tensors`` by the names that ``find_storage`` was given and returns float32 (float64 where the
    weight is stored so); it raises ``RouterError`` where values contradict each other.
    """

    scheme: str
    dtype: str
    shape: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    decode: Callable[[Mapping[str, np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Scheme:
    """One way to store a weight: how to see that a router is stored so, and how to decode it."""

    name: str
    recognises: Callable[[RouterTensors], bool]
    open: Callable[[RouterTensors], Stored]


SCHEMES = Rooms("storage scheme", "moegeom.router.storages", Scheme)


def find_storage(
    tensors: Mapping[str, TensorInfo],
    settings: Settings,
    router: str,
    leaf: str = "weight",
    read: Read | None = None,
) -> Stored:
    """How a router weight is stored.

    Parameters
    ----------
    tensors
        All tensors of the router's module by the part of their name behind its path, without
        those that its family knows as something else.
    settings
        The config, whose ``quantization_config`` counts.
    router
        What to call the router in a message.
    leaf
        What the weight is called where it is stored as plain floats.
    read
        Reads one of ``tensors`` by the same name. Needed where the shape stands in a tensor: by
        bitsandbytes, and by pack-quantized weights whose rows do not fill whole words.

    Raises
    ------
    RouterError
        If the storage is not understood: a dtype, a shape, a scale that is missing, a version, or
        a tensor that nobody knows (it may change what the weight means).
    """
    for info in tensors.values():
        _check_size(info)
    module = RouterTensors(tensors, settings, router, leaf, read)
    for scheme in SCHEMES.all():
        if scheme.recognises(module):
            return scheme.open(module)
    raise _not_recognised(module)


def stored(
    tensors: RouterTensors,
    scheme: str,
    dtype: str,
    shape: tuple[int, int],
    parts: Mapping[str, TensorInfo],
    decode: Callable[[Values], Float32[np.ndarray, "experts hidden"]],
) -> Stored:
    """The record of a quantised weight, whose decoded size is believable.

    Raises
    ------
    RouterError
        If it is not.
    """
    first = next(iter(parts.values()))
    if math.prod(shape) > ROUTER_PACKED_VALUES:
        raise refuse(first, f"decodes to shape {shape}, too many values for a router.")

    def by_name(values: Mapping[str, Shaped[np.ndarray, "..."]]) -> Float[np.ndarray, "..."]:
        # Scales may be NaN or infinite; what comes of it is looked at with all other weights.
        with np.errstate(all="ignore"):
            return decode(tensors.by_part(values, parts))

    return Stored(scheme, dtype, shape, tuple(parts.values()), by_name)


def check_plain(info: TensorInfo, what: str) -> None:
    """Raise unless the tensor is stored as plain floats of a believable size."""
    _check_size(info)
    if info.dtype not in PLAIN_FLOATS:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' ({what}) is stored as {info.dtype}, "
            f"expected one of {', '.join(sorted(PLAIN_FLOATS))}.",
            code=STORAGE_UNKNOWN,
        )


def _not_recognised(tensors: RouterTensors) -> RouterError:
    """The error for a module that no scheme recognises."""
    hint = f"Known storage: {', '.join(SCHEMES.names())}; otherwise use the original weights."
    weight = tensors.infos.get(tensors.leaf)
    if weight is None:
        parts = sorted(tensors.infos.values(), key=lambda info: info.name)
        listed = ", ".join(f"'{info.name}' ({info.dtype})" for info in parts[:8])
        more = ", ..." if len(parts) > 8 else ""
        name = tensors.name("weight") if parts else tensors.leaf
        method = str(look_up(tensors.settings, "quant_method")[1])[:60]
        return RouterError(
            f"{tensors.router}: there is no tensor '{name}', only {listed or 'none'}{more}, "
            f"which is no storage known for the quantisation method {method}.",
            hint,
            code=STORAGE_UNKNOWN,
        )
    beside = sorted(tensors.infos.keys() - {tensors.leaf})
    if beside:
        return stands_beside(tensors.infos[beside[0]], weight)
    return RouterError(
        f"{weight.file}: tensor '{weight.name}' (router weight) is stored as {weight.dtype}, "
        f"expected one of {', '.join(sorted(PLAIN_FLOATS))}.",
        hint,
        code=STORAGE_UNKNOWN,
    )


def _check_size(info: TensorInfo) -> None:
    if info.size_bytes > ROUTER_BYTES:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' has {info.size_bytes} bytes, too many for a router."
        )
