"""Four-bit floats: MXFP4, NVFP4, and NF4 and FP4 of bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.checkpoint.json_text import parse_object
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.limits import QUANTISER_STATE_BYTES
from moegeom.core.shapes import Float32, Shaped
from moegeom.router.storage import (
    EXPONENTS,
    FLOATS,
    RouterTensors,
    Stored,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
    scale_floats,
    scaled,
    scheme,
    stored,
    unpack_e2m1,
)

# -------------------------------------------------------------------------------------------- MXFP4
_MX_GROUP = 32

#: Names and dtype of the values, and the name of their scales.
_MX_SPELLINGS = (
    ("weight_packed", "U8", "weight_scale"),
    ("weight", "U8", "weight_scale"),
    ("weight", "I8", "weight_scale_inv"),
    ("weight", "I8", "scale"),
    ("weight_blocks", "U8", "weight_scales"),
    ("weight.blocks", "U8", "weight.scales"),
)


def _spelling(tensors: RouterTensors) -> tuple[str, str] | None:
    for values, dtype, scales in _MX_SPELLINGS:
        if tensors.dtype(values) == dtype and tensors.dtype(scales) in EXPONENTS:
            return values, scales
    return None


@scheme(lambda tensors: _spelling(tensors) is not None)
def mxfp4(tensors: RouterTensors) -> Stored:
    """MXFP4: floats (E2M1) with an exponent (E8M0) per 32 columns.

    weight = value * 2^(exponent - 127), exact in float32; exponent 255 is NaN (OCP Microscaling
    Formats 1.0, sections 5.3.3, 5.4.1 and 6.1).

    Checked against transformers 5.23.0 ``integrations/mxfp4.py`` (``_blocks`` and ``_scales``;
    gpt-oss itself writes ``.blocks`` and ``.scales``) and ``integrations/finegrained_fp8.py``
    (``int8`` with ``weight_scale_inv``), compressed-tensors 0.20.0 ``mxfp4`` (``weight_packed``)
    and modelopt 0.47.0 ``mxfp4_tensor.py`` (``weight``).
    """
    spelling = _spelling(tensors)
    values_name, scales_name = spelling or _MX_SPELLINGS[0][::2]
    parts = tensors.take("MXFP4", {values_name: {"U8", "I8"}, scales_name: EXPONENTS})
    packed = parts[values_name]
    # The blocks may be an axis of their own.
    if len(packed.shape) == 3:
        rows, num_bytes = packed.shape[0], packed.shape[1] * packed.shape[2]
        expect_shape(packed, (rows, packed.shape[1], _MX_GROUP // 2))
    else:
        rows, num_bytes = matrix_shape(packed)
    shape = (rows, 2 * num_bytes)
    if 0 in shape or shape[1] % _MX_GROUP:
        raise refuse(packed, f"holds {shape[1]} values a row, expected a multiple of {_MX_GROUP}.")
    expect_shape(parts[scales_name], (rows, shape[1] // _MX_GROUP))

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        floats = unpack_e2m1(values[values_name].reshape(rows, num_bytes))
        return scaled(floats, scale_floats(values[scales_name]), (1, _MX_GROUP))

    return stored(tensors, "mxfp4", "mxfp4", shape, parts, decode)


# -------------------------------------------------------------------------------------------- NVFP4
_NV_GROUP = 16

#: Name of the values and of the scale for all, and how that one is applied.
_NV_SPELLINGS = (
    ("weight_packed", "weight_global_scale", np.divide),
    ("weight", "weight_scale_2", np.multiply),
)


@scheme(
    lambda tensors: (
        any(tensors.dtype(values) == "U8" for values, _, _ in _NV_SPELLINGS)
        and tensors.dtype("weight_scale") == "F8_E4M3"
    )
)
def nvfp4(tensors: RouterTensors) -> Stored:
    """NVFP4: floats (E2M1) with an E4M3 scale per 16 columns and one scale for all.

    The two writers store the scale for all as each other's reciprocal:

    - compressed-tensors 0.20.0 ``nvfp4`` (``weight_packed``): value * (scale /
      ``weight_global_scale``)
    - modelopt 0.47.0 ``nvfp4_tensor.py`` (``weight``): value * (scale * ``weight_scale_2``)

    Both in float32, in this order.
    """
    packed_name, whole_name, apply = next(s for s in _NV_SPELLINGS if tensors.dtype(s[0]) == "U8")
    parts = tensors.take(
        "NVFP4", {packed_name: {"U8"}, "weight_scale": {"F8_E4M3"}, whole_name: {"F32"}}
    )
    packed = parts[packed_name]
    rows, num_bytes = matrix_shape(packed)
    shape = (rows, 2 * num_bytes)
    if shape[1] % _NV_GROUP:
        raise refuse(packed, f"holds {shape[1]} values a row, expected a multiple of {_NV_GROUP}.")
    expect_shape(parts["weight_scale"], (rows, shape[1] // _NV_GROUP))
    expect_shape(parts[whole_name], (1,), ())

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        scale = apply(scale_floats(values["weight_scale"]), values[whole_name].reshape(1, 1))
        return scaled(unpack_e2m1(values[packed_name]), scale, (1, _NV_GROUP))

    return stored(tensors, "nvfp4", "nvfp4", shape, parts, decode)


# ------------------------------------------------------------------------------------- bitsandbytes
#: NF4: Dettmers et al. 2023 (QLoRA), appendix E, to the digits printed there. FP4: sign, two bits
#: of exponent, one of mantissa, a special value for 1, divided by 12.
_POSITIVE_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
FP4 = (*_POSITIVE_FP4, *(-v for v in _POSITIVE_FP4))
_TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": FP4,
}  # fmt: skip

#: Any dtype may hold the bytes (``bnb_4bit_quant_storage``).
_CONTAINERS = FLOATS | {"U8", "I8"}


@dataclass(frozen=True)
class _State:
    """Checked content of the quant state."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    nested_offset: np.float32


