"""Words of MLX: integers, or floats of four or eight bits, as one string of bits a row."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from moegeom.checkpoint.dtypes import upcast
from moegeom.core.errors import RouterError
from moegeom.core.shapes import Float32
from moegeom.router.storage import (
    FLOATS,
    RouterTensors,
    Stored,
    Values,
    expect_shape,
    matrix_shape,
    mlx_entry,
    not_decoded,
    refuse,
    scale_floats,
    scaled,
    scheme,
    spread,
    stored,
    unpack_e2m1,
    unpack_rows,
    wrong,
)

#: Bits of an integer; those of other modes, and of the columns that share a scale.
_BITS = (2, 3, 4, 5, 6, 8)
_FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


@scheme(lambda tensors: tensors.dtype("weight") == "U32")
def mlx(tensors: RouterTensors) -> Stored:
    """MLX: weight = scale * integer + bias, each of a group of columns, in float32.

    The integers of a row are one string of bits, lowest first: those of 3, 5 and 6 bits lie across
    words. In the modes ``mxfp4``, ``mxfp8`` and ``nvfp4`` weight = scale * float, without a bias.
    ``bits`` and ``group_size`` stand in ``quantization`` of the config, under the path of a module
    where it has its own; a string of bits says neither, so the two have to agree with the shapes.

    MLX 0.32.4 ``mlx.core.quantize``; mlx-lm ``utils.py`` (``load_model``).
    """
    place, entry = mlx_entry(tensors.settings, tensors.path)
    mode = entry.get("mode", "affine")
    if mode != "affine" and mode not in _FLOAT_MODES:
        raise not_decoded(f"'{place}.mode'", mode, " or ".join(("affine", *_FLOAT_MODES)))
    is_affine = mode == "affine"
    parts = tensors.take(
        f"words of MLX ({mode})",
        {"weight": {"U32"}, "scales": FLOATS if is_affine else {"U8"}}
        | ({"biases": FLOATS} if is_affine else {}),
    )
    weight, scales = parts["weight"], parts["scales"]
    (rows, words), groups = matrix_shape(weight), matrix_shape(scales)[1]
    usual = (None, None) if is_affine else _FLOAT_MODES[mode]
    claimed, group = _numbers(place, entry, usual)
    columns = groups * group
    if 32 * words != claimed * columns:
        raise refuse(
            weight,
            f"holds {32 * words / columns:g} bits a column (32 x {words} words over {columns} "
            f"columns, {groups} groups of {group}); config.json: '{place}' says {claimed}.",
            f"Write the 'bits' and 'group_size' of '{tensors.path}' into config.json, or convert "
            "again.",
        )
    expect_shape(scales, (rows, groups))
    if is_affine:
        expect_shape(parts["biases"], scales.shape)
    shape = (rows, columns)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        raw = np.ascontiguousarray(values["weight"])
        if not is_affine:
            bytes_ = raw.view(np.uint8)
            is_fp8 = claimed == 8
            floats = upcast(bytes_.view(ml_dtypes.float8_e4m3fn)) if is_fp8 else unpack_e2m1(bytes_)
            table = values["scales"]
            factor = table.view(ml_dtypes.float8_e4m3fn) if mode == "nvfp4" else table
            return scaled(floats.astype(np.float32, copy=False), scale_floats(factor), (1, group))
        integers = unpack_rows(np.ascontiguousarray(raw.T).view(np.int32), claimed)[:columns].T
        weight = integers.astype(np.float32, order="C")
        weight = scaled(weight, scale_floats(values["scales"]), (1, group))
        weight += spread(scale_floats(values["biases"]), shape, (1, group))
        return weight

    kind = f"int{claimed}" if is_affine else mode
    return stored(tensors, "mlx", f"{kind} mlx", shape, parts, decode)


def _numbers(
    place: str, entry: Mapping[str, object], usual: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Bits of a value, and columns that share a scale."""
    bits, group = entry.get("bits", usual[0]), entry.get("group_size", usual[1])
    expected = _BITS if usual[0] is None else (usual[0],)
    if bits is None:
        raise RouterError(
            f"weights are packed as MLX packs them, and the config does not say '{place}.bits'.",
            'Take config.json from the source, with its table "quantization" (bits, group_size).',
        )
    if type(bits) is not int or bits not in expected:
        raise wrong(f"'{place}.bits'", bits, f"one of {expected}")
    if type(group) is not int or not 0 < group < 2**31:
        raise wrong(f"'{place}.group_size'", group, "a positive integer")
    return bits, group
