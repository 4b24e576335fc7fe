"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the input dimension.

weight[out, in] = scales[g, out] * (qweight[in, out] - zero[g, out]) with g = g_idx[in]; exact in
float32 for scales in half precision, which engines round the product to.

``qzeros`` holds the zero point minus one in ``gptq`` (v1) and the zero point in ``gptq_v2``.
gptqmodel 7.7.0 ``nn_modules/qlinear/__init__.py`` (``PackableQuantLinear``) and ``utils/model.py``
(``convert_gptq_v1_to_v2_format_module``).
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float32, Int
from moegeom.core.text import number_of
from moegeom.router.settings import Settings
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import num_words, scale_floats, unpack_rows
from moegeom.router.storages._config import flag, integer, look_up, not_decoded, word
from moegeom.router.storages._tensors import (
    FLOATS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)

_BITS = (2, 3, 4, 8)

#: What is added to a stored zero point, by the name of the format.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("qweight") != "" and word(tensors.settings, "quant_method") == "gptq"


def _open(tensors: RouterTensors) -> Stored:
    parts = tensors.take(
        "GPTQ", {"qweight": {"I32"}, "qzeros": {"I32"}, "scales": FLOATS}, {"g_idx": {"I32"}}
    )
    qweight, scales = parts["qweight"], parts["scales"]
    format_name, spelled = look_up(tensors.settings, "checkpoint_format", "format")
    offset = _ZERO_OFFSETS.get("gptq" if spelled is None else spelled)
    if offset is None:
        raise not_decoded(format_name, spelled, " or ".join(_ZERO_OFFSETS))
    bits, hidden = _bits_and_hidden(tensors)
    experts = matrix_shape(qweight)[1]
    groups = matrix_shape(scales)[0]
    expect_shape(scales, (groups, experts))
    expect_shape(parts["qzeros"], (groups, num_words(experts, bits)))
    in_order = None if "g_idx" in parts else _groups_in_order(tensors, hidden, groups)
    zero_is_half = flag(tensors.settings, "sym") and not _has_exceptions(tensors.settings)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        group = values["g_idx"] if in_order is None else in_order
        if not ((group >= 0) & (group < groups)).all():
            raise refuse(
                parts["g_idx"],
                f"holds {group.min()} to {group.max()}, expected groups from 0 to {groups - 1}.",
            )
        packed_zeros = np.ascontiguousarray(values["qzeros"].T)
        zeros = unpack_rows(packed_zeros, bits)[:experts].astype(np.float32)
        if offset and zeros.max() == 2**bits - 1:
            # One more is 2^bits to some engines and 0 to others.
            raise refuse(
                parts["qzeros"],
                f"holds {2**bits - 1}, to which the format 'gptq' adds 1 beyond its {bits} bits.",
                "Quantise again with the format 'gptq_v2'.",
            )
        zeros += offset
        if zero_is_half and not (zeros == 2 ** (bits - 1)).all():
            raise refuse(
                parts["qzeros"],
                f"stands for zero points from {zeros.min():.0f} to {zeros.max():.0f}; config.json "
                f"says symmetric, which has {2 ** (bits - 1)}.",
                "Does 'checkpoint_format' (gptq or gptq_v2) belong to these tensors?",
            )
        factors = scale_floats(values["scales"]).T
        weight = unpack_rows(values["qweight"], bits).T.astype(np.float32, order="C")
        weight -= zeros[:, group]
        weight *= factors[:, group]
        return weight

    return stored(tensors, "gptq", f"int{bits} gptq", (experts, hidden), parts, decode)


def _bits_and_hidden(tensors: RouterTensors) -> tuple[int, int]:
    """Bits of an integer, and how many integers a column holds."""
    qweight = tensors.infos[tensors.key("qweight")]
    rows = matrix_shape(qweight)[0]
    claimed = integer(tensors.settings, "bits")
    g_idx = tensors.infos.get(tensors.key("g_idx"))
    if g_idx is None:
        if claimed not in _BITS:
            raise not_decoded("'quantization_config.bits'", claimed, f"one of {_BITS}")
        bits, hidden = claimed, rows * 32 // claimed
    else:
        hidden = g_idx.shape[0] if len(g_idx.shape) == 1 else 0
        fitting = [b for b in _BITS if hidden and rows * 32 == hidden * b]
        if not fitting:
            raise refuse(
                g_idx,
                f"has shape {g_idx.shape}, which fits no number of bits of {_BITS} for "
                f"'{qweight.name}' of shape {qweight.shape}.",
            )
        bits = fitting[0]
        if claimed not in (None, bits) and not _has_exceptions(tensors.settings):
            raise refuse(qweight, f"holds integers of {bits} bits; config.json says {claimed}.")
    if hidden * bits != rows * 32:
        raise refuse(
            qweight,
            f"has {number_of(rows, 'row')}, which hold no whole number of {bits}-bit integers.",
        )
    return bits, hidden


def _has_exceptions(settings: Settings) -> bool:
    """True where some modules have other settings (``dynamic`` of gptqmodel)."""
    return bool(look_up(settings, "dynamic")[1])


def _groups_in_order(tensors: RouterTensors, hidden: int, groups: int) -> Int[np.ndarray, "hidden"]:
    """The group of each input where ``g_idx`` is not stored."""
    scales = tensors.infos[tensors.key("scales")]
    if flag(tensors.settings, "desc_act"):
        raise refuse(scales, "is by activation order ('desc_act'), but there is no 'g_idx'.")
    size = integer(tensors.settings, "group_size")
    size = hidden if size == -1 else size or -(-hidden // groups)
    if -(-hidden // size) != groups:
        raise refuse(
            scales,
            f"holds {groups} groups, expected {-(-hidden // size)} of {size} for {hidden} inputs.",
        )
    return np.arange(hidden) // size


SCHEME = Scheme("gptq", _recognises, _open)
