"""Eight-bit floats times a scale per tensor, row, group or block.

weight = stored * scale, in float32. Engines round that product to the dtype they compute in.

- ``weight_scale_inv`` (in spite of its name a factor) per block: DeepSeek-V3's
  ``inference/kernel.py`` ``weight_dequant_kernel``; transformers 5.23.0
  ``integrations/finegrained_fp8.py`` ``Fp8Dequantize``. Per tensor: its ``FP8Linear``.
- ``scale`` is the same tensor in DeepSeek's own names (``inference/convert.py``).
- ``weight_scale`` per tensor, row, group or block: compressed-tensors 0.20.0
  ``naive_quantized``, transformers 5.23.0 ``integrations/fbgemm_fp8.py``, modelopt 0.47.0.
- Scales in E8M0 per 32 columns (MXFP8): compressed-tensors 0.20.0 ``mxfp8``.
"""

from __future__ import annotations

import numpy as np

from moegeom.checkpoint.dtypes import SCALED_FLOATS, upcast
from moegeom.core.shapes import Float32
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import Block, find_block, scale_floats, spread
from moegeom.router.storages._config import look_up, pair, recipe_block, weight_recipes
from moegeom.router.storages._tensors import (
    EXPONENTS,
    FLOATS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)

#: Names of the scale, and whether it may be per row.
_SCALES = {"weight_scale_inv": False, "weight_scale": True, "scale": True}

#: DeepSeek's block size, when ``quantization_config.weight_block_size`` does not say.
_BLOCK = (128, 128)

#: Columns that share an exponent: OCP Microscaling Formats 1.0, section 5.2.
_MX_GROUP = (1, 32)


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("weight") in SCALED_FLOATS


def _open(tensors: RouterTensors) -> Stored:
    weight = tensors.infos[tensors.key("weight")]
    shape = matrix_shape(weight)
    named = [part for part in _SCALES if tensors.dtype(part)]
    if not named:
        expected = " or ".join(
            repr(tensors.name(part)) for part in ("weight_scale_inv", "weight_scale")
        )
        raise refuse(weight, f"is stored as {weight.dtype} without a scale, expected {expected}.")
    scale_dtypes = FLOATS | EXPONENTS
    parts = tensors.take(
        weight.dtype,
        {"weight": SCALED_FLOATS, named[0]: scale_dtypes},
        {"weight_zero_point": SCALED_FLOATS | {"I8"}},
    )
    scale = parts[named[0]]
    if _SCALES[named[0]] and scale.shape == (shape[0],):
        block = (1, shape[1])
    else:
        block = find_block(scale, shape, _blocks(tensors, named[0], shape))
    if "weight_zero_point" in parts:
        expect_shape(parts["weight_zero_point"], scale.shape)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        floats = upcast(values["weight"])
        if "weight_zero_point" in parts:
            zero = upcast(values["weight_zero_point"]).astype(np.float32)
            floats = floats - spread(zero, shape, block)
        return floats * spread(scale_floats(values[named[0]]), shape, block)

    return stored(tensors, "fp8", weight.dtype, shape, parts, decode)


def _blocks(tensors: RouterTensors, scale: str, shape: tuple[int, int]) -> list[Block]:
    """What may share a scale of this name, by its definition and the config."""
    stated = pair(look_up(tensors.settings, "weight_block_size"))
    blocks = [stated or _BLOCK] if stated or scale != "weight_scale" else []
    if _SCALES[scale]:
        blocks += [shape, (1, shape[1])]
        recipes = weight_recipes(tensors.settings)
        blocks += [b for b in (recipe_block(r, shape[1]) for r in recipes) if b]
    if tensors.dtype(scale) in EXPONENTS:
        blocks.append(_MX_GROUP)
    return blocks


SCHEME = Scheme("fp8", _recognises, _open)
