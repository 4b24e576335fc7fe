"""Which part of a weight a scale belongs to."""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.store import TensorInfo
from moegeom.router.storages._tensors import refuse

Block = tuple[int, int]


def find_block(scale: TensorInfo, shape: tuple[int, int], blocks: Collection[Block]) -> Block:
    """Rows and columns that share one scale: all if there is but one, else a block that fits.

    The last blocks may be cut off.

    Raises
    ------
    RouterError
        If no block fits the shape of the scale, or two that differ.
    """
    if scale.shape in ((), (1,)):
        return shape
    rows, columns = shape
    # A block larger than the weight is as large as the weight.
    inside = {(min(b, rows), min(c, columns)) for b, c in blocks}
    fitting = [(b, c) for b, c in inside if scale.shape == (-(-rows // b), -(-columns // c))]
    if len(fitting) != 1:
        listed = " or ".join(map(str, dict.fromkeys(blocks))) or "unknown size"
        why = "fits more than one reading of" if fitting else "is no scale for"
        raise refuse(
            scale,
            f"has shape {scale.shape} of {scale.dtype}, which {why} "
            f"a weight of shape {shape} in blocks of {listed}.",
        )
    return fitting[0]


def spread(
    scale: Float32[np.ndarray, "*stored"], shape: tuple[int, int], block: Block
) -> Float32[np.ndarray, "rows columns"]:
    """One number for each element of the weight."""
    (rows, columns), (height, width) = shape, block
    table = scale.reshape(-(-rows // height), -(-columns // width))
    return table.repeat(height, axis=0)[:rows].repeat(width, axis=1)[:, :columns]


def scale_floats(scale: Shaped[np.ndarray, "*stored"]) -> Float32[np.ndarray, "*stored"]:
    """A scale as float32; a byte is the exponent of a power of two (E8M0: 2^(byte - 127))."""
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    return upcast(scale).astype(np.float32)
