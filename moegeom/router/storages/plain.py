"""Plain floats: the tensor is the weight."""

from __future__ import annotations

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, upcast
from moegeom.router.storage import Scheme, Stored
from moegeom.router.storages._tensors import RouterTensors


def _recognises(tensors: RouterTensors) -> bool:
    return len(tensors.infos) == 1 and tensors.dtype("weight") in PLAIN_FLOATS


def _open(tensors: RouterTensors) -> Stored:
    info = tensors.take("plain floats", {"weight": PLAIN_FLOATS})["weight"]
    key = tensors.key("weight")
    return Stored("plain", info.dtype, info.shape, (info,), lambda values: upcast(values[key]))


SCHEME = Scheme("plain", _recognises, _open)
