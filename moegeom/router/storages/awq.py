"""AWQ: four-bit integers, packed along the output dimension in an order of their own.

weight[out, in] = scales[g, out] * (qweight[in, out] - qzeros[g, out]) with g = in // group size;
exact in float32 for scales in half precision, which engines round the product to.

AutoAWQ 0.2.9 ``modules/linear/gemm.py`` (``WQLinear_GEMM``) and ``utils/packing_utils.py``;
compressed-tensors 0.20.0 ``entrypoints/convert/converters/autoawq.py``.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float32, Int32, UInt8
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import scale_floats
from moegeom.router.storages._config import integer, look_up, not_decoded, word
from moegeom.router.storages._tensors import (
    FLOATS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)

_BITS = 4

#: Which of eight neighbouring outputs lies in each half byte of a word, lowest first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("qweight") != "" and word(tensors.settings, "quant_method") == "awq"


def _open(tensors: RouterTensors) -> Stored:
    for key in ("version", "checkpoint_format", "format"):
        name, version = look_up(tensors.settings, key)
        if version is not None and str(version).lower() != "gemm":
            raise not_decoded(name, version, "gemm")
    bits = integer(tensors.settings, "bits", "w_bit")
    if bits not in (None, _BITS):
        raise not_decoded("'quantization_config.bits'", bits, str(_BITS))
    parts = tensors.take("AWQ", {"qweight": {"I32"}, "qzeros": {"I32"}, "scales": FLOATS})
    hidden, words = matrix_shape(parts["qweight"])
    groups = matrix_shape(parts["scales"])[0]
    experts = words * len(_ORDER)
    expect_shape(parts["scales"], (groups, experts))
    expect_shape(parts["qzeros"], (groups, words))
    size = integer(tensors.settings, "group_size", "q_group_size")
    size = hidden if size == -1 else size or hidden // groups
    if groups * size != hidden:
        raise refuse(
            parts["scales"], f"holds {groups} groups of {size}; there are {hidden} inputs."
        )

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        by_group = _unpack(values["qweight"]).reshape(groups, size, experts).astype(np.float32)
        by_group -= _unpack(values["qzeros"])[:, np.newaxis]
        by_group *= scale_floats(values["scales"])[:, np.newaxis]
        return np.ascontiguousarray(by_group.reshape(hidden, experts).T)

    return stored(tensors, "awq", "int4 awq", (experts, hidden), parts, decode)


def _unpack(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows experts"]:
    """The integers of each row, eight to a word."""
    halves = np.empty((*words.shape, len(_ORDER)), np.uint8)
    for place, output in enumerate(_ORDER):
        halves[:, :, output] = words.view(np.uint32) >> np.uint32(_BITS * place) & np.uint32(0xF)
    return halves.reshape(words.shape[0], -1)


SCHEME = Scheme("awq", _recognises, _open)
