"""One number for each element of the weight, and a scale for some of them where it has eight bits.

weight = (stored - zero point) * scale, in float32. Engines round that product to the dtype they
compute in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, SCALED_FLOATS, upcast
from moegeom.checkpoint.formats.gguf import BLOCK_DTYPES
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.shapes import Float32
from moegeom.router.storage import (
    EXPONENTS,
    FLOATS,
    Block,
    RouterTensors,
    Stored,
    Values,
    expect_shape,
    find_block,
    look_up,
    matrix_shape,
    pair,
    recipe_block,
    refuse,
    scale_floats,
    scaled,
    scheme,
    spread,
    stored,
    weight_recipes,
)


# -------------------------------------------------------------------------------------- not scaled
def _as_it_is(tensors: RouterTensors, name: str, what: str, dtypes: Collection[str]) -> Stored:
    """The tensor, as the store reads it, is the weight."""
    info = tensors.take(what, {"weight": dtypes})["weight"]
    key = tensors.key("weight")
    return Stored(name, info.dtype, info.shape, (info,), lambda values: upcast(values[key]))


@scheme(lambda tensors: len(tensors.infos) == 1 and tensors.dtype("weight") in PLAIN_FLOATS)
def plain(tensors: RouterTensors) -> Stored:
    """Plain floats: the tensor is the weight."""
    return _as_it_is(tensors, "plain", "plain floats", PLAIN_FLOATS)


@scheme(lambda tensors: tensors.dtype("weight") in BLOCK_DTYPES)
def gguf_blocks(tensors: RouterTensors) -> Stored:
    """Blocks, decoded while they are read: the store gives the float32 values of
    ``gguf.quants.dequantize``, llama.cpp's own definition; the dtype says how they are stored.
    """
    return _as_it_is(tensors, "gguf_blocks", "blocks of GGUF", BLOCK_DTYPES)


# ------------------------------------------------------------------------------------------- scaled
#: Names of the scale, and whether it may be per row:
#:
#: - ``weight_scale_inv`` (in spite of its name a factor) per block: DeepSeek-V3's
#:   ``inference/kernel.py`` ``weight_dequant_kernel``; transformers 5.23.0
#:   ``integrations/finegrained_fp8.py`` ``Fp8Dequantize``. Per tensor: its ``FP8Linear``.
#: - ``weight_scale`` per tensor, row, group or block: compressed-tensors 0.20.0
#:   ``naive_quantized``, transformers 5.23.0 ``integrations/fbgemm_fp8.py``, modelopt 0.47.0.
#: - ``scale`` is the first of these in DeepSeek's own names (``inference/convert.py``).
#:
#: Scales in E8M0 per 32 columns (MXFP8): compressed-tensors 0.20.0 ``mxfp8``.
_SCALES = {"weight_scale_inv": False, "weight_scale": True, "scale": True}

#: DeepSeek's block size, when ``quantization_config.weight_block_size`` does not say.
_BLOCK = (128, 128)

#: Columns that share an exponent: OCP Microscaling Formats 1.0, section 5.2.
_MX_GROUP = (1, 32)


@scheme(lambda tensors: tensors.dtype("weight") in SCALED_FLOATS)
def fp8(tensors: RouterTensors) -> Stored:
    """Eight-bit floats with a scale per tensor, row, group or block."""
    weight = tensors.infos[tensors.key("weight")]
    scale = next((part for part in _SCALES if tensors.dtype(part)), None)
    if scale is None:
        names = [repr(tensors.name(part)) for part in ("weight_scale_inv", "weight_scale")]
        raise refuse(
            weight, f"is stored as {weight.dtype} without a scale, expected {' or '.join(names)}."
        )
    stated = pair(look_up(tensors.settings, "weight_block_size"))
    blocks = [stated or _BLOCK] if stated or scale != "weight_scale" else []
    blocks += [_MX_GROUP] * (tensors.dtype(scale) in EXPONENTS)
    parts = tensors.take(
        weight.dtype,
        {"weight": SCALED_FLOATS, scale: FLOATS | EXPONENTS},
        {"weight_zero_point": SCALED_FLOATS | {"I8"}},
    )
    return _scaled(tensors, "fp8", weight.dtype, parts, blocks, _SCALES[scale])


@scheme(lambda tensors: tensors.dtype("weight") == "I8" and tensors.dtype("weight_scale") != "")
def int8(tensors: RouterTensors) -> Stored:
    """Integers of compressed-tensors 0.20.0 ``int_quantized``
    (``quantization/lifecycle/forward_helpers.py`` ``_dequantize``), which rounds to the dtype of
    the scale.
    """
    parts = tensors.take(
        "int8", {"weight": {"I8"}, "weight_scale": FLOATS}, {"weight_zero_point": {"I8"}}
    )
    return _scaled(tensors, "int8", "int8", parts, [], may_be_by_row=True)


def _scaled(
    tensors: RouterTensors,
    name: str,
    dtype: str,
    parts: Mapping[str, TensorInfo],
    blocks: Sequence[Block],
    may_be_by_row: bool,
) -> Stored:
    """A weight and its scale, the first two of ``parts``; elements of one of ``blocks`` share it,
    or, where it may be by row, those of the tensor, of a row, or of a group of the config.
    """
    (_, weight), (scale_name, scale), *_ = parts.items()
    shape = matrix_shape(weight)
    if may_be_by_row and scale.shape == (shape[0],):
        block = (1, shape[1])
    else:
        recipes = weight_recipes(tensors.settings) if may_be_by_row else []
        by_row = [shape, (1, shape[1])] if may_be_by_row else []
        groups = [b for b in (recipe_block(r, shape[1]) for r in recipes) if b]
        block = find_block(scale, shape, [*blocks, *by_row, *groups])
    if "weight_zero_point" in parts:
        expect_shape(parts["weight_zero_point"], scale.shape)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        floats = upcast(values["weight"]).astype(np.float32, copy=False)
        if "weight_zero_point" in parts:
            zero = upcast(values["weight_zero_point"]).astype(np.float32)
            floats -= spread(zero, shape, block)
        return scaled(floats, scale_floats(values[scale_name]), block)

    return stored(tensors, name, dtype, shape, parts, decode)


@scheme(lambda tensors: tensors.dtype("weight") == "I8" and tensors.dtype("SCB") != "")
def bitsandbytes_int8(tensors: RouterTensors) -> Stored:
    """LLM.int8(), integers with the largest magnitude of each row: stored * SCB / 127, as
    bitsandbytes 0.50.2 ``_ops.py`` (``int8_vectorwise_dequant``) computes it in float32: the
    product first, then times the rounded 1/127.
    """
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
