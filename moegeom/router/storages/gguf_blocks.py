"""Block-quantised tensors of GGUF files: decoded while they are read.

The store gives the float32 values of ``gguf.quants.dequantize``, llama.cpp's own definition; the
dtype still says how they are stored (``Q8_0``).
"""

from __future__ import annotations

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.formats._gguf_types import BLOCK_DTYPES
from moegeom.router.storage import Scheme, Stored
from moegeom.router.storages._tensors import RouterTensors


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("weight") in BLOCK_DTYPES


def _open(tensors: RouterTensors) -> Stored:
    info = tensors.take("blocks of GGUF", {"weight": BLOCK_DTYPES})["weight"]
    key = tensors.key("weight")
    return Stored(
        "gguf_blocks", info.dtype, info.shape, (info,), lambda values: upcast(values[key])
    )


SCHEME = Scheme("gguf_blocks", _recognises, _open)
