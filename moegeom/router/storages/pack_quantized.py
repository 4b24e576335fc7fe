"""The ``pack-quantized`` format of compressed-tensors: integers of 2, 4 or 8 bits by row or group.

weight = (stored - 2^(bits - 1) - zero point) * scale, in float32; the library rounds to the dtype
of the scale. The zero point is packed along the rows, with the same offset (``int8`` without it in
early files). ``weight_g_idx`` names the group of each column, -1 for none named.

compressed-tensors 0.20.0 ``compressors/pack_quantized``; ``weight_g_idx`` by 0.9.0
``quantization/lifecycle/forward.py``. Its versions pack other numbers of bits differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.checkpoint.store import TensorInfo
from moegeom.core.shapes import Float32, Int, Shaped
from moegeom.router.storage import Scheme, Stored, stored
from moegeom.router.storages._codes import num_words, scale_floats, unpack_rows
from moegeom.router.storages._config import recipe_block, weight_recipes
from moegeom.router.storages._tensors import (
    FLOATS,
    RouterTensors,
    Values,
    expect_shape,
    matrix_shape,
    refuse,
)

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class _Reading:
    """How a recipe of the config reads the tensors; ``group`` is the number of columns."""

    bits: int
    group: int
    is_symmetric: bool


def _recognises(tensors: RouterTensors) -> bool:
    return tensors.dtype("weight_packed") == "I32"


def _open(tensors: RouterTensors) -> Stored:
    parts = tensors.take(
        "pack-quantized integers",
        {"weight_packed": {"I32"}, "weight_scale": FLOATS, "weight_shape": {"I32", "I64"}},
        {"weight_zero_point": {"I32", "I8"}, "weight_g_idx": {"I32", "I64"}},
    )
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    rows = matrix_shape(packed)[0]
    expect_shape(parts["weight_shape"], (2,))
    stated = tensors.read(tensors.key("weight_shape")) if tensors.read else None
    reading, columns = _find_reading(tensors, packed, scale, stated)
    bits, shape = reading.bits, (rows, columns)
    if "weight_g_idx" in parts:
        expect_shape(parts["weight_g_idx"], (columns,))
    zero = parts.get("weight_zero_point")
    if zero is None and not reading.is_symmetric:
        raise refuse(packed, "has no zero point, and config.json says that it is not symmetric.")
    groups = 1 if reading.group == columns else -(-columns // reading.group)
    if zero is not None and zero.dtype == "I32":
        expect_shape(zero, (num_words(rows, bits), groups))
    elif zero is not None:
        expect_shape(zero, scale.shape)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        if values["weight_shape"].tolist() != [rows, columns]:
            raise refuse(
                parts["weight_shape"],
                f"says {values['weight_shape'].tolist()}; '{packed.name}' holds {[rows, columns]}.",
            )
        words = np.ascontiguousarray(values["weight_packed"].T)
        integers = unpack_rows(words, bits)[:columns].T.astype(np.float32)
        half = np.float32(2 ** (bits - 1))
        group = np.arange(columns) // reading.group
        if "weight_g_idx" in parts:
            group = _named_groups(parts["weight_g_idx"], values["weight_g_idx"], groups, group)
        if zero is None:
            integers -= half
        elif zero.dtype == "I8":
            table = values["weight_zero_point"].astype(np.float32).reshape(-1, groups) + half
            integers -= table[:, group]
        else:
            integers -= unpack_rows(values["weight_zero_point"], bits)[:rows][:, group]
        return integers * scale_floats(values["weight_scale"]).reshape(-1, groups)[:, group]

    return stored(tensors, "pack_quantized", f"int{bits} pack-quantized", shape, parts, decode)


def _find_reading(
    tensors: RouterTensors,
    packed: TensorInfo,
    scale: TensorInfo,
    stated: Shaped[np.ndarray, "2"] | None,
) -> tuple[_Reading, int]:
    """The one recipe of the config that fits the shapes, and the number of columns."""
    rows, words = matrix_shape(packed)
    readings: set[tuple[_Reading, int]] = set()
    recipes = weight_recipes(tensors.settings)
    for recipe in recipes:
        bits = recipe.get("num_bits")
        if type(bits) is not int or bits not in _BITS or recipe.get("type", "int") != "int":
            continue
        columns = words * 32 // bits if stated is None else int(stated[1])
        if columns < 1 or num_words(columns, bits) != words:
            continue
        block = recipe_block(recipe, columns) or (1, columns)
        group = min(block[1], columns)
        by_row = [(rows,), (), (1,)] if group == columns else []
        if scale.shape in ((rows, -(-columns // group)), *by_row):
            readings.add((_Reading(bits, group, recipe.get("symmetric", True) is True), columns))
    if len(readings) != 1:
        raise refuse(
            packed,
            f"has shape {packed.shape} and a scale of shape {scale.shape}, which "
            f"{'several' if readings else 'none'} of the {len(recipes)} 'config_groups' of "
            f"config.json fit, expected one with 'num_bits' of {_BITS}.",
        )
    return readings.pop()


def _named_groups(
    info: TensorInfo,
    named: Int[np.ndarray, "hidden"],
    groups: int,
    in_order: Int[np.ndarray, "hidden"],
) -> Int[np.ndarray, "hidden"]:
    """The group of each column."""
    if (named == -1).all():
        return in_order
    if not ((named >= 0) & (named < groups)).all():
        raise refuse(
            info,
            f"holds {named.min()} to {named.max()}, expected groups from 0 to {groups - 1}.",
        )
    return named


SCHEME = Scheme("pack_quantized", _recognises, _open)
