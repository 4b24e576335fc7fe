"""LLM.int8(): eight-bit integers with the largest magnitude of each row.

weight = stored * SCB / 127, as bitsandbytes 0.50.2 ``_ops.py`` (``int8_vectorwise_dequant``)
computes it in float32: the product first, then times the rounded 1/127.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float32
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import scale_floats
from moegeom.router.storages._tensors import (
    FLOATS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("weight") == "I8" and tensors.dtype("SCB") != ""


def _open(tensors: RouterTensors) -> Stored:
    parts = tensors.take(
        "int8 of bitsandbytes", {"weight": {"I8"}, "SCB": FLOATS}, {"weight_format": {"U8"}}
    )
    shape = matrix_shape(parts["weight"])
    expect_shape(parts["SCB"], (shape[0],))
    if "weight_format" in parts:
        expect_shape(parts["weight_format"], (), (1,))

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        if "weight_format" in parts and values["weight_format"].any():
            code = int(values["weight_format"].max())
            raise refuse(
                parts["weight_format"], f"is {code}, expected 0 (rows, not tiles of a GPU)."
            )
        largest = scale_floats(values["SCB"])[:, np.newaxis]
        return values["weight"].astype(np.float32) * largest * np.float32(1 / 127)

    return stored(tensors, "bitsandbytes_int8", "int8 bitsandbytes", shape, parts, decode)


SCHEME = Scheme("bitsandbytes_int8", _recognises, _open)
