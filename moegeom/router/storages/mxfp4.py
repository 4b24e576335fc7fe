"""MXFP4: four-bit floats (E2M1) with an exponent (E8M0) per 32 columns.

weight = value * 2^(exponent - 127), exact in float32; exponent 255 is NaN (OCP Microscaling
Formats 1.0, sections 5.3.3, 5.4.1 and 6.1).

Checked against transformers 5.23.0 ``integrations/mxfp4.py`` (``_blocks`` and ``_scales``; gpt-oss
itself writes ``.blocks`` and ``.scales``) and ``integrations/finegrained_fp8.py`` (``int8`` with
``weight_scale_inv``), compressed-tensors 0.20.0 ``mxfp4`` (``weight_packed``) and modelopt 0.47.0
``mxfp4_tensor.py`` (``weight``).
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float32
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import scale_floats, spread, unpack_e2m1
from moegeom.router.storages._tensors import (
    EXPONENTS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)

_GROUP = 32

#: Names and dtype of the values, and the name of their scales.
_SPELLINGS = (
    ("weight_packed", "U8", "weight_scale"),
    ("weight", "U8", "weight_scale"),
    ("weight", "I8", "weight_scale_inv"),
    ("weight", "I8", "scale"),
    ("weight_blocks", "U8", "weight_scales"),
    ("weight.blocks", "U8", "weight.scales"),
)


def _spelling(tensors: RouterTensors) -> tuple[str, str] | None:
    for values, dtype, scales in _SPELLINGS:
        if tensors.dtype(values) == dtype and tensors.dtype(scales) in EXPONENTS:
            return values, scales
    return None


def _open(tensors: RouterTensors) -> Stored:
    spelling = _spelling(tensors)
    values_name, scales_name = spelling or _SPELLINGS[0][::2]
    parts = tensors.take("MXFP4", {values_name: {"U8", "I8"}, scales_name: EXPONENTS})
    packed = parts[values_name]
    # The blocks may be an axis of their own.
    if len(packed.shape) == 3:
        rows, num_bytes = packed.shape[0], packed.shape[1] * packed.shape[2]
        expect_shape(packed, (rows, packed.shape[1], _GROUP // 2))
    else:
        rows, num_bytes = matrix_shape(packed)
    shape = (rows, 2 * num_bytes)
    if 0 in shape or shape[1] % _GROUP:
        raise refuse(packed, f"holds {shape[1]} values a row, expected a multiple of {_GROUP}.")
    expect_shape(parts[scales_name], (rows, shape[1] // _GROUP))

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        floats = unpack_e2m1(values[values_name].reshape(rows, num_bytes))
        return floats * spread(scale_floats(values[scales_name]), shape, (1, _GROUP))

    return stored(tensors, "mxfp4", "mxfp4", shape, parts, decode)


SCHEME = Scheme("mxfp4", lambda tensors: _spelling(tensors) is not None, _open)
