"""NVFP4: four-bit floats (E2M1) with an E4M3 scale per 16 columns and one scale for all.

The two writers store the scale for all as each other's reciprocal:

- compressed-tensors 0.20.0 ``nvfp4`` (``weight_packed``): value * (scale / ``weight_global_scale``)
- modelopt 0.47.0 ``nvfp4_tensor.py`` (``weight``): value * (scale * ``weight_scale_2``)

Both in float32, in this order.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float32
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import scale_floats, spread, unpack_e2m1
from moegeom.router.storages._tensors import (
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)

_GROUP = 16

#: Name of the values and of the scale for all, and how that one is applied.
_SPELLINGS = (
    ("weight_packed", "weight_global_scale", np.divide),
    ("weight", "weight_scale_2", np.multiply),
)


def _recognises(tensors: RouterTensors) -> bool:
    is_packed = any(tensors.dtype(values) == "U8" for values, _, _ in _SPELLINGS)
    return is_packed and tensors.dtype("weight_scale") == "F8_E4M3"


def _open(tensors: RouterTensors) -> Stored:
    packed_name, whole_name, apply = next(s for s in _SPELLINGS if tensors.dtype(s[0]) == "U8")
    parts = tensors.take(
        "NVFP4", {packed_name: {"U8"}, "weight_scale": {"F8_E4M3"}, whole_name: {"F32"}}
    )
    packed = parts[packed_name]
    rows, num_bytes = matrix_shape(packed)
    shape = (rows, 2 * num_bytes)
    if shape[1] % _GROUP:
        raise refuse(packed, f"holds {shape[1]} values a row, expected a multiple of {_GROUP}.")
    expect_shape(parts["weight_scale"], (rows, shape[1] // _GROUP))
    expect_shape(parts[whole_name], (1,), ())

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        scale = apply(scale_floats(values["weight_scale"]), values[whole_name].reshape(1, 1))
        return unpack_e2m1(values[packed_name]) * spread(scale, shape, (1, _GROUP))

    return stored(tensors, "nvfp4", "nvfp4", shape, parts, decode)


SCHEME = Scheme("nvfp4", _recognises, _open)
