"""Eight-bit integers times a scale per tensor, row or group.

weight = (stored - zero point) * scale, in float32. compressed-tensors 0.20.0 ``int_quantized``
(``quantization/lifecycle/forward_helpers.py`` ``_dequantize``) rounds to the dtype of the scale.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float32
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import find_block, scale_floats, spread
from moegeom.router.storages._config import recipe_block, weight_recipes
from moegeom.router.storages._tensors import (
    FLOATS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
)


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("weight") == "I8" and tensors.dtype("weight_scale") != ""


def _open(tensors: RouterTensors) -> Stored:
    parts = tensors.take(
        "int8", {"weight": {"I8"}, "weight_scale": FLOATS}, {"weight_zero_point": {"I8"}}
    )
    shape = matrix_shape(parts["weight"])
    scale = parts["weight_scale"]
    if scale.shape == (shape[0],):
        block = (1, shape[1])
    else:
        recipes = weight_recipes(tensors.settings)
        blocks = [shape, (1, shape[1]), *(recipe_block(r, shape[1]) for r in recipes)]
        block = find_block(scale, shape, [b for b in blocks if b])
    if "weight_zero_point" in parts:
        expect_shape(parts["weight_zero_point"], scale.shape)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        integers = values["weight"].astype(np.float32)
        if "weight_zero_point" in parts:
            zero = values["weight_zero_point"].astype(np.float32)
            integers -= spread(zero, shape, block)
        return integers * spread(scale_floats(values["weight_scale"]), shape, block)

    return stored(tensors, "int8", "int8", shape, parts, decode)


SCHEME = Scheme("int8", _recognises, _open)