def _state_part(tensors: RouterTensors) -> str | None:
    parts = [f"weight.quant_state.bitsandbytes__{kind}" for kind in _TABLES]
    return next((part for part in parts if tensors.dtype(part)), None)


@scheme(lambda tensors: _state_part(tensors) is not None)
def bitsandbytes_4bit(tensors: RouterTensors) -> Stored:
    """NF4 and FP4 of bitsandbytes: an index into 16 values times the largest magnitude of a block.

    weight = quant_map[index] * absmax[block], the weight taken row by row, the first of two indices
    in the high half of a byte. A nested ``absmax`` is stored the same way with 8 bits:
    nested_quant_map[absmax] * nested_absmax[block of it] + nested_offset. All in float32; the
    library rounds to the dtype in the quant state.

    bitsandbytes 0.50.2 ``functional.py`` (``QuantState``, ``dequantize_4bit``). It computes with
    its own 16 values, whatever ``quant_map`` says: other ones are refused.
    """
    state_part = _state_part(tensors) or ""
    kind = state_part.rpartition("__")[2]
    is_nested = tensors.dtype("weight.nested_absmax") != ""
    nested = {"weight.nested_absmax": FLOATS, "weight.nested_quant_map": FLOATS}
    parts = tensors.take(
        f"{kind} of bitsandbytes",
        {
            "weight": _CONTAINERS,
            "weight.absmax": {"U8"} if is_nested else FLOATS,
            "weight.quant_map": FLOATS,
            state_part: {"U8"},
            **(nested if is_nested else {}),
        },
    )
    state = _read_state(tensors, state_part, is_nested)
    count = state.shape[0] * state.shape[1]
    if parts["weight"].size_bytes != -(-count // 2):
        raise refuse(
            parts["weight"],
            f"has {parts['weight'].size_bytes} bytes; {state.shape} values take {-(-count // 2)}.",
        )
    num_blocks = -(-count // state.blocksize)
    expect_shape(parts["weight.absmax"], (num_blocks,))
    expect_shape(parts["weight.quant_map"], (16,))
    if is_nested:
        expect_shape(parts["weight.nested_absmax"], (-(-num_blocks // state.nested_blocksize),))
        expect_shape(parts["weight.nested_quant_map"], (256,))

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        table = scale_floats(values["weight.quant_map"])
        # The last digit may be rounded otherwise; the values of another table are far away.
        if not np.allclose(table, _TABLES[kind], rtol=0.0, atol=1e-6):
            raise refuse(parts["weight.quant_map"], f"does not hold the 16 values of {kind}.")
        raw = np.ascontiguousarray(values["weight"]).reshape(-1).view(np.uint8)
        indices = np.stack([raw >> 4, raw & 0xF], axis=-1).reshape(-1)[:count]
        largest = _largest(values, state) if is_nested else scale_floats(values["weight.absmax"])
        floats = _times_block(table[indices], largest, state.blocksize)
        return floats.reshape(state.shape)

    return stored(tensors, "bitsandbytes_4bit", kind, state.shape, parts, decode)


def _largest(values: Values, state: _State) -> Float32[np.ndarray, "blocks"]:
    """The largest magnitude of each block, from its nested storage."""
    indices = values["weight.absmax"]
    table = scale_floats(values["weight.nested_quant_map"])
    outer = scale_floats(values["weight.nested_absmax"])
    return _times_block(table[indices], outer, state.nested_blocksize) + state.nested_offset


def _times_block(
    floats: Float32[np.ndarray, "values"], factors: Float32[np.ndarray, "blocks"], size: int
) -> Float32[np.ndarray, "values"]:
    """Each value times the factor of its block; the last block may be cut off."""
    return floats * factors.repeat(min(size, len(floats)))[: len(floats)]


def _read_state(tensors: RouterTensors, part: str, is_nested: bool) -> _State:
    """The quant state, which alone says how the bytes are arranged."""
    info = tensors.infos[tensors.key(part)]
    if tensors.read is None or info.size_bytes > QUANTISER_STATE_BYTES:
        raise refuse(info, f"has {info.size_bytes} bytes, expected a short JSON text to be read.")
    raw: Shaped[np.ndarray, "..."] = tensors.read(tensors.key(part))
    state = parse_object(raw.tobytes(), f"{info.file}: tensor '{info.name}'")
    kind = part.rpartition("__")[2]
    shape = state.get("shape")
    sizes = [n for n in shape if type(n) is int and 0 < n < 2**31] if type(shape) is list else []
    if len(sizes) != 2 or sizes != shape:
        raise refuse(info, f"has 'shape' {str(shape)[:60]}, expected two positive integers.")
    if state.get("quant_type") != kind:
        raise refuse(
            info, f"has 'quant_type' {str(state.get('quant_type'))[:60]}, expected {kind}."
        )
    return _State(
        (sizes[0], sizes[1]),
        _size(info, state, "blocksize"),
        _size(info, state, "nested_blocksize") if is_nested else 1,
        _offset(info, state) if is_nested else np.float32(0.0),
    )


def _size(info: TensorInfo, state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise refuse(info, f"has '{key}' {str(value)[:60]}, expected a positive integer.")
    return value


def _offset(info: TensorInfo, state: Mapping[str, Any]) -> np.float32:
    value = state.get("nested_offset")
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
        return np.float32(value)
    raise refuse(info, f"has 'nested_offset' {str(value)[:60]}, expected a number.")
